"""Small panels with the same axes in a grid, and one legend below them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvsim.plots.style import legend_of, name_axes, plain, whole_ticks


class Panels:
    """A grid of `count` panels, at most `columns` in a row.

    size: of one panel, inches. share: which panels have the same limits. Only the panels on the
    left and at the bottom name their axes.
    """

    def __init__(
        self,
        count: int,
        *,
        columns: int = 4,
        size: tuple[float, float] = (2.3, 2.1),
        share: Literal["all", "row"] = "all",
    ) -> None:
        across = min(columns, count)
        rows = math.ceil(count / across)
        shape = (max(4.8, size[0] * across + 0.5), size[1] * rows + 1.1)
        self.figure = Figure(figsize=shape, dpi=150, layout="constrained")
        grid = self.figure.subplots(rows, across, squeeze=False, sharex=share, sharey=share)
        self.axes: list[Axes] = list(grid.flat[:count])
        self.left: list[Axes] = list(grid[:, 0])
        self.bottom = self.axes[-across:]
        for axis in grid.flat[count:]:
            axis.remove()
        for axis in self.axes:
            plain(axis)
        for axis in self.bottom:
            axis.tick_params(labelbottom=True)

    def label(self, across: str, up: str) -> None:
        """Name the axes, with their units."""
        for axis in self.bottom:
            name_axes(axis, across)
        for axis in self.left:
            name_axes(axis, y=up)

    def legend(self, *, columns: int) -> None:
        """Draw one legend below all panels, with the entries of the first."""
        legend_outside(self.figure, self.axes[0], columns=columns)


def legend_outside(figure: Figure, axis: Axes, *, columns: int) -> None:
    """Draw one legend below a figure of constrained layout, with the names of one panel."""
    handles, names = axis.get_legend_handles_labels()
    by_name = dict(zip(names, handles, strict=True))
    handles = list(by_name.values())
    legend_of(figure, handles, list(by_name), columns=columns, loc="outside lower center")


def single_panel(width: float, height: float) -> tuple[Figure, Axes]:
    """Build a figure of constrained layout with one panel, in inches."""
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    return figure, figure.subplots()


def layer_axis(axis: Axes, n_layers: int) -> None:
    """Make the horizontal axis that of the layers, with whole numbers."""
    plain(axis, "layer")
    axis.set_xlim(-0.5, n_layers - 0.5)
    whole_ticks(axis.xaxis)


def trace_label(traces: Iterable[str]) -> str:
    """Return the name of the only trace, or the number of traces."""
    names = list(dict.fromkeys(traces))
    return names[0] if len(names) == 1 else f"{len(names)} traces"
