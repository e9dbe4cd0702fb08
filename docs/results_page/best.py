"""Which policies could be the best at a budget, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvsim.analysis.arrays import Ints
from kvsim.analysis.significance import ALPHA, FEWEST, best_set, excess, interaction, needed
from kvsim.schema import rounded
from results_page.plan import Plan
from results_page.statistics import Floats, Results
from results_page.traces import labels

#: Most policies of a set that a sentence names, and how many of larger ones.
_NAMES, _FIRST = 6, 3
#: Below as many prompts a set is coarse.
ENOUGH = 12
#: Share of a sum of squared differences of one prompt above which a set is less sure.
_UNEVEN = 0.6


def values(r: Results, policies: Sequence[str], budget: int) -> tuple[Floats, Ints]:
    """KL [prompt, policy] of the prompts that have all, by digest, and the places of these."""
    kl = np.stack([r.of(label, budget, "response_kl") for label in policies], axis=1)
    order = np.argsort(np.array(r.digests), kind="stable")
    order = order[~np.isnan(kl[order]).any(1)]
    return kl[order], order


def tasks_of(plan: Plan, prompts: Ints) -> list[str]:
    """The task of each prompt; questions of a model's answers are one."""
    return ["" if plan.solved else str(labels(plan, at + 1)["task"]) for at in prompts.tolist()]


def sentence(budget: int, names: Sequence[str], x: Floats, tasks: Sequence[str]) -> str:
    """The set of the best of values [prompt, policy], first by task [prompt] if that matters."""
    n, lead = len(x), x.mean(0).argmin()
    if n < FEWEST:
        leads = (x.argmin(1) == lead).sum()
        return (
            f"Budget {budget}: {names[lead]} has the lowest KL and leads on {leads} of {n} "
            "prompts, which say nothing of other prompts."
        )
    parts = ". ".join(_over_prompts(names, x))
    coarse = ", coarse" * (n < ENOUGH)
    return f"Budget {budget} ({n} prompts{coarse}): {_by_task(names, x, np.array(tasks))}{parts}."


def _over_prompts(names: Sequence[str], x: Floats) -> list[str]:
    inside, order = best_set(x)[1], np.argsort(x.mean(0), kind="stable")
    lead, second, *_ = order
    rivals = [j for j in order if inside[j] and j != lead]
    parts = [f"{_set(names, x)} of {len(names)} policies"]
    shown = lead if rivals else second
    worst = excess(x).max(1)[shown]
    if not np.isfinite(worst):
        parts.append(f"No bound says how much worse {names[shown]} may be")
    elif worst > 0.005:
        parts.append(f"{names[shown]} is at most {100 * worst:.0f} % worse than the best")
    if len(rivals) == 1:
        count, least, most = (
            "any number" if each > 10_000 else rounded(float(each), ".2g")
            for each in needed(x[:, lead], x[:, rivals[0]])
        )
        parts.append(f"About {count} prompts ({least} to {most}) would separate the two")
    gaps = (x - x[:, [lead]]) ** 2
    alone = [j for j in order if not inside[j] and gaps[:, j].max() > _UNEVEN * gaps[:, j].sum()]
    if alone:
        parts.append(
            f"One prompt makes most of the difference to {names[alone[0]]}, so the set is less "
            "sure than 95 %"
        )
    return parts


def _by_task(names: Sequence[str], x: Floats, tasks: Floats) -> str:
    kinds, counts = np.unique(tasks, return_counts=True)
    if len(kinds) < 2 or not (counts.min() >= 6 or (counts.min() >= 3 and len(kinds) >= 4)):
        return ""
    p = interaction(x, tasks)
    if p > ALPHA:
        return f"that the order depends on the task is not shown (p = {p:.2g}); "
    enough = kinds[counts >= FEWEST]
    each = (f"{kind}: {_set(names, x[tasks == kind])}" for kind in enough)
    first = f"the order depends on the task (p = {p:.2g})"
    return "; ".join([first, *each, "on average over prompts: "])


def _set(names: Sequence[str], x: Floats) -> str:
    inside, order = best_set(x)[1], np.argsort(x.mean(0), kind="stable")
    members = [names[j] for j in order if inside[j]]
    if len(members) in (1, len(names)):
        return "any" if len(members) > 1 else members[0]
    if len(members) > _NAMES:
        members = [*members[:_FIRST], f"{len(members) - _FIRST} others"]
    return f"{', '.join(members[:-1])} or {members[-1]}"
