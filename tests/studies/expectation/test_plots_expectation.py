"""Figures of Expected Attention: their data beside the definitions, their labels and units."""

import numpy as np
import polars as pl
import pytest
from scipy.stats import spearmanr

import kvsim
from kvsim.analysis.output.reconstruction import reconstruction_table
from kvsim.plots import expected_observed, reconstruction_error
from kvsim.studies.expectation.expectation import STEPS, expected_and_observed
from tests.plots.test_plots_sets import lines
from traces import random_trace


def made(seed, name, size=1.0):
    """A small random trace of two layers, two KV heads of two query heads."""
    return random_trace(seed=seed, name=name, size=size, n=60, layer_ids=[8, 20])


def test_a_panel_has_the_attention_of_each_key():
    """Rows are layers and columns steps; each says both of its correlations."""
    figure, found = (x(made(0, "a"), cut=24) for x in (expected_observed, expected_and_observed))
    panels, bar = figure.axes[:-1], figure.axes[-1]
    heads = [ranks.argsort()[(len(ranks) - 1) // 2] for ranks in found.spearman[-1]]

    assert len(panels) == 8
    for place, panel in enumerate(panels):
        layer, step = divmod(place, 4)
        head = heads[layer]
        observed = np.exp(found.observed[layer, head])
        (points,) = panel.collections
        x, y = points.get_offsets().data.T
        assert x == pytest.approx(observed)
        assert y == pytest.approx(np.exp(found.expected[step, layer, head]))
        assert list(points.get_array()) == list(range(4, 24))
        *name, said = panel.get_title().split("\n")
        rank, logs = spearmanr(x, y).statistic, np.corrcoef(np.log(x), np.log(y))[0, 1]
        assert said == f"Spearman {rank:.2f}, log-Pearson {logs:.2f}"
        assert name == ([STEPS[step].replace("_", " ")] if layer == 0 else [])
        assert (panel.get_xscale(), panel.get_yscale()) == ("log", "log")
        across, up = panel.lines[0].get_data()
        assert up / across == pytest.approx(1 / observed.sum())
    assert [text.get_text() for text in panels[4].texts] == [f"layer 20, head {heads[1]}"]
    assert figure.get_supylabel() == "expected (share of the keys)"
    assert figure.get_supxlabel() == "observed attention (share)"
    assert bar.get_ylabel() == "position of the key"
    assert figure.get_suptitle() == (
        "a: 20 keys before position 24, mean over 36 later rows\n"
        "dotted: equal shares (fidelity: exact)"
    )


@pytest.fixture(scope="module")
def errors():
    """Two traces, three policies of two names, three shares."""
    policies = [
        kvsim.policy("knorm"),
        kvsim.policy("expected_attention"),
        kvsim.policy("expected_attention", n_future=8),
    ]
    traces = [made(seed, name) for seed, name in enumerate("ab")]
    return pl.concat([reconstruction_table(one, policies, (0.0, 0.3, 0.6)) for one in traces])


def test_errors_are_means_over_layers_and_by_layer(errors):
    """A line and a map per policy, with what tells policies of one name apart."""
    figure = reconstruction_error(errors)
    axis, *maps, bar = figure.axes
    names = ["knorm", "expected_attention", "expected_attention (n_future=8)"]
    params = errors["params"].unique(maintain_order=True)
    drawn = lines(axis)

    assert list(drawn) == names
    for name, one, panel in zip(names, params, maps, strict=True):
        rows = [row for row in errors.iter_rows(named=True) if row["params"] == one]
        cells = np.zeros((2, 3))
        for row in rows:
            cells[row["layer"], [0.0, 0.3, 0.6].index(row["ratio"])] += (
                row["relative_head_error"] / 2
            )
        assert drawn[name][0] == pytest.approx([0, 0.3, 0.6])
        assert drawn[name][1] == pytest.approx(cells.mean(0))
        image = panel.images[0].get_array()
        assert image.data[:, 1:] == pytest.approx(cells[:, 1:])
        assert image.mask[:, 0].all()
        assert panel.get_title() == name
        assert [tick.get_text() for tick in panel.get_xticklabels()] == ["0", "0.3", "0.6"]
    assert axis.get_xlabel() == "share of the entries evicted"
    assert axis.get_ylabel() == "error of the layer's output (relative to the full output)"
    assert bar.get_ylabel() == "error (relative to the full output)"
    assert figure.get_suptitle() == (
        "2 traces: output of all heads where a policy evicts once, then 12 rows "
        "(fidelity: exact, open)"
    )
