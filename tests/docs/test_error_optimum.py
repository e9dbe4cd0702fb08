"""docs/error_optimum.py: the layer error, its search and its bound, against all sets by trying."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
import torch

import kvsim
from error_optimum import Heads, bound, searched, searched_alone
from kvsim.schema import NEVER
from traces import random_trace

P, PLACES = 9, 3


def projected(seed, **options):
    """A trace of two KV heads with groups of two and output projections, in float64."""
    generator = torch.Generator().manual_seed(seed)
    o_proj = torch.randn(1, 4, 8, 12, generator=generator, dtype=torch.float64)
    sizes = {"layers": 1, "n": 40, "prompt_len": P, "dim": 8, "size": 1.0, "dtype": torch.float64}
    return random_trace(seed=seed, o_proj=o_proj, **sizes | options)


def test_the_error_is_that_of_the_metric():
    """Squared `layer_error` of a replay after one event; each head alone by the definition."""
    trace = projected(1, prompt_len=20)
    record = kvsim.replay(trace, "knorm", 6, interval=100, prefill=True)
    kept = record.evicted_at[0, :, :20] == NEVER
    layer = Heads.of(trace, 0)
    value = kvsim.measure(trace, record, "layer_error")["value"][0]

    assert layer.error(kept) == pytest.approx(value**2, rel=1e-6)
    together = sum(layer.moved(head, kept[head]).sum(0) for head in range(2))
    assert np.square(together).sum(-1).mean() == pytest.approx(layer.error(kept))


@pytest.mark.parametrize("joint", [False, True])
def test_steps_have_the_error_that_follows(joint):
    """Of every entry that is kept too, or dropped."""
    layer, rng = Heads.of(projected(2), 0), np.random.default_rng(2)
    kept = rng.random((2, P)) < 0.5
    rest = layer.moved(1, kept[1]).sum(0) if joint else None
    for sign, entry in product((1, -1), range(P)):
        if kept[0, entry] == (sign == 1):
            continue
        changed = kept.copy()
        changed[0, entry] = sign == 1
        error = layer.error(changed) if joint else layer.alone(0, changed[0])

        assert layer.after(0, kept[0], rest, sign)[entry] == pytest.approx(error, rel=1e-8)


def test_search_and_bound_enclose_the_best_of_all_sets():
    """The bound is below the best set by trying, and the search rarely above it, by little."""
    sets = np.zeros((84, P), bool)
    for row, places in zip(sets, combinations(range(P), PLACES), strict=True):
        row[list(places)] = True
    ratios, joint, gaps = [], [], []
    for seed in range(6):
        layer = Heads.of(projected(seed, size=3.0), 0)
        start = np.stack([sets[0], sets[0]])
        for head in range(2):
            best = min(layer.alone(head, x) for x in sets)
            low = bound(layer, head, PLACES)
            found = layer.alone(head, searched_alone(layer, head, [sets[0]]))
            assert low <= best * (1 + 1e-9)
            assert found >= best * (1 - 1e-9)
            ratios.append(found / best)
            gaps.append(max(low, 0) / best)
        moved = [np.stack([layer.moved(head, x).sum(0) for x in sets]) for head in range(2)]
        every = np.square(moved[0][:, None] + moved[1]).sum(-1).mean(-1)
        joint.append(layer.error(searched(layer, [start])) / every.min())

    assert min(joint) >= 1 - 1e-9
    assert np.mean(ratios) < 1.05
    assert np.mean(joint) < 1.1
    assert np.mean(gaps) > 0.15
