"""Figures of kept sets: where in the text they lie, and how much of them stays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from kvsim.metrics import kept_coverage
from kvsim.metrics.catalogue import mean_known
from kvsim.metrics.coverage import BINS, MIDDLE
from kvsim.plots.prompts import Ints, Prompts, Shown, mean_line
from kvsim.plots.style import caption, legend_below, plain, series
from kvsim.record import Record
from kvsim.trace import Trace

Floats = NDArray[np.float64]

_POSITION = "relative position (0: first, 1: at the event)"
_SHADE = "#f2efe9"


def middle_coverage(
    traces: Sequence[Trace],
    records: Sequence[Record],
    *,
    layer: int | None = None,
    head: int | None = None,
    bins: int = BINS,
) -> Figure:
    """Share of each part of the text that is kept, a line per policy; a panel per budget.

    AMS (arXiv 2605.23200), Fig. 4 (a). Mean over events, heads and layers, then over prompts with
    the 95 % interval. Dotted, in the policy's colour: a set of its size without preference for any
    place. The middle third is shaded.

    Args:
        traces: of which the records are.
        records: policies and budgets.
        layer: index in the trace, all by default.
        head: KV head, all by default.
        bins: parts of equal width.

    Raises:
        TraceError: a record of another trace.
        PolicyError: nothing left in any record.
    """

    def curves(gone: list[Ints]) -> Floats | None:
        found = [kept_coverage(one, bins) for one in gone]
        known = [one for one in found if len(one.rows)]
        if not known:
            return None
        lines = [mean_known(one.curve).mean(0) for one in known]
        flat = np.array([one.overall.mean() for one in known])
        return np.stack([mean_known(np.stack(lines, axis=-1)), np.full(bins, flat.mean())])

    shown = Shown(layer, head)
    found = Prompts.of(traces, records, shown, curves)
    figure, axes = _panels(found)
    styles = series(found.policies)
    centres = (np.arange(bins) + 0.5) / bins
    first, last = map(float, MIDDLE)
    for axis, asked in zip(axes, found.budgets, strict=True):
        axis.axvspan(first, last, color=_SHADE, zorder=0)
        for policy in found.policies:
            values = found.values.get((policy, asked))
            if values is None:
                continue
            lines, flat = zip(*values, strict=True)
            mean_line(axis, centres, lines, label=policy, lw=1.3, ms=3, **styles[policy])
            axis.plot(centres, np.mean(flat, 0), ":", lw=1, color=styles[policy]["color"])
        axis.set_xlim(0, 1)
        axis.set_ylim(bottom=0)
        axis.set_xlabel(_POSITION, fontsize=8)
        plain(axis)
    axes[0].set_ylabel("share of the positions kept", fontsize=8)
    what = f"Where kept entries lie: {shown.text(traces[0])}, {found.counted}"
    _finish(figure, axes, f"{what}\nshaded: middle; dotted: no place preferred", found)
    return figure


def _panels(found: Prompts) -> tuple[Figure, list[Axes]]:
    """A panel per budget, side by side."""
    budgets = found.budgets
    figure = Figure(figsize=(max(5.6, 3.4 * len(budgets) + 0.4), 3.6), dpi=150)
    axes = list(figure.subplots(1, len(budgets), squeeze=False, sharey=True)[0])
    for axis, asked in zip(axes, budgets, strict=True):
        axis.set_title(f"budget {asked}", fontsize=9)
    return figure, axes


def _finish(figure: Figure, axes: Sequence[Axes], what: str, found: Prompts) -> None:
    """Caption and legend, and room for both."""
    caption(figure, what, found.fidelities)
    height = legend_below(figure, axes[0], columns=5)
    figure.tight_layout(rect=(0, height, 1, 1))
