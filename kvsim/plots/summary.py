"""Figures that compare policies: metrics over budgets, and where entries are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from textwrap import fill
from typing import Any

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from kvsim.analysis.arrays import Floats, mean_known
from kvsim.analysis.axes import trace_head, trace_layer
from kvsim.analysis.comparison import compare
from kvsim.analysis.evidence import EVIDENCE
from kvsim.analysis.evidence import ranking as ranks
from kvsim.analysis.folder import Tabular, as_table
from kvsim.analysis.kept.coverage import BINS, MIDDLE, kept_coverage, retained_positions
from kvsim.analysis.kept.retention import last_event
from kvsim.analysis.kept.states import gone_of
from kvsim.analysis.output.error import check_record
from kvsim.analysis.registry import METRICS
from kvsim.analysis.results import REQUESTED, check_models, labelled
from kvsim.analysis.summaries import COSTS, against_entries, main_variants, split_by
from kvsim.analysis.table import fidelity
from kvsim.core.arguments import listed
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.errors import PolicyError, TraceError
from kvsim.plots.registry import figure
from kvsim.plots.style import (
    COLOURS,
    DASHES,
    NEUTRAL,
    caption,
    counted,
    finish,
    log_if_crowded,
    log_ticks,
    mean_line,
    means_of,
    name_axes,
    panels,
    plain,
    record_labels,
    requested_order,
    series,
    short_text,
)
from kvsim.store.opening import Traces, as_traces

_Ints = NDArray[np.int32]
#: Draws arrays of each prompt, by policy, in a panel; with the names of all policies.
Draw = Callable[[Axes, Mapping[str, Sequence[Floats]], Sequence[str]], None]

_SHADE = "#f2efe9"


@figure()
def over_budgets(table: Tabular, metrics: str | Sequence[str] | None = None) -> Figure:
    """Each metric against the budget, a line per policy: mean over prompts and 95 % interval.

    With one budget it is `ranking`, of the metrics that have a better direction.

    Args:
        table: results of a replay or live run, or the path of a run.
        metrics: a panel each; of metrics with variants the main one. By default the metric of
            `kvsim.compare`, retained mass and wipe-out, as far as the table has them.

    Returns a Figure. Raises PolicyError for unknown metrics, or if the table has none of them.
    """
    table = as_table(table)
    metrics = _metrics(table, "retained_mass", "wipeout") if metrics is None else listed(metrics)
    means = _means(table, metrics)
    shown = [name for name in metrics if name in set(means["metric"])]
    sizes = table.drop_nulls("budget").group_by(requested=REQUESTED).agg(pl.col("budget").mean())
    entries = dict(sizes.iter_rows())
    budgets = sorted(requested_order(means["requested"].to_list()), key=entries.__getitem__)
    if len(budgets) == 1 and (ranked := [name for name in shown if METRICS[name].better]):
        return ranking(table, ranked)
    styles = series(means["policy"].unique(maintain_order=True))
    figure, axes = panels(len(shown), columns=3, size=(3.4, 2.9), share="none")
    for axis, name in zip(axes, shown, strict=True):
        of_metric = means.filter(metric=name)
        for policy, style in styles.items():
            of_policy = of_metric.filter(policy=policy)
            part = of_policy.sort(pl.col("requested").cast(pl.Enum(budgets)))
            places = np.array([budgets.index(budget) for budget in part["requested"]])
            low, mean, high = (part[end].to_numpy() for end in ("low", "mean", "high"))
            if len(places) > 1:
                axis.fill_between(places, low, high, color=style["color"], alpha=0.15, lw=0)
            else:  # a band of no width
                axis.vlines(places, low, high, color=style["color"], lw=1.3)
            axis.plot(places, mean, label=policy, lw=1.3, ms=4, **style)
        axis.set_xticks(range(len(budgets)), budgets)
        log_if_crowded(axis, of_metric["mean"], share="share" in METRICS[name].unit)
        plain(axis, _budget_label(budgets), fill(metric_label(name), 44))
    finish(figure, axes[0], f"Mean over {counted(means['n'])}", means["fidelity"], columns=6)
    return figure


@figure()
def pareto(table: Tabular, metrics: str | Sequence[str] | None = None) -> Figure:
    """Each metric against the entries that rows really saw; policies on the front are filled.

    A policy at a budget is on the front if no other result is better with as few entries. With
    sparse attention or quantizers the axes are bytes held and read. With one budget it is
    `ranking`.

    Args:
        table: as for `over_budgets`; with the metrics of the axes.
        metrics: as for `over_budgets`. `entries_seen`, `bytes_held` and `bytes_read` among them are
            the axes, a panel for each metric and axis.

    Returns a Figure. Raises PolicyError for unknown metrics, or if the table lacks those it needs.
    """
    table = as_table(table)
    named: list[str] = _metrics(table, "wipeout") if metrics is None else listed(metrics)
    costs = [name for name in named if name in COSTS]
    if not costs:
        stored = (table["access"] != "").any()
        costs = ["bytes_held", "bytes_read"] if stored else ["entries_seen"]
    metrics = [name for name in named if name not in COSTS]
    means = _means(table, [*metrics, *costs])
    measured = set(means["metric"])
    shown = [(name, cost) for name in metrics if name in measured for cost in costs]
    if not shown or not set(costs) <= measured:
        others = ", ".join(name for name in COSTS if name in {*table["metric"]} - {*costs})
        others = f", or name another axis: {others}" if others else ""
        raise PolicyError(
            f"a Pareto figure needs {' and '.join(costs)} and one of {', '.join(metrics)}; the "
            f"table has {', '.join(sorted(measured))}; replay with --metric "
            f"{','.join([*metrics, *costs])}{others}"
        )
    directed = [name for name, _ in shown if METRICS[name].better]
    if directed and costs == ["entries_seen"] and means["requested"].n_unique() == 1:
        return ranking(table, directed)
    styles = series(means["policy"].unique(maintain_order=True))
    figure, axes = panels(len(shown), columns=3, size=(4.2, 3.1), share="none")
    for axis, (name, cost) in zip(axes, shown, strict=True):
        points = against_entries(means, name, cost)
        for policy, style in styles.items():
            part = points.filter(policy=policy).sort("seen")
            seen, mean = part["seen"].to_numpy(), part["mean"].to_numpy()
            ends = np.abs(part.select("low", "high").to_numpy().T - mean)
            whisker = {"fmt": "none", "ecolor": style["color"], "elinewidth": 0.7}
            axis.errorbar(seen, mean, np.nan_to_num(ends), **whisker)
            axis.plot(seen, mean, lw=0.8, ms=4, mfc="white", label=policy, **style)
            on = part["best"].to_numpy()
            axis.plot(seen[on], mean[on], ms=7, **{**style, "linestyle": "none"})
        log_if_crowded(axis, points["mean"], share="share" in METRICS[name].unit)
        if cost != "entries_seen":
            axis.set_xscale("log")
            log_ticks(axis.xaxis, unit="B")
        plain(axis, COSTS[cost], fill(metric_label(name), 44))
    subject = f"Mean over {counted(means['n'])}; filled: on the front"
    if any(METRICS[name].better is None for name, _ in shown):
        subject += ", where one direction is better"
    finish(figure, axes[0], subject, means["fidelity"], columns=6)
    return figure


def _metrics(table: pl.DataFrame, *others: str) -> list[str]:
    return list(dict.fromkeys((next(ranks(table), EVIDENCE[-1]), *others)))


@figure()
def ranking(table: Tabular, metrics: str | Sequence[str] | None = None) -> Figure:
    """Policies in the order of a metric, a panel per budget: mean over prompts and 95 % interval.

    Filled circles could be the best policy (`kvsim.compare`); the dotted line is the best mean.
    Grey squares are references, which have no rank.

    Args:
        table: as for `over_budgets`.
        metrics: panels each, with a better direction; by default the metric of `kvsim.compare`.

    Returns a Figure. Raises PolicyError as `kvsim.compare`.
    """
    table = as_table(table)
    names: list[str] = [] if metrics is None else listed(metrics)
    comparisons = [compare(table, name) for name in names] or [compare(table)]
    policies = labelled(table)["policy"].drop_nulls().unique(maintain_order=True).to_list()
    shades = COLOURS if len(policies) <= len(COLOURS) else COLOURS[:1] * len(policies)
    colours = dict(zip(policies, shades, strict=False))
    every = pl.concat(x.overall.with_columns(ranks=pl.lit(x.metric)) for x in comparisons)
    shown = every.partition_by("ranks", "requested", maintain_order=True)
    size = 4.3, 0.7 + 0.28 * len(policies)
    figure, axes = panels(len(shown), columns=3, size=size, share="none")
    for axis, part in zip(axes, shown, strict=True):
        name = part["ranks"][0]
        for place, row in enumerate(part.iter_rows(named=True)):
            ranked = row["rank"] is not None
            colour = colours[row["policy"]] if ranked else NEUTRAL
            face = colour if row["could_be_best"] or not ranked else "white"
            if row["low"] is not None:
                axis.plot([row["low"], row["high"]], [place, place], color=colour, lw=1.3)
            axis.plot(row["mean"], place, "o" if ranked else "s", ms=5, color=colour, mfc=face)
        log_if_crowded(axis, part["mean"], across=True, share="share" in METRICS[name].unit)
        axis.axvline(part["mean"][0], color="black", lw=0.9, ls=":", zorder=0)
        labels = [short_text(policy, 30) for policy in part["policy"]]
        axis.set_yticks(range(part.height), labels, parse_math=False)
        axis.set_ylim(part.height - 0.5, -0.5)
        plain(axis, fill(metric_label(name), 44), title=f"budget {part['requested'][0]}")
    note = f"Mean over {counted(every['n'])}\nfilled: could be the best; dotted: the best mean"
    if every["rank"].null_count():
        note += "; grey squares: references, not tested"
    caption(figure, note, every["fidelity"])
    return figure


@figure(source="AMS, Fig. 4")
def middle_coverage(
    traces: Traces,
    records: Record | Sequence[Record],
    *,
    layer: int | None = None,
    head: int | None = None,
) -> Figure:
    """Share kept of each part of the sequence, a line per policy; a panel per budget.

    AMS (arXiv 2605.23200), Fig. 4 (a). Mean over events, heads and layers, then over prompts with
    the 95 % interval. Dotted is a set of the same size that prefers no position. Even `random`
    keeps fewer early entries, which had to survive more events: compare with it.

    Args:
        traces: one or several.
        records: their replays.
        layer: all by default.
        head: all KV heads by default.

    Returns a Figure. Raises PolicyError if nothing was evicted.
    """
    traces = as_traces(traces)
    records = listed(records)

    def curves(gone: list[_Ints]) -> Floats | None:
        every = [found for x in gone if len((found := kept_coverage(x))[0])]
        if not every:
            return None
        lines = [mean_known(curve).mean(0) for _, curve, _, _ in every]
        flat = np.mean([overall.mean() for _, _, overall, _ in every])
        return np.stack([mean_known(np.stack(lines, axis=-1)), np.full(BINS, flat)])

    centres = (np.arange(BINS) + 0.5) / BINS

    def draw(axis: Axes, values: Mapping[str, Sequence[Floats]], policies: Sequence[str]) -> None:
        axis.axvspan(*map(float, MIDDLE), color=_SHADE, zorder=0)
        for policy, style in series(policies).items():
            if policy in values:
                lines, flat = zip(*values[policy], strict=True)
                mean_line(axis, centres, lines, label=policy, lw=1.3, ms=3, **style)
                axis.plot(centres, np.mean(flat, 0), ":", lw=1, color=style["color"])

    label, subject = "share of the positions kept", "Where kept entries lie"
    note = "shaded: middle third; dotted: no position preferred"
    return _per_budget(traces, records, (layer, head), curves, draw, (label, subject, note))


@figure(source="AMS, Fig. 5, Table 14", requires="at least two events")
def iou_by(table: Tabular, by: str = "stage") -> Figure:
    """Retained-set IoU of each policy by stage of the model or a label; a panel per budget.

    AMS (arXiv 2605.23200), Fig. 5 and Table 14. Mean over prompts with the 95 % interval. A short
    black line across each bar is chance, the IoU of sets of the same sizes without memory.

    Args:
        table: with the metric `retained_iou`.
        by: `stage`, `layer`, or a label of the prompts: `domain`, `task`, `level`.

    Returns a Figure. Raises PolicyError without such a column, or without an IoU.
    """
    table, _ = split_by(labelled(as_table(table)), by)
    values = table.filter(pl.col(by).is_not_null(), metric="retained_iou", variant="")
    needs = f"retained_iou by {by}; it takes two events of a policy, and traces with a {by}"
    means = means_of(values, [by], needs=needs)
    groups = means[by].unique().sort().to_list()
    budgets = requested_order(means["requested"].to_list())
    styles = series(means["policy"].unique(maintain_order=True))
    width = max(3.4, 0.16 * len(groups) * (len(styles) + 1) + 0.8)
    figure, axes = panels(len(budgets), columns=len(budgets), size=(width, 2.6), share="row")
    bar = 0.8 / len(styles)
    for axis, budget in zip(axes, budgets, strict=True):
        for place, (policy, style) in enumerate(styles.items()):
            part = means.filter(policy=policy, requested=budget)
            places = np.array([groups.index(group) for group in part[by]], dtype=np.float64)
            places += (place - (len(styles) - 1) / 2) * bar
            mean = part["mean"].to_numpy()
            ends = np.abs(part.select("low", "high").cast(pl.Float64).to_numpy().T - mean)
            axis.bar(places, mean, 0.9 * bar, color=style["color"], label=policy, zorder=2)
            look: dict[str, Any] = {"ecolor": "black", "elinewidth": 0.8, "capsize": 1.5}
            axis.errorbar(places, mean, ends, fmt="none", zorder=3, **look)  # not drawn where null
            chance = part["chance"].cast(pl.Float64).to_numpy()
            edges = places - 0.45 * bar, places + 0.45 * bar
            axis.hlines(chance, *edges, color="black", lw=1.2, zorder=4)
        names = [short_text(str(group), 16) for group in groups]
        axis.set_xticks(range(len(groups)), names, parse_math=False)
        plain(axis, by, title=f"budget {budget}")
        axis.set_ylim(0, 1)
    name_axes(axes[0], y="IoU of consecutive kept sets")
    subject = f"Retained-set IoU by {by}; across bars: chance\nmean over {counted(means['n'])}"
    finish(figure, axes[0], subject, means["fidelity"], columns=5)
    return figure


@figure(source="G-KV, Fig. 7")
def position_density(
    traces: Traces,
    records: Record | Sequence[Record],
    *,
    layer: int | None = None,
    head: int | None = None,
) -> Figure:
    """Density of the positions that the last event keeps, a line per policy; a panel per budget.

    G-KV (arXiv 2512.00504), Fig. 7. A histogram with area 1; every prompt has the same weight. The
    vertical line is the mean of the policy; dotted is a uniform set.

    Args:
        traces: one or several.
        records: their replays.
        layer: all by default.
        head: all KV heads by default.

    Returns a Figure. Raises PolicyError if nothing was evicted.
    """
    traces = as_traces(traces)
    records = listed(records)

    def density(gone: list[_Ints]) -> Floats | None:
        evicted = [x for x in gone if last_event(x) >= 0]
        relative = np.concatenate([np.zeros(0), *(retained_positions(x)[1] for x in evicted)])
        if not len(relative):
            return None
        heights, _ = np.histogram(relative, BINS, (0, 1), density=True)
        return np.append(heights, relative.mean())

    def draw(axis: Axes, values: Mapping[str, Sequence[Floats]], policies: Sequence[str]) -> None:
        axis.axhline(1.0, color="black", lw=0.9, ls=":")
        axis.axvline(0.5, color="black", lw=0.9, ls=":")
        for (policy, style), dashes in zip(series(policies).items(), cycle(DASHES), strict=False):
            if policy in values:
                heights = [np.append(height[:BINS], height[BINS - 1]) for height in values[policy]]
                steps = {**style, "label": policy, "drawstyle": "steps-post"}
                steps |= {"marker": "", "linestyle": dashes}
                mean_line(axis, np.arange(BINS + 1) / BINS, heights, lw=1.3, **steps)
                mean = float(np.mean([height[BINS] for height in values[policy]]))
                axis.axvline(mean, color=style["color"], lw=1, ls=dashes)

    label, subject = "density of kept entries (area 1)", "What the last event keeps"
    note = "vertical: mean; dotted: uniform"
    return _per_budget(traces, records, (layer, head), density, draw, (label, subject, note))


def _per_budget(
    traces: Sequence[Trace],
    records: Sequence[Record],
    place: tuple[int | None, int | None],
    value: Callable[[list[_Ints]], Floats | None],
    draw: Draw,
    texts: tuple[str, str, str],
) -> Figure:
    """Draw a number of every record over relative positions, a panel per budget.

    place: the layer and the KV head shown, None for all. value: of the rows after which entries
    are gone, [H, T] of each layer shown; None leaves a record out. texts: what the vertical axis,
    the title and the line below it say.
    """
    layer, head = place
    check_models(traces)
    traces = [trace.part() for trace in traces]
    by_name = {trace.name: trace for trace in traces}
    values: dict[tuple[str, str], list[Floats]] = {}
    fidelities: set[str] = set()
    for record, name in zip(records, record_labels(records), strict=True):
        if record.trace not in by_name:
            raise TraceError(
                f"a record of {record.trace!r}, but the traces are {', '.join(by_name)}; give "
                "the traces that were replayed"
            )
        trace = by_name[record.trace]
        check_record(trace, record)
        layers = record.layers if layer is None else [trace_layer(trace, layer)]
        gone = {at: gone_of(trace, record, at, head) for at in layers}
        array = value(list(gone.values()))
        if array is not None:
            budget = record.facts.share or str(record.budget)
            values.setdefault((name, budget), []).append(array)
            fidelities |= {fidelity(trace, record, "sets", at) for at in gone}
    if not values:
        raise PolicyError("nothing left the cache, so there is nothing to show; lower --budget")
    policies = list(dict.fromkeys(policy for policy, _ in values))
    budgets = requested_order([budget for _, budget in values])
    figure, axes = panels(len(budgets), columns=len(budgets), size=(3.4, 2.6), share="row")
    for axis, budget in zip(axes, budgets, strict=True):
        of_budget = {policy: values[policy, at] for policy, at in values if at == budget}
        draw(axis, of_budget, policies)
        axis.set_xlim(0, 1)
        plain(axis, "relative position (0: first, 1: at the event)", title=f"budget {budget}")
    label, subject, note = texts
    name_axes(axes[0], y=label)
    axes[0].set_ylim(bottom=0)  # of all panels, once the highest is drawn
    where = "all layers" if layer is None else f"layer {traces[0].layer_ids[layer]}"
    where += ", all KV heads" if head is None else f", KV head {trace_head(traces[0], head)}"
    prompts = counted(len(arrays) for arrays in values.values())
    text = f"{subject}: {where}, mean over {prompts}\n{note}"
    finish(figure, axes[0], text, fidelities, columns=5)
    return figure


def _means(table: pl.DataFrame, metrics: Sequence[str]) -> pl.DataFrame:
    measured = ", ".join(table["metric"].unique(maintain_order=True)) or "none"
    needs = f"mean of {', '.join(metrics)}; it has {measured}"
    return means_of(main_variants(labelled(table), metrics), needs=needs)


def metric_label(name: str) -> str:
    """Return a metric's name with its unit and its better direction, for an axis."""
    entry = METRICS[name]
    summed = ", sum over layers" if entry.layers == "sum" else ""
    better = f", {entry.better} is better" if entry.better else ""
    return f"{name.replace('_', ' ')} ({entry.unit}{summed}{better})"


def _budget_label(budgets: Sequence[str]) -> str:
    kinds = {"%": "share of the trace", "r": "share of the tokens so far"}  # 25%, 25%so-far
    units = [
        "entries" if size.isdecimal() else kinds.get(size[-1], "bytes of all heads")
        for size in requested_order(budgets)
    ]
    return f"budget per KV head ({' or '.join(dict.fromkeys(units))})"
