"""Figures of kept sets: their data, which the analysis computes, their labels and units."""

import numpy as np
import polars as pl
import pytest

import kvsim
from kvsim.analysis.arrays import mean_known
from kvsim.analysis.kept.coverage import kept_coverage, retained_positions
from kvsim.plots.summary import iou_by, middle_coverage, position_density
from traces import random_trace


@pytest.fixture(scope="module")
def traces():
    """Two prompts."""
    return [random_trace(seed=seed, name=name) for seed, name in enumerate("ab")]


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


def covered(record, layer, heads):
    """Share kept of each bin, mean over the layer's events and heads."""
    return mean_known(kept_coverage(record.evicted_at[layer])[1][heads]).mean(0)


def test_coverage_is_the_share_kept_by_position(traces, records):
    """A panel per budget, a line per policy, the mean over layers and prompts."""
    small, large = middle_coverage(traces, records).axes

    assert [axis.get_title() for axis in (small, large)] == ["budget 12", "budget 20"]
    x, y = lines(small)["tova"]
    of_tova = [one for one in records if one.policy == "tova" and one.budget == 12]
    by_hand = [covered(one, layer, [0, 1]) for one in of_tova for layer in range(2)]
    np.testing.assert_allclose(x, (np.arange(20) + 0.5) / 20)
    np.testing.assert_allclose(y, np.mean(by_hand, axis=0))
    assert list(lines(large)) == ["tova", "snapkv@original"]


@pytest.fixture(scope="module")
def table(traces, records):
    """IoU of the records; the traces are of two domains."""
    parts = [
        kvsim.measure(trace, records[4 * i : 4 * i + 4], ["retained_iou"])
        for i, trace in enumerate(traces)
    ]
    domain = pl.col("trace").replace_strict({"a": "algebra", "b": "geometry"})
    return pl.concat(parts).with_columns(domain=domain)


def overlaps(table, **place):
    """IoU of consecutive kept sets, mean over layers and heads, then over prompts."""
    chosen = table.filter(variant="", **place)
    return chosen.group_by("trace").agg(pl.col("value").mean())["value"].mean()


def test_bars_by_label_stand_beside_chance(table):
    """One prompt per domain has no interval; the line across a bar is the chance of the table."""
    figure = iou_by(table, "domain")

    axis = figure.axes[1]
    assert axis.get_title() == "budget 20"
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["algebra", "geometry"]
    heights = [bar.get_height() for bar in axis.containers[0]]
    own = [overlaps(table, policy="tova", budget=20, trace=trace) for trace in "ab"]
    assert heights == pytest.approx(own)
    across = [part[0][1] for part in axis.collections[1].get_segments()]
    rows = table.filter(policy="tova", budget=20, variant="").group_by("domain").agg("chance")
    expected = {domain: np.mean(chance) for domain, chance in rows.rows()}
    assert across == pytest.approx([expected["algebra"], expected["geometry"]])


def test_density_is_a_histogram_of_area_one(traces, records):
    """Relative positions of what the last event keeps, prompts on equal terms."""
    figure = position_density(traces, records)

    small = figure.axes[0]
    _, heights = lines(small)["tova"]
    densities, means = [], []
    for record in (one for one in records if (one.policy, one.budget) == ("tova", 12)):
        found = np.concatenate([retained_positions(gone)[1] for gone in record.evicted_at])
        counts = [sum(b <= 20 * x < b + 1 for x in found) for b in range(20)]
        densities.append(np.array(counts) * 20 / len(found))
        means.append(np.mean(found))
    np.testing.assert_allclose(heights[:20], np.mean(densities, axis=0))
    assert sum(heights[:20]) / 20 == pytest.approx(1)
    upright = [line.get_xdata()[0] for line in small.lines if len({*line.get_xdata()}) == 1]
    assert upright[0] == 0.5
    assert upright[1] == pytest.approx(np.mean(means))
    assert small.get_ylabel() == "density of kept entries (area 1)"
    assert "fidelity" in figure.get_suptitle()
