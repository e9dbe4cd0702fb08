"""Figures of attention: overlap and sparsity beside loops over keys, labels and units."""

import math

import numpy as np
import polars as pl
import pytest

import kvsim
from kvsim.analysis.attention.sparsity import SHARES
from kvsim.analysis.table import COLUMNS
from kvsim.errors import PolicyError, TraceError
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


def top(values, count):
    """The places of the largest values, the lower place first among equals."""
    return {*sorted(range(len(values)), key=lambda place: (-values[place], place))[:count]}


def overlaps(trace, layer, window, share):
    """(each of three windows, union, equal budget), mean over heads: loops over keys."""
    keys = trace.n_pos - 4 * window
    attention = trace.attention(layer, slice(0, trace.n_pos)).double().numpy()
    found = []
    for head in range(trace.n_heads):
        group = range(head * trace.group, (head + 1) * trace.group)
        scores = []
        for block in range(4):
            rows = range(keys + block * window, keys + (block + 1) * window)
            scores.append(
                [
                    np.mean([max(attention[g, r, p] for g in group) for r in rows])
                    for p in range(keys)
                ]
            )
        count = math.ceil(share * keys - 1e-9)

        last, *earlier = (top(one, count) for one in (scores[3], *scores[:3]))
        best = [max(one[p] / max(one) for one in scores[:3]) for p in range(keys)]
        sets = [*earlier, set.union(*earlier), top(best, count)]
        found.append([len(last & one) / count for one in sets])
    return np.mean(found, axis=0)


def test_overlap_is_that_of_loops(traces):
    """A panel per layer, the mean over prompts; chance is the share, and 1 - (1 - share)^3."""
    tops = (0.1, 0.25, 1.0)

    _, axis = overlap_curves(traces, layers=[0, 1], window=8, tops=tops).axes

    drawn = lines(axis)
    by_hand = np.mean([[overlaps(t, 1, 8, s) for s in tops] for t in traces], axis=0)
    names = ("oldest window", "second window", "third window", "union of the three", "equal budget")
    for place, name in enumerate(names):
        np.testing.assert_allclose(drawn[name], by_hand[:, place])
    one = np.array([5 / 48, 12 / 48, 1])  # 48 keys, whole sets
    np.testing.assert_allclose(drawn["chance, one set"], one)
    np.testing.assert_allclose(drawn["chance, union"], 1 - (1 - one) ** 3)
    assert axis.get_title() == "layer 1"


def test_overlap_over_all_layers_says_what_it_is(traces):
    """One panel, the mean over the layers; axes and caption."""
    figure = overlap_curves(traces, window=8, tops=(0.25,))

    (axis,) = figure.axes
    by_hand = [overlaps(t, layer, 8, 0.25) for t in traces for layer in range(2)]
    assert lines(axis)["union of the three"] == pytest.approx([np.mean(by_hand, axis=0)[3]])
    assert axis.get_title() == "all layers"
    assert axis.get_xlabel() == "share of keys that count as top"
    assert "windows of 8 rows" in figure.get_suptitle()
    assert "2 prompts (fidelity: exact)" in figure.get_suptitle()


def test_a_trace_too_short_for_four_windows_is_an_error(traces):
    """It says which."""
    with pytest.raises(TraceError, match="a has 80 rows: four windows of 20"):
        overlap_curves(traces, window=20)


def sparse(trace, layer, p, first):
    """Share of the keys before the last 16 rows below p x maximum, from `first` on; loops."""
    attention = trace.attention(layer, slice(0, trace.n_pos)).double().numpy()
    start, shares = trace.n_pos - 16, []
    for head in range(trace.n_heads):
        group = range(head * trace.group, (head + 1) * trace.group)
        rows = range(start, trace.n_pos)
        scores = [
            np.mean([max(attention[g, r, key] for g in group) for r in rows])
            for key in range(first, start)
        ]
        shares.append(sum(one < p * max(scores) for one in scores) / len(scores))
    return np.mean(shares)


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


def test_sparsity_over_p_is_that_of_loops(traces, table):
    """A row of panels for each cache, a line per layer; columns are the keys of the maximum."""
    figure = sparsity_curves(table)

    titles = [axis.get_title() for axis in figure.axes]
    assert titles == [
        f"{cache}: {keys}"
        for cache in ("full cache", "tova", "streaming_llm")
        for keys in ("all keys", "all keys but the sink")
    ]
    for axis, first in zip(figure.axes[:2], (0, 4), strict=True):
        for layer in range(2):
            for p, height in curve(axis, f"layer {layer}").items():
                by_hand = np.mean([sparse(trace, layer, p, first) for trace in traces])
                assert height == pytest.approx(by_hand)
        assert list(curve(axis, "layer 0")) == list(SHARES)
    cells = table.filter(
        policy="tova", metric="sparsity_compressed", variant="p=0.05,max=behind_sink"
    )
    for layer in range(2):
        expected = cells.filter(layer=layer)["value"].mean()
        assert curve(figure.axes[3], f"layer {layer}")[0.05] == pytest.approx(expected)
    assert curve(figure.axes[3], "mean")[0.05] == pytest.approx(cells["value"].mean())


def test_sparsity_of_one_layer_has_no_mean_line(table):
    """The layer that was requested alone."""
    axis = sparsity_curves(table, layers=[1]).axes[0]

    assert [line.get_label() for line in axis.lines] == ["layer 1"]


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


def test_many_layers_have_a_colour_bar(table):
    """Where a legend would have more entries than fit."""
    deep = pl.concat([table.with_columns(layer=pl.col("layer") + 2 * i) for i in range(6)])

    figure = sparsity_curves(deep)

    assert figure.legends == []
    assert figure.axes[-1].get_ylabel() == "layer (dashed: mean)"
    assert figure.axes[-1].get_ylim() == (0, 11)


def test_a_table_without_sparsity_is_an_error(table):
    """It says what to measure, or which layers there are not."""
    with pytest.raises(PolicyError, match="measure sparsity and sparsity_compressed"):
        sparsity_curves(pl.DataFrame(schema=COLUMNS))
    with pytest.raises(PolicyError, match="no sparsity in layers 7"):
        sparsity_curves(table, layers=[7])
