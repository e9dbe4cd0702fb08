"""G-KV: its worked example, and redundancy in blocks and from event to event."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import kvsim
from kvsim.core.pieces import Inputs
from kvsim.core.select import select
from kvsim.errors import PolicyError
from kvsim.policies import redundancy
from kvsim.policies.gkv import GKV, Global, fuse, normalise
from kvsim.policies.knorm import Knorm
from kvsim.policies.redundancy import mean_similarity
from reference import windows
from traces import random_trace

FUSIONS = ("max", "mean", "sum")


def similarity(keys, threshold, epsilon, *, else_first=False):
    """Mean cosine of every key [n, dim] with the others, by the rule of the reference."""
    event = SimpleNamespace(params={"threshold": threshold}, keys=keys.double().numpy()[None])
    among = list(range(len(keys)))
    mean, _ = windows.redundancy(event, 0, among, epsilon=epsilon, quirk=else_first)
    return list(mean.values())


FIRST, SECOND = [0.4, 0.1, 0.2, 0.3], [0.03, 0.20, 0.05, 0.10, 0.02, 0.04]
GLOBAL = {
    "max": [0.8, 1.0, 0.6, 0.5, 0.1, 0.2],
    "mean": [0.83, 0.6, 0.65, 0.5, 0.1, 0.2],
    "sum": [0.95, 1.4, 0.85, 0.5, 0.1, 0.2],
}


def chosen(scores, pos, *, budget, window):
    """Positions that one head keeps: the best by score, and the window."""
    pos = torch.tensor([[pos]])
    values = torch.zeros(pos.shape)
    values[..., : len(scores)] = torch.as_tensor(scores)
    protected = pos > pos.max() - window
    kept = select(values, torch.tensor([[budget]]), protected, torch.ones_like(protected))
    return pos[kept].tolist()


@pytest.mark.parametrize("fusion", FUSIONS)
def test_golden_example(fusion):
    """One head, budget 5, window 2, decay 0.8: two events worked by hand, to the number."""
    every = torch.ones(1, dtype=torch.bool)
    new = normalise(torch.tensor(FIRST), every)
    score = fuse(torch.full((4,), math.nan), new, fusion, 0.8)
    assert score.tolist() == pytest.approx([1, 0.25, 0.5, 0.75])
    assert chosen(score, [0, 1, 2, 3, 4, 5], budget=5, window=2) == [0, 2, 3, 4, 5]

    old = torch.tensor([1, 0.5, 0.75, math.nan, math.nan, math.nan])
    new = normalise(torch.tensor(SECOND), every)
    assert new.tolist() == pytest.approx([0.15, 1, 0.25, 0.5, 0.1, 0.2])
    score = fuse(old, new, fusion, 0.8)
    assert score.tolist() == pytest.approx(GLOBAL[fusion])
    pos = [0, 2, 3, 4, 5, 6, 7, 8]
    assert chosen(score, pos, budget=5, window=2) == [0, 2, 3, 7, 8]
    assert chosen(new, pos, budget=5, window=2) == [2, 3, 4, 7, 8]  # the local score alone


def keys_of(kind, n=37, heads=3, dim=8, seed=0):
    """[2, heads, n, dim] keys, float64: isotropic, with a common direction, repeated, some zero."""
    draw = np.random.default_rng(seed)
    keys = draw.standard_normal((2, heads, n, dim))
    if kind == "common":
        keys += 1.5 * draw.standard_normal((2, heads, 1, dim))
    elif kind == "repeated":
        keys = keys[:, :, draw.integers(0, 5, n)]
    elif kind == "zero":
        keys[:, :, draw.integers(0, n, n // 3)] = 0.0
        keys[0, 0] = 0.0
    return torch.from_numpy(keys)


@pytest.mark.parametrize("blocks", ["usual", "small"])
@pytest.mark.parametrize("else_first", [False, True])
@pytest.mark.parametrize("threshold", [0.5])
@pytest.mark.parametrize("kind", ["isotropic", "common", "repeated", "zero"])
def test_redundancy_equals_the_matrix(kind, threshold, else_first, blocks, monkeypatch):
    """For heads of any length, in one block or in many, with rows that match nothing or not."""
    if blocks == "small":
        monkeypatch.setattr(redundancy, "_BLOCK_BYTES", 500)
        monkeypatch.setattr(redundancy, "_NARROW", 2)
        monkeypatch.setattr(redundancy, "_WIDE", 5)
    keys = keys_of(kind)
    among = torch.ones(keys.shape[:3], dtype=torch.bool)
    among[0, 1, :11] = False
    among[1, 0, ::3] = False
    among[1, 1, :-1] = False
    among[1, 2] = False
    found = mean_similarity(keys, among, threshold=threshold, epsilon=1e-6, else_first=else_first)
    for layer, head in np.ndindex(2, 3):
        there = among[layer, head]
        if bool(there.any()):
            expected = similarity(keys[layer, head, there], threshold, 1e-6, else_first=else_first)
            np.testing.assert_allclose(found[layer, head, there], expected, atol=1e-12)
        assert not found[layer, head, ~there].any()


def replay_searching(name, kind, monkeypatch, search):
    """Replay a policy of redundancy with ten events; search stands in for `mean_similarity`."""
    monkeypatch.setattr(redundancy, "_NARROW", 2)
    for module in ("gkv", "rkv"):
        monkeypatch.setattr(f"kvsim.policies.{module}.mean_similarity", search)
    keys = keys_of(kind, n=40, heads=2)
    trace = random_trace(n=40, prompt_len=12, dtype=torch.float64, k=keys)
    quantizer = {"scorer__window": 4, "group": 4, "bits_per_number": 1} if "kivi" in name else {}
    kvsim.replay(trace, kvsim.policy(name, window=2, **quantizer), budget=10, interval=3)


@pytest.mark.parametrize("name", ["rkv@original", "rkv@ams", "adakv+gkv", "gkv+kivi"])
@pytest.mark.parametrize("kind", ["common"])
def test_redundancy_goes_on_from_the_event_before(kind, name, monkeypatch):
    """It is that of a new search, whoever has left, and where a quantizer changes keys."""
    events = []

    def both(keys, among, *, view, **how):
        found = mean_similarity(keys, among, view=view, **how)
        torch.testing.assert_close(found, mean_similarity(keys, among, **how))
        events.append(view.row)
        return found

    replay_searching(name, kind, monkeypatch, both)
    assert len(events) == 10


@pytest.mark.deep
def test_redundancy_holds_no_matrix():
    """2048 keys in 8 heads have 128 MiB of similarities; blocks take a few MiB."""
    keys = torch.randn(1, 8, 2048, 4, generator=torch.Generator().manual_seed(0))
    among = torch.ones(keys.shape[:3], dtype=torch.bool)
    with torch.profiler.profile(profile_memory=True, record_shapes=True) as profile:
        mean_similarity(keys, among, threshold=0.999, epsilon=1e-6)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 0 < largest <= 16 << 20


def test_global_takes_what_it_is_from_the_scorer_inside():
    """Columns, rows, protection; its own scores are not signed, and it goes around once."""
    it = Global(GKV(window=9))

    assert set(it.columns) == {"global", "fused"}
    assert all(math.isnan(value) for value in it.columns.values())
    assert it.reads == Inputs(rows=9)
    assert it.protection(50) == GKV(window=9).protection(50)
    assert it.scale == "positive"
    with pytest.raises(PolicyError, match="global score already"):
        Global(Global(Knorm()))
