"""Tables of layers at a reader's knobs, against loops over their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvsim
from kvsim.analysis.attention.sparsity import sparsity_table
from kvsim.analysis.attention.windows import overlap_table
from kvsim.analysis.prompt.ranking import rank_pattern, ranking
from kvsim.policies.asl import ASL


def random_trace(layers=4, n=90, prompt_len=70, seed=0):
    """Random queries, keys and values; 4 query heads on 2 KV heads."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(layers, heads, n, 8, generator=generator) for heads in (4, 2, 2))
    return kvsim.Trace.from_arrays(2 * q, k, v, prompt_len=prompt_len, rope=kvsim.Rope.default(8))


def scores(trace, layer, rows, keys):
    """Of each KV head and key: maximum over the group of attention, mean over the rows."""
    full = trace.attention(layer, slice(0, trace.n_pos)).double().numpy()  # [qhead, row, pos]
    out = np.zeros((trace.n_heads, keys))
    for head in range(trace.n_heads):
        own = full[head * trace.group : (head + 1) * trace.group]
        for key in range(keys):
            out[head, key] = np.mean([max(one[row, key] for one in own) for row in rows])
    return out


@settings(max_examples=8)
@given(st.integers(0, 50), st.integers(3, 14), st.integers(0, 3))
def test_overlap_is_that_of_a_loop(seed, window, layer):
    """Four windows at the end; top keys among those before them, heads on equal terms."""
    trace = random_trace(seed=seed)
    keys = trace.n_pos - 4 * window
    blocks = [range(keys + i * window, keys + (i + 1) * window) for i in range(4)]
    by_block = [scores(trace, layer, rows, keys) for rows in blocks]
    found = overlap_table(trace, layer, window=window, shares=(0.1, 0.5))
    for row in found.to_dicts():
        count = math.ceil(row["share"] * keys - 1e-9)
        sums = dict.fromkeys(("oldest", "second", "third", "union"), 0.0)
        for head in range(trace.n_heads):
            tops = [set(np.argsort(-one[head], kind="stable")[:count]) for one in by_block]
            for name, top in zip(("oldest", "second", "third"), tops, strict=False):
                sums[name] += len(top & tops[3]) / count
            sums["union"] += len((tops[0] | tops[1] | tops[2]) & tops[3]) / count
        for name, total in sums.items():
            assert row[name] == pytest.approx(total / trace.n_heads)
        assert row["chance"] == pytest.approx(count / keys)
        assert row["chance_union"] == pytest.approx(1 - (1 - count / keys) ** 3)


def test_sparsity_is_that_of_a_loop():
    """Keys before the last 16 rows, next to the largest score of all, or behind the sink."""
    trace = random_trace(layers=2)
    start = trace.n_pos - 16
    found = {(row["layer"], row["p"]): row for row in sparsity_table(trace).to_dicts()}

    assert len(found) == 4
    for (layer, p), row in found.items():
        of_keys = scores(trace, layer, range(start, trace.n_pos), start)
        everywhere = np.mean([(one < p * one.max()).mean() for one in of_keys])
        behind = np.mean([(one[4:] < p * one[4:].max()).mean() for one in of_keys])
        assert row["sequence"] == pytest.approx(everywhere)
        assert row["behind_sink"] == pytest.approx(behind)


def test_a_trace_too_short_for_a_window_has_no_sparsity():
    """Null, not a number of nothing."""
    assert sparsity_table(random_trace(n=12, prompt_len=6))["sequence"].null_count() == 8


@settings(max_examples=20)
@given(st.data())
def test_a_pattern_shows_the_ranks_of_what_could_go_on(data):
    """Tokens of a loop, in either order; geometric means of neighbours in a narrow picture."""
    trace = random_trace(seed=data.draw(st.integers(0, 5)))
    known = ranking(trace, ASL(window=8))
    look_back, k = data.draw(st.integers(1, 4)), data.draw(st.integers(0, known.ranked))
    columns, by = data.draw(st.integers(1, 80)), data.draw(st.sampled_from(["rank", "position"]))
    found = rank_pattern(known, look_back, k, by=by, columns=columns)
    of = known.ranks.numpy()
    wanted = [
        token
        for token in range(known.ranked)
        if any(of[layer, token] <= k for layer in range(4 - look_back, 4))
    ]
    if by == "rank":
        wanted.sort(key=lambda token: of[-1, token])

    assert found.tokens.tolist() == wanted
    assert found.ranks.shape == (4, len(found.edges) - 1)
    assert len(found.edges) - 1 <= columns
    for column in range(len(found.edges) - 1):
        own = wanted[found.edges[column] : found.edges[column + 1]]
        for layer in range(4):
            mean = math.prod(float(of[layer, token]) for token in own) ** (1 / len(own))
            assert found.ranks[layer, column] == pytest.approx(mean)
    assert sum(np.diff(found.edges)) == len(wanted)
