"""How judged KL goes with wrong answers of live runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from study import read

from kvsim.analysis.arrays import Bools
from results_page.best import values
from results_page.rank_correlation import rank_correlation
from results_page.ranking import correlated
from results_page.statistics import Floats, Results
from results_page.traces import ANSWERS, samples

#: Policies of the live runs.
POLICIES = (
    *("streaming_llm", "snapkv", "h2o", "tova", "expected_attention", "keydiff", "rkv", "gkv"),
)


def pairs(kl: Floats, wrong: Bools) -> Floats:
    """Of each pair of a wrong and a right answer under one policy: 1 if KL of the wrong is larger.

    kl, wrong [prompt, policy]; 0.5 for ties. The mean is the area under the ROC curve.
    """
    each = [
        (np.sign(k[w][:, None] - k[~w]) + 1).ravel() / 2 for k, w in zip(kl.T, wrong.T, strict=True)
    ]
    return np.concatenate(each)


def auc(kl: Floats, wrong: Bools) -> str:
    """The share of `pairs`, and its 95 % interval over prompts."""
    draws = np.random.default_rng(0).integers(0, len(kl), (1000, len(kl)))
    parts = (pairs(kl[at], wrong[at]) for at in draws)
    ends = np.quantile([part.mean() for part in parts if len(part)], [0.025, 0.975])
    return correlated(pairs(kl, wrong).mean(), *ends)


def live_answers(
    r: Results, policies: Sequence[str], budget: int
) -> tuple[Floats, Bools, Floats, Bools]:
    """KL and wrong answers [prompt, policy], of all prompts, then of those that have both."""
    rows = {
        (row["policy"], row["budget"], row["task"], row["index"]): not row["right"]
        for row in read(ANSWERS.with_name("qwen-live.jsonl"))
        if row["model"] == r.plan.model.lower()
    }
    asked = sorted({key[2:] for key in rows if key[0] in policies})
    wrong = np.array([[rows[name, budget, *of] for name in policies] for of in asked])
    kl, prompts = values(r, policies, budget)
    ids = [prompt.id.rsplit("-", 2)[1:] for prompt in samples(r.plan)[1:]]
    known = [(task, int(index)) for task, index in ids]
    both = [(at, asked.index(known[p])) for at, p in enumerate(prompts) if known[p] in asked]
    at, of = np.array(both).T
    return kl, wrong, kl[at], wrong[of]


def right_answers(r: Results, policies: Sequence[str]) -> str:
    """Whether KL orders policies by their wrong answers, and tells these from right ones."""
    between, within = [], []
    for budget in r.plan.budgets:
        kl, wrong, own, lost = live_answers(r, policies, budget)
        found = rank_correlation(kl, wrong.astype(np.float64), same=False)
        between.append(f"{correlated(*found)} at {budget}")
        within.append(f"{auc(own, lost)} at {budget}")
    return (
        f"Of [{len(wrong)} live answers](qwen.md#answers-under-policies), the share of wrong ones "
        f"orders the {len(policies)} policies as judged KL here with a rank correlation of "
        f"{', '.join(between)} entries; in brackets the 95 % interval for other policies and "
        "prompts, which leaves all open. Of pairs of a wrong and a right answer under one policy, "
        f"on the {len(lost)} questions that both have, the wrong one has the larger KL in a share "
        f"of {', '.join(within)} (chance is 0.50). A row of the recorded answer counts the same "
        "whether the answer depends on it or not, KL does not see whether a wrong step is mended "
        "later, and answers that ran into the limit of 600 tokens count as they stand: under "
        "`tova` 46 and 34 of 48."
    )
