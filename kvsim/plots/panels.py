"""Small panels with the same axes in a grid, and one legend below them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvsim.plots.style import legend_of, plain


class Panels:
    """A grid of `count` panels, at most `columns` beside each other.

    size: of one panel, inches. share: which of them have the same limits. The names of the axes
    stand on the left and below alone.
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
        """What the axes are, with their units."""
        for axis in self.bottom:
            axis.set_xlabel(across, fontsize=8)
        for axis in self.left:
            axis.set_ylabel(up, fontsize=8)

    def legend(self, *, columns: int) -> None:
        """One legend below all panels, with the entries of the first."""
        legend_outside(self.figure, self.axes[0], columns=columns)


def legend_outside(figure: Figure, axis: Axes, *, columns: int) -> None:
    """One legend below a figure of constrained layout, with the names of one panel."""
    handles, names = axis.get_legend_handles_labels()
    once = dict(zip(names, handles, strict=True))
    legend_of(figure, list(once.values()), list(once), columns=columns, loc="outside lower center")


def known(values: Iterable[str]) -> str:
    """The one name there is, or how many there are."""
    names = list(dict.fromkeys(values))
    return names[0] if len(names) == 1 else f"{len(names)} traces"
