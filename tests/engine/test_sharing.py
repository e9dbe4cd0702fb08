"""What replays of one trace share changes none of them, and is computed once."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch

import kvsim
from kvsim.policies import future, oracle, parameters
from kvsim.policies.snapkv import SnapKV
from traces import random_trace

TERMS = {"interval": 16, "prefill": True}
BUDGETS = (24, 22)
#: Policies in turn on one trace: scores that read the budget or not, and the same ones inside.
POLICIES = (
    *("snapkv", "h2o", "cake", "oracle", "expected_attention", "adakv+h2o", "ams+snapkv"),
    *("criticalkv+snapkv", "global+h2o", "union+snapkv", "criticalkv+global+snapkv"),
)


def trace():
    """A trace with output projections."""
    o_proj = torch.randn(2, 4, 8, 12, generator=torch.Generator().manual_seed(1))
    return random_trace(prompt_len=40, o_proj=o_proj)


def replayed(shared, name, budget):
    """When each entry leaves; windows are shorter than the budgets."""
    short = ("window", "recent")
    given = {x: 6 for x in parameters(name) if x.rpartition("__")[2] in short}
    return kvsim.replay(shared, kvsim.policy(name, **given), budget, **TERMS).evicted_at


def test_replays_of_one_trace_keep_what_each_alone_keeps():
    """Whatever the budgets and the policies before, also around the same scorer."""
    shared = trace()
    for name, budget in product(POLICIES, BUDGETS):
        alone = replayed(trace(), name, budget)
        assert np.array_equal(replayed(shared, name, budget), alone), (name, budget)


def test_a_cache_that_nothing_has_left_is_scored_once(monkeypatch):
    """Whatever the budget, and inside of other pieces; later caches are scored by each replay."""
    rows, score = Counter(), SnapKV.score

    def counted(self, view):
        rows[view.row] += 1
        return score(self, view)

    monkeypatch.setattr(SnapKV, "score", counted)
    shared = trace()
    for policy, budget in product(("snapkv", "adakv+snapkv", "global+snapkv"), BUDGETS):
        replayed(shared, policy, budget)

    first, *later = rows.values()
    assert first == 1
    assert set(later) == {6}


@pytest.mark.parametrize("by", ["mass", "output"])
def test_the_oracle_weighs_later_rows_event_by_event_or_together(by, monkeypatch):
    """Sums over the rows between events equal sums over all later rows at each event."""
    policy = kvsim.policy("oracle", by=by)
    together = kvsim.replay(trace(), policy, 20, **TERMS)
    calls, future_mass = [], future.future_mass

    def counted(*arguments, **options):
        calls.append(arguments[1])
        return future_mass(*arguments, **options)

    monkeypatch.setattr(oracle, "_MOST", 1)
    monkeypatch.setattr(oracle, "future_mass", counted)
    apart = kvsim.replay(trace(), policy, 20, **TERMS)

    assert calls == [(row,) for row in together.events]
    assert np.array_equal(together.evicted_at, apart.evicted_at)
