"""The answer of a comparison in a sentence per budget: which policy is best, and how sure that is.

`kvsim replay`, `kvsim compare`, reports and the dashboard open with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from kvsim.analysis.comparison import Comparison, compare
from kvsim.analysis.registry import METRICS
from kvsim.analysis.results import is_live, mixed
from kvsim.analysis.significance import MOST, undecidable
from kvsim.analysis.validity import OUTCOMES
from kvsim.errors import PolicyError
from kvsim.schema import rounded

#: What ranks policies, the first that is measured; of live runs `OUTCOMES` do.
RANKING = ("output_error", "layer_error", "retained_mass", "wipeout")

#: Most policies that a verdict names at a time, and how many of more: the next in rank.
_NAMES, _FIRST = 6, 3


@dataclass(frozen=True)
class Verdict:
    """The best policy at a budget.

    asked: the budget as it was asked for. best: its label; mean over `prompts`, with the ends of
    its 95 % interval (None for one prompt); leads: on how many of them no other is better.
    tied: policies of the same mean; shared: whether two policies lead together on some prompt.
    beaten: policies that it is better than beyond chance, corrected for the number of comparisons,
    by rank; undecided: the others, with the number of prompts that would decide where that can be
    said; equal: those that no prompt distinguishes. seen: entries that a row sees, if that is over
    5 % more than under another policy. second: the policy that is next in rank, if any.
    """

    asked: str
    metric: str
    best: str
    mean: float
    low: float | None
    high: float | None
    prompts: int
    leads: int
    tied: tuple[str, ...]
    shared: bool
    beaten: tuple[str, ...]
    undecided: tuple[tuple[str, int | None], ...]
    equal: tuple[str, ...]
    seen: float | None
    second: str | None

    @property
    def text(self) -> str:
        """The verdict as a sentence or two."""
        most = "highest" if METRICS[self.metric].better == "higher" else "lowest"
        mean = rounded(self.mean, ".3g")
        if self.low is not None and self.high is not None:
            mean += f" [{rounded(self.low, '.3g')}, {rounded(self.high, '.3g')}]"
        best = f"{_listed([self.best, *self.tied])} share" if self.tied else f"{self.best} has"
        parts = [f"Budget {self.asked}: {best} the {most} {self.metric}, {mean}"]
        if self.prompts == 1:
            parts[0] += " on this prompt" + f"; the next is {self.second}" * bool(self.second)
        if self.prompts > 1:
            leads = "no policy is better" if self.tied or self.shared else "leads"
            parts[0] += f", and {leads} on {self.leads} of {self.prompts} prompts"
            against = {
                "beyond chance better than": self.beaten,
                "not decided against": [*map(_needing, self.undecided)],
                "equal to": self.equal,
            }
            clauses = (f"{how} {_listed(names)}" for how, names in against.items() if names)
            parts.append("; ".join(clauses))
        if self.seen is not None:
            parts.append(
                f"but its rows see more entries ({self.seen:.0f}) than under other policies, so "
                "this is no fair comparison"
            )
        return ". ".join(part[:1].upper() + part[1:] for part in parts if part) + "."


def _needing(pair: tuple[str, int | None]) -> str:
    name, needed = pair
    if needed is None:
        return name
    if needed >= MOST:
        return f"{name} (nor would {MOST:,} prompts decide)"
    return f"{name} (about {needed:,} prompts would decide)"


def _listed(names: Sequence[str]) -> str:
    *most, last = names
    if len(names) > _NAMES:
        most, last = [*names[:_FIRST]], f"{len(names) - _FIRST} others"
    return f"{', '.join(most)} and {last}" if most else last


def verdicts(comparison: Comparison) -> list[Verdict]:
    """The best policy at each budget that has two or more, and what it is better than."""
    ranked = comparison.table.drop_nulls("rank")
    return [
        _verdict(comparison.metric, rows.to_dicts())
        for rows in ranked.partition_by("asked", maintain_order=True)
        if rows.height > 1
    ]


def _verdict(metric: str, rows: Sequence[dict[str, Any]]) -> Verdict:
    best, *rest = rows  # by rank
    if best["against"] is None:  # the others are compared with it
        pairs = [
            (row["policy"], {"worse": "better"}.get(row["verdict"], row["verdict"]), row)
            for row in rest
            if row["against"] == best["policy"]
        ]
    else:  # with another one
        pairs = [(best["against"], best["verdict"], best)]
    behind = [row["policy"] for row in rest if row["rank"] > best["rank"]]
    return Verdict(
        *(best["asked"], metric, best["policy"], best["mean"], best["low"], best["high"]),
        *(best["n"], best["leads"]),
        tied=tuple(row["policy"] for row in rest if row["rank"] == best["rank"]),
        shared=sum(row["leads"] for row in rows) > best["n"],
        beaten=tuple(name for name, verdict, _ in pairs if verdict == "better"),
        undecided=tuple(
            (name, x["needed"]) for name, verdict, x in pairs if verdict == "undecided"
        ),
        equal=tuple(name for name, verdict, _ in pairs if verdict == "equal"),
        seen=best["seen"] if best["unfair"] else None,
        second=behind[0] if behind else None,
    )


def ranking(table: pl.DataFrame, metrics: Iterable[str]) -> Iterator[str]:
    """Yield the measured metrics that rank the policies of a Table, what says most first.

    metrics: those that may rank replays. Of live runs what the model did ranks, and never an error
    of single layers, which may say the opposite.
    """
    measured = set(table.drop_nulls(["policy", "value"])["metric"]) & {*METRICS}
    metrics = [*metrics]
    first = (name for name in RANKING if name in metrics)
    for name in OUTCOMES if is_live(table) else dict.fromkeys((*first, *metrics)):
        if name in measured and METRICS[name].better:
            yield name


def answer(table: pl.DataFrame, metrics: Sequence[str]) -> tuple[list[Verdict], list[str]]:
    """The verdicts of a Table by the first metric of `ranking`.

    And the lines in which to say them, with what is lacking for a decision. Both are empty where
    there is nothing to compare: one policy, or no prompt with values of all.
    """
    if reason := mixed(table):
        return [], [f"No verdict: {reason}."]
    try:
        comparison = compare(table, next(ranking(table, metrics)))
    except (PolicyError, StopIteration):  # no prompt has values of all policies, or no metric
        return [], []
    each = verdicts(comparison)
    return each, [*lines(comparison, each)]


def lines(comparison: Comparison, each: Sequence[Verdict]) -> Iterator[str]:
    """Yield the lines of verdicts, and what is lacking for a decision."""
    yield from (verdict.text for verdict in each)
    lacking = undecidable(len(comparison.traces), comparison.comparisons)
    if each and lacking:
        yield f"{lacking[0].upper()}{lacking[1:]}."
