"""What the events of AMS decided, by entry and by segment, beside loops over the Plans."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvsim
from apps.dashboard import cuts
from kvsim.errors import PolicyError
from kvsim.studies.segments.segments import segmented
from traces import random_trace

EPSILON = 1e-12


def replayed(seed=0, budget=24, interval=20, **parameters):
    """A record of `ams` over random numbers, small enough for 120 positions."""
    trace = random_trace(n=120, prompt_len=60, seed=seed)
    small = {"min_segment": 4, "max_segment": 16, "window": 8, "sink": 2, "recent": 4}
    policy = kvsim.policy("ams+tova", **{**small, **parameters})
    return kvsim.replay(trace, policy, budget=budget, interval=interval, internals=True)


def normalised(values):
    """Each share of the sum, with the release's epsilon."""
    total = sum(value + EPSILON for value in values)
    return [(value + EPSILON) / total for value in values]


@pytest.mark.parametrize("mode", ["strict", "reference"])
@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 99),
    decay=st.floats(0, 1),
    mix=st.floats(0, 1),
    sink=st.integers(0, 3),
    recent=st.integers(0, 6),
)
def test_credit_follows_from_the_masses_that_were_observed(mode, seed, decay, mix, sink, recent):
    """Position by position: lambda c + (1 - lambda) m, 0 for new entries; and what is protected."""
    record = replayed(seed, mode=mode, credit_decay=decay, credit_mix=mix, sink=sink, recent=recent)
    remembered: dict[int, float] = {}
    for one in segmented(record, 1, 1):
        at = dict(zip(one.pos.tolist(), range(len(one.pos)), strict=True))
        assert one.observed.sum() == pytest.approx(1)
        credit = {
            p: decay * remembered.get(p, 0.0) + (1 - decay) * one.observed[i] for p, i in at.items()
        }
        np.testing.assert_allclose(one.credit, list(credit.values()), atol=1e-12)
        share = normalised(list(credit.values()))
        mass = normalised(
            [mix * m + (1 - mix) * c for m, c in zip(one.observed, share, strict=True)]
        )
        np.testing.assert_allclose(one.mass, mass, atol=1e-12)
        protected = [p for p in at if p < sink or p > one.row - recent]
        assert one.pos[one.protected].tolist() == protected
        remembered = {p: credit[p] for p, i in at.items() if one.kept[i]}


@pytest.mark.parametrize("mode", ["strict", "reference"])
def test_numbers_of_segments_are_those_of_their_entries(mode):
    """Counts, masses and spans by loops over entries; segments and quotas are the policy's."""
    record = replayed(mode=mode)
    found = segmented(record, 1, 0)
    assert [one.row for one in found] == record.events
    for one in found:
        (plans,) = (plans for plans in record.internals if plans.row == one.row)
        at, given = (plans.layers.index(1), 0), (plans.groups, plans.quotas)
        if mode == "reference":
            given = plans.notes["segment"], plans.notes["quota"]
        assert one.segment.tolist() == given[0][at][plans.pos[at] >= 0].tolist()
        assert one.quota.tolist() == given[1][at][: len(one.quota)].tolist()
        table = cuts.table(one).to_dicts()
        assert len(table) == len(one.quota) == one.segment.max() + 1
        for number, row in enumerate(table):
            inside = [i for i, segment in enumerate(one.segment) if segment == number]
            behind = inside[-1] + 1
            end = one.pos[behind] if behind < len(one.pos) else one.row + 1
            places = [one.row, number, one.starts[number], end - 1]
            assert [row[name] for name in ("event", "segment", "first", "last")] == places
            assert row["first"] == one.pos[inside[0]]
            assert row["entries"] == len(inside) == one.counts()[number]
            assert row["quota"] == one.quota[number]
            for name in ("kept", "protected"):
                assert row[name] == sum(bool(getattr(one, name)[i]) for i in inside)
            for name in ("observed", "credit", "mass"):
                total = sum(getattr(one, name)[i] for i in inside)
                assert row[name] == pytest.approx(total, abs=1e-12)
        suffix = one.mass[one.pos > one.row - 8].sum()
        assert one.suffix == pytest.approx(suffix, abs=1e-9)
        kept = np.flatnonzero(record.retained(one.row)[1, 0])
        assert one.pos[one.kept].tolist() == kept.tolist()
        if mode == "strict":
            assert one.counts(one.kept).tolist() == one.quota.tolist()


def test_a_record_without_segments_is_refused():
    """Another policy, and no internals: the message says what to do."""
    record = replayed()
    assert len(segmented(record, 0, 0)) == len(record.events)
    bare = kvsim.Record(
        **{name: getattr(record, name) for name in ("evicted_at", "params", "budget", "schedule")},
        policy="tova",
        prompt_len=60,
        layers=(0, 1),
        layer_ids=(0, 1),
    )
    with pytest.raises(PolicyError, match="record of tova has no segments"):
        segmented(bare, 0, 0)
