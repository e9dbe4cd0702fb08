"""English sentences on a comparison, and the rows of a table next to them.

`kvsim replay`, `kvsim compare`, reports, the dashboard and pages begin with the sentences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil, inf
from operator import itemgetter
from typing import Any

import polars as pl

from kvsim.analysis.comparison import Comparison, compare
from kvsim.analysis.evidence import ANSWERS, EVIDENCE, WORTH, ranking
from kvsim.analysis.registry import METRICS
from kvsim.analysis.results import mixed
from kvsim.analysis.significance import ALPHA, ENOUGH, FEWEST, MOST
from kvsim.analysis.summaries import ROUNDING
from kvsim.analysis.verdict import Scale, Verdict
from kvsim.errors import PolicyError
from kvsim.schema import plural, rounded

#: Most policies that a sentence names; of more, the first in rank.
_NAMES, _FIRST = 6, 3
#: A larger share is not reported.
_LARGE = 10.0


def answer(
    table: pl.DataFrame, metrics: Sequence[str], metric: str | None = None
) -> tuple[Comparison | None, list[str]]:
    """Compare the policies of a Table by a metric, by default the first of `ranking`.

    Returns the comparison and its sentences; None and no sentences with only one policy, or no
    prompt with values of all.
    """
    if reason := mixed(table):
        return None, [f"No verdict: {reason}."]
    try:
        comparison = compare(table, metric or next(ranking(table, metrics)))
    except (PolicyError, StopIteration):  # no prompt has values of all policies, or no metric
        return None, []
    said = [*lines(comparison)]
    return comparison if said else None, said


def lines(comparison: Comparison) -> Iterator[str]:
    """Yield sentences for each verdict, then anomalies, then how good the evidence is."""
    for verdict in comparison.verdicts:
        yield said(verdict, comparison.metric, comparison.scale)
    if comparison.verdicts:
        yield from _reversed(comparison)
        yield basis(comparison)


def _reversed(comparison: Comparison) -> Iterator[str]:
    sign, found = -1 if comparison.better == "higher" else 1, list[str]()
    for part in comparison.overall.drop_nulls("rank").partition_by("policy", maintain_order=True):
        for less, more in pairwise(part.sort("entries").iter_rows(named=True)):
            worse = sign * (more["mean"] - less["mean"]) > ROUNDING * abs(less["mean"])
            if worse and less["n"] == more["n"]:
                of = (f"{rounded(x['mean'], '.3g')} at {x['requested']}" for x in (less, more))
                found.append(f"{less['policy']} ({', '.join(of)})")
    if found:
        yield f"Worse with more entries on these prompts: {_listed(found)}."


def said(verdict: Verdict, metric: str, scale: Scale) -> str:
    """Describe the verdict at a budget in sentences."""
    about = f"{metric}, {plural(verdict.prompts, 'prompt')}"
    if verdict.order is not None and verdict.order <= ALPHA:
        parts = [f"the order depends on the task (p = {verdict.order:.2g}; {about})"]
        few = [each for each in verdict.tasks if each.prompts < FEWEST]
        parts += [f"{each.task}: {_could(each)}" for each in verdict.tasks if each not in few]
        if few:
            best = [f"{each.task} {_listed(each.first)} ({each.prompts})" for each in few]
            parts.append(f"First on too few prompts to tell: {', '.join(best)}")
        parts.append(f"On average over tasks: {_could(verdict)}")
        every = [x for x in verdict.policies if all(x in each.best for each in verdict.tasks)]
        if verdict.one is False:
            parts.append("No policy is the best in all tasks")
        elif every:
            parts.append(f"In all tasks the best could be {_listed(every, 'or')}")
        else:
            parts.append("That no policy is the best in all tasks takes 12 prompts of each to show")
    elif verdict.prompts < FEWEST:
        parts = [_lowest(verdict, metric, scale)]
    else:
        parts = [*_best(verdict, metric, scale)]
        if (p := verdict.order) is not None:
            parts.append(f"That the order depends on the task is not shown (p = {p:.2g})")
    if verdict.unfair:
        parts.append(
            f"Rows see more entries under {_listed(verdict.unfair)} than under others, so this is "
            "no fair comparison"
        )
    return f"Budget {verdict.requested}: {'. '.join(parts)}."


def _best(verdict: Verdict, metric: str, scale: Scale) -> Iterator[str]:
    """Yield which policies could be the best, how good they are, and how many prompts decide."""
    best, count = verdict.best, len(verdict.policies)
    about = f"by {metric} (95 %, {plural(verdict.prompts, 'prompt')})"
    alone = best == verdict.first and (verdict.equal or len(best) == 1)
    if len(best) == count and not alone:
        left = "both" if count == 2 else f"all {count}"
        yield f"no policy is excluded {about}; {left} could be the best"
        yield "This does not show that they are equal"
    elif alone:
        equal = ", equal on every prompt, are" if verdict.equal else " is"
        yield f"{_listed(best)}{equal} the best of {count} policies {about}"
    elif len(best) <= _NAMES:
        rest = [name for name in verdict.policies if name not in best]
        others = f"{rest[0]} is" if len(rest) == 1 else f"the other {len(rest)} are"
        yield f"{_listed(best, 'or')} is the best of {count} policies {about}; {others} not"
    else:
        yield f"{len(best)} of {count} policies could be the best {about}: {_listed(best)}"
    if alone:
        after = next((each for each in verdict.standings if each["policy"] not in best), None)
        if after is not None and _bounded(after, scale):
            amount = bound(after["worse_by"], metric, scale)
            yield f"The next, {after['policy']}, is at most {amount} worse"
    else:
        yield from _good(verdict, metric, scale)
        if len(best) <= _NAMES and verdict.needed:
            about_n, least, most = (_count(number) for number in verdict.needed)
            span = f" ({least} to {most})" if least != most else ""
            about_n = f"About {about_n}" if verdict.needed[0] else f"More than {MOST:,}"
            yield f"{about_n} prompts{span} would tell them apart"
    if verdict.uneven:
        yield (
            f"One prompt makes most of the difference between {verdict.first[0]} and "
            f"{verdict.uneven}; with values this uneven the set is less sure than 95 %"
        )
    if verdict.prompts < ENOUGH:
        yield f"{verdict.prompts} prompts are coarse; record {ENOUGH}"


def _bounded(standing: dict[str, Any], scale: Scale) -> bool:
    bound = standing.get("worse_by")
    return bound is not None and bound <= (_LARGE if scale.relative else inf)


def _good(verdict: Verdict, metric: str, scale: Scale) -> Iterator[str]:
    """Yield which of the set are as good as the best, or how good the best proven one is."""
    known = [x for x in verdict.standings if x["policy"] in verdict.best and _bounded(x, scale)]
    good = [each["policy"] for each in known if each.get("as_good")]
    if good and scale.margin is not None:
        are = "is" if len(good) == 1 else "are"
        yield f"{_listed(good)} {are} within {bound(scale.margin, metric, scale)} of the best"
    elif known:
        surest = min(known, key=itemgetter("worse_by"))
        amount = bound(surest["worse_by"], metric, scale)
        yield f"{surest['policy']} is at most {amount} worse than the best"


def _lowest(verdict: Verdict, metric: str, scale: Scale) -> str:
    first, one = verdict.first, verdict.prompts == 1
    most = "highest" if scale.higher else "lowest"
    has = "share" if len(first) > 1 else "has"
    text = f"{_listed(first)} {has} the {most} mean {metric}, "
    text += rounded(verdict.standings[0]["mean"], ".3g")
    after = next((each["policy"] for each in verdict.standings if each["rank"] > 1), None)
    if one:
        following = "" if after is None else f"; the next is {after}"
        return f"{text}, on this prompt{following}"
    alone = len(first) == 1 and sum(x["leads"] for x in verdict.standings) <= verdict.prompts
    leads = "leads" if alone else "no policy is better"
    return f"{text}, and {leads} on {verdict.standings[0]['leads']} of {verdict.prompts} prompts"


def _could(verdict: Verdict) -> str:
    every = len(verdict.best) == len(verdict.policies)
    return "any of them" if every else _listed(verdict.best, "or")


def bound(value: float | None, metric: str, scale: Scale) -> str:
    """Format the most by which a policy is worse, `12 %` or in the unit; empty without a bound."""
    if value is None:
        return ""
    if scale.relative:
        return f"{ceil(100 * value - 1e-9)} %"
    return f"{rounded(value, '.2g')} {METRICS[metric].unit}"


def _count(number: int | None) -> str:
    return "any number" if number is None else f"{float(f'{number:.2g}'):,.0f}"


def _listed(names: Sequence[str], last: str = "and") -> str:
    *most, end = names
    if len(names) > _NAMES:
        most, end, last = [*names[:_FIRST]], f"{len(names) - _FIRST} others", "and"
    return f"{', '.join(most)} {last} {end}" if most else end


def basis(comparison: Comparison) -> str:
    """Describe how good the evidence of a comparison is."""
    rows = comparison.table.drop_nulls("rank")
    levels, metric = {*comparison.table["fidelity"]}, comparison.metric
    kind = {"closed": "of live runs", "judged": "of the replay's kept sets, judged by the model"}
    kinds = [text for level, text in kind.items() if level in levels][:1]
    parts = [" ".join([f"Ranked by {metric}", *kinds])]
    if not kinds and metric in EVIDENCE:
        parts[0] += "; kvsim replay --judge ranks by the model's own predictions"
    if comparison.unranked:
        parts[0] += f"; without a value of it: {_listed(comparison.unranked)}"
    if metric in WORTH and "closed" not in levels and not (rows["access"] != "").any():
        low, high = WORTH[metric]
        parts.append(
            f"Among 16 evictions on two models its ranking at one budget correlated with the "
            f"ranking by live KL at {low:.2f} to {high:.2f}"
        )
    if metric == EVIDENCE[0]:
        low, high = ANSWERS
        parts.append(
            f"KL does not count answers: rankings by KL and by wrong answers correlated at "
            f"{low:.2f} to {high:.2f} in four cases"
        )
    if any(verdict.prompts < FEWEST for verdict in comparison.verdicts):
        parts.append(FEW)
    return f"{'. '.join(parts)}."


#: The remark on too few prompts, before a run and after it.
FEW = (
    f"Fewer than {FEWEST} prompts say nothing about other prompts; record {ENOUGH} (kvsim capture "
    "--prompts FILE.jsonl)"
)


def tabulated(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Headers and a row for each policy and budget: the ranking metric and its certainty."""
    rows = []
    for row in comparison.overall.iter_rows(named=True):
        numbers = {x: rounded(row[x], ".3g") for x in ("mean", "low", "high") if row[x] is not None}
        mean = numbers.get("mean", "")
        if "low" in numbers:
            mean += f" [{numbers['low']}, {numbers['high']}]"
        could = {True: "yes", False: "no", None: ""}[row["could_be_best"]]
        worse = bound(row["worse_by"], comparison.metric, comparison.scale)
        cells = [row["requested"], row["policy"], mean]
        rows.append([*cells, *(["reference", ""] if row["rank"] is None else [could, worse])])
    return ["budget", "policy", comparison.metric, "could be best", "worse by at most"], rows
