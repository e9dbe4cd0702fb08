"""Opening of a page of results: a ranking and two figures, of the numbers in its tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from kvsim.analysis.significance import FEWEST
from kvsim.policies import describe, names
from results_page.drawing import COLORS

#: Places of the ranking.
_PLACES = 8
#: No candidates: no budget binds them, they look ahead, or they are chance.
_REFERENCES = ("full", "oracle", "random", "rpc")
_TABLE = re.compile(r"^### Budget (\d+)(?:: (.*))?\n\n((?:\|.*\n?)+)", re.MULTILINE)
_NUMBER = re.compile(r"(-?[\d.]+)(?: \[(-?[\d.]+), (-?[\d.]+)\])?")


#: The mark of policies that have learned from queries of another prompt.
CALIBRATED = "†"
#: The heading of what follows the opening.
MEASURED = "## How this was measured"


class Row(NamedTuple):
    """A policy at a budget: its label, and mean and ends of the interval of error and wipe-out."""

    label: str
    error: tuple[float, float, float]
    wiped: tuple[float, float, float]

    @property
    def family(self) -> str:
        """The policy of which this is a preset, a setting or a combination."""
        return re.split(r"[@+,]", self.label)[0]


def rows(text: str) -> dict[str, list[Row]]:
    """Return the rows of the tables of a page, without references.

    By budget, with the number of prompts where that is not all.
    """
    out: dict[str, list[Row]] = {}
    for budget, prompts, table in _TABLE.findall(text):
        head, _, *lines = (
            [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()
        )
        places = head.index("output error"), head.index("wipe-out 32")
        for cells in lines:
            label = cells[0].replace("`", "").replace(CALIBRATED, "")
            found = [_NUMBER.match(cells[at]) for at in places]
            # too few prompts have no interval
            numbers = [tuple(float(x or "nan") for x in one.groups()) for one in found if one]
            row = Row(label.partition(" (")[0], *numbers) if len(numbers) == len(places) else None
            if row is not None and row.family not in _REFERENCES:
                key = f"{budget} ({prompts})" if prompts else budget
                out.setdefault(key, []).append(row)
    return out


def best(of_budget: Sequence[Row]) -> list[Row]:
    """Return the best row of each family, by output error."""
    first: dict[str, Row] = {}
    for row in sorted(of_budget, key=lambda row: (row.error, len(row.label))):
        first.setdefault(row.family, row)
    return list(first.values())


def beside(figure: str) -> str:
    """Return the name of the figure of the ranking, next to that of all policies."""
    return figure.replace(".png", "-ranking.png")


def opening(text: str, figure: str) -> str:
    """Return the ranking of a page with the links to its two figures.

    text: of the page, with its tables. figure: that of all policies, as the page links to it.
    """
    by_budget = {budget: best(of_budget) for budget, of_budget in rows(text).items()}
    few = [budget for budget, ranked in by_budget.items() if np.isnan(ranked[0].error[1])]
    by_budget = {budget: ranked for budget, ranked in by_budget.items() if budget not in few}
    unranked = f" Not ranked: budget {', '.join(few)}, which takes at least {FEWEST} prompts."
    lines = [
        "| rank | " + " | ".join(f"budget {budget}" for budget in by_budget) + " |",
        "| ---: |" + " --- |" * len(by_budget),
    ]
    for place in range(_PLACES):
        cells = [_cell(ranked[place]) for ranked in by_budget.values() if place < len(ranked)]
        lines.append(f"| {place + 1} | {' | '.join(cells)} |")
    meaning = (
        "Output error, mean and 95 % interval over prompts, of the best preset or combination of "
        "each policy; those without a budget, those that look ahead and chance are left out. "
        "Intervals that overlap decide nothing by themselves. "
        f"{CALIBRATED} marks policies that were calibrated on another prompt of the same kind. "
        "All rows are in the tables [below](#what-policies-keep-and-lose)."
    ) + unranked * bool(few)
    alt = "Output error and wiped-out regions of the best preset or combination of each policy"
    parts = [
        "## Which policy is best",
        meaning,
        "\n".join(lines),
        "A low error and few wiped-out regions are different things:",
        f"![{alt}]({beside(figure)})",
        f"![Output error of every policy at every budget]({figure})",
    ]
    return "\n\n".join(parts)


def _cell(row: Row) -> str:
    mean, low, high = row.error
    return f"{shown(row.label)} {mean:.3f} [{low:.3f}, {high:.3f}]"


def shown(label: str) -> str:
    """A policy as tables name it, marked where it was calibrated."""
    name, comma, rest = label.partition(",")
    parts = [part for part in name.split("+") if part in names()]
    mark = CALIBRATED * any("calibration" in describe(part).required for part in parts)
    return f"`{name}`{mark}{comma}{rest}"


def ranking_figure(text: str, path: Path) -> None:
    """Draw error and wiped-out regions of the best of each policy, a dot for each budget."""
    by_budget = rows(text)
    middle = best([*by_budget.values()][(len(by_budget) - 1) // 2])
    image = Figure(figsize=(7.5, 0.17 * len(middle) + 1.3), dpi=72)
    panels = image.subplots(1, 2, sharey=True)
    for at, (budget, of_budget) in enumerate(by_budget.items()):
        by_label = {row.label: row for row in of_budget}
        color = COLORS[at % len(COLORS)]
        for place, row in enumerate(middle):
            if row.label not in by_label:
                continue
            values = by_label[row.label].error, by_label[row.label].wiped
            for panel, (mean, low, high) in zip(panels, values, strict=True):
                panel.hlines(place, low, high, color=color, linewidth=1)
                label = f"budget {budget}" if not place else None
                panel.plot(mean, place, "o", color=color, markersize=3.5, label=label)
    panels[0].set_yticks(range(len(middle)), [row.label for row in middle], fontsize=6.5)
    panels[0].set_ylim(len(middle), -1)
    panels[0].set_xscale("log")
    panels[0].xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panels[0].xaxis.set_major_formatter("{x:g}")
    panels[0].xaxis.set_minor_formatter(NullFormatter())
    panels[0].set_xlabel("output error", fontsize=8)
    panels[1].set_xlabel("regions of 32 tokens wiped out", fontsize=8)
    for panel in panels:
        panel.grid(axis="both", color="#e6e6e6", linewidth=0.5)
        panel.set_axisbelow(True)
        panel.tick_params(axis="x", labelsize=7)
    image.legend(*panels[1].get_legend_handles_labels(), fontsize=7, ncols=4, loc="lower center")
    image.tight_layout(rect=(0, 0.3 / image.get_figheight(), 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.savefig(path, metadata={"Software": None}, pil_kwargs={"optimize": True})
