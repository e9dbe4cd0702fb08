"""Policies of the user's own: how they are named, and mistakes in what they return."""

import re
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import pytest
import torch

import kvsim
from kvsim.core.parameters import Between
from kvsim.core.pieces import (
    Allocator,
    Even,
    Everything,
    Plan,
    Scorer,
    Scores,
    Uniform,
    Wrapper,
)
from kvsim.core.propagation import Propagation, Step, dropped_after
from kvsim.core.reading import SparseAttention
from kvsim.errors import PolicyError
from kvsim.sweeps import replay_all
from kvsim.testing import strategies


@dataclass(frozen=True)
class Flat(Allocator):
    """The same number of entries in each head; of another kind than "right" with a mistake."""

    kind: Literal["right", "number", "indices", "floats", "tensor", "heads"] = "right"
    share: Annotated[float, Between(0, 1)] = 1.0

    def plan(self, view, scores, protected):
        """Return quotas of the kind."""
        budget = view.budget.expand_as(view.count)
        if self.kind == "number":
            return Plan(torch.full_like(view.count, view.budget))
        if self.kind == "indices":
            return Plan(scores.topk(2, -1).indices)
        if self.kind == "floats":
            return Plan(budget * 1.0)
        if self.kind == "heads":
            return Plan(budget[0])
        return budget if self.kind == "tensor" else Plan(budget)


class Plain(Flat):
    """One without parameters of its own is a class of an allocator as well."""


@dataclass(frozen=True)
class Doubled(Wrapper):
    """Twice the scores of the scorer inside."""

    def score(self, view):
        """Return them with the columns of the scorer."""
        inner = self.inner(view)
        return Scores(2 * inner.values, inner.columns)


@dataclass(frozen=True)
class ByBudget(Scorer):
    """The first entries at budgets below 10, else the last."""

    def score(self, view):
        """Positions, or their opposites."""
        return view.pos.float() * (1 if view.setting.budget < 10 else -1)


@pytest.mark.parametrize(
    "name", ["{}:ByBudget", "criticalkv+{}:ByBudget", "{0}:Doubled+{0}:ByBudget"]
)
def test_scores_of_ones_own_are_not_shared(name):
    """Budgets of one trace have those of a replay alone, whatever the scorer reads of its view."""
    name = name.format(__name__)

    def trace():
        return strategies.make_case("normal", layers=2, n=40, prompt_len=25).trace()

    for record in replay_all([trace()], [name], [8, 12], interval=5).records:
        alone = kvsim.replay(trace(), name, record.budget, interval=5)
        assert (alone.evicted_at == record.evicted_at).all()


def flat():
    """A function that returns an allocator, which no name can put around a scorer."""
    return Flat()


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("{}:Flat+snapkv", "snapkv"),
        ("{}:Flat+snapkv@scaled", "snapkv@scaled"),
        ("{}:Plain+union+tova", "union+tova"),
        ("{}:Doubled+snapkv", "snapkv"),
        ("{0}:Flat+{0}:Doubled+snapkv+quest", "snapkv+quest"),
    ],
)
def test_classes_of_ones_own_stand_before_a_scorer(name, same):
    """An allocator or a wrapper, with its parameters, those of the scorer and scaled lengths."""
    trace = strategies.make_case("normal", layers=3, heads=2, n=40, prompt_len=25).trace()
    name, params = name.format(__name__), {} if "tova" in same else {"window": 4}
    records = [kvsim.replay(trace, kvsim.policy(x, **params), 8, interval=5) for x in (name, same)]

    assert (records[0].evicted_at == records[1].evicted_at).all()
    assert records[0].policy == name
    if "Flat" in name:
        assert kvsim.policy(name, share=0.5, **params).params["share"] == 0.5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{}:Flat", r":Flat \(allocator\); expected a scorer inside"),
        ("{}:flat+snapkv", r":flat \(scorer\) \+ snapkv \(scorer\); expected at most one"),
        ("snapkv+{}:Flat", r"snapkv \(scorer\) \+ .*:Flat \(allocator\); expected a scorer"),
        ("union+{}:Flat+tova", r"union \(wrapper\) \+ .*:Flat \(allocator\) \+ tova"),
    ],
)
def test_what_is_no_allocator_in_front_is_refused(name, message):
    """The error says what is true of the class or the function, and what can stand there."""
    with pytest.raises(PolicyError, match=message):
        kvsim.policy(name.format(__name__))


class InPlace(Scorer):
    """The norms of keys, by a scorer that writes to all that it reads."""

    def score(self, view):
        """Norms before the change."""
        norms = view.keys.norm(dim=-1)
        for read in (view.keys, view.values, view.queries(8)):
            read.mul_(2)
        return norms


class Negated(Wrapper):
    """The opposite scores, by a wrapper that writes to those inside."""

    def score(self, view):
        """Negate in place."""
        inner = self.inner(view)
        inner.values.neg_()
        return inner


class Scaling(SparseAttention):
    """The largest logits, by a piece that writes to queries."""

    def score(self, queries, pages, visible):
        """Before the change."""
        scores = queries @ pages.keys.flatten(1, 2).unsqueeze(1).mT
        queries.mul_(2)
        return scores


class Shortened(Propagation):
    """Half of the rows go on behind the first layer, by a piece that writes to keys."""

    def after(self, view, memory):
        """The first half."""
        view.keys.mul_(2)
        return Step(torch.arange(view.row // 2), done=True)

    def forecast(self, budget, prompt_len, n_layers, layer=None):
        """As `after`."""
        return dropped_after(0, (prompt_len - 1) // 2, prompt_len, n_layers)


@pytest.mark.parametrize(
    "changes",
    [
        {"scorer": InPlace()},
        {"scorer": Negated(kvsim.policy("snapkv", window=4).scorer)},
        {"sparse": Scaling()},
        {"propagation": Shortened()},
    ],
    ids=lambda x: next(iter(x)) + type(next(iter(x.values()))).__name__,
)
def test_a_policy_that_writes_to_its_view_changes_no_other(changes):
    """The trace in memory, which replays of other policies and metrics read, stays as it is."""
    plain = kvsim.policy("snapkv", window=4)
    trace = strategies.make_case("normal", layers=3, heads=2, n=40, prompt_len=25).trace()
    before = {name: trace.read(name).clone() for name in "qkv"}
    expected = kvsim.replay(trace, plain, 8, interval=5).evicted_at
    kvsim.replay(trace, replace(plain, **changes), 8, interval=5)
    assert all(torch.equal(trace.read(name), was) for name, was in before.items())
    assert (kvsim.replay(trace, plain, 8, interval=5).evicted_at == expected).all()


def test_classes_that_replays_know_have_no_subclasses():
    """A shortcut for equal quotas would pass over a subclass with others."""
    for base, of in ((Uniform, "Allocator"), (Everything, "Allocator"), (Even, "LayerBudgets")):
        with pytest.raises(PolicyError, match=f"is a subclass of {base.__name__}, .* one of {of},"):
            type("Mine", (base,), {})


def test_a_member_that_no_contract_has_is_refused():
    """A misspelt one, or of an earlier version; a parameter or a helper may have such a name."""
    for name, value, message in (
        ("clairvoyant", True, "; .*, or a parameter, `clairvoyant: bool`"),
        ("colums", True, "; did you mean 'columns'"),
        ("protects", lambda _: None, r"; did you mean 'protection'\?; .*, or _protects"),
        ("reeds", property(lambda _: None), "; did you mean 'reads'"),
    ):
        with pytest.raises(PolicyError, match=f"^Mine declares {name}{message}"):
            type("Mine", (Scorer,), {name: value})
    assert type("Rows", (Scorer,), {"__annotations__": {"rows": int}, "rows": 3}).rows == 3
    assert type("Helped", (Scorer,), {"weigh": lambda _: 3}).weigh(None) == 3


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("number", r"raised \w+ \(.*\) in test_own_policies\.py, line \d+$"),
        (
            "indices",
            r"the plan .* is torch\.int64 \[\d, 2, 2\]; .* integers \[\d, 2\] \[layer, KV head",
        ),
        ("floats", r"the plan .* at row 24 is torch\.float32 \[\d, 2\]; expected a .*Plan with"),
        ("heads", r"the plan .* at row 24 is torch\.int64 \[2\]; expected"),
        (
            "tensor",
            r"the plan .* at row 24 is torch\.int64 .*; expected a kvsim\.core\.policy\.Plan",
        ),
    ],
)
def test_a_wrong_plan_is_named_as_the_allocators(kind, message):
    """Quotas of another type or shape, and an error in `plan`, are said of the plan, not scores."""
    trace = strategies.make_case("normal", layers=3, heads=2, n=40, prompt_len=25).trace()
    policy = kvsim.policy(f"{__name__}:Flat+knorm", kind=kind)
    (failure,) = replay_all([trace], [policy], [8], interval=5).failures
    assert re.search(message, failure.error)
