"""Bugs in a policy of a user: each is caught by the invariant named here."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import kvsim
from kvsim.core.policy import Allocator, Plan, Protection, Scorer
from kvsim.core.view import View
from kvsim.testing import InvariantError, check_policy

pytestmark = pytest.mark.deep


@dataclass(frozen=True)
class Mine(Scorer):
    """A scorer of the user's own: attention of the last row."""

    columns: ClassVar[dict[str, float]] = {}
    per_row: ClassVar[bool] = False

    def score(self, view: View) -> Tensor:
        """Mean over the group."""
        return view.attn(1, group="mean")[..., 0, :]

    def protection(self, budget: int) -> Protection:
        """Nothing."""
        return Protection()


@dataclass(frozen=True)
class Remembering(Mine):
    """Adds what it computed at its last call, in whatever replay that was."""

    last: list[Tensor] = field(default_factory=list, repr=False)

    def score(self, view: View) -> Tensor:
        """Half of it is a memory."""
        now = super().score(view)
        before = self.last.pop() if self.last else torch.zeros_like(now)
        self.last.append(now)
        n = min(now.shape[-1], before.shape[-1])
        if before.shape[:2] != now.shape[:2]:
            return now
        return now + torch.nn.functional.pad(before[..., :n].to(now), (0, now.shape[-1] - n))


@dataclass(frozen=True)
class CountingUp(Mine):
    """Remembers in its own fields how often it was asked."""

    calls: list[int] = field(default_factory=list)

    def score(self, view: View) -> Tensor:
        """The policy object is not what it was."""
        self.calls.append(view.row)
        return super().score(view)


def counting_pads(scores: Tensor, view: View) -> Tensor:
    """Even slots first, pads included."""
    even = torch.arange(view.pos.shape[-1]) % 2 == 0
    return scores + even.to(view.keys.dtype)


def peeking(_: Tensor, view: View) -> Tensor:
    """Similarity to the mean of all keys of the trace, those to come included."""
    mean = view._source.keys.nanmean(2, keepdim=True)
    return torch.nn.functional.cosine_similarity(view.keys, mean, dim=-1)


def dividing(_: Tensor, view: View) -> Tensor:
    """The first component of the normalised key, whose norm can be 0."""
    return view.keys[..., 0] / view.keys.norm(dim=-1)


def first_head(scores: Tensor, view: View) -> Tensor:
    """The ranking of KV head 0 for all heads."""
    return scores[:, :1].expand_as(view.pos)


def normalising(scores: Tensor, view: View) -> Tensor:
    """Keys are normalised in place, as fast code is written for tensors of one's own."""
    view.keys.div_(1 + view.keys.norm(dim=-1, keepdim=True))
    return scores


def through_numpy(scores: Tensor, view: View) -> Tensor:
    """Queries of the most recent row are set to 0 in memory that tensors share."""
    view.queries(1).numpy()[:] = 0
    return scores


def undeclared(_: Tensor, view: View) -> Tensor:
    """Negative scores, and no word of it."""
    return -view.keys.norm(dim=-1)


def mine(bug: Callable[[Tensor, View], Tensor]) -> Mine:
    """The user's scorer with a bug."""
    score = {"score": lambda self, view: bug(Mine.score(self, view), view)}
    scorer: Mine = type(bug.__name__, (Mine,), score)()
    return scorer


@dataclass(frozen=True)
class Greedy(Allocator):
    """An allocator that keeps one entry more in the first head."""

    def plan(self, view: View, scores: Tensor, protected: Tensor) -> Plan:
        """One too many."""
        quotas = view.budget.expand_as(view.count).clone()
        quotas[:, 0] += 1
        return Plan(quotas)


@pytest.mark.parametrize(
    ("scorer", "invariant"),
    [
        (mine(normalising), "input_unchanged"),
        (mine(through_numpy), "input_unchanged"),
        (Remembering(), "isolation"),
        (CountingUp(), "isolation"),
        (mine(counting_pads), "ragged"),
        (mine(peeking), "causality"),
        (mine(dividing), "finite"),
        (mine(first_head), "head_permutation"),
        (mine(undeclared), "declared_sign"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Mine) else value,
)
def test_bug_in_a_policy_of_the_users_own_is_caught(scorer, invariant):
    """Leaked state, pads, the future, NaN and mixed heads, each by its own invariant."""
    policy = kvsim.Policy("mine", scorer)
    with pytest.raises(InvariantError, match=f"invariant '{invariant}'"):
        check_policy(policy, max_examples=1000, only=[invariant], shrink=False)


def test_allocator_that_exceeds_the_budget_is_caught():
    """What a layer holds is counted where the budget is shared."""
    policy = kvsim.Policy("mine", Mine(), allocator=Greedy())
    with pytest.raises(InvariantError, match="invariant 'exact_size'"):
        check_policy(policy, max_examples=100, shrink=False)


def test_policy_without_a_bug_passes():
    """The scorer that the buggy ones are made from satisfies every invariant."""
    check_policy(kvsim.Policy("mine", Mine()), max_examples=12)


def test_failure_shows_the_case():
    """The message has the policy, the invariant and a case that can be built again."""
    with pytest.raises(InvariantError) as caught:
        check_policy(kvsim.Policy("mine", mine(first_head)), only=["head_permutation"])
    for part in ("mine", "'head_permutation'", "budget=", "Case(", "seed=", "prompt_len="):
        assert part in str(caught.value)
