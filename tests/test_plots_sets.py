"""Figures of kept sets: their data beside plain loops, their labels and units."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvsim
from kvsim.errors import PolicyError, TraceError
from kvsim.plots.sets import middle_coverage


def made(seed, name):
    """A small random trace of two layers, two KV heads of two query heads."""
    torch.manual_seed(seed)
    return kvsim.Trace.from_arrays(
        torch.randn(2, 4, 90, 8) * 2,
        torch.randn(2, 2, 90, 8),
        torch.randn(2, 2, 90, 8),
        prompt_len=30,
        rope=kvsim.Rope.default(8),
        name=name,
    )


@pytest.fixture(scope="module")
def traces():
    """Two prompts."""
    return [made(0, "a"), made(1, "b")]


@pytest.fixture(scope="module")
def records(traces):
    """Two policies, one of them per query head, at two budgets over both prompts."""
    policies = [kvsim.policy("tova"), kvsim.policy("snapkv@original", window=4)]
    return [
        kvsim.replay(trace, policy, budget=budget, interval=7)
        for trace in traces
        for policy in policies
        for budget in (12, 20)
    ]


def lines(axis):
    """Data of the lines with a name."""
    return {
        line.get_label(): (line.get_xdata(), line.get_ydata())
        for line in axis.lines
        if not line.get_label().startswith("_")
    }


def covered(record, layer, heads, bins):
    """Share kept of each bin, mean over the layer's events and heads: loops over positions."""
    rows = sorted({*record.evicted_at[layer].ravel().tolist()} - {2**31 - 1})
    shares = {b: [] for b in range(bins)}
    for head in heads:
        for row in rows:
            kept, there = [0] * bins, [0] * bins
            for pos in range(row + 1):
                b = (2 * pos + 1) * bins // (2 * (row + 1))
                there[b] += 1
                kept[b] += record.evicted_at[layer, head, pos] > row
            for b in range(bins):
                if there[b]:
                    shares[b].append(kept[b] / there[b])
    return [np.mean(shares[b]) for b in range(bins)]


def test_coverage_is_the_share_kept_by_position(traces, records):
    """A panel per budget, a line per policy, as loops over layers, heads, events, positions."""
    small, large = middle_coverage(traces, records, bins=6).axes

    assert [axis.get_title() for axis in (small, large)] == ["budget 12", "budget 20"]
    x, y = lines(small)["tova"]
    of_tova = [one for one in records if one.policy == "tova" and one.budget == 12]
    by_hand = [covered(one, layer, range(2), 6) for one in of_tova for layer in range(2)]
    np.testing.assert_allclose(x, (np.arange(6) + 0.5) / 6)
    np.testing.assert_allclose(y, np.mean(by_hand, axis=0))
    assert list(lines(large)) == ["tova", "snapkv@original"]


def test_coverage_of_one_head_of_one_layer(traces, records):
    """Of a record per query head, the query heads of the KV head."""
    found = middle_coverage(traces[:1], records[:4], layer=1, head=1, bins=6).axes[0]

    tova, snapkv = records[0], records[2]
    np.testing.assert_allclose(lines(found)["tova"][1], covered(tova, 1, [1], 6))
    np.testing.assert_allclose(lines(found)["snapkv@original"][1], covered(snapkv, 1, [2, 3], 6))
    assert "layer 1, KV head 1, one prompt" in found.figure.get_suptitle()


def test_coverage_names_chance_middle_and_fidelity(traces, records):
    """Chance is flat at K / N, the middle third is shaded, axes say what they are."""
    figure = middle_coverage(traces[:1], records[:1], bins=4)

    (axis,) = figure.axes
    (dotted,) = (line for line in axis.lines if line.get_linestyle() == ":")
    events = records[0].events
    assert list(dotted.get_ydata()) == pytest.approx([np.mean([12 / (e + 1) for e in events])] * 4)
    (span,) = axis.patches
    assert (span.get_x(), span.get_x() + span.get_width()) == pytest.approx((1 / 3, 2 / 3))
    assert "relative position" in axis.get_xlabel()
    assert axis.get_ylabel() == "share of the positions kept"
    assert "(fidelity: exact, open)" in figure.get_suptitle()


def test_figures_of_several_prompts_say_so(traces, records):
    """The number of prompts, and a band for the interval."""
    figure = middle_coverage(traces, records)

    assert "mean over 2 prompts, with 95 % interval" in figure.get_suptitle()
    assert len(figure.axes[0].collections) == 2


def test_what_cannot_be_shown_is_an_error(traces, records):
    """A record of another trace, and records in which nothing leaves."""
    with pytest.raises(TraceError, match="a record of 'b', but the traces are a"):
        middle_coverage(traces[:1], records)
    with pytest.raises(PolicyError, match="nothing left the cache"):
        middle_coverage(traces, [kvsim.replay(traces[0], kvsim.policy("tova"), budget=90)])
