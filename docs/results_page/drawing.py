"""The figure of the page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from kvsim import Policy
from kvsim.analysis.summaries import Interval
from results_page.statistics import Results

#: Of the budgets in the figure, from the smallest on.
COLORS = ("#c8102e", "#e08a1e", "#7a9cc6", "#1f4e79")


def figure(r: Results, policies: Mapping[str, Policy], path: Path) -> None:
    """Output error of every policy, one dot and its interval for each budget."""
    middle = r.plan.budgets[len(r.plan.budgets) // 2]
    shown = [label for label in policies if label != "full"]
    shown.sort(key=lambda label: -np.nanmean(r.of(label, middle, "output_error")))
    image = Figure(figsize=(7.5, 0.155 * len(shown) + 1.0), dpi=72)
    axis = image.subplots()
    for at, n in enumerate(r.plan.budgets):
        found = [Interval.of(r.of(label, n, "output_error")) for label in shown]
        low, mean, high = np.array([(one.low, one.mean, one.high) for one in found]).T
        color = COLORS[at % len(COLORS)]
        axis.hlines(range(len(shown)), low, high, color=color, linewidth=1)
        axis.plot(mean, range(len(shown)), "o", color=color, markersize=3.5, label=f"budget {n}")
    axis.set_xscale("log")
    axis.set_yticks(range(len(shown)), shown, fontsize=6.5)
    axis.set_ylim(-1, len(shown))
    axis.grid(axis="both", color="#e6e6e6", linewidth=0.5)
    axis.set_axisbelow(True)
    axis.set_xlabel("output error, mean and 95 % interval over prompts")
    axis.legend(loc="upper right", fontsize=7)
    image.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    image.savefig(path, metadata={"Software": None}, pil_kwargs={"optimize": True})
