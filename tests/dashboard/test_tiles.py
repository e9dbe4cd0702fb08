"""Pooled pictures: equal to plain loops, bounded whatever the length, and true to the metrics."""

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvsim
from apps.dashboard.tiles import STATES, reading_tile, retention_tile
from kvsim.analysis.kept.retention import wipeouts
from traces import changed, random_trace


@functools.cache
def made(n=70, layers=2, prompt_len=20, *, lse=False):
    """A trace of random numbers."""
    trace = random_trace(n=n, layers=layers, prompt_len=prompt_len, seed=n)
    return changed(trace, lse=trace.full()[1]) if lse else trace


@given(
    budget=st.integers(8, 40),
    interval=st.integers(1, 24),
    side=st.sampled_from([9, 40, 400]),
    policy=st.sampled_from(["random", "tova", "streaming_llm"]),
)
def test_retention_says_what_the_record_says(budget, interval, side, policy):
    """Codes of each event by the kept set, and the share of wiped regions of the metric."""
    trace, region = made(140), 8
    record = kvsim.replay(trace, kvsim.policy(policy), budget, interval=interval)
    rows, variants = wipeouts(record.gone_after[1], [region], [0.0])
    ((rates, _),) = variants.values()

    tile = retention_tile(record, 1, 1, region, side)
    whole = retention_tile(record, 1, 1, region, side=400)

    assert max(tile.values.shape) <= side
    assert whole.rows.tolist() == rows.tolist()
    for row, codes, share in zip(whole.rows, whole.values, rates[1], strict=True):
        held = record.retained(row)[1, 1]
        assert np.array_equal(codes == STATES.index("not yet there"), np.arange(140) > row)
        assert np.array_equal(codes == STATES.index("kept"), held)
        wiped = codes == STATES.index("in a region of which nothing is left")
        regions = max(0, (row + 1 - 32) // region - 1)
        if regions:
            assert wiped.sum() / region / regions == pytest.approx(share)
    assert set(tile.rows) <= set(whole.rows)
    assert not len(whole.rows) or tile.rows[-1] == whole.rows[-1]
    # a cell that holds a retained entry says so
    for row, codes in zip(tile.rows, tile.values, strict=True):
        held = np.logical_or.reduceat(record.retained(row)[1, 1], tile.positions[:-1])
        assert np.array_equal(codes == STATES.index("kept"), held)


@pytest.mark.parametrize("heads", ["query", "kv"])
def test_the_map_of_reads_says_what_the_account_says(heads):
    """Codes are those of a plain loop over rows, pages and query heads, between events too."""
    trace = made(140)
    policy = kvsim.policy(
        "tova+quest", page=3, share=0.5, dense_layers=0, scorer__heads=heads, heads="group"
    )
    record = kvsim.replay(trace, policy, 24, interval=16)
    account = record.reads
    expected = np.zeros((120, 140), int)
    for row in range(20, 140):
        held = np.flatnonzero(record.kept(row)[1, 1])
        bits = np.unpackbits(account.bits[1, :, row - account.first], axis=-1)
        read = bits[2:4].any(0) if heads == "query" else bits[1]
        expected[row - 20, : row + 1] = 1
        expected[row - 20, held] = [2 + read[slot // 3] for slot in range(len(held))]

    whole = reading_tile(record, 1, 1, side=400)
    tile = reading_tile(record, 1, 1, side=50)

    assert np.array_equal(whole.values, expected)
    assert {2, 3} <= {*expected[-1]}
    assert whole.rows.tolist() == [*range(20, 141)]
    assert tile.values.shape == (40, 47)
    assert tile.values[7, 3] == expected[21:24, 9:12].max()
