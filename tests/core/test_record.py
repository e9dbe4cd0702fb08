"""Records: what rows see."""

import numpy as np
import pytest

from kvsim.core.record import Record
from kvsim.errors import PositionError
from kvsim.schema import NEVER


def make_record(evicted_at, **given):
    """A Record of one layer and head."""
    fields = {"policy": "tova", "params": {}, "budget": 2, "interval": 1, "prefill": True}
    array = np.asarray(evicted_at, dtype=np.int32).reshape(1, 1, -1)
    return Record(array, prompt_len=2, layers=(0,), **{**fields, **given})


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
