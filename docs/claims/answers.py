"""How judged KL goes with wrong answers of live runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from study import correlated, read

from claims.statistics import Floats, Results
from claims.traces import ANSWERS, samples
from kvsim.analysis.arrays import Bools, Ints

#: Policies of the live runs.
POLICIES = (
    *("streaming_llm", "snapkv", "h2o", "tova", "expected_attention", "keydiff", "rkv", "gkv"),
)


def values(r: Results, policies: Sequence[str], budget: int) -> tuple[Floats, Ints]:
    """KL [prompt, policy] of the prompts that have all, by digest, and the places of these."""
    kl = np.stack([r.of(label, budget, "response_kl") for label in policies], axis=1)
    order = np.argsort(np.array(r.digests), kind="stable")
    order = order[~np.isnan(kl[order]).any(1)]
    return kl[order], order


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
