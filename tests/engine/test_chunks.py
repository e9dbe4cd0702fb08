"""A prompt in chunks, each compressed before the next one attends: rows, entries, refusals."""

from __future__ import annotations

import json
from itertools import product

import numpy as np
import pytest

import kvsim
from kvsim.core.policy import Schedule
from kvsim.core.record import record_document, record_of
from kvsim.engine.replay import settings_of
from kvsim.errors import KvsimError, PolicyError
from kvsim.sweeps.driver import replay_all
from kvsim.testing.strategies import make_case

CASE = make_case("normal", layers=3, heads=2, group=2, n=80, prompt_len=50, seed=3)
TRACE = CASE.trace(40)
SNAPKV = kvsim.policy("snapkv", window=4)


@pytest.mark.parametrize(
    ("compress", "prefill", "rows"),
    [
        ("prompt", True, [14, 29, 44, 49, 59, 69, 79]),
        ("context", True, [14, 29, 39, 59, 69, 79]),
        ("both", True, [14, 29, 39, 49, 59, 69, 79]),
        ("prompt", False, [59, 69, 79]),
    ],
)
def test_rows_of_events(compress, prefill, rows):
    """Chunks end after every 15 rows and where the context and the prompt end."""
    schedule = Schedule(10, prefill, compress, prefill_chunk=15)

    assert schedule.rows(50, 80, 40) == rows
    record = kvsim.replay(
        TRACE, "knorm", 20, interval=10, prefill=prefill, compress=compress, prefill_chunk=15
    )
    assert record.events == [row for row in rows if row >= 20]
    assert (record.schedule, record.own_schedule) == (schedule, False)


def test_a_question_longer_than_a_chunk_is_chunked_from_its_own_start():
    """With events after both, chunks of the question begin where the context ends."""
    schedule = Schedule(None, compress="both", prefill_chunk=4)

    assert schedule.rows(50, 80, 41) == [*range(3, 40, 4), 40, 44, 48, 49]


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


@pytest.mark.parametrize(
    ("compress", "chunk", "longest"),
    [("prompt", 15, 35), ("context", 15, 40), ("both", 15, 30), ("context", None, 40)],
)
def test_events_know_the_longest_cache_of_their_trace(compress, chunk, longest):
    """Chunks restart where the context ends, and a question stays until rows follow it."""
    schedule = Schedule(10, compress=compress, prefill_chunk=chunk)

    last, earlier = settings_of(TRACE, SNAPKV, 20, schedule)

    assert last.longest(80) == longest
    assert [each.longest(15) for each in earlier[:1]] == [15][: len(earlier)]


def test_later_chunks_see_what_is_left():
    """At the budget after each chunk; the rows of a later chunk see that and their own chunk."""
    record = kvsim.replay(TRACE, SNAPKV, 20, prefill_chunk=15)

    for end, seen in ((30, 20), (45, 20), (50, 20)):
        assert (record.retained(end - 1).sum(-1) == seen).all()
    assert (record.kept(44).sum(-1) == 35).all()
    assert record.retained(29)[..., 26:30].all(), "the window is that of the chunk"
    once = kvsim.replay(TRACE, SNAPKV, 20)
    assert not np.array_equal(record.retained(49), once.retained(49))


def test_a_codec_rounds_for_the_rows_of_later_chunks():
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


@pytest.mark.parametrize("chunk", [0, -3, 1.5, "8"])
def test_a_chunk_that_is_no_number_of_rows_is_refused(chunk):
    """In one line that says what was expected."""
    with pytest.raises(KvsimError, match=r"prefill_chunk is .*; expected"):
        kvsim.replay(TRACE, SNAPKV, 20, prefill_chunk=chunk)


def test_kept_sets_are_open_loop_once_a_later_chunk_decides():
    """A second event reads queries of rows that did not see the first one, but in layer 0."""
    levels = []
    for budget, chunk in ((20, 15), (20, None), (40, 45)):
        record = kvsim.replay(TRACE, SNAPKV, budget, prefill_chunk=chunk)
        table = kvsim.measure(TRACE, record, ["wipeout"])
        levels.append([*dict.fromkeys(table.sort("layer")["fidelity"])])

    assert levels == [["exact", "open"], ["exact"], ["exact", "open"]]


def test_records_and_results_tell_it_apart():
    """Stored records have it, older ones have one event; results have it as a parameter."""
    run = replay_all([TRACE], [SNAPKV, kvsim.policy("knorm")], [20], prefill_chunk=15)

    assert not run.failures
    document = record_document(run.records[0])
    assert record_of(document, run.records[0].evicted_at).prefill_chunk == 15
    del document["prefill_chunk"]
    assert record_of(document, run.records[0].evicted_at).prefill_chunk is None
    (params,) = {json.loads(x)["prefill_chunk"] for x in run.table["params"].drop_nulls()}
    assert params == run.parameters["schedules"][0]["prefill_chunk"] == 15
    assert any("every 15 rows of the prompt, the prompt, every 32 rows" in x for x in run.remarks)


def test_oracle_and_optimum_beside_chunks_have_their_events():
    """Regret is measured against kept sets that are cut after each chunk too."""
    run = replay_all([TRACE], [SNAPKV], [20], prefill_chunk=15, regret=True)

    assert not run.failures
    values = run.table.filter(metric="regret")["value"].drop_nulls()
    assert len(values)
    assert (values >= -1e-6).all()
