"""Pages of a paged cache: freed ones and empty slots, against loops over rows, pages and slots."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvsim
from kvsim.analysis.kept.pages import pages
from kvsim.testing.strategies import make_case
from reference.strategies import evictions


def naive(gone, prompt_len, size):
    """(freed, fragmentation) of one table, slot by slot and row by row."""
    total = gone.shape[1]
    # of each head: the position in each slot
    slots = [[p for p in range(total) if max(p, head[p]) >= prompt_len] for head in gone]
    allocated = held = full = 0
    for row in range(prompt_len, total):
        full += row // size + 1
        for page in range(total):
            places = range(page * size, page * size + size)
            own = [[head[i] for i in places if i < len(head)] for head in slots]
            written = any(p <= row for of_head in own for p in of_head)
            last = max((gone[h][p] for h, of_head in enumerate(own) for p in of_head), default=-1)
            allocated += written and last >= row
            held += sum(p <= row <= gone[h][p] for h, of_head in enumerate(own) for p in of_head)
    return 1 - allocated / full, 1 - held / (allocated * size * len(gone))


@settings(max_examples=60, deadline=None)
@given(evictions(heads=3), st.integers(1, 7), st.data())
def test_pages_are_those_of_a_loop(evicted_at, size, data):
    """Of heads together and each by itself, whatever leaves when."""
    total = evicted_at.shape[1]
    prompt_len = data.draw(st.integers(1, total))
    together = pages(evicted_at[None], prompt_len, size)
    alone = pages(evicted_at[:, None], prompt_len, size)

    if prompt_len == total:
        assert np.isnan([*together.freed, *alone.fragmentation]).all()
        return
    each = [naive(head[None], prompt_len, size) for head in evicted_at]
    assert [*together.freed, *together.fragmentation] == pytest.approx(
        naive(evicted_at, prompt_len, size)
    )
    assert list(zip(alone.freed, alone.fragmentation, strict=True)) == [
        pytest.approx(values) for values in each
    ]


def test_pages_are_metrics_by_name():
    """A table per head, per layer and for the model; whole pages leave fewer empty slots."""
    trace = make_case("sharp", layers=2, heads=2, n=120, prompt_len=60, seed=3).trace()
    shares = {}
    for name in ("paged", "norm_ratio"):
        record = kvsim.replay(trace, name, 32, interval=16)
        table = kvsim.measure(trace, record, metrics=["pages_freed", "fragmentation"])
        shares[name] = {(r["metric"], r["variant"]): r["value"] for r in table.to_dicts()}
        assert table.filter(variant="page=16,table=head").height == 2 * 2 * 2
        assert table.filter(variant="page=16,table=model").height == 2

    key = ("fragmentation", "page=16,table=layer")
    assert shares["paged"][key] < shares["norm_ratio"][key]
