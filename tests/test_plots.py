"""Figures: their content, not their pixels."""

import numpy as np
import pytest
import torch

import kvsim
from kvsim import plots


@pytest.fixture(scope="module")
def trace():
    """A small random trace."""
    torch.manual_seed(0)
    return kvsim.Trace.from_arrays(
        torch.randn(2, 4, 60, 8) * 2,
        torch.randn(2, 2, 60, 8),
        torch.randn(2, 2, 60, 8),
        prompt_len=20,
        rope=kvsim.Rope.default(8),
        name="small",
    )


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
    """0 future, 1 seen, 2 evicted, 3 evicted and needed, as the Record and full attention say."""
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
    assert (~seen[cells == 2]).all()
    missed = ~seen & ~future & (attention >= plots.NEEDED)
    assert missed.any()
    assert (cells[missed] == 3).all()


def test_the_legend_of_the_retention_map_names_its_colours(trace, records):
    """Seen, evicted, and evicted although needed."""
    figure = plots.retention_map(trace, records)

    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[:2] == ["seen", "evicted"]
    assert "5%" in labels[2]


def test_the_error_figure_has_a_line_per_policy_and_its_fidelity(trace, records):
    """Means over layers and heads, from the prompt on."""
    figure = plots.error_over_rows(trace, records, smooth=1)

    lines = figure.axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["tova", "snapkv@original"]
    (expected,) = kvsim.metrics.output_error(trace, records[:1])
    np.testing.assert_allclose(lines[0].get_ydata(), expected.error.mean((0, 1))[20:], rtol=1e-5)
    assert "exact, open" in figure.get_suptitle()


def test_long_traces_are_pooled_and_misses_survive(monkeypatch):
    """A block of cells shows the worst of them."""
    monkeypatch.setattr(plots.records, "_PIXELS", 10)
    needed = np.zeros((40, 40), dtype=bool)
    needed[39, 0] = True

    cells = plots.records._cells(np.full(40, 20), needed)

    assert cells.shape == (10, 10)
    assert cells[9, 0] == 3


def test_equal_figures_are_equal_files(trace, records, tmp_path):
    """No date or version makes two runs differ."""
    paths = [plots.save(plots.error_over_rows(trace, records), tmp_path / f"{i}.png") for i in "ab"]

    assert paths[0].read_bytes() == paths[1].read_bytes()
