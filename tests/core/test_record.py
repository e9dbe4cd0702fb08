"""Records: what rows see."""

import json

import numpy as np
import pytest

from kvsim.core.policy import Schedule
from kvsim.core.reading import Reads
from kvsim.core.record import Record, Response, record_document, record_of
from kvsim.core.storing import Spec
from kvsim.errors import PositionError, TraceError
from kvsim.schema import NEVER


def make_record(evicted_at, **given):
    """A Record of one layer and head."""
    fields = {"policy": "tova", "params": {}, "budget": 2, "schedule": Schedule(1)}
    array = np.asarray(evicted_at, dtype=np.int32).reshape(1, 1, -1)
    return Record(array, prompt_len=2, layers=(0,), layer_ids=(0,), **{**fields, **given})


def test_a_row_sees_a_position_from_its_own_row_to_its_last():
    """Row r sees p iff p <= r <= evicted_at[p]; retained is what the next row finds."""
    record = make_record([2, NEVER, 3, NEVER])

    assert record.events == [2, 3]
    assert record.kept(2)[0, 0].tolist() == [True, True, True, False]
    assert record.retained(2)[0, 0].tolist() == [False, True, True, False]
    assert record.kept(3)[0, 0].tolist() == [False, True, True, True]
    assert record.retained(3)[0, 0].tolist() == [False, True, False, True]


@pytest.mark.parametrize("row", [-1, 4, 1.5, "x", None, [1]])
def test_a_row_outside_the_trace_is_refused(row):
    """The message names the rows that there are."""
    record = make_record([NEVER] * 4)

    for ask in (record.kept, record.retained):
        with pytest.raises(PositionError, match=r"expected 0\.\.3"):
            ask(row)


RESPONSE = Response((1, 2, 3), "a b c", None, (1, 2), "a b", full_right=True)


def test_a_response_is_stored_with_its_record():
    """All of it comes back; a record without one has none, as those of earlier versions."""
    record = make_record([NEVER, 3], response=RESPONSE)
    document = json.loads(json.dumps(record_document(record)))

    assert record_of(document, record.evicted_at).response == RESPONSE
    del document["response"]
    assert record_of(document, record.evicted_at).response is None
    assert "response" not in record_document(make_record([NEVER]))


@pytest.mark.parametrize(
    "other",
    [{"tokens": "12"}, {"tokens": [True]}, {"text": 1}, {"right": "yes"}, {"full_tokens": [1.5]}],
)
def test_a_response_of_other_types_is_refused(other):
    """Run folders are untrusted input, and their values are printed."""
    document = record_document(make_record([NEVER], response=RESPONSE))
    document["response"] |= other

    with pytest.raises(TraceError, match=f"response: {next(iter(other))} is"):
        record_of(document, make_record([NEVER]).evicted_at)


def test_responses_part_at_the_first_token_that_differs():
    """A response that ends earlier, or goes on, parts at the end of the shorter one."""

    def same(tokens, full):
        return Response(tokens, None, None, full, None, None).same_tokens

    assert same((1, 2, 3), (1, 5, 3)) == 1
    assert same((1, 2), (1, 2, 3)) == same((1, 2, 3), (1, 2)) == 2
    assert same((), (1,)) == 0


#: An account of two query heads of one KV head: two rows after two of the prompt, pages of two.
READS = Reads(np.full((1, 2, 2, 1), 128, np.uint8), 2, "query", 2, Spec("quest", {}))


def test_an_account_of_reads_is_stored_with_its_record():
    """Bits and sizes come back; a record without it has none."""
    record = make_record([NEVER] * 4, reads=READS)
    document = json.loads(json.dumps(record_document(record)))
    read = record_of(document, record.evicted_at, READS.bits).reads

    assert (read.page, read.heads, read.first) == (2, "query", 2)
    assert np.array_equal(read.bits, READS.bits)
    assert record_of(document, record.evicted_at).reads is None


@pytest.mark.parametrize(
    "shape", [(2, 2, 2, 1), (1, 0, 2, 1), (1, 2, 1, 1), (1, 2, 3, 1), (1, 2, 2, 2)]
)
def test_an_account_of_another_record_is_refused(shape):
    """Layers, heads, rows and pages are those of evicted_at; the message has both shapes."""
    record = make_record([NEVER] * 4, reads=READS)

    with pytest.raises(ValueError, match=r"next to evicted_at \(1, 1, 4\)"):
        record_of(record_document(record), record.evicted_at, np.zeros(shape, np.uint8))
