"""Verdicts on policies at one budget, from values by prompt.

`kvsim.analysis.comparison` has the values, `significance` the statistics, `sentences` the English.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from kvsim.analysis.arrays import Floats, Strings
from kvsim.analysis.significance import (
    ALPHA,
    ENOUGH,
    FEWEST,
    MOST,
    behind,
    best_set,
    excess,
    identical,
    interaction,
    needed,
    one_best,
    rank_intervals,
    weights,
)
from kvsim.analysis.summaries import ROUNDING, Interval

#: Largest share of a sum of squared differences from one prompt.
_UNEVEN = 0.6
#: Fewest prompts of each task for a test of the order, or of each of so many tasks.
_OF_TASK, _OF_FEW, _TASKS = 6, 3, 4


class Scale(NamedTuple):
    """How values compare: direction, whether differences are shares, and the margin."""

    higher: bool
    relative: bool
    margin: float | None


@dataclass(frozen=True)
class Verdict:
    """The outcome for the policies at one budget, over all tasks or in one.

    standings: of the ranked policies, by rank, columns of `kvsim.analysis.comparison.compare` by
    name; from 6 prompts on with `could_be_best`. equal: whether several have the best mean and no
    prompt distinguishes them. needed: prompts that would show the first better than the rest of the
    set that holds the best, and an 80 % interval; None above 10,000. uneven: a policy outside of
    the set whose difference is due to one prompt. unfair: those of the set whose rows see over 5 %
    more entries than another's. order: p-value of "the order is the same in all tasks"; one:
    whether one policy could be the best in all of them; None where that was not tested. tasks: the
    verdict of each.
    """

    requested: str
    task: str | None
    prompts: int
    standings: tuple[dict[str, Any], ...]
    equal: bool = False
    needed: tuple[int | None, ...] | None = None
    uneven: str | None = None
    unfair: tuple[str, ...] = ()
    order: float | None = None
    one: bool | None = None
    tasks: tuple[Verdict, ...] = ()

    @property
    def policies(self) -> list[str]:
        """The ranked policies, by rank."""
        return [each["policy"] for each in self.standings]

    @property
    def first(self) -> list[str]:
        """The policies of the best mean."""
        return [each["policy"] for each in self.standings if each["rank"] == 1]

    @property
    def best(self) -> list[str]:
        """The set that holds the best policy with 95 %, by rank; empty for fewer than 6 prompts."""
        return [each["policy"] for each in self.standings if each.get("could_be_best")]

    def describe(self) -> dict[str, Any]:
        """The verdict, ready for JSON."""
        facts = {name: x for name, x in vars(self).items() if name not in ("standings", "tasks")}
        facts |= {name: getattr(self, name) for name in ("policies", "first", "best")}
        return facts | {"tasks": [each.describe() for each in self.tasks]}


def judged(
    requested: str, names: Sequence[str], values: Floats, tasks: Strings | None, scale: Scale
) -> Verdict:
    """The verdict on values [policy, prompt], over all tasks [prompt] and in each."""
    verdict = _judged(requested, names, values, tasks, scale)
    if tasks is None or len(names) < 2:
        return verdict
    labels, counts = np.unique(tasks, return_counts=True)
    parts = ((str(x), values[:, tasks == x]) for x in labels)
    each = tuple(_judged(requested, names, part, None, scale, task) for task, part in parts)
    few = counts.min() >= _OF_FEW and len(labels) >= _TASKS
    order = one = None
    if scale.relative and (few or counts.min() >= _OF_TASK):
        order = interaction(values.T, tasks)
    if counts.min() >= _OF_TASK:
        one = bool((one_best(-values.T if scale.higher else values.T, tasks) > ALPHA).any())
    return replace(verdict, order=order, one=one, tasks=each)


def _judged(
    requested: str,
    names: Sequence[str],
    values: Floats,
    tasks: Strings | None,
    scale: Scale,
    task: str | None = None,
) -> Verdict:
    k, n = values.shape
    values = even(values)
    x = -values.T if scale.higher else values.T  # lower is better
    y = x * weights(n, tasks)[:, None]
    mean = even(y.sum(0)[:, None])[:, 0]
    rank = 1 + np.searchsorted(np.sort(mean), mean)
    given: dict[str, Any] = {"rank": rank, "leads": (x.min(1) == x.T).sum(1)}
    could = np.zeros(k, bool)
    if n >= FEWEST and k > 1:
        given["p_best"], could = best_set(x, tasks)
        of = excess(values.T, tasks, higher=scale.higher) if scale.relative else behind(x, tasks)
        given |= {"could_be_best": could, "worse_by": of.max(1)}
        if scale.margin is not None:
            given["as_good"] = given["worse_by"] <= scale.margin
        if n >= ENOUGH:
            given["rank_low"], given["rank_high"] = rank_intervals(x, tasks)
    ends = Interval.of_each([*(values * weights(n, tasks) * n)])
    order = np.argsort(rank, kind="stable")
    standings = [
        {"policy": names[j]}
        | {end: none_of(vars(ends[j])[end]) for end in ("mean", "low", "high")}
        | {name: none_of(of_policy[j].item()) for name, of_policy in given.items()}
        for j in order
    ]
    lead = order[0]
    same = identical(x)[lead]
    rivals = np.flatnonzero(could & ~same)
    counts = [needed(n * y[:, lead], n * y[:, j], len(rivals)) for j in rivals]
    gaps = (x - x[:, [lead]]) ** 2
    alone = ~could & could.any() & (gaps.max(0) > _UNEVEN * gaps.sum(0))
    return Verdict(
        requested=requested,
        task=task,
        prompts=n,
        standings=tuple(standings),
        equal=bool((rank == 1).sum() > 1 and same[rank == 1].all()),
        needed=tuple(ceil(x) if x <= MOST else None for x in max(counts)) if counts else None,
        uneven=next((names[j] for j in order if alone[j]), None),
    )


def none_of(number: Any) -> Any:
    """A number for a table: None where it is NaN or infinite."""
    return number if np.isfinite(number) else None


def even(values: Floats) -> Floats:
    """Values [policy, prompt], equal where they differ by no more than rounding."""
    order = values.argsort(0, kind="stable")
    rising = np.take_along_axis(values, order, 0)
    for lower, upper in pairwise(rising):
        upper[...] = np.where(upper - lower <= ROUNDING * np.abs(upper), lower, upper)
    out = np.empty_like(values)
    np.put_along_axis(out, order, rising, 0)
    return out


def task_labels(labels: Sequence[str | None]) -> Strings | None:
    """The task of each prompt; "other" for none, or one of a single prompt. None for one task."""
    named = np.array(["other" if label is None else label for label in labels])
    _, at, counts = np.unique(named, return_inverse=True, return_counts=True)
    named = np.where(counts[at] == 1, "other", named)
    counts = np.unique(named, return_counts=True)[1]
    return named if len(counts) > 1 and counts.min() > 1 else None
