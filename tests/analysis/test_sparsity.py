"""Attention sparsity of the full and of a compressed cache, against loops over keys."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvsim
from kvsim.analysis.attention.sparsity import attention_sparsity, compressed_sparsity
from kvsim.core.policy import Schedule
from kvsim.core.record import Record
from kvsim.schema import NEVER
from kvsim.testing.strategies import cases
from reference import metrics

SHARES = (0.05, 0.4)
KINDS = ("normal", "sharp", "sink")


def scores_of(weights, own, start):
    """Mean over rows from `start` of the largest weight of the query heads, [pos]."""
    return weights[own, start:].max(0).mean(0)


def below(scores, among, counted, share):
    """Share of the positions counted that score less than `share` of the largest among."""
    if not counted:
        return np.nan
    peak = max((scores[p] for p in among), default=0.0)
    return sum(1 for p in counted if scores[p] < share * peak) / len(counted)


@settings(max_examples=30)
@given(case=cases(kinds=KINDS, max_n=28), window=st.integers(1, 9), domain=st.integers(1, 20))
def test_sparsity_of_full_attention_equals_loops(case, window, domain):
    """Both maxima, every layer and head; NaN where the window is the whole trace."""
    sink, start, group = 2, case.n - window, case.shape[2]
    for layer in range(case.shape[0]):
        found = attention_sparsity(
            case.trace(), layer, shares=SHARES, window=window, domain=domain, sink=sink
        )
        weights = metrics.attention(case.q[layer], case.k[layer], case.scale)
        for head in range(case.shape[1]):
            if start < 1:
                assert all(np.isnan(values[head]) for values in found.values())
                continue
            keys = list(range(start))
            scores = scores_of(weights, range(head * group, (head + 1) * group), start)
            late = [p for p in keys if p >= start - domain]
            behind = [p for p in late if p >= sink]
            for share in SHARES:
                expected = (
                    below(scores, keys, late, share),
                    below(scores, keys[sink:], behind, share),
                )
                got = [found[f"p={share:g},max={x}"][head] for x in ("sequence", "behind_sink")]
                assert got == pytest.approx(expected, nan_ok=True)


@settings(max_examples=30)
@given(
    case=cases(kinds=KINDS, max_n=24),
    window=st.integers(1, 9),
    per_query_head=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_sparsity_of_a_compressed_cache_equals_loops(case, window, per_query_head, seed):
    """Rows attend over what they see; the keys are those that the last row still sees."""
    rng = np.random.default_rng(seed)
    layers = tuple(rng.permutation(case.shape[0]).tolist())
    heads = case.q.shape[1] if per_query_head else case.shape[1]
    shape = len(layers), heads, case.n
    gone = np.maximum(rng.integers(0, case.n + 4, shape), np.arange(case.n))
    gone = np.maximum(np.where(gone >= case.n, NEVER, gone), case.prompt_len - 1).astype(np.int32)
    record = some(gone, case.prompt_len, layers, per_query_head=per_query_head)
    whole = kvsim.replay(case.trace(), kvsim.policy("full"), budget=1)
    sink = 2

    found, _ = compressed_sparsity(
        case.trace(), [record, whole], shares=SHARES, window=window, sink=sink
    )

    start = max(case.prompt_len, case.n - window)
    per_head = case.q.shape[1] // heads
    for at, layer in enumerate(layers):
        weights = metrics.attention(case.q[layer], case.k[layer], case.scale, gone[at])
        for head in range(heads):
            own = range(head * per_head, (head + 1) * per_head)
            keys = [p for p in range(start) if gone[at, head, p] >= case.n - 1 and start < case.n]
            scores = scores_of(weights, own, start) if keys else ()
            behind = [p for p in keys if p >= sink]
            for share in SHARES:
                expected = below(scores, keys, keys, share), below(scores, behind, behind, share)
                peaks = "sequence", "behind_sink"
                got = tuple(found[at][f"p={share:g},max={x}"][head] for x in peaks)
                assert got == pytest.approx(expected, nan_ok=True)


def some(gone, prompt_len, layers, **changes):
    """A record with these rows of eviction."""
    return Record(
        gone,
        policy="some",
        params={},
        budget=4,
        schedule=Schedule(None),
        prompt_len=prompt_len,
        layers=layers,
        layer_ids=layers,
        **changes,
    )
