"""A user's policy against a user's rule: agreement, disagreement, and each part of a rule."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch

import kvsim
from kvsim.core.policy import Allocator, Inputs, Plan, Protection, Schedule, Scorer, Scores
from kvsim.errors import BudgetError
from kvsim.testing import InvariantError, Rule, Scored, check_policy, loops, strategies
from kvsim.testing.loops.rows import choose


@dataclass(frozen=True)
class Peak(Scorer):
    """A decaying maximum of the attention received, plus a little of the value's norm."""

    window: int = 2

    columns: ClassVar[dict[str, float]] = {"best": float("nan")}

    @property
    def reads(self):
        """The window."""
        return Inputs(rows=self.window)

    def score(self, view):
        """The larger of half of what was and the largest attention now, and the value's norm."""
        now = view.attn(self.window, group="max").amax(2)
        best = torch.fmax(0.5 * view["best"], now)
        return Scores(best + 0.1 * torch.log1p(view.values.norm(dim=-1)), {"best": best})

    def protection(self, budget):
        """The window and the first entry."""
        return Protection(sink=1, recent=self.window)


PEAK = kvsim.Policy("peak", Peak(), schedule=Schedule(interval=3, prefill=False))


def peak(event, decay=0.5, window=2, sign=1):
    """The same in loops."""
    values = []
    for head, live in enumerate(event.live):
        best = event.column("best")[head]
        now = dict.fromkeys(live, 0.0)
        for qhead in event.qheads(head):
            for row in event.window(window):
                for pos, weight in event.attention(qhead, row).items():
                    now[pos] = max(now[pos], weight)
        best.update({pos: max(decay * best.get(pos, 0.0), now[pos]) for pos in live})
        norms = {pos: float(np.linalg.norm(event.values[head, pos])) for pos in live}
        values.append({pos: sign * (best[pos] + 0.1 * np.log1p(norms[pos])) for pos in live})
    return Scored(values, loops.union(loops.first(event, 1), loops.last(event, 2)))


RULE = Rule(peak, interval=3, prefill=False)
ONLY = ["naive_replay"]


def test_a_policy_agrees_with_its_rule():
    """A scorer with a column, a window, protection and a schedule, each written a second time."""
    passed = check_policy(PEAK, rule=RULE, max_examples=3)
    assert passed.decisions >= 20
    assert repr(passed).endswith(
        f"on 3 generated cases, {passed.decisions} decisions equal to the rule's"
    )


@pytest.mark.parametrize(
    "wrong", [{"sign": -1}, {"window": 3}, {"window": 1}, {"decay": 0.0}], ids=str
)
def test_a_wrong_rule_never_passes(wrong):
    """However few examples are asked for; the first difference is named."""
    rule = replace(RULE, score=lambda event: peak(event, **wrong))
    place = (
        r"'naive_replay': layer \d, head \d, position \d+ leaves (never|after row \d+), expected"
    )
    for number in range(20):  # the name is the seed
        policy = replace(PEAK, name=f"peak{number}")
        with pytest.raises(InvariantError, match=place):
            check_policy(policy, rule=rule, only=ONLY, max_examples=1, shrink=False)


def test_a_rule_that_decides_nothing_does_not_pass():
    """Traces of one token hold nothing to choose from."""
    few = (
        "0 decisions among entries compared with the rule, expected at least 20; raise max_examples"
    )
    with pytest.raises(InvariantError, match=few):
        check_policy(PEAK, rule=RULE, only=ONLY, max_n=1)


@pytest.mark.parametrize(
    "wrong",
    [
        replace(RULE, interval=4),
        replace(RULE, prefill=True),
        replace(RULE, score=lambda event: Scored(peak(event).values)),
    ],
    ids=["interval", "prefill", "protection"],
)
def test_a_rule_that_differs_is_caught(wrong):
    """Another schedule and no protection each break `naive_replay`."""
    with pytest.raises(InvariantError, match="'naive_replay'"):
        check_policy(PEAK, rule=wrong, only=ONLY, max_examples=300, shrink=False)


@dataclass(frozen=True)
class Skewed(Allocator):
    """One entry more for the first head and one less for the last, where two are left."""

    def plan(self, view, scores, protected):
        """Quotas around the budget."""
        quotas = view.budget.expand_as(view.count).clone()
        step = ((protected.sum(-1) + 1 < quotas).all(-1)).to(quotas.dtype)
        quotas[:, 0] += step
        quotas[:, -1] -= step
        return Plan(quotas)


def skewed(event, scored, protected):
    """The same, one head after the other."""
    step = all(len(p) + 1 < b for p, b in zip(protected, event.budgets, strict=True))
    event.budgets[0] += step
    event.budgets[-1] -= step
    kept, decisions = [], []
    for head in range(len(event.live)):
        chosen, margin, size = choose("skewed", event, head, scored, protected[head])
        kept.append(chosen)
        decisions.append((margin, size))
    return kept, decisions


def test_a_rule_may_allocate():
    """An allocator is compared as a scorer is, and a rule without it is caught."""
    policy = replace(PEAK, allocator=Skewed())
    schedule = {"interval": 3, "prefill": False}

    check_policy(
        policy,
        rule=Rule(peak, allocate=skewed, **schedule),
        exempt=["head_permutation"],  # the first head is special
        max_examples=12,
    )
    with pytest.raises(InvariantError, match="'naive_replay'"):
        check_policy(
            policy,
            rule=Rule(peak, **schedule),
            only=["naive_replay"],
            max_examples=300,
            shrink=False,
        )


def newest(event):
    """The newest entries, whose ranks are equal in every dtype."""
    return Scored([{pos: float(pos) for pos in live} for live in event.live], exact=True)


CASE = strategies.make_case("normal", layers=2, heads=2, n=12, prompt_len=6)


def kept_at_the_end(rule, budget=4, **settings):
    """Positions that head 0 of each layer holds after the last row."""
    out = loops.replay(CASE, rule, budget=budget, **settings)
    return [np.flatnonzero(layer[0] == loops.NEVER).tolist() for layer in out.evicted_at]


def test_a_rule_may_protect_and_share_the_budget_over_layers():
    """Beyond the scorer's own protection, and with a budget for each layer."""
    sink = Rule(newest, protect=lambda event: loops.first(event, 1))
    deeper = Rule(newest, layer_budgets=lambda _, budget: ([budget + 2, budget - 2], []))

    assert kept_at_the_end(Rule(newest)) == [[8, 9, 10, 11]] * 2
    assert kept_at_the_end(sink) == [[0, 9, 10, 11]] * 2
    assert kept_at_the_end(deeper) == [[6, 7, 8, 9, 10, 11], [10, 11]]
    with pytest.raises(BudgetError, match="protects 5 entries, budget is 4"):
        kept_at_the_end(Rule(newest, protect=lambda event: loops.first(event, 5)))
