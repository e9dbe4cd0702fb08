"""Likeness of kept keys, and what the sizes of values alone would keep, against loops."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvsim
from kvsim.analysis.kept.vectors import key_similarity, value_norm_overlap
from kvsim.schema import NEVER
from kvsim.testing.strategies import make_case


def cosines(keys, chosen):
    """The cosine of every pair of the chosen positions; a zero key is like no other."""
    size = np.linalg.norm
    for i, j in combinations(chosen, 2):
        both = size(keys[i]) * size(keys[j])
        yield float(keys[i] @ keys[j]) / both if both else 0.0


@given(seed=st.integers(0, 2**20), stay=st.sampled_from((0.05, 0.5, 1.0)))
def test_it_equals_a_loop_over_pairs(seed, stay):
    """Ragged heads, zero keys, heads with one key or none; chance is over all pairs there."""
    rng = np.random.default_rng(seed)
    rows = np.array([9, 17, NEVER])
    at = rng.integers(np.searchsorted(rows, np.arange(24)), 3, size=(3, 24))
    gone = rows[np.where(rng.random(at.shape) < stay, 2, at)].astype(np.int32)
    keys = rng.integers(-1, 2, size=(3, 24, 2)).astype(float)

    values, chances = key_similarity(keys)(gone)

    known = [int(x) for x in gone.ravel() if x != NEVER]
    for head in range(3):
        mean = chance = np.nan
        if known:
            there = range(max(known) + 1)
            kept = [p for p in there if gone[head, p] > max(known)]
            each, random = (list(cosines(keys[head], some)) for some in (kept, there))
            mean, chance = (np.mean(some) if some else np.nan for some in (each, random))
        assert values[head] == pytest.approx(mean, nan_ok=True, abs=1e-12)
        assert chances[head] == pytest.approx(chance, nan_ok=True, abs=1e-12)


def test_the_metric_reads_each_heads_own_keys():
    """Per KV head and per query head, whose group shares the keys."""
    case = make_case("normal", layers=2, heads=2, group=2, n=60, prompt_len=40)
    trace = case.trace()
    for name in ("snapkv", "snapkv@original"):
        record = kvsim.replay(trace, kvsim.policy(name, window=8), 16)
        table = kvsim.measure(trace, record, ["key_similarity"])
        for layer, gone in enumerate(record.gone_after):
            keys = case.k[layer].astype(float).repeat(len(gone) // 2, axis=0)
            found = table.filter(layer=layer)

            got = [found[name].to_list() for name in ("value", "chance")]
            assert got == [pytest.approx(x) for x in key_similarity(keys)(gone)]


@given(seed=st.integers(0, 2**20), sink=st.integers(0, 6), stay=st.sampled_from((0.1, 0.5, 1.0)))
def test_overlap_equals_loops_over_entries(seed, sink, stay):
    """Ragged heads, sinks left out, ties to the lower position."""
    rng = np.random.default_rng(seed)
    rows = np.array([9, 17, NEVER])
    at = rng.integers(np.searchsorted(rows, np.arange(24)), 3, size=(3, 24))
    gone = rows[np.where(rng.random(at.shape) < stay, 2, at)].astype(np.int32)
    norms = rng.integers(0, 6, size=(3, 24)).astype(float)

    values, chances = value_norm_overlap(gone, norms, sink)

    known = [int(x) for x in gone.ravel() if x != NEVER]
    for head in range(3):
        expected = chance = np.nan
        if known:
            there = range(sink, max(known) + 1)
            kept = {p for p in there if gone[head, p] > max(known)}
            largest = sorted(there, key=lambda p: (-norms[head, p], p))[: len(kept)]
            if 0 < len(kept) < len(there):
                expected = len(kept & set(largest)) / len(kept)
                chance = len(kept) / len(there)
        assert values[head] == pytest.approx(expected, nan_ok=True)
        assert chances[head] == pytest.approx(chance, nan_ok=True)


def test_the_metric_reads_each_heads_own_values():
    """Per KV head and per query head, whose group shares the values."""
    case = make_case("normal", layers=2, heads=2, group=2, n=60, prompt_len=40)
    trace = case.trace()
    norms = np.linalg.norm(case.v, axis=-1)
    for name in ("snapkv", "snapkv@original"):
        record = kvsim.replay(trace, kvsim.policy(name, window=4), budget=12, prefill=True)
        table = kvsim.measure(trace, record, ["value_norm_overlap"])
        each = record.evicted_at.shape[1] // 2
        expected = [
            value_norm_overlap(record.evicted_at[layer], norms[layer].repeat(each, 0))[0]
            for layer in range(2)
        ]
        assert table["value"].to_list() == pytest.approx(np.concatenate(expected).tolist())
        assert table["qhead" if each == 2 else "head"].to_list() == [*range(2 * each)] * 2
