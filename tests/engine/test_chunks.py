"""A prompt in chunks, each compressed before the next one attends: rows, entries, refusals."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import kvsim
from kvsim.core.policy import Schedule
from kvsim.errors import PolicyError
from kvsim.testing.strategies import make_case

CASE = make_case("normal", layers=3, heads=2, group=2, n=80, prompt_len=50, seed=3)
TRACE = CASE.trace(40)
SNAPKV = kvsim.policy("snapkv", window=4)


@pytest.mark.parametrize(
    ("compress", "prefill", "chunk", "rows"),
    [
        ("prompt", True, 15, [14, 29, 44, 49, 59, 69, 79]),
        ("context", True, 15, [14, 29, 39, 59, 69, 79]),
        ("both", True, 15, [14, 29, 39, 49, 59, 69, 79]),
        ("prompt", False, 15, [59, 69, 79]),
        ("prompt", True, None, [49, 59, 69, 79]),
        ("context", True, None, [39, 59, 69, 79]),
        ("both", True, None, [39, 49, 59, 69, 79]),
    ],
)
def test_rows_of_events(compress, prefill, chunk, rows):
    """Chunks end after every 15 rows and where the context and the prompt end."""
    schedule = Schedule(10, prefill, compress, chunk)

    assert schedule.rows(50, 80, 40) == rows
    record = kvsim.replay(
        TRACE, "knorm", 20, interval=10, prefill=prefill, compress=compress, prefill_chunk=chunk
    )
    assert record.events == [row for row in rows if row >= 20]
    assert (record.schedule, record.facts.own_schedule) == (schedule, False)


@pytest.mark.parametrize("compress", ["prompt", "context", "both"])
@pytest.mark.parametrize("chunk", [None, 1, 7, 8, 50])
@pytest.mark.parametrize(("prompt_len", "context_len"), [(1, 1), (24, 17), (50, 8), (50, 41)])
def test_the_longest_cache_before_an_event(prompt_len, context_len, chunk, compress):
    """It is what counting row by row finds, if every event cuts to the budget."""
    for interval, budget, more in product([None, 1, 9], [4, 20, 33], [0, 1, 9, 31]):
        schedule, n_pos = (
            Schedule(interval, compress=compress, prefill_chunk=chunk),
            prompt_len + more,
        )
        rows = schedule.rows(prompt_len, n_pos, context_len)
        held, longest, before = 0, 0, -1
        for row in rows:
            held, before = held + row - before, row
            longest, held = max(longest, held), min(held, budget)

        assert schedule.longest(prompt_len, budget, n_pos, context_len) == longest, schedule


def test_later_chunks_see_what_is_left():
    """At the budget after each chunk; the rows of a later chunk see that and their own chunk."""
    record = kvsim.replay(TRACE, SNAPKV, 20, prefill_chunk=15)

    for end, seen in ((30, 20), (45, 20), (50, 20)):
        assert (record.retained(end - 1).sum(-1) == seen).all()
    assert (record.kept(44).sum(-1) == 35).all()
    assert record.retained(29)[..., 26:30].all(), "the window is that of the chunk"
    once = kvsim.replay(TRACE, SNAPKV, 20)
    assert not np.array_equal(record.retained(49), once.retained(49))


def test_a_quantizer_rounds_for_the_rows_of_later_chunks():
    """They see rounded entries, as rows after a prompt do."""
    record = kvsim.replay(TRACE, "int4", 20, prefill_chunk=15)
    errors = kvsim.analysis.output.error.output_error(TRACE, [record])[0].error

    assert not errors[..., :15].any()
    assert (errors[..., 16:].mean(-1) > 0.01).all()


@pytest.mark.parametrize(
    ("name", "params"),
    [("fastkv", {"window": 4}), ("quest", {}), ("tova+quest", {}), ("kvzip", {}), ("think", {})],
)
def test_policies_without_a_rule_are_refused_in_one_line(name, params):
    """Unless there is one chunk, where it is the same as ever."""
    policy = kvsim.policy(name, **params)
    with pytest.raises(PolicyError, match="no rule for a prompt in chunks of 15 rows"):
        kvsim.replay(TRACE, policy, 20, prefill_chunk=15)
    records = [kvsim.replay(TRACE, policy, 20, prefill_chunk=x) for x in (None, 50)]
    assert np.array_equal(*(record.evicted_at for record in records))


def test_kept_sets_are_open_loop_once_a_later_chunk_decides():
    """A second event reads queries of rows that did not see the first one, but in layer 0."""
    levels = []
    for budget, chunk in ((20, 15), (20, None), (40, 45)):
        record = kvsim.replay(TRACE, SNAPKV, budget, prefill_chunk=chunk)
        table = kvsim.measure(TRACE, record, ["wipeout"])
        levels.append([*dict.fromkeys(table.sort("layer")["fidelity"])])

    assert levels == [["exact", "open"], ["exact"], ["exact", "open"]]
