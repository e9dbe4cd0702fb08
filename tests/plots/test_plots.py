"""Figures: their content, not their pixels."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import kvsim
from kvsim import plots
from kvsim.policies.asl import ASL
from kvsim.studies.layers import figures
from kvsim.studies.layers.ranking import ranking
from traces import random_trace


@pytest.fixture(scope="module")
def trace():
    """A small random trace."""
    return random_trace(n=60, name="small")


@pytest.fixture(scope="module")
def records(trace):
    """Two policies at two budgets, one of them per query head."""
    policies = [kvsim.policy("tova"), kvsim.policy("snapkv@original", window=4)]
    return [
        kvsim.replay(trace, policy, budget=budget, interval=5)
        for policy in policies
        for budget in (8, 16)
    ]


def test_the_retention_map_shows_what_each_row_sees(trace, records):
    """0 future, 1 seen, 3 evicted, 4 evicted and needed, as the Record and full attention say."""
    figure = plots.retention_map(trace, records, layer=1, head=1)

    drawn = [axis for axis in figure.axes if axis.images]
    assert len(drawn) == 4
    assert [axis.get_title() for axis in drawn[:2]] == ["tova", "snapkv@original"]
    cells = np.asarray(drawn[0].images[0].get_array())
    record = records[0]
    future = np.triu(np.ones((60, 60), dtype=bool), 1)
    assert ((cells == 0) == future).all()
    seen = np.stack([record.kept(row)[1, 1] for row in range(60)])
    attention = trace.attention(1, slice(0, 60))[2:4].amax(0).numpy()
    assert (seen[cells == 1]).all()
    assert (~seen[cells == 3]).all()
    assert not (cells == 2).any()
    missed = ~seen & ~future & (attention >= plots.NEEDED)
    assert missed.any()
    assert (cells[missed] == 4).all()


def test_variants_of_a_policy_are_apart(trace):
    """In panels and lines of figures of records; a line over prompts counts each once."""
    policies = [kvsim.policy("snapkv", window=window) for window in (4, 8)]
    of_both = [kvsim.replay(trace, policy, 16, interval=5) for policy in policies]
    names = ["snapkv (window=4)", "snapkv (window=8)"]

    figure = plots.retention_map(trace, of_both, layer=1, head=1)
    assert [axis.get_title() for axis in figure.axes] == names
    strips = plots.bursts(trace, of_both, layer=1, head=1).axes[0]
    assert [label.get_text() for label in strips.get_yticklabels()] == names
    for figure in (plots.position_density(trace, of_both), plots.middle_coverage(trace, of_both)):
        assert {*names} <= {*figure.axes[0].get_legend_handles_labels()[1]}
        assert "mean over one prompt" in figure.get_suptitle().replace("\n", " ")


def test_the_retention_map_shows_what_is_held_and_not_read(trace):
    """2 where no query head of the group reads a held entry; the legend names it."""
    policy = kvsim.policy("snapkv+quest", window=4, page=2, share=0.5, dense_layers=0)
    record = kvsim.replay(trace, policy, 16, interval=8)

    figure = plots.retention_map(trace, record, layer=1, head=1)

    cells = np.asarray(figure.axes[0].images[0].get_array())
    rows, gone = slice(record.prompt_len, 60), torch.from_numpy(record.evicted_at[1])
    read = record.reads.entries(1, rows, gone).unflatten(0, (2, 2)).any(1)[1].numpy()
    held = np.stack([record.kept(row)[1, 1] for row in range(60)])
    assert (cells[: record.prompt_len] != 2).all()
    unread = held[rows] & ~read
    assert unread.any()
    assert (cells[rows] == 2)[unread & (cells[rows] < 4)].all()
    assert (cells[rows] == 1)[read & (cells[rows] < 4)].all()
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[:3] == ["seen", "held, not read", "evicted"]


def deep(seed=0, layers=12, n=90, name="deep"):
    """A trace whose layers look at the same tokens from the middle on."""
    torch.manual_seed(seed)
    share = (torch.arange(layers) / (layers * 0.6)).clamp(max=1)[:, None, None, None]
    q, k = (
        share * torch.randn(h, n, 8) + (1 - share) * torch.randn(layers, h, n, 8) for h in (4, 2)
    )
    return kvsim.Trace.from_arrays(
        3 * q,
        k,
        torch.randn(layers, 2, n, 8),
        prompt_len=n - 4,
        rope=kvsim.Rope.default(8),
        name=name,
        token_text=["$" if i == 5 else f"t{i}\n" for i in range(n)],
    )


@pytest.fixture(scope="module")
def layered():
    """A trace and its curves at two budgets."""
    trace = deep()
    ranked = ranking(trace, ASL(window=16))
    return trace, [ranked.curve(b) for b in (32, 50)]


def drawn_text(figure):
    """Every text of a figure."""
    return [text.get_text() for text in figure.findobj(lambda one: hasattr(one, "get_text"))]


def test_variance_curves_show_threshold_and_selection(layered):
    """A line from the first tested layer to the last, tau, and a circle at the selection layer."""
    _, found = layered

    figure = figures.variance_curves(found)

    (axis,) = figure.axes
    for one in found:
        assert one.selected() is not None
        (line,) = (x for x in axis.get_lines() if f"budget {one.budget}" in str(x.get_label()))
        first = one.first_layer
        np.testing.assert_array_equal(line.get_xdata(), range(first, 12))
        np.testing.assert_array_equal(line.get_ydata(), one.relative[first:])
        marks = [(x.get_xdata()[0], x.get_ydata()[0]) for x in axis.get_lines() if x.get_ms() == 9]
        assert (one.selected(), one.relative[one.selected()]) in marks
    assert any(list(line.get_ydata()) == [0.3, 0.3] for line in axis.get_lines())
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        f"deep, budget {one.budget}: selects after layer {one.selected()}" for one in found
    ]
    assert figure.get_suptitle() == (
        "deep: do ranks settle? circle: selection layer\n"
        "window 16, first tested layer 4, look-back 5 (fidelity: exact)"
    )


def test_the_grid_names_its_layers(layered):
    """A cell per first layer and look-back, with the layer or `never`, hatched where cut short."""
    ranked = layered[1][0].ranking
    rules = [replace(ranked.rule, first_layer=a, look_back=b) for a in (1, 4, 10) for b in (2, 4)]
    layers = [ranked.curve(32, rule).selected() for rule in rules]

    figure = figures.selection_grid(ranked, 32, (1, 4, 10), (2, 4))

    (axis,) = figure.axes
    cells = [text.get_text() for text in axis.texts]
    assert cells == ["never" if at is None else str(at) for at in layers]
    assert "never" in cells
    assert sum(patch.get_hatch() is not None for patch in axis.patches) == 1  # (1, 4) alone
    image = axis.images[0].get_array()
    assert np.ma.getmaskarray(image).ravel().tolist() == [at is None for at in layers]
    assert "tau 0.3 (fidelity: exact)" in figure.get_suptitle()


def test_the_rank_pattern_is_in_the_order_of_the_last_layer(layered):
    """Tokens of the last layers' union, the best of the last layer first."""
    _, found = layered
    one = found[0]

    figure = figures.rank_pattern(one)

    axis, bar = figure.axes
    image = np.asarray(axis.images[0].get_array())
    back, ranked = one.look_back, one.ranking.ranks.numpy()
    union = np.flatnonzero((ranked[-back:] <= one.k).any(0))
    assert image.shape == (12, len(union))
    assert (np.diff(image[-1]) > 0).all()
    np.testing.assert_allclose(sorted(image[-1]), sorted(ranked[-1, union]))
    assert bar.get_ylabel() == "rank, of 70"
    assert "fidelity: exact" in figure.get_suptitle()


def test_the_histogram_counts_traces(layered):
    """Bars at the selection layers, `never` behind the last layer, the mean as a line."""
    _, found = layered
    other = replace(found[0].ranking, trace="other", task="deep")
    never = [replace(x, ranking=other, rule=replace(x.rule, tau=0.0)) for x in found]

    figure = figures.selection_histogram([*found, *never])

    (axis,) = figure.axes
    bars = sorted(
        (round(bar.get_x() + bar.get_width() / 2), bar.get_height()) for bar in axis.patches
    )
    assert bars == sorted([(one.selected(), 1) for one in found] + [(12, 1), (12, 1)])
    assert [t.get_text() for t in axis.get_xticklabels()][-1] == "never"
    assert axis.get_title() == "deep, 2 traces"
    means = [line.get_xdata()[0] for line in axis.get_lines()]
    assert means == [one.selected() for one in found]


@pytest.mark.parametrize("layers", [1, 3])
def test_shallow_models_have_every_figure(layers):
    """One layer, or three: nothing to select, and no figure fails or warns."""
    trace = deep(layers=layers)
    ranked = ranking(trace, ASL(window=16))
    found = [ranked.curve(b) for b in (17, 32, 100)]

    for figure in (
        figures.variance_curves(found),
        figures.layer_attention(trace, 16),
        figures.selection_histogram(found),
        *(figures.rank_pattern(one) for one in found),
        *(figures.selection_grid(ranked, b) for b in (17, 32, 100)),
    ):
        figure.draw_without_rendering()
        assert "exact" in " ".join(drawn_text(figure))
