"""The course of one head: equal to the Table of the metrics, and gaps equal to plain loops."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvsim
from kvsim.analysis.kept.states import head_course, kept_positions, longest_gaps
from traces import random_trace


@pytest.mark.parametrize(
    ("policy", "interval"), [("tova", 7), ("streaming_llm", None), ("snapkv@original", None)]
)
def test_numbers_are_those_of_the_table(policy, interval):
    """Every event, every number: `measure` with events says the same."""
    trace = random_trace(n=110)
    record = kvsim.replay(trace, kvsim.policy(policy), 34, interval=interval, layers=[1])
    table = kvsim.measure(
        trace, record, ["wipeout", "burst_length", "middle_coverage"], events=True
    )
    axis = "qhead" if record.per_query_head else "head"
    for head in range(record.evicted_at.shape[1]):
        course = head_course(record, 1, head)
        assert course["event"].to_list() == record.events
        for name, metric, variant in (
            ("wipeout", "wipeout", "length=32,threshold=0"),
            ("longest", "burst_length", "longest"),
            ("middle", "middle_coverage", ""),
        ):
            told = table.filter(
                pl.col("metric") == metric, pl.col("variant") == variant, pl.col(axis) == head
            ).sort("event")
            assert course[name].cast(float).to_list() == told["value"].to_list()
        for row in course.to_dicts():
            kept = np.flatnonzero(record.retained(row["event"])[0, head]).tolist()
            assert kept_positions(record, 1, head, row["event"]).tolist() == kept
            assert row["kept"] == len(kept)
            assert row["share"] == pytest.approx(len(kept) / (row["event"] + 1))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 99), budget=st.integers(1, 60), interval=st.integers(1, 30))
def test_the_longest_gap_is_the_first_of_the_longest_runs(seed, budget, interval):
    """By a loop over positions; as long as the metric says."""
    record = kvsim.replay(
        random_trace(n=110, seed=seed), kvsim.policy("random"), budget, interval=interval
    )
    course = head_course(record, 0, 1)
    gaps = longest_gaps(record, 0, 1, course["event"].to_numpy())
    for row, (start, stop) in zip(course["event"], gaps.tolist(), strict=True):
        best, run = (0, 0), 0
        for position in range(row + 1):
            run = run + 1 if record.evicted_at[0, 1, position] <= row else 0
            if run > best[1] - best[0]:
                best = position + 1 - run, position + 1
        assert (start, stop) == best
    assert (gaps[:, 1] - gaps[:, 0]).tolist() == course["longest"].to_list()
