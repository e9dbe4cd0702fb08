"""Regions of slots that an event wipes out: plain loops, chance over every choice, closed forms."""

import itertools

import numpy as np
import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kvsim
from kvsim.analysis.kept.retention import Leaving, event_rows, wipeout
from kvsim.analysis.kept.slots import LeavingSlots
from kvsim.schema import NEVER
from kvsim.testing.strategies import make_case
from reference.strategies import evictions

TIED = np.array([[5, 3, 3, NEVER, 5, 5, NEVER, 7], [7, 3, 5, 5, 4, NEVER, 7, 7]], np.int32)


@settings(deadline=None)
@given(
    evictions(most=60),
    st.integers(1, 9),
    st.sampled_from([0.0, 0.1, 0.34, 0.5]),
    st.integers(0, 5),
    st.integers(0, 9),
)
@example(TIED, 2, 0.5, 0, 0)
def test_slots_equal_a_loop_over_the_live_entries(last, length, threshold, sink, recent):
    """Regions of the entries that are live before an event, and those of which too little stays."""
    leaving = LeavingSlots.of(Leaving.of(last))
    found = leaving.wipeout(length, threshold, sink, recent)

    assert found.rows.tolist() == event_rows(last).tolist()
    slots = set()
    for head, (j, row) in itertools.product(range(len(last)), enumerate(found.rows.tolist())):
        live = [p for p in range(row + 1) if last[head, p] >= row]
        slots |= {(head, j, slot) for slot, p in enumerate(live) if last[head, p] == row}
        regions = wiped = 0
        for first in range(0, len(live) - length + 1, length):
            if first < sink or first + length > len(live) - recent:
                continue
            regions += 1
            kept = sum(last[head, p] > row for p in live[first : first + length])
            wiped += kept <= threshold * length + 1e-9
        assert leaving.leaving.live[head, j] == len(live)
        assert (found.regions[head, j], found.wiped[head, j]) == (regions, wiped)
        expected = wiped / regions if regions else np.nan
        np.testing.assert_equal(found.hazard[head, j], expected)
    assert set(zip(leaving.head, leaving.event, leaving.slot, strict=True)) == slots


@pytest.mark.parametrize(("length", "threshold"), [(2, 0.0), (3, 0.34), (4, 0.5)])
def test_chance_is_the_mean_over_all_sets_of_the_size(length, threshold):
    """At a second event, where slots and positions differ, over every choice of what it keeps."""
    before = [0, 2, 3, 5, 6, 7, 8, 9, 10]  # 1 and 4 left earlier
    choices = list(itertools.combinations(before, 5))
    last = np.full((len(choices), 11), 10, np.int32)
    last[:, [1, 4]] = 5
    for one, choice in zip(last, choices, strict=True):
        one[list(choice)] = NEVER

    found = LeavingSlots.of(Leaving.of(last)).wipeout(length, threshold, sink=1, recent=1)

    assert found.regions[0].tolist()[-1] > 0
    np.testing.assert_allclose(found.hazard_chance[:, 1], found.hazard[:, 1].mean())


@pytest.mark.parametrize("fill", ["head_max", "observed"])
def test_ams_wipes_out_no_region_that_holds_a_segment(fill):
    """Regions of 2 max_segment - 1 slots: one segment of each lies inside, and keeps an entry."""
    trace = make_case("sink", layers=2, heads=2, n=400, prompt_len=60).trace()
    policy = kvsim.policy(
        "ams", min_segment=4, max_segment=8, window=8, sink=2, recent=4, suffix_fill=fill
    )
    record = kvsim.replay(trace, policy, 48, interval=40, internals=True)
    assert not any(plans.notes["infeasible"].any() for plans in record.internals)

    lost = dict.fromkeys((15, 16, 5), 0)
    for evicted_at in record.evicted_at:
        leaving = LeavingSlots.of(Leaving.of(evicted_at))
        for length in lost:
            found = leaving.wipeout(length, 0.0, sink=0, recent=0)
            assert found.regions.min() > 0
            lost[length] += found.wiped.sum()
        assert (wipeout(evicted_at, 15).wiped > 0).any()

    assert lost[15] == lost[16] == 0
    assert lost[5] > 0


def test_the_table_has_slots_as_a_space_of_the_hazard():
    """Every length and threshold, a row for each event on request; none in the cumulative rate."""
    trace = make_case("sink", layers=2, heads=2, n=200, prompt_len=100).trace()
    record = kvsim.replay(trace, kvsim.policy("tova"), 64, interval=25)

    table = kvsim.measure(trace, record, ["wipeout", "wipeout_hazard"], events=True)

    slots = table.filter(pl.col("variant").str.starts_with("space=slots"))
    assert set(slots["metric"]) == {"wipeout_hazard"}
    assert slots["variant"].n_unique() == 8
    at = slots.filter(variant="space=slots,length=16,threshold=0.1", layer=1, head=0)
    found = LeavingSlots.of(Leaving.of(record.evicted_at[1])).wipeout(16, 0.1)
    assert at["event"].to_list() == found.rows.tolist() == record.events
    np.testing.assert_allclose(at["value"].to_numpy(), found.hazard[0])
    np.testing.assert_allclose(at["chance"].to_numpy(), found.hazard_chance[0])
    # no region of 128 fits between sinks and recent entries of a cache of 89
    wide = slots.filter(variant="space=slots,length=128,threshold=0", event=record.events[-1])
    assert wide["value"].null_count() == len(wide) == 4


def test_without_an_event_there_is_nothing_to_wipe_out():
    """Shapes stay those of no events."""
    found = LeavingSlots.of(Leaving.of(np.full((2, 9), NEVER, np.int32))).wipeout(4, 0.0)

    assert found.hazard.shape == found.hazard_chance.shape == (2, 0)
