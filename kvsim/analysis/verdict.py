"""The answer of a comparison: which policy is best at each budget, and how sure that is.

`kvsim replay` and `kvsim compare` open with sentences, reports and the dashboard with a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from kvsim.analysis.comparison import Comparison, compare
from kvsim.analysis.evidence import EVIDENCE, WORTH, ranking
from kvsim.analysis.registry import METRICS
from kvsim.analysis.results import REQUESTED, mixed
from kvsim.analysis.significance import MOST, undecidable
from kvsim.errors import PolicyError
from kvsim.schema import rounded

#: Most policies that a verdict names at a time, and how many of more: the next in rank.
_NAMES, _FIRST = 6, 3


@dataclass(frozen=True)
class Verdict:
    """The best policy at a budget.

    requested: the budget as requested. best: its label; mean over `prompts`, with the ends of
    its 95 % interval (None for one prompt); leads: on how many of them no other is better.
    tied: policies of the same mean; shared: whether two policies lead together on some prompt.
    beaten: policies that it is better than beyond chance, corrected for the number of comparisons,
    by rank; undecided: the others, with the number of prompts that would decide where that can be
    said; equal: those that no prompt distinguishes. seen: entries that a row sees, if that is over
    5 % more than under another policy. second: the policy that is next in rank, if any. contrary:
    metrics of `EVIDENCE` by which others are best, with these.
    """

    requested: str
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
    contrary: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def dissent(self) -> str:
        """What other evidence says is best, in a clause; empty where it agrees."""
        metrics: dict[tuple[str, ...], list[str]] = {}
        for metric, names in self.contrary:
            metrics.setdefault(names, []).append(metric)
        return "; ".join(f"by {_listed(by)} it is {_listed(x)}" for x, by in metrics.items())

    @property
    def text(self) -> str:
        """The verdict as a sentence or two."""
        most = "highest" if METRICS[self.metric].better == "higher" else "lowest"
        mean = rounded(self.mean, ".3g")
        if self.low is not None and self.high is not None:
            mean += f" [{rounded(self.low, '.3g')}, {rounded(self.high, '.3g')}]"
        best = f"{_listed([self.best, *self.tied])} share" if self.tied else f"{self.best} has"
        parts = [f"Budget {self.requested}: {best} the {most} {self.metric}, {mean}"]
        if self.prompts == 1:
            parts[0] += " on this prompt" + f"; the next is {self.second}" * bool(self.second)
        if self.prompts > 1:
            leads = "no policy is better" if self.tied or self.shared else "leads"
            parts[0] += f", and {leads} on {self.leads} of {self.prompts} prompts"
        if self.contrary:
            parts[0] += f"; {self.dissent}"
        if self.prompts > 1:
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
    """The best policy at each budget of two or more, and the policies that it beats."""
    ranked = comparison.table.drop_nulls("rank")
    return [
        _verdict(comparison, rows.to_dicts())
        for rows in ranked.partition_by("requested", maintain_order=True)
        if rows.height > 1
    ]


def _verdict(comparison: Comparison, rows: Sequence[dict[str, Any]]) -> Verdict:
    best, *rest = rows  # by rank
    if best["against"] is None:  # the others are compared with it
        pairs = [
            (row["policy"], {"worse": "better"}.get(row["verdict"], row["verdict"]), row)
            for row in rest
            if row["against"] == best["policy"]
        ]
    else:  # with another one
        pairs = [(best["against"], best["verdict"], best)]
    first = {row["policy"] for row in rows if row["rank"] == best["rank"]}
    metric = comparison.metric
    others = comparison.evidence if metric in EVIDENCE else {}
    found = ((name, leaders.get(best["requested"], ())) for name, leaders in others.items())
    behind = [row["policy"] for row in rest if row["rank"] > best["rank"]]
    return Verdict(
        *(best["requested"], metric, best["policy"], best["mean"], best["low"], best["high"]),
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
        contrary=tuple((name, names) for name, names in found if names and first.isdisjoint(names)),
    )


def answer(
    table: pl.DataFrame, metrics: Sequence[str], metric: str | None = None
) -> tuple[Comparison | None, list[str]]:
    """Compare the policies of a Table by a metric, by default the first of `ranking`.

    And the lines that follow, with the evidence that a decision lacks; budgets in the order of the
    Table. None and no lines where there is nothing to compare: one policy, or no prompt with values
    of all.
    """
    if reason := mixed(table):
        return None, [f"No verdict: {reason}."]
    try:
        comparison = compare(table, metric or next(ranking(table, metrics)))
    except (PolicyError, StopIteration):  # no prompt has values of all policies, or no metric
        return None, []
    budgets = table.drop_nulls("policy").select(x=REQUESTED)["x"].unique(maintain_order=True)
    order = pl.col("requested").cast(pl.Enum(budgets))
    rows = comparison.table.sort(order, maintain_order=True)
    comparison = replace(comparison, table=rows)
    said = [*lines(comparison)]
    return comparison if said else None, said


def lines(comparison: Comparison) -> Iterator[str]:
    """Yield the verdicts, their metric, and the evidence that a decision lacks."""
    each = [verdict.text for verdict in verdicts(comparison)]
    yield from each
    if each:
        yield basis(comparison)
        yield from _lacking(comparison)


def _lacking(comparison: Comparison) -> Iterator[str]:
    lacking = undecidable(len(comparison.traces), comparison.comparisons)
    if lacking:
        yield f"{lacking[0].upper()}{lacking[1:]}."


def basis(comparison: Comparison) -> str:
    """The metric that a comparison ranks by, in a sentence."""
    levels, by = {*comparison.table["fidelity"]}, f"Ranked by {comparison.metric}"
    if "closed" in levels:
        by += ", measured in live runs"
    elif "judged" in levels:
        by += " of the model's predictions under the kept sets of the replay (judged)"
    elif EVIDENCE[0] not in comparison.evidence:
        by += "; kvsim replay --judge ranks by the model's own predictions"
    if comparison.unranked:
        by += f"; {_listed(comparison.unranked)} without a value of it"
    if "closed" in levels or comparison.metric not in WORTH:
        return f"{by}."
    low, high = WORTH[comparison.metric]
    return (
        f"{by}. Its rank correlation with live KL at one budget was {low:.2f} to {high:.2f} among "
        "16 policies that only evict, on two models."
    )


#: Headers of `tabulated`.
HEADERS = (
    *("budget", "rank", "policy", "mean", "95 % interval"),
    *("against the best", "prompts needed"),
)


def tabulated(comparison: Comparison) -> tuple[str, list[list[str]]]:
    """Return the verdict as a sentence and rows below `HEADERS`, the first of each budget."""
    rows, said, many = [], [basis(comparison)], False
    for part in comparison.table.drop_nulls("rank").partition_by("requested", maintain_order=True):
        if part.height < 2:  # nothing to be better than
            continue
        many |= part.height > _NAMES
        tied = (part["rank"] == 1).sum() > 1
        for row in part.head(_NAMES).iter_rows(named=True):
            verdict = {"worse": "beyond chance", "undecided": "not decided"}.get(row["verdict"])
            decided = verdict or row["verdict"] or "best"
            if row["rank"] == 1:
                decided = "tied" if tied else "best"
            ends = [rounded(row[end], ".3g") for end in ("low", "high") if row[end] is not None]
            needed = row["needed"] and ("≥ " * (row["needed"] >= MOST) + f"{row['needed']:,}")
            cells = [row["requested"], str(row["rank"]), row["policy"], rounded(row["mean"], ".3g")]
            cells += [" to ".join(ends), decided + ", but sees more entries" * row["unfair"]]
            rows.append([*cells, needed or ""])
    said += [f"At budget {x.requested}, {x.dissent}." for x in verdicts(comparison) if x.contrary]
    if many:
        said.append(f"The first {_NAMES} of each budget.")
    return " ".join([*said, *_lacking(comparison)]), rows
