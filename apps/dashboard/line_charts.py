"""Line charts of plotly: policies over budgets and against entries seen, curves by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
import polars as pl
import streamlit as st
from plotly.subplots import make_subplots

from kvsim.analysis.registry import METRICS
from kvsim.plots.style import is_crowded, requested_order, series
from kvsim.plots.summary import metric_label
from kvsim.schema import visible

from . import elements

#: Names of plotly for styles of matplotlib.
_DASHES = {"-": "solid", "--": "dash", ":": "dot"}
_MARKERS = {
    "o": "circle",
    "s": "square",
    "^": "triangle-up",
    "D": "diamond",
    "v": "triangle-down",
    "<": "triangle-left",
    ">": "triangle-right",
}
#: Panels of one picture at most, and in a row.
PANELS, ACROSS = 12, 3

Style = Mapping[str, Any]


def label(metric: str) -> str:
    """A metric with its unit and its better direction; its name may come from a file."""
    return metric_label(metric) if metric in METRICS else elements.shortened(metric, 40)


def styles(names: Sequence[str]) -> dict[str, Style]:
    """Return colour, dash and symbol of each name, the same as in the figures of kvsim."""
    return {
        name: {
            "color": look["color"],
            "dash": _DASHES[look["linestyle"]],
            "symbol": _MARKERS[look["marker"]],
        }
        for name, look in series(names).items()
    }


def draw(figure: go.Figure, key: str, height: int = 420) -> None:
    """Show a figure over the whole width, high enough for its legend."""
    names = sum(each.showlegend is not False for each in figure.data)
    height = max(height, 100 + 29 * names)
    figure.update_layout(height=height, margin={"l": 10, "r": 10, "t": 30, "b": 10})
    figure.update_layout(hoverlabel={"align": "left"})
    elements.chart(figure, key)


def over_budgets(
    means: pl.DataFrame,
    of: Mapping[str, Style],
    *,
    key: str,
    label: str,
    by: str | None = None,
    logarithmic: bool | None = None,
) -> None:
    """Show a line per policy over budgets with 95 % intervals, a panel per value of `by`.

    means: of `kvsim.analysis.summaries.averages`; `by` is a column. of: styles of the policies.
    label: of what is drawn. logarithmic: the scale, by default as `is_wide` says.
    """
    if logarithmic is None:
        logarithmic = is_wide(means)
    below = means.filter(pl.col("mean") <= 0)["policy"].unique(maintain_order=True)
    if logarithmic and below.len():
        st.text(
            visible(f"Not on the logarithmic scale, because of values of 0: {', '.join(below)}")
        )
    figure = _over_budgets(means, of, label, by, logarithmic=logarithmic)
    panels = 1 if by is None else min(PANELS, means[by].n_unique())
    down = -(-panels // ACROSS)
    draw(figure, key, 420 if down == 1 else 290 * down + 60)


@st.cache_resource(max_entries=64, show_spinner=False)
def _over_budgets(
    means: pl.DataFrame,
    of: Mapping[str, Style],
    label: str,
    by: str | None,
    *,
    logarithmic: bool,
) -> go.Figure:
    groups: list[Any] = [None] if by is None else means[by].unique().sort().to_list()[:PANELS]
    budgets = requested_order(means["requested"].to_list())
    policies = means["policy"].unique(maintain_order=True).to_list()
    across = min(ACROSS, len(groups))
    down = -(-len(groups) // across)
    titles = [f"{by} {elements.shortened(str(group), 18)}" for group in groups] if by else None
    figure = make_subplots(
        down, across, shared_yaxes="all", subplot_titles=titles, horizontal_spacing=0.02
    )
    wide = means["low"].is_not_null().any()
    step = min(0.06, 0.5 / len(policies)) if wide else 0.0
    with_chance = "chance" in means.columns and means["chance"].is_not_null().any()
    for place, group in enumerate(groups):
        panel = means if by is None else means.filter(pl.col(by) == group)
        at = {"row": place // across + 1, "col": place % across + 1}
        for order, policy in enumerate(policies):
            part = panel.filter(policy=policy).sort(pl.col("requested").cast(pl.Enum(budgets)))
            shift = (order - (len(policies) - 1) / 2) * step
            x = [budgets.index(budget) + shift for budget in part["requested"]]
            figure.add_trace(_line(part, x, policy, of[policy], legend=place == 0), **at)
            if with_chance and part["chance"].is_not_null().any():
                figure.add_trace(_chance(part, x, policy, of[policy]), **at)
    figure.update_xaxes(
        tickvals=list(range(len(budgets))), ticktext=budgets, range=[-0.4, len(budgets) - 0.6]
    )
    for column in range(across):
        figure.update_xaxes(title="budget", row=down, col=column + 1)
    figure.update_yaxes(title=label, col=1)
    if logarithmic:
        figure.update_yaxes(type="log")
    return figure


def is_wide(means: pl.DataFrame) -> bool:
    """Whether means are drawn on a logarithmic scale: crowded, as in figures, and above 0.

    Without `full`, whose errors are 0 by definition.
    """
    rising = means.filter(pl.col("policy") != "full", pl.col("unit") != "share")["mean"].sort()
    return rising.len() > 0 and rising[0] > 0 and is_crowded(rising.to_list())


def _line(part: pl.DataFrame, x: list[float], policy: str, look: Style, *, legend: bool) -> Any:
    return go.Scatter(
        x=x,
        y=part["mean"].to_list(),
        name=elements.shortened(policy, 48),
        legendgroup=policy,
        showlegend=legend,
        mode="lines+markers",
        line={"color": look["color"], "dash": look["dash"], "width": 1.8},
        marker={"symbol": look["symbol"], "size": 8},
        error_y=_bars(part, look),
        text=[_hover(row) for row in part.to_dicts()],
        hovertemplate="%{text}<extra></extra>",
    )


def _bars(part: pl.DataFrame, look: Style) -> dict[str, Any] | None:
    if not part["low"].count():
        return None
    return {
        "type": "data",
        "array": (part["high"] - part["mean"]).to_list(),
        "arrayminus": (part["mean"] - part["low"]).to_list(),
        "thickness": 1.2,
        "width": 3,
        "color": look["color"],
    }


def _chance(part: pl.DataFrame, x: list[float], policy: str, look: Style) -> Any:
    """Dotted line of random sets of the same sizes."""
    return go.Scatter(
        x=x,
        y=part["chance"].to_list(),
        legendgroup=policy,
        showlegend=False,
        mode="lines+markers",
        line={"color": look["color"], "dash": "dot", "width": 1},
        marker={"symbol": "line-ew-open", "size": 9},
        hovertemplate=f"{elements.shortened(policy, 48)}: chance %{{y:.4g}}<extra></extra>",
    )


def _hover(row: Mapping[str, Any]) -> str:
    name = elements.shortened(row["policy"], 48)
    lines = [f"<b>{name}</b>, budget {elements.shortened(str(row['requested']))}"]
    lines.append(f"{row['mean']:.4g}")
    if row["low"] is not None:
        lines[-1] += f" [{row['low']:.4g}, {row['high']:.4g}]"
    if row.get("chance") is not None:
        lines.append(f"chance {row['chance']:.4g}")
    if row.get("seen") is not None:
        lines.append(f"{row['seen']:.1f} entries seen")
    lines.append(f"{row['n']} of {row['of']} prompts")
    return "<br>".join(lines)


@st.cache_resource(max_entries=16, show_spinner=False)
def against_entries(
    panels: Mapping[str, pl.DataFrame], of: Mapping[str, Style], cost: str
) -> go.Figure:
    """Return a panel per metric, one below another: its mean against a cost; filled: on the front.

    panels: by label, of `against_entries`. cost: its label.
    """
    figure = make_subplots(len(panels), 1, shared_xaxes=True, vertical_spacing=0.06)
    for place, (label, points) in enumerate(panels.items()):
        at = {"row": place + 1, "col": 1}
        for policy in points["policy"].unique(maintain_order=True):
            part, look = points.filter(policy=policy).sort("seen"), of[policy]
            line = _line(part, part["seen"].to_list(), policy, look, legend=place == 0)
            best = part["best"].to_list()
            line.line.width = 1
            line.marker.symbol = [look["symbol"] + ("" if on else "-open") for on in best]
            line.marker.size = [10 if on else 7 for on in best]
            line.marker.color = look["color"]
            figure.add_trace(line, **at)
        figure.update_yaxes(title=label, type="log" if is_wide(points) else None, **at)
    figure.update_xaxes(title=cost, row=len(panels))
    return figure
