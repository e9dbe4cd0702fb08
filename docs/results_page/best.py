"""Which policies could be the best at a budget, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvsim.analysis.arrays import Ints
from kvsim.analysis.comparison import MARGIN
from kvsim.analysis.sentences import said
from kvsim.analysis.verdict import Scale, judged, task_labels
from results_page.plan import Plan
from results_page.statistics import Floats, Results
from results_page.traces import labels


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
    """The verdict on values [prompt, policy], first by task [prompt] if that matters."""
    scale = Scale(higher=False, relative=True, margin=MARGIN)
    verdict = judged(str(budget), names, x.T, task_labels(tasks), scale)
    return said(verdict, "response_kl", scale)
