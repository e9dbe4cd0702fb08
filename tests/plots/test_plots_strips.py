"""Strips of what is held after an event: states, runs and brackets beside loops and the metric."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from matplotlib.colors import to_hex

import kvsim
from kvsim.plots.events import STATES, bursts, strip, strips_after
from kvsim.schema import NEVER
from traces import random_trace

HOSTILE = ["<b>", "$x$", "\n", "\x1b[31m", "\u202e", "\ud800", "漢", "y" * 50]


@pytest.fixture(scope="module")
def trace():
    """Two layers, two KV heads of two query heads, with texts that are not to be trusted."""
    text = [HOSTILE[i % len(HOSTILE)] for i in range(115)]
    return random_trace(n=115, prompt_len=40, name="a $ name", token_text=text)


@pytest.fixture(scope="module")
def records(trace):
    """Two policies at one schedule, one of them per query head."""
    policies = [kvsim.policy("streaming_llm"), kvsim.policy("snapkv@original", window=4)]
    return [kvsim.replay(trace, policy, budget=30, interval=20) for policy in policies]


def by_hand(gone, row):
    """(states, runs) of the positions up to a row: loops over them."""
    events = [g for g in gone if g <= row]
    states, runs, start = [], [], None
    for p in range(row + 1):
        evicted = gone[p] <= row
        states.append(STATES[(2 if gone[p] == max(events) else 1) if evicted else 0])
        if evicted and start is None:
            start = p
        if start is not None and not evicted:
            runs.append([start, p - 1])
            start = None
    return states, runs if start is None else [*runs, [start, row]]


@example([3, 3, NEVER, 5, 5, 5], 5)
@example([NEVER] * 4, 2)
@given(
    st.lists(st.sampled_from([9, 14, 19, 24, 29, NEVER]), min_size=1, max_size=30),
    st.integers(0, 29),
)
def test_states_and_runs_equal_loops(gone, row):
    """Of any eviction times, after any row."""
    row = min(row, len(gone) - 1)
    gone = [max(at, p) for p, at in enumerate(gone)]

    found = strip("x", np.array(gone[: row + 1], np.int32), row)

    states, runs = by_hand(gone, row)
    assert [STATES[code] for code in found.codes] == states
    assert found.runs.tolist() == runs
    assert found.lengths.tolist() == [last - first + 1 for first, last in runs]


def test_the_row_is_one_after_which_all_have_evicted(trace):
    """Of the records' last events the earliest; `full`, which has none, does not count."""
    policies = [("tova", 7), ("streaming_llm", 20), ("full", 20)]
    records = [kvsim.replay(trace, kvsim.policy(n), 30, interval=i) for n, i in policies]

    row, found = strips_after(trace, records)

    assert row == min(max(one.events) for one in records[:2])
    assert [one.name for one in found] == ["tova", "streaming_llm", "full"]
    assert (found[2].codes == 0).all()


def test_every_position_has_the_colour_of_its_state(trace, records):
    """All of them above, the part below; the legend names the colours."""
    figure = bursts(trace, records, layer=1, head=0)

    whole, part = figure.axes
    row, found = strips_after(trace, records, layer=1, head=0)
    patches = figure.legends[0].legend_handles[:3]
    colours = dict(zip([to_hex(p.get_facecolor()) for p in patches], range(3), strict=True))
    first, last = (round(end + 0.5) for end in part.get_xlim())
    for axis, start, stop in ((whole, 0, row), (part, first, last - 1)):
        assert len(axis.images) == 2
        for image, one in zip(axis.images, found, strict=True):
            (pixels,) = image.get_array()
            drawn = [colours[to_hex(pixel)] for pixel in pixels]
            assert drawn == one.codes[start : stop + 1].tolist()
            assert image.get_extent()[:2] == [start - 0.5, stop + 0.5]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        *STATES,
        "a burst: 32 or more evicted in a row",
    ]
