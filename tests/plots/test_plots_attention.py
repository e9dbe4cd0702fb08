"""Figures of attention: overlap and sparsity beside loops over keys, labels and units."""

import numpy as np
import polars as pl
import pytest

import kvsim
from kvsim.analysis.attention.sparsity import SHARES
from kvsim.analysis.attention.windows import window_overlap
from kvsim.analysis.table import COLUMNS
from kvsim.errors import PolicyError
from kvsim.plots.attention import overlap_curves, sparsity_curves
from traces import random_trace


@pytest.fixture(scope="module")
def traces():
    """Two prompts."""
    return [
        random_trace(seed=seed, name=name, n=80, prompt_len=30) for seed, name in enumerate("ab")
    ]


def lines(axis):
    """Heights of the lines by their names."""
    return {line.get_label(): line.get_ydata() for line in axis.lines}


def overlaps(traces, layers, tops):
    """(each of three windows, union, equal budget) by share, mean over prompts, layers."""
    found = [window_overlap(trace, layer, shares=tops) for trace in traces for layer in layers]
    return np.mean([[values for values, _ in x.values()] for x in found], axis=0)


def test_overlap_is_that_of_the_analysis(traces):
    """A panel per layer, the mean over prompts; chance is the share, and 1 - (1 - share)^3."""
    tops = np.arange(1, 21) / 20

    _, axis = overlap_curves(traces, layers=[0, 1]).axes

    drawn = lines(axis)
    names = ("oldest window", "second window", "third window", "union of the three", "equal budget")
    for name, expected in zip(names, overlaps(traces, [1], tops), strict=False):
        np.testing.assert_allclose(drawn[name], expected)
    np.testing.assert_allclose(drawn["chance, one set"], tops)  # of 40 keys
    np.testing.assert_allclose(drawn["chance, union"], 1 - (1 - tops) ** 3)
    assert axis.get_title() == "layer 1"


@pytest.fixture(scope="module")
def table(traces):
    """Full and compressed sparsity of two policies."""
    policies = [kvsim.policy("tova"), kvsim.policy("streaming_llm")]
    return pl.concat(
        kvsim.measure(
            trace,
            [kvsim.replay(trace, one, budget=24, interval=8) for one in policies],
            ["sparsity", "sparsity_compressed"],
        )
        for trace in traces
    )


def curve(axis, name):
    """Heights of a line by p."""
    (line,) = (one for one in axis.lines if one.get_label() == name)
    return dict(zip(line.get_xdata(), line.get_ydata(), strict=True))


def test_sparsity_over_p_is_that_of_the_table(table):
    """A row of panels for each cache, a line per layer; columns are the keys of the maximum."""
    figure = sparsity_curves(table)

    caches = {"full cache": None, "tova": "tova", "streaming_llm": "streaming_llm"}
    peaks = {"all keys": "sequence", "all keys but the sink": "behind_sink"}
    panels = [(cache, keys) for cache in caches for keys in peaks]
    assert [axis.get_title() for axis in figure.axes] == [f"{x}: {keys}" for x, keys in panels]
    for axis, (cache, keys) in zip(figure.axes, panels, strict=True):
        of_cache = table.filter(pl.col("policy").eq_missing(pl.lit(caches[cache])))
        for p in SHARES:
            cells = of_cache.filter(variant=f"p={p:g},max={peaks[keys]}")
            for layer in range(2):
                expected = cells.filter(layer=layer)["value"].mean()
                assert curve(axis, f"layer {layer}")[p] == pytest.approx(expected)
            assert curve(axis, "mean")[p] == pytest.approx(cells["value"].mean())
        assert list(curve(axis, "layer 0")) == list(SHARES)


def test_sparsity_names_axes_and_fidelity(table):
    """p, share, and what can be trusted how far; at two budgets rows name theirs."""
    more = pl.concat([table, table.with_columns(budget=pl.col("budget") + 8)])

    figure = sparsity_curves(table)
    titles = [axis.get_title() for axis in sparsity_curves(more).axes[::2]]

    assert figure.axes[-1].get_xlabel() == "p, share of the maximum"
    assert figure.axes[-1].get_xscale() == "log"
    assert figure.axes[0].get_ylabel() == "share of keys"
    assert "mean over heads and 2 prompts" in figure.get_suptitle()
    assert "(fidelity: exact, open)" in figure.get_suptitle()
    assert titles[:2] == ["full cache: all keys", "tova, budget 24: all keys"]
    assert "streaming_llm, budget 32: all keys" in titles


def test_a_table_without_sparsity_is_an_error(table):
    """It says what to measure, or which layers there are not."""
    with pytest.raises(PolicyError, match="no sparsity or sparsity_compressed"):
        sparsity_curves(pl.DataFrame(schema=COLUMNS))
    with pytest.raises(PolicyError, match="no sparsity or sparsity_compressed of these layers"):
        sparsity_curves(table, layers=[7])
