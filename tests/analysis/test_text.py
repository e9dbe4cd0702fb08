"""Repetition, loops, and which token strings a policy keeps, against loops."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvsim
from kvsim.analysis.kept.text import (
    is_punctuation,
    punctuation_lift,
    repetition,
    retention_lift,
)
from kvsim.schema import NEVER
from traces import random_trace

TOKENS = st.lists(st.integers(0, 3), max_size=40)


@given(tokens=TOKENS, n=st.integers(1, 5))
def test_repetition_counts_distinct_n_grams(tokens, n):
    """1 - distinct / all; NaN, not 0, where there is none."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    expected = 1 - len(set(grams)) / len(grams) if grams else np.nan

    assert repetition(np.array(tokens, np.int64), n) == pytest.approx(expected, nan_ok=True)


def made(text=None, tokens=None, n=60, prompt=20, layers=1, heads=2):
    """A random trace with a text."""
    text = {"token_text": text, "tokens": tokens}
    return random_trace(layers=layers, heads=heads, group=1, n=n, dim=4, prompt_len=prompt, **text)


@given(
    text=st.lists(
        st.sampled_from(["the", " the", ".", "\x1b[31m", "<b>"]), min_size=30, max_size=30
    ),
    sink=st.integers(0, 3),
    recent=st.integers(0, 3),
)
def test_lift_equals_loops_over_positions_and_heads(text, sink, recent):
    """Counts, rates and lift of every string, which stays as it was recorded."""
    trace = made(text, n=30, prompt=10)
    record = kvsim.replay(trace, kvsim.policy("random"), budget=8, interval=5)
    last = record.evicted_at[0]

    found = retention_lift(trace, record, 0, sink=sink, recent=recent)

    at = max(x for x in last.ravel().tolist() if x != NEVER)
    rows = {}
    for p in range(sink, at + 1 - recent):
        for h in (0, 1):
            count, kept = rows.get(text[p], (0, 0))
            rows[text[p]] = count + 1, kept + bool(last[h, p] > at)
    entries, kept = (sum(x[i] for x in rows.values()) for i in (0, 1))
    assert set(found["token"]) == set(rows)
    for one in found.iter_rows(named=True):
        count, retained = rows[one["token"]]
        assert one["count"] == count // 2
        assert one["rate"] == pytest.approx(retained / count)
        assert one["mean"] == pytest.approx(kept / entries)
        if kept:
            assert one["lift"] == pytest.approx(retained / count / (kept / entries))
        else:
            assert one["lift"] is None
        assert one["low"] - 1e-12 <= one["rate"] <= one["high"] + 1e-12
    lifts = found["lift"].drop_nulls().to_list()
    assert lifts == sorted(lifts, reverse=True)


def test_heads_do_not_narrow_the_interval():
    """Heads that all keep the same say no more than one of them: Wilson's interval of 8 of 10."""
    trace = made(["a"] * 10, n=10, prompt=10, heads=4)
    gone = np.full((1, 4, 10), NEVER, np.int32)
    gone[..., [2, 5]] = 9
    record = kvsim.replay(trace, kvsim.policy("full"), budget=1)
    record = kvsim.Record(**{**vars(record), "evicted_at": gone})

    (one,) = retention_lift(trace, record, 0).to_dicts()

    assert (one["count"], one["rate"]) == (10, 0.8)
    # 0.8 of 10: Brown, Cai, DasGupta 2001, Statist. Sci. 16:101, the Wilson interval
    assert (one["low"], one["high"]) == pytest.approx((0.4902, 0.9433), abs=1e-4)


def test_punctuation_is_known_by_its_characters():
    """Marks alone, with or without spaces; no words, numbers, symbols or nothing."""
    text = [".", " ,", "...", "。", '"', "a.", "1", "+", " ", ""]

    assert is_punctuation(text).tolist() == [True] * 5 + [False] * 5


@given(seed=st.integers(0, 2**20), sink=st.integers(0, 5), recent=st.integers(0, 30))
def test_the_lift_of_punctuation_equals_loops(seed, sink, recent):
    """Share kept of the marks over share kept of all, positions at both ends left out."""
    rng = np.random.default_rng(seed)
    rows = np.array([12, 20, 28, NEVER])
    first = np.searchsorted(rows, np.arange(30))
    gone = rows[rng.integers(first, 4, size=(2, 30))].astype(np.int32)
    marks = rng.random(30) < 0.3

    found = punctuation_lift(gone, marks, sink=sink, recent=recent)

    known = [int(x) for x in gone.ravel() if x != NEVER]
    for head in range(2):
        last = max(known, default=0)
        every = [gone[head, p] > last for p in range(sink, last + 1 - recent)]
        own = [gone[head, p] > last for p in range(sink, last + 1 - recent) if marks[p]]
        expected = np.nan
        if known and own and any(every):
            expected = np.mean(own) / np.mean(every)
        assert found[head] == pytest.approx(expected, nan_ok=True)


def test_text_metrics_belong_to_no_layer():
    """One value per n, without layer, head and policy, and null where the response is too short."""
    trace = made(tokens=np.arange(60) % 3, prompt=54)
    records = [kvsim.replay(trace, kvsim.policy("tova"), budget=b) for b in (8, 16)]

    table = kvsim.measure(trace, records, ["repetition", "entries_seen"])

    own = table.filter(pl.col("policy").is_null())
    assert own.select("metric", "variant", "value").rows() == [
        ("repetition", "n=2", pytest.approx(1 - 3 / 5)),
        ("repetition", "n=3", pytest.approx(1 - 3 / 4)),
        ("repetition", "n=4", pytest.approx(0.0)),
        ("repetition", "n=8", None),
    ]
    assert own["layer"].is_null().all()
    assert set(own["fidelity"]) == {"exact"}
    bare = made(prompt=54)
    assert kvsim.measure(bare, records[0], ["repetition"]).is_empty()
