"""What a trace keeps for later replays of it."""

import numpy as np
import torch

import kvsim
from kvsim.core.shared_results import Memo
from kvsim.engine import layers
from kvsim.policies import expected_attention
from kvsim.testing.strategies import make_case


def test_results_of_one_kind_stay_and_other_kinds_make_room():
    """Of the same kind the first ones that fit are kept; another kind takes their place."""
    kept, computed = Memo(), []

    def ask(*key):
        def compute():
            computed.append(key)
            return torch.zeros(10), None

        assert kept(key, compute, 2 * 40)[0].shape == (10,)

    for _ in range(2):
        for event in range(3):
            ask("moments", event)
    ask("received", 0)
    ask("received", 0)
    ask("moments", 1)
    ask("moments", 0)

    of_moments = [("moments", event) for event in (0, 1, 2, 2)]
    assert computed == [*of_moments, ("received", 0), ("moments", 0)]


def test_nobody_writes_to_what_is_kept():
    """A policy that changes its scores in place gets a copy of the attention received."""
    trace = make_case("normal", n=24, prompt_len=20).trace()
    first = kvsim.replay(trace, "observed_attention", 8).evicted_at
    (kept, _), *_ = trace.memo._results.values()
    before = kept.clone()

    class Writing(expected_attention.Scorer):
        def score(self, view):
            return view.received().mul_(-1.0).float()

    kvsim.replay(trace, Writing(), 8)

    assert torch.equal(kept, before)
    assert np.array_equal(kvsim.replay(trace, "observed_attention", 8).evicted_at, first)


def test_a_memory_budget_bounds_what_is_kept(monkeypatch):
    """Of a replay that may take little memory only a sixteenth of that stays."""
    kept = {}
    monkeypatch.setattr(layers, "LOGIT_BYTES", 0)  # what even the smallest trace needs
    for memory in (None, 160_000):
        trace = make_case("normal", heads=2, n=48, dim=16, prompt_len=30).trace()
        kvsim.replay(trace, "expected_attention", 12, interval=6, memory=memory)
        kept[memory] = trace.memo._bytes

    assert 0 < kept[160_000] <= 10_000 < kept[None]
