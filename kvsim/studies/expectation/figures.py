"""The figure of expected attention; its numbers are `exact`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from kvsim.analysis.arrays import Floats
from kvsim.analysis.axes import checked_index
from kvsim.plots.registry import figure
from kvsim.plots.style import caption, colour_bar, label, panels
from kvsim.store.opening import TraceLike, as_trace
from kvsim.studies.expectation.expectation import STEPS, expected_and_observed

#: Attention below this is drawn as this value: logits of some heads are hundreds below the others.
FLOOR: Final = 1e-12


@figure(source="Expected Attention, Fig. 10")
def expected_observed(
    trace: TraceLike, *, layers: Sequence[int] | None = None, cut: int | None = None
) -> Figure:
    """Expected against observed attention on each key of a query head, by layer and step.

    Expected Attention (arXiv 2510.00636), Fig. 10. Rows are layers, columns are steps. Dotted is
    where both agree: expected attention sums to 1 over the keys, observed attention to the share
    that they get. Each layer shows the head with the median Spearman correlation of the last step.

    Args:
        trace: of prompt and response.
        layers: all by default.
        cut: rows of the past; by default a fifth of the trace, as in the paper.

    Returns a Figure. Raises PolicyError without rows before and after the cut, or with windows.
    """
    trace = as_trace(trace)
    expectation = expected_and_observed(trace, cut)
    count, _, keys = expectation.observed.shape
    wanted = range(count) if layers is None else layers
    shown = [checked_index("layer", at, count, trace.name) for at in wanted]
    size = len(shown) * len(STEPS)
    figure, axes = panels(size, columns=len(STEPS), size=(2.1, 2.0), share="row")
    at = np.arange(expectation.sink, expectation.cut)
    scale = Normalize(expectation.sink, expectation.cut - 1)
    lowest = 1.0
    for place, axis in enumerate(axes):
        row, step = divmod(place, len(STEPS))
        layer = shown[row]
        ranks = expectation.spearman[-1, layer]  # NaN counts as highest
        known = int((~np.isnan(ranks)).sum())
        head = int(ranks.argsort(kind="stable")[max(0, known - 1) // 2])
        observed = np.exp(expectation.observed[layer, head])
        expected = np.exp(expectation.expected[:, layer, head])
        look: dict[str, Any] = {"s": 7, "lw": 0, "cmap": "viridis", "norm": scale, "zorder": 3}
        axis.scatter(observed.clip(FLOOR), expected[step].clip(FLOOR), c=at, **look)
        ends = np.array([FLOOR, 1.0])
        axis.plot(ends, ends / observed.sum(), ":", color="black", lw=0.8)
        axis.set(xscale="log", yscale="log", xlim=_around(observed), ylim=_around(expected))
        axis.tick_params(which="minor", labelsize=5)  # labelled where there is less than a decade
        lowest = min(lowest, observed.min(), expected.min())
        rank = expectation.spearman[step, layer, head]
        logs = expectation.log_pearson[step, layer, head]
        name = f"{STEPS[step].replace('_', ' ')}\n" if row == 0 else ""
        axis.set_title(f"{name}Spearman {rank:.2f}, log-Pearson {logs:.2f}", fontsize=7)
        if step == 0:
            text = f"layer {trace.layer_ids[layer]}, head {head}"
            axis.text(0.03, 0.97, text, transform=axis.transAxes, fontsize=7, va="top")
    label(figure, "observed attention (share)", "expected (share of the keys)")
    layout = {"pad": 0.01, "aspect": 40, "shrink": 0.9}
    image = ScalarMappable(scale, "viridis")
    colour_bar(figure, image, axes, "position of the key", **layout)
    edge = f"; at the edge: {FLOOR:g} or less" if lowest <= FLOOR else ""
    what = f"{trace.name}: {keys} keys before position {expectation.cut}, mean over "
    what += f"{trace.n_pos - expectation.cut} later rows\ndotted: equal shares{edge}"
    caption(figure, what, ["exact"])
    return figure


def _around(values: Floats) -> tuple[float, float]:
    return 0.5 * max(float(values.min()), FLOOR), min(2.0, 2 * max(float(values.max()), FLOOR))
