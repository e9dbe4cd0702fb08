"""The figure of needles in haystacks: share kept, or answers, by depth and length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import polars as pl
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from kvsim.analysis.folder import Tabular, as_table
from kvsim.analysis.results import labelled
from kvsim.core.arguments import listed
from kvsim.plots.registry import figure
from kvsim.plots.style import (
    CELLS,
    caption,
    colour_bar,
    counted,
    label,
    means_of,
    panels,
    requested_order,
    short_text,
)

_MIDDLE: Final[dict[str, Any]] = {"ha": "center", "va": "center", "fontsize": 8}
_LABELS = ("length", "depth")
#: Title, and label of the colour bar, by metric.
_SHOWN = {
    "needle_recall": ("Entries of the needle kept", "share of the needle kept"),
    "answer_right": ("Right answers", "share of right answers"),
}


@figure(requires="prompts with a needle, length and depth")
def needle(table: Tabular, metrics: str | Sequence[str] = ("needle_recall",)) -> Figure:
    """Recall of the needle by its depth and the length of the prompt; a panel per policy, budget.

    The grid of Kamradt (github.com/gkamradt/LLMTest_NeedleInAHaystack). A cell has the mean over
    layers, heads and prompts in percent, or the right answers and the number of prompts.

    Args:
        table: with the metric, and labels `length` (tokens) and `depth` (share).
        metrics: `needle_recall`, or `answer_right` of a live run.

    Returns a Figure. Raises PolicyError for other metrics, or without values by length and depth.
    """
    table = labelled(as_table(table))
    metrics = listed(metrics)
    name = metrics[0]
    named = all(label in table for label in _LABELS) and metrics == [name] and name in _SHOWN
    complete = pl.all_horizontal(pl.col(_LABELS).is_not_null()) if named else pl.lit(value=False)
    values = table.filter(complete, pl.col("metric") == name)
    needs = f"{', '.join(metrics)} by length and depth; it takes one of {', '.join(_SHOWN)}, and "
    needs += "prompts with a needle and both labels (kvsim prompts --model smollm2 --task needle)"
    means = means_of(values, _LABELS, needs=needs)
    answers = name == "answer_right"
    lengths, depths = (means[label].unique().sort().to_list() for label in _LABELS)
    policies = means["policy"].unique(maintain_order=True).to_list()
    budgets = requested_order(means["requested"].to_list())
    columns = max(1, 4 // len(budgets)) * len(budgets)
    size = max(1.9, 0.36 * len(lengths) + 0.5), max(1.7, 0.28 * len(depths) + 0.6)
    figure, axes = panels(len(policies) * len(budgets), columns=columns, size=size)
    cells = [(policy, budget) for policy in policies for budget in budgets]
    norm = Normalize(0, 1)
    colours = ScalarMappable(norm, "Blues")
    for axis, (policy, budget) in zip(axes, cells, strict=True):
        grid = np.full((len(depths), len(lengths)), np.nan)
        of = means.filter(policy=policy, requested=budget).sort("depth", "length")
        for row in of.iter_rows(named=True):
            down, across = depths.index(row["depth"]), lengths.index(row["length"])
            grid[down, across] = mean = row["mean"]
            shown = f"{mean * row['n']:.3g}/{row['n']}" if answers else f"{100 * mean:.0f}"
            colour = "white" if mean > 0.6 else "black"
            axis.text(across, down, shown, color=colour, **_MIDDLE)
        axis.imshow(grid, cmap=colours.cmap, norm=norm, **CELLS)
        axis.grid(visible=False)
        axis.set_xticks(range(len(lengths)), [str(length) for length in lengths])
        axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        title = f"{short_text(policy, 28)}\nbudget {budget}"
        axis.set_title(title, fontsize=8, parse_math=False)
    label(figure, "length of the prompt (tokens)", "depth of the needle")
    colour_bar(figure, colours, axes, _SHOWN[name][1], shrink=0.8)
    subject = f"{_SHOWN[name][0]} {'of' if answers else '(%), mean over'} {counted(means['n'])}"
    caption(figure, subject.removesuffix(", with 95 % interval"), means["fidelity"])
    return figure
