"""The figure of segments: masses, cuts, quotas and kept entries, and what it refuses."""

import numpy as np
import pytest

import kvsim
from kvsim.errors import PolicyError, TraceError
from kvsim.studies.segments.figures import mass_curve
from kvsim.studies.segments.segments import segmented
from traces import changed, random_trace


@pytest.fixture(scope="module")
def trace():
    """Two layers, two KV heads of two query heads."""
    return random_trace(n=120, prompt_len=60, name="small")


def replayed(trace, **parameters):
    """`ams` over `tova`, small enough for the trace, with what it decided."""
    small = {"min_segment": 4, "max_segment": 16, "window": 8, "sink": 2, "recent": 4}
    policy = kvsim.policy("ams+tova", **{**small, **parameters})
    return kvsim.replay(trace, policy, budget=24, interval=20, internals=True)


@pytest.mark.parametrize("mode", ["strict", "reference"])
def test_masses_cuts_and_quotas_are_those_of_the_event(trace, mode):
    """Two columns, the first and the last event, with the numbers of `segmented`."""
    record = replayed(trace, mode=mode)

    figure = mass_curve(trace, record, layer=1, head=1)

    events = segmented(record, 1, 1)
    assert len(events) > 2
    for column, event in enumerate((events[0], events[-1])):
        upper, lower = figure.axes[column], figure.axes[2 + column]
        first = event.starts.tolist()
        *cuts, curve, ticks = upper.lines
        np.testing.assert_array_equal(curve.get_xdata(), event.pos)
        np.testing.assert_allclose(curve.get_ydata(), event.mass.cumsum())
        assert [line.get_xdata()[0] for line in cuts] == first[1:]
        np.testing.assert_array_equal(ticks.get_xdata(), event.pos[event.kept])
        entries, quotas = lower.containers
        assert [bar.get_x() for bar in quotas] == first
        assert [bar.get_height() for bar in entries] == event.counts().tolist()
        assert [bar.get_height() for bar in quotas] == event.quota.tolist()
        assert upper.get_title() == f"event after row {event.row}: {len(first)} segments"


def test_what_cannot_be_shown_is_an_error(trace):
    """Another policy, no internals, an event that is none, another trace."""
    record = replayed(trace)
    plain = kvsim.replay(trace, kvsim.policy("tova"), budget=24, interval=20, internals=True)
    other = changed(trace, **{name: trace.read(name)[:, :, :80] for name in "qkv"})

    with pytest.raises(PolicyError, match="the record of tova has no segments of layer 0"):
        mass_curve(trace, plain)
    with pytest.raises(PolicyError, match="row 7 acts on layer 0, head 0; events are after"):
        mass_curve(trace, record, events=[7])
    with pytest.raises(TraceError, match="replayed from"):
        mass_curve(other, record)
