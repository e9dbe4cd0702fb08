"""The rows of the tables, the ranking that opens the page, and its two figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from kvsim import Policy
from kvsim.analysis.significance import ENOUGH, FEWEST, rank_intervals
from kvsim.analysis.summaries import Interval
from kvsim.policies import describe, names
from results_page.best import sentence, tasks_of, values
from results_page.rank_correlation import rank_correlation
from results_page.statistics import Floats, Results

#: Columns of the tables: heading, metric, variant (None: the main one), format.
COLUMNS = (
    ("KL", "response_kl", None, ".3f"),
    ("layer error", "layer_error", None, ".3f"),
    ("output error", "output_error", None, ".3f"),
    ("retained mass", "retained_mass", None, ".3f"),
    ("regret", "regret", None, ".3f"),
    ("wipe-out 32", "wipeout", "length=32,threshold=0", ".2f"),
    ("IoU", "retained_iou", None, ".2f"),
    ("entries", "entries_seen", None, ".1f"),
)
KL, LAYER_ERROR, ERROR, WIPED = "KL", "layer error", "output error", "wipe-out 32"
ENTRIES = "entries"
#: Of the budgets in the figures, from the smallest on.
COLORS = ("#c8102e", "#e08a1e", "#7a9cc6", "#1f4e79")
#: Places of the ranking.
_PLACES = 5
#: Marks of policies that have learned from queries of another prompt, or read the context twice.
CALIBRATED, PROBED = "†", "‡"


@dataclass(frozen=True)
class Row:
    """A policy at a budget: intervals by heading, and the IoU that chance alone gives."""

    label: str
    bounded: bool
    values: Mapping[str, Interval]
    chance: Interval

    @property
    def default(self) -> bool:
        """Whether it is a policy, or a combination, as it is by default."""
        return not {"@", ","} & {*self.label}

    @property
    def reference(self) -> bool:
        """Whether it is not ranked: no budget binds it, or it knows more than others."""
        parts = [describe(part) for part in _parts(self.label)]
        knows = any(part.policy.reads.future for part in parts)
        return not self.bounded or knows or bool(_mark(parts))

    def mean(self, title: str) -> float:
        """The mean of a column; NaN without a value."""
        return self.values[title].mean


def rows(r: Results, policies: Mapping[str, Policy]) -> dict[int, list[Row]]:
    """The rows of each budget, ranked by KL."""
    out = {}
    for budget in r.plan.budgets:
        columns = {
            title: Interval.of_each([r.of(label, budget, metric, variant) for label in policies])
            for title, metric, variant, _ in COLUMNS
        }
        found = [
            Row(
                label,
                one.bounded,
                {title: each[number] for title, each in columns.items()},
                Interval.of(r.chance(label, budget, "retained_iou")),
            )
            for number, (label, one) in enumerate(policies.items())
        ]
        out[budget] = ranked(found, KL)
    return out


def ranked(of_budget: Sequence[Row], title: str) -> list[Row]:
    """Rows from the lowest mean on; those without a value are last, and of equals the shorter."""

    def place(row: Row) -> tuple[bool, float, int]:
        return np.isnan(row.mean(title)), row.mean(title), len(row.label)

    return sorted(of_budget, key=place)


def ranked_rows(of_budget: Sequence[Row]) -> list[Row]:
    """The default of each policy by KL, without references."""
    return [x for x in of_budget if x.default and not x.reference and x.values[KL].n]


def opening(r: Results, by_budget: Mapping[int, Sequence[Row]], figure: str) -> str:
    """The ranking of a page with the links to its two figures.

    figure: that of all policies, as the page links to it.
    """
    lines, columns, agreed = [], [], []
    for budget, of_budget in by_budget.items():
        leaders = ranked_rows(of_budget)
        policies = [row.label for row in leaders]
        x, prompts = values(r, policies, budget)
        lines.append("* " + sentence(budget, [*map(shown, policies)], x, tasks_of(r.plan, prompts)))
        columns.append(_cells(leaders, x))
        agreed.append([_agreement(r, policies, budget, x, prompts, m) for m in _ERRORS])
    head = ["| rank | " + " | ".join(f"budget {budget}" for budget in by_budget) + " |"]
    head.append("| ---: |" + " --- |" * len(by_budget))
    places = enumerate(zip(*columns, strict=False), start=1)
    rows_of = [f"| {place} | {' | '.join(cells)} |" for place, cells in places]
    errors = "; ".join(
        f"{name} {', '.join(of)}"
        for name, of in zip(_ERRORS, zip(*agreed, strict=True), strict=True)
    )
    alt = "KL and wiped-out regions of the default of each policy"
    return "\n\n".join(
        [
            "## Which policy is best",
            _MEANING,
            "\n".join(lines),
            _TABLE,
            "\n".join([*head, *rows_of]),
            f"Rank correlation with KL over {len(policies)} policies at these budgets: {errors}.",
            f"![{alt}]({beside(figure)})",
            f"![KL of every policy at every budget]({figure})",
        ]
    )


SETS = (
    "Which policies could be the best, at 95 % for each budget and task by itself "
    "([how](compare.md#what-it-means)); bounds are 95 % each:"
)
_MEANING = (
    "By judged KL: how far the model's predictions of the response move from those with the full "
    "cache when each row sees what the replay kept, in nats per token; of the default of each "
    "policy and of combinations. Not ranked, as no budget binds them or they know more: `full`, "
    f"`rpc`, oracles, policies calibrated on another prompt of the same kind ({CALIBRATED}), and "
    f"those that read the context twice ({PROBED}). {SETS}"
)
_TABLE = (
    "Means over prompts with 95 % intervals, and from 12 prompts on the ranks that are possible. "
    "[All rows](#what-policies-keep-and-lose)."
)
_ERRORS = ("layer_error", "output_error")


def _cells(leaders: Sequence[Row], x: Floats) -> list[str]:
    cells = [f"{shown(row.label)} {row.values[KL].text('.3f')}" for row in leaders]
    if len(x) >= ENOUGH:
        cells = [f"{c} ({a} to {b})" for c, a, b in zip(cells, *rank_intervals(x), strict=True)]
    return cells[:_PLACES]


def _agreement(
    r: Results, policies: Sequence[str], budget: int, x: Floats, prompts: Floats, metric: str
) -> str:
    errors = np.stack([r.of(label, budget, metric)[prompts] for label in policies], axis=1)
    return correlated(*rank_correlation(x, errors))


def correlated(value: float, low: float, high: float) -> str:
    """A rank correlation as text, with its interval if it has one."""
    return Interval(value, low, high, 1).text(".2f")


def table(by_budget: Mapping[int, Sequence[Row]], budget: int) -> str:
    """All rows, ranked by KL at this budget: KL at each budget, then the other columns at this.

    A policy whose rows see another number of entries than those of most policies says so.
    """
    others, most = COLUMNS[1:-1], usual_entries(by_budget[budget])
    elsewhere = {n: {row.label: row for row in rows} for n, rows in by_budget.items()}
    lines = []
    for row in by_budget[budget]:
        cells = []
        for n, by_label in elsewhere.items():
            kl = by_label[row.label].values[KL]
            cells.append(kl.text(".3f") if n == budget else f"{kl.mean:.3f}" if kl.n else "")
        for title, _, _, form in others:
            one = row.values[title]
            cells.append(f"{one.mean:{form}}" if one.n else "")
            if title == "IoU":
                cells.append(f"{row.chance.mean:{form}}" if row.chance.n else "")
        notes = [] if row.bounded else ["no budget binds"]
        if (seen := f"{row.mean(ENTRIES):.1f}") != most:
            notes.append(f"{seen} entries")
        note = f" ({', '.join(notes)})" if notes else ""
        lines.append([f"{shown(row.label)}{note}", *cells])
    titles = [title for title, *_ in others]
    titles.insert(titles.index("IoU") + 1, "IoU by chance")
    return markdown(["policy", *(f"KL {n}" for n in by_budget), *titles], lines)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of numbers: a label in the first column, the others to the right."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "| --- |" + " ---: |" * (len(head) - 1), *lines[1:]])


def usual_entries(of_budget: Sequence[Row]) -> str:
    """Return the number of entries that rows see under most policies, as text."""
    return Counter(f"{row.mean(ENTRIES):.1f}" for row in of_budget).most_common(1)[0][0]


def shown(label: str) -> str:
    """A policy as tables name it, marked where it was calibrated."""
    name, comma, rest = label.partition(",")
    return f"`{name}`{_mark([describe(part) for part in _parts(label)])}{comma}{rest}"


def _parts(label: str) -> list[str]:
    """The policies of the catalogue that a label combines."""
    return [part for part in label.partition(",")[0].split("+") if part in names()]


def _mark(parts: Sequence[Any]) -> str:
    calibrated = any("calibration" in part.entry.required for part in parts)
    probed = any("probe_q" in part.policy.reads.arrays for part in parts)
    return CALIBRATED * calibrated + PROBED * probed


def beside(figure: str) -> str:
    """The name of the figure of the ranking, next to that of all policies."""
    return figure.replace(".png", "-ranking.png")


def figures(by_budget: Mapping[int, Sequence[Row]], path: Path, *, every: bool = True) -> None:
    """Draw KL and wiped-out regions of the default of each policy, and KL of every policy.

    Without `every` the first alone has all policies, in the figure at `path`.
    """
    middle = by_budget[[*by_budget][(len(by_budget) - 1) // 2]]
    measured = [row for row in middle if row.values[KL].n and row.label != "full"]
    leaders = ranked_rows(middle) if every else measured
    ranking = Figure(figsize=(7.5, 0.17 * len(leaders) + 1.3), dpi=72)
    _draw([*ranking.subplots(1, 2, sharey=True)], [KL, WIPED], leaders, by_budget)
    images = {Path(beside(str(path))) if every else path: ranking}
    if every:
        images[path] = Figure(figsize=(7.5, 0.155 * len(measured) + 1.0), dpi=72)
        _draw([images[path].subplots()], [KL], measured, by_budget)
    path.parent.mkdir(parents=True, exist_ok=True)
    for file, image in images.items():
        handles = image.axes[0].get_legend_handles_labels()
        image.legend(*handles, fontsize=7, ncols=4, loc="lower center")
        image.tight_layout(rect=(0, 0.3 / image.get_figheight(), 1, 1))
        image.savefig(file, metadata={"Software": None}, pil_kwargs={"optimize": True})


def _draw(
    panels: Sequence[Any],
    titles: Sequence[str],
    shown_rows: Sequence[Row],
    by_budget: Mapping[int, Sequence[Row]],
) -> None:
    """A line for each policy, and a dot with its interval for each budget."""
    for color, (budget, of_budget) in zip(COLORS, by_budget.items(), strict=False):
        by_label = {row.label: row for row in of_budget}
        for panel, title in zip(panels, titles, strict=True):
            found = [by_label[row.label].values[title] for row in shown_rows]
            low, mean, high = np.array([(one.low, one.mean, one.high) for one in found]).T
            places = range(len(found))
            panel.hlines(places, low, high, color=color, linewidth=1)
            label = f"budget {budget}" + f", {found[0].n} prompts" * (found[0].n < FEWEST)
            panel.plot(mean, places, "o", color=color, markersize=3.5, label=label)
    panels[0].set_yticks(range(len(shown_rows)), [row.label for row in shown_rows], fontsize=6.5)
    panels[0].set_ylim(len(shown_rows), -1)
    panels[0].set_xscale("log")
    panels[0].xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panels[0].xaxis.set_major_formatter("{x:g}")
    panels[0].xaxis.set_minor_formatter(NullFormatter())
    called = {KL: "KL to the full cache, nats per token", WIPED: "regions of 32 tokens wiped out"}
    for panel, title in zip(panels, titles, strict=True):
        panel.set_xlabel(called[title], fontsize=8)
        panel.grid(axis="both", color="#e6e6e6", linewidth=0.5)
        panel.set_axisbelow(True)
        panel.tick_params(axis="x", labelsize=7)
