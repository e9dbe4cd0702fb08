"""Strips of what is held after an event: states, runs and brackets beside loops and the metric."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from matplotlib.colors import to_hex

import kvsim
from kvsim.plots.events import STATES, bursts, strip
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

    codes, found = strip(np.array(gone, np.int32), row)

    states, runs = by_hand(gone, row)
    assert [STATES[code] for code in codes] == states
    assert found.tolist() == runs


def test_every_position_has_the_colour_of_its_state(trace, records):
    """After the earliest of the last events, and `full` has none; the legend names the colours."""
    row = min(max(record.events) for record in records)
    full = kvsim.replay(trace, kvsim.policy("full"), 30)

    figure = bursts(trace, [*records, full], layer=1, head=0)

    (axis,) = figure.axes
    patches = figure.legends[0].legend_handles[:3]
    colours = dict(zip([to_hex(p.get_facecolor()) for p in patches], range(3), strict=True))
    assert f"after row {row};" in figure.get_suptitle()
    for image, record in zip(axis.images, [*records, full], strict=True):
        (pixels,) = image.get_array()
        codes, _ = strip(record.gone_after[1][0], row)
        assert [colours[to_hex(pixel)] for pixel in pixels] == codes.tolist()
        assert image.get_extent()[:2] == [-0.5, row + 0.5]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        *STATES,
        "a burst: 32 or more evicted in a row",
    ]
