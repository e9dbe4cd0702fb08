"""Segments, boundaries, quotas: loops over positions and what events decided, closed forms."""

import itertools
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kvsim
from kvsim.analysis.arrays import event_rows
from kvsim.analysis.kept.chance import mean_run, n_runs
from kvsim.schema import NEVER
from kvsim.studies.segments.segments import ams_segments, proxy_segments
from kvsim.testing.strategies import make_case
from reference.strategies import evictions

OF_SEGMENTS = ["segment_count", "segment_length", "boundary_shift"]
DECIDED = [*OF_SEGMENTS, "quota_share", "suffix_mass"]
SMALL = {"min_segment": 3, "max_segment": 8, "window": 5, "sink": 2, "recent": 4}

#: Boundaries that come or go next to all that is special: the first run, the end of the text.
EDGES = np.array(
    [
        [8, 8, NEVER, 11, 11, 11, NEVER, 8, 11, 11, 11, NEVER],
        [11, 8, 11, 8, NEVER, NEVER, NEVER, 11, NEVER, 11, 11, NEVER],
    ],
    np.int32,
)


def small_trace(n=96, prompt_len=30, layers=2, **shape):
    """A random trace whose events at an interval of 12 evict at a budget of 24."""
    return make_case("sink", layers=layers, heads=2, n=n, prompt_len=prompt_len, **shape).trace()


def segmented(trace, name="ams", budget=24, interval=12, **params):
    """A record of `ams` with everything that its events decided."""
    policy = kvsim.policy(name, **{**SMALL, **params})
    return kvsim.replay(trace, policy, budget, interval=interval, internals=True)


def shift(earlier, later, row):
    """Mean shift of two events' boundaries [position], the first one after `row`; or NaN."""
    later = [p for p in later if p <= row]
    if not earlier or not later:
        return np.nan
    return np.mean([min(abs(p - other) for other in earlier) for p in later])


def run_starts(last, row):
    """Positions at which a run of what is kept after `row` starts."""
    kept = [p for p in range(row + 1) if last[p] > row]
    return [p for p in kept if p - 1 not in kept], len(kept)


def decided_starts(plans, layer, head):
    """(first positions of segments, live entries) of a head, from the groups of the entries."""
    at = plans.layers.index(layer), head
    groups = plans.notes["segment"] if plans.groups is None else plans.groups
    first, live = {}, 0
    for pos, group in zip(plans.pos[at].tolist(), groups[at].tolist(), strict=True):
        if pos >= 0:
            first.setdefault(group, pos)
            live += 1
    return list(first.values()), live


def assert_equal(found, head, events):
    """A head's numbers are those of `events`: (row, first positions of segments, entries)."""
    rows = [row for row, *_ in events]
    count, entries = ([x[i] for x in events] for i in (1, 2))
    count = [len(starts) for starts in count]
    assert found.rows.tolist() == rows
    assert found.count[head].tolist() == count
    assert found.entries[head].tolist() == entries
    length = [t / s if s else np.nan for t, s in zip(entries, count, strict=True)]
    np.testing.assert_allclose(found.length[head], length)
    pooled = sum(entries) / sum(count) if sum(count) else np.nan
    np.testing.assert_allclose(found.pooled_length[head], pooled)
    cuts = [starts[1:] for _, starts, _ in events]
    if found.shift is not None:
        pairs = [shift(*pair) for pair in zip(cuts, cuts[1:], rows, strict=False)]
        np.testing.assert_allclose(found.shift[head], pairs)


@settings(deadline=None)
@given(evictions(most=60))
@example(EDGES)
def test_runs_equal_a_loop_over_positions(last):
    """Number and length of the runs that stay, of every head at every event."""
    found = proxy_segments(last)

    for head in range(len(last)):
        events = [(row, *run_starts(last[head], row)) for row in event_rows(last).tolist()]
        assert_equal(found, head, events)


@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, 1000),
    st.sampled_from(["ams", "ams@release"]),
    st.sampled_from(["strict", "reference"]),
    st.sampled_from(["mass", "fixed"]),
    st.sampled_from([0.02, 0.1, 0.3]),
    st.integers(1, 4),
)
def test_segments_equal_a_loop_over_the_groups_of_entries(seed, name, mode, kind, share, least):
    """Of what events decided: the same from lengths and the record as from groups and positions."""
    trace = small_trace(n=70, seed=seed)
    record = segmented(
        trace,
        name,
        budget=20,
        interval=9,
        mode=mode,
        segmentation=kind,
        segment_mass=share,
        min_segment=least,
        segment_length=7,
        suffix_fill="observed",
    )

    for layer, head in np.ndindex(2, 2):
        events = [
            (plans.row, *decided_starts(plans, layer, head))
            for plans in sorted(record.internals, key=lambda one: one.row)
        ]
        assert len(events) == 4
        assert_equal(ams_segments(record, layer), head, events)


@pytest.mark.parametrize(("total", "kept"), [(8, 1), (8, 3), (8, 7), (1, 0)])
def test_chance_is_the_mean_over_all_sets_of_the_size(total, kept):
    """Number of runs and their mean length, over every choice of what is kept."""
    choices = list(itertools.combinations(range(total), kept))
    last = np.full((len(choices), total), total - 1, np.int32)
    for one, choice in zip(last, choices, strict=True):
        one[list(choice)] = NEVER

    found = proxy_segments(last)

    for form, values in ((n_runs, found.count), (mean_run, found.length)):
        chance = found.chance(form)
        np.testing.assert_allclose(chance, np.full_like(chance, values.mean()))


@settings(deadline=None, max_examples=20)
@given(
    st.integers(0, 1000),
    st.sampled_from(["strict", "reference"]),
    st.sampled_from(["mass", "length", "equal"]),
    st.integers(0, 9),
)
def test_shares_of_the_budget_sum_to_one(seed, mode, weights, least):
    """By mass, as a minimum and by rounding; each what the notes of the events say."""
    trace = small_trace(n=70, seed=seed)
    record = segmented(trace, mode=mode, weights=weights, min_quota=least, budget=20)

    table = kvsim.measure(trace, record, ["quota_share", "suffix_mass"], events=True)

    at = ["layer", "head", "event"]
    wide = table.filter(metric="quota_share").pivot(on="variant", index=at, values="value")
    suffix = table.filter(metric="suffix_mass")
    assert set(suffix["variant"]) == {""}
    wide = wide.join(suffix.select(*at, suffix="value"), on=at)
    assert len(wide) == 2 * 2 * len(record.internals)
    for row in wide.iter_rows(named=True):
        (plans,) = (one for one in record.internals if one.row == row["event"])
        here = row["layer"], row["head"]
        assert row["mass"] + row["minimum"] + row["rounding"] == pytest.approx(1)
        assert min(row["mass"], row["minimum"], row["rounding"]) > -1e-6
        assert row["mass"] == pytest.approx(plans.notes["quota_by_mass"][here])
        assert row["minimum"] == pytest.approx(plans.notes["quota_minimum"][here])
        assert row["infeasible"] == plans.notes["infeasible"][here]
        if mode == "strict":
            assert row["rounding"] == pytest.approx(0, abs=1e-6)
        recent = plans.pos[here] > plans.row - SMALL["window"]
        if mode == "strict":
            assert row["suffix"] == pytest.approx(plans.notes["mass"][here][recent].sum())


def variants(table):
    """Variants by metric."""
    return {
        metric: set(found["variant"]) for (metric,), found in table.group_by("metric") if metric
    }


def test_without_internals_there_is_the_proxy_alone():
    """Decisions of events have no value, instead of 0; the proxies are the same."""
    trace = small_trace()
    record = segmented(trace)
    bare = replace(record, internals=())
    tova = kvsim.replay(trace, kvsim.policy("tova"), 24, interval=12, internals=True)

    full, less, other = (kvsim.measure(trace, one, DECIDED) for one in (record, bare, tova))

    proxies = {"segment_count": {"proxy_run"}}
    proxies["segment_length"] = {"proxy_run,mean", "proxy_run,pooled"}
    assert variants(less) == variants(other) == proxies
    assert set(variants(full)) == set(DECIDED)
    kept = full.filter(pl.col("variant").str.starts_with("proxy_run"))
    assert kept.equals(less)


def test_events_are_listed_on_request():
    """One row for each event of a layer, for pairs of events that of the first; their mean else."""
    trace = small_trace()
    record = segmented(trace)

    table = kvsim.measure(trace, record, DECIDED, events=True)
    short = kvsim.measure(trace, record, DECIDED)

    for name, rows in (("segment_count", record.events), ("boundary_shift", record.events[:-1])):
        for layer in range(2):
            found = table.filter(metric=name, variant="ams", layer=layer, head=0)
            assert found["event"].to_list() == rows
            own = short.filter(metric=name, variant="ams", layer=layer, head=0)
            assert own["value"].item() == pytest.approx(found["value"].mean())
    pooled = table.filter(variant="ams,pooled")
    assert pooled["event"].null_count() == len(pooled) == 4
