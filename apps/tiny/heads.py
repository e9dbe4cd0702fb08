"""A figure of the heads of a small model: the attention that `apps.tiny.probes` measures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from apps.tiny.results import Row, heads

Floats = NDArray[np.float64]


def head_masses(rows: Sequence[Row]) -> Figure:
    """Draw a heat map: rows are query heads, columns the shares of attention and of needed words.

    rows: results, see `apps.tiny.probes.structure`.
    """
    measured = heads(rows)
    needs = list(measured[0]["mass"])
    rests = {"first 4": "first", "marks": "marks", "last 32": "last", "chain before": "chain"}
    left = np.array([[each[name] for name in rests.values()] for each in measured])
    right = np.array([list(each["mass"].values()) for each in measured])
    layers = np.array([each["layer"] for each in measured])
    figure = Figure(figsize=(8.6, 0.21 * len(measured) + 1.7), dpi=116)
    axes = figure.subplots(
        1, 2, width_ratios=[len(rests), len(needs)], gridspec_kw={"wspace": 0.06}
    )
    labels = [f"{each['layer']}.{each['head']}" for each in measured]
    _grid(axes[0], left, list(rests), labels)
    _grid(axes[1], right, needs, [""] * len(measured))
    axes[0].set_ylabel("layer.head", fontsize=9)
    axes[0].set_title("share of attention", fontsize=9)
    axes[1].set_title("share on the position that a word is looked up from", fontsize=9)
    for axis in axes:
        for row in np.flatnonzero(np.diff(layers)):
            axis.axhline(row + 0.5, color="black", lw=1)
    figure.subplots_adjust(
        left=0.07, right=0.99, top=1 - 0.35 / figure.get_figheight(), bottom=0.17
    )
    return figure


def _grid(axis: Axes, shares: Floats, columns: Sequence[str], rows: Sequence[str]) -> None:
    """Draw shares from 0 to 1 as coloured cells, with their numbers from 0.05 on."""
    axis.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    for (row, column), share in np.ndenumerate(shares):
        if share >= 0.05:
            ink = "white" if share > 0.6 else "black"
            text = f"{share:.2f}".removeprefix("0")
            axis.text(column, row, text, ha="center", va="center", fontsize=8, color=ink)
    axis.set_xticks(range(len(columns)), columns, rotation=40, ha="right", fontsize=8)
    axis.set_yticks(range(len(rows)), rows, fontsize=8)
    axis.tick_params(length=0)
