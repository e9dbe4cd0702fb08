"""The figure of the page: what predicts the live divergence, and what does not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars as pl
from matplotlib.figure import Figure

from drawing import small
from fidelity_page.loops import Loops
from kvsim.analysis.prediction import FLOOR

#: Metrics of the replay, a column each.
METRICS = {"layer_error": "layer error (replay)", "output_error": "output error (replay)"}

_COLORS = (
    *("#8c8c8c", "#1f77b4", "#17becf", "#2ca02c", "#98df8a", "#d62728"),
    *("#ff9896", "#9467bd", "#e377c2", "#000000", "#ff7f0e", "#bcbd22"),
)


def figure(measured: Sequence[Loops], path: Path) -> None:
    """Live KL over both metrics, a row for each model: a point for each policy and budget."""
    image = Figure(figsize=(8.5, 3.4 * len(measured)), dpi=100)
    axes = image.subplots(len(measured), len(METRICS), squeeze=False, sharey="row")
    for row, loops in zip(axes, measured, strict=True):
        policies = [policy.name for policy in loops.study.policies]
        for axis, (metric, label) in zip(row, METRICS.items(), strict=True):
            cells = loops.points(metric).group_by("policy", "asked", maintain_order=True)
            means = cells.agg(pl.col("error", "kl").mean()).with_columns(pl.col("kl").clip(FLOOR))
            for name, color in zip(policies, _COLORS, strict=False):
                of = means.filter(policy=name).sort("error")
                axis.plot(of["error"], of["kl"], "o-", color=color, markersize=4, linewidth=0.6)
            axis.set(xscale="log", yscale="log", xlabel=label)
            axis.grid(color="#e6e6e6", linewidth=0.5)
            axis.set_axisbelow(True)
        row[0].set_ylabel(f"{loops.study.prompts.model}: live KL (nats; at least {FLOOR})")
    image.legend(policies, loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    image.tight_layout(rect=(0, 0.05, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.savefig(path, metadata={"Software": None})
    small(path, path)
