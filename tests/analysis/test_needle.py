"""What rows after the prompt see of the needle, against loops over rows and entries."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvsim
from kvsim.analysis.kept.coverage import needle_visibility
from kvsim.schema import NEVER
from traces import random_trace

NAMES = ["needle_recall", "needle_wipeout"]


@given(
    data=st.data(),
    prompt_len=st.integers(1, 12),
    response=st.integers(1, 8),
    heads=st.integers(1, 3),
)
def test_visibility_equals_a_loop_over_rows(data, prompt_len, response, heads):
    """Row r sees entry p where p <= r <= evicted_at[p]; shares of each row, then their mean."""
    total = prompt_len + response
    rows = [*range(prompt_len - 1, total), NEVER]
    at = [[data.draw(st.sampled_from(rows)) for _ in range(total)] for _ in range(heads)]
    evicted_at = np.maximum(np.array(at), np.arange(total)).astype(np.int32)
    pairs = st.tuples(st.integers(0, prompt_len - 1), st.integers(1, prompt_len))
    spans = data.draw(st.lists(pairs.filter(lambda s: s[0] < s[1]), min_size=1, max_size=3))
    entries = sorted({p for start, end in spans for p in range(start, end)})

    found = needle_visibility(evicted_at, prompt_len, spans)

    for head in range(heads):
        recall, chance, wipeout = [], [], []
        for row in range(prompt_len, total):
            seen = [p for p in range(total) if p <= row <= evicted_at[head, p]]
            recall.append(sum(p in seen for p in entries) / len(entries))
            chance.append(sum(p < prompt_len for p in seen) / prompt_len)
            gone = [all(p not in seen for p in range(start, end)) for start, end in spans]
            wipeout.append(sum(gone) / len(spans))
        expected = [np.mean(recall), np.mean(chance), np.mean(wipeout)]
        assert [values[head] for values in found] == pytest.approx(expected)


def trace(spans=None):
    """A random trace of 60 tokens, 40 of them the prompt."""
    meta = {} if spans is None else {"spans": {"needle": spans}}
    return random_trace(n=60, prompt_len=40, meta=meta)


def test_a_window_sees_the_needles_that_lie_in_it():
    """With 4 sinks and 8 recent entries one needle is kept whole, one half, one not."""
    spans = [[1, 3], [20, 24], [30, 34]]
    source = trace(spans)
    policy = kvsim.policy("streaming_llm")
    record = kvsim.replay(source, policy, budget=12, interval=1000, prefill=True)

    table = kvsim.measure(source, record, NAMES)

    assert table.height == 2 * source.n_layers * source.n_heads
    recall, wipeout = (table.filter(metric=name) for name in NAMES)
    assert recall["value"].to_list() == pytest.approx([0.4] * recall.height)
    assert recall["chance"].to_list() == pytest.approx([12 / 40] * recall.height)
    assert wipeout["value"].to_list() == pytest.approx([1 / 3] * wipeout.height)
