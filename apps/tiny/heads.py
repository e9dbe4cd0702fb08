"""Figures of the heads of a small model: their attention, and their effect on the response.

All numbers come from `apps.tiny.probes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray

from apps.tiny.results import Row, best, heads
from kvsim.plots.style import COLOURS
from kvsim.studies.language.ledger import Purpose
from kvsim.studies.language.tasks import TASKS

Floats = NDArray[np.float64]

MAP = "viridis"


def head_maps(maps: Any, *, prompt: int) -> Figure:
    """Draw the attention of every query head over one sample; rows are layers, columns heads.

    Args:
        maps: [layer, query head, row, pos].
        prompt: positions of the prompt; lines separate it from the response.
    """
    maps = np.asarray(maps, dtype=np.float64)
    layers, count, total, _ = maps.shape
    figure = Figure(figsize=(1.4 * count + 1.0, 1.4 * layers + 0.75), dpi=110)
    axes = figure.subplots(layers, count, squeeze=False, sharex=True, sharey=True)
    # a single cell would be too faint at this size: each is drawn with its neighbours
    for (layer, head), axis in np.ndenumerate(axes):
        image = axis.imshow(
            _grown(maps[layer, head]),
            cmap=MAP,
            norm=PowerNorm(0.5, 0, 1),
            interpolation="nearest",
            extent=(0, total, total, 0),
        )
        for draw in (axis.axhline, axis.axvline):
            draw(prompt, color="white", lw=0.5, ls=":")
        # room on the left, so that the frame does not hide the first token, where sinks are
        axis.set_xlim(-0.03 * total, total)
        axis.set_facecolor(mpl.colormaps[MAP](0.0))
        axis.set_xticks([])
        axis.set_yticks([])
        if layer == 0:
            axis.set_title(f"head {head}", fontsize=8)
        if head == 0:
            axis.set_ylabel(f"layer {layer}\nrow", fontsize=8)
        if layer == layers - 1:
            axis.set_xlabel("position", fontsize=8)
    figure.suptitle(
        f"Attention over one sample of {total} tokens; dotted: end of the prompt", fontsize=9
    )
    width, height = figure.get_size_inches()
    figure.subplots_adjust(
        left=0.45 / width,
        right=1 - 0.55 / width,
        top=1 - 0.5 / height,
        bottom=0.25 / height,
        wspace=0.04,
        hspace=0.04,
    )
    bar = figure.colorbar(image, cax=figure.add_axes((1 - 0.45 / width, 0.1, 0.01, 0.7)))
    bar.ax.tick_params(labelsize=7)
    return figure


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
    figure = Figure(figsize=(9.6, 0.235 * len(measured) + 2.3), dpi=120)
    axes = figure.subplots(
        1, 2, width_ratios=[len(rests), len(needs)], gridspec_kw={"wspace": 0.06}
    )
    labels = [f"{each['layer']}.{each['head']}" for each in measured]
    _grid(axes[0], left, list(rests), labels)
    _grid(axes[1], right, needs, [""] * len(measured))
    axes[0].set_ylabel("layer.head", fontsize=8)
    axes[0].set_title("where attention rests", fontsize=9)
    axes[1].set_title("mass on the position that a word needs", fontsize=9)
    for axis in axes:
        for row in np.flatnonzero(np.diff(layers)):
            axis.axhline(row + 0.5, color="white", lw=2.5)
    figure.subplots_adjust(left=0.07, right=0.99, top=1 - 0.4 / figure.get_figheight(), bottom=0.16)
    return figure


def removed_heads(rows: Sequence[Row]) -> Figure:
    """Draw a heat map: the share of looked-up words that are right without one part.

    Rows are the whole model, each layer and each KV head; columns are purposes, all tasks together.
    rows: results, see `apps.tiny.probes.ablation`.
    """
    tasks = [row["removed"] for row in best(rows, "ablation").values()]
    parts = [name for name in tasks[0] if "mean" not in name]
    measured = {purpose for task in tasks for purpose in task["nothing"]["by_purpose"]}
    purposes = [purpose for purpose in get_args(Purpose) if purpose in measured]
    right = np.zeros((len(parts), len(purposes)))
    for at, part in enumerate(parts):
        for to, purpose in enumerate(purposes):
            pairs = [task[part]["by_purpose"].get(purpose, (0, 0)) for task in tasks]
            right[at, to] = sum(hits for hits, _ in pairs) / sum(words for _, words in pairs)
    figure = Figure(figsize=(6.4, 0.25 * len(parts) + 1.6), dpi=120)
    axis = figure.subplots()
    names = [f"without {name}" if name != "nothing" else "whole model" for name in parts]
    _grid(axis, right, purposes, [name.replace("head", "KV head") for name in names])
    for row, name in enumerate(parts):
        if name.startswith("layer"):
            axis.axhline(row - 0.5, color="white", lw=2.5)
    axis.set_title("share of looked-up words that are right, teacher-forced", fontsize=9)
    figure.tight_layout()
    return figure


def training_curves(rows: Sequence[Row]) -> Figure:
    """Draw development samples against tokens of training; two panels for each seed.

    Left the share of exact chains of each task, right the share of looked-up words of each purpose
    that are right. rows: results, see `apps.tiny.evaluate.curve`.
    """
    runs = {row["seed"]: row["curve"] for row in rows if row["part"] == "curve"}
    figure = Figure(figsize=(9.6, 2.4 * len(runs) + 1.2), dpi=120)
    axes = figure.subplots(len(runs), 2, squeeze=False, sharex=True, sharey=True)
    for pair, (seed, points) in zip(axes, sorted(runs.items()), strict=True):
        _curves(pair[0], points, "exact", TASKS)
        _curves(pair[1], points, "right", get_args(Purpose))
        pair[0].set_ylabel(f"seed {seed}, %", fontsize=8)
    axes[0, 0].set_title("exact chains", fontsize=9)
    axes[0, 1].set_title("right words, by what is looked up", fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("tokens of training, millions; dotted: the mix begins", fontsize=8)
        axis.legend(
            fontsize=7, frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.2)
        )
    figure.tight_layout()
    return figure


def _curves(axis: Axes, points: Sequence[Row], share: str, names: Sequence[str]) -> None:
    """Draw a line for each name that every point has, and their mean."""
    names = [name for name in names if all(name in point[share] for point in points)]
    tokens = np.array([point["tokens"] for point in points]) / 1e6
    shares = 100 * np.array([[point[share][name] for name in names] for point in points])
    for to, name in enumerate(names):
        again, colour = divmod(to, len(COLOURS))
        axis.plot(tokens, shares[:, to], ["-", "--"][again], color=COLOURS[colour], label=name)
    axis.plot(tokens, shares.mean(1), color="black", lw=2, label="mean")
    mixed = [at for at, point in zip(tokens, points, strict=True) if point["stage"] == "mix"]
    if mixed:
        axis.axvline(mixed[0], color="black", lw=0.8, ls=":")
    axis.set_ylim(-3, 103)
    axis.tick_params(labelsize=7)
    axis.grid(alpha=0.25)


def _grid(axis: Axes, shares: Floats, columns: Sequence[str], rows: Sequence[str]) -> None:
    """Draw shares from 0 to 1 as coloured cells, with their numbers from 0.005 on."""
    axis.imshow(shares, cmap=MAP, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    for (row, column), share in np.ndenumerate(shares):
        if share >= 0.005:
            ink = "black" if share > 0.6 else "white"
            text = f"{share:.2f}".removeprefix("0")
            axis.text(column, row, text, ha="center", va="center", fontsize=6.5, color=ink)
    axis.set_xticks(range(len(columns)), columns, rotation=40, ha="right", fontsize=7.5)
    axis.set_yticks(range(len(rows)), rows, fontsize=7)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


def _grown(cells: Floats) -> Floats:
    """Return the maximum of every cell and its neighbours to the left and above."""
    out = cells.copy()
    out[1:] = np.maximum(out[1:], cells[:-1])
    out[:, 1:] = np.maximum(out[:, 1:], cells[:, :-1])
    return out
