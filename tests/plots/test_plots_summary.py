"""Figures of a whole Table: what they show, not their pixels."""

import numpy as np
import polars as pl
import pytest

from kvsim.analysis.registry import METRICS
from kvsim.analysis.table import COLUMNS
from kvsim.errors import PolicyError
from kvsim.plots.summary import over_budgets, pareto, ranking
from tests.facts import facts


@pytest.fixture(scope="module")
def table():
    """Two policies, two budgets, seven prompts, three metrics."""
    rows = []
    for trace in range(7):
        for policy, less in (("tova", 0.0), ("ams", 0.1)):
            for budget in (32, 64):
                values = {
                    "output_error": 16 / budget - less + 0.01 * trace,
                    "wipeout": 0.5 - less,
                    "entries_seen": float(budget),
                }
                for name, value in values.items():
                    row = dict.fromkeys(COLUMNS)
                    row |= {"trace": str(trace), "policy": policy, "budget": budget}
                    row |= {"metric": name, "variant": METRICS[name].main, "layer": 0}
                    row |= {"params": "{}", "value": value, "unit": METRICS[name].unit}
                    rows.append(row | facts(policy) | {"fidelity": "open"})
    return pl.DataFrame(rows, schema=COLUMNS)


def test_lines_are_means_over_prompts(table):
    """A panel per metric with its unit, a line per policy, the interval as a band."""
    figure = over_budgets(table)
    error, wiped = figure.axes
    lines = {line.get_label(): line.get_ydata() for line in error.lines}

    assert lines["tova"] == pytest.approx([0.53, 0.28])
    assert lines["ams"] == pytest.approx([0.43, 0.18])
    assert error.get_ylabel() == "output error (relative, lower is better)"
    assert wiped.get_ylabel() == "wipeout (share, lower is better)"
    assert [tick.get_text() for tick in error.get_xticklabels()] == ["32", "64"]
    assert error.get_xlabel() == "budget per KV head (entries)"
    assert len(error.collections) == 2
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["tova", "ams"]
    assert figure.get_suptitle() == "Mean over 7 prompts, with 95 % interval (fidelity: open)"


def test_entries_and_shares_are_in_the_order_of_entries(table):
    """A share of 48 entries lies between 32 and 64, and no line folds back."""
    share = table.filter(budget=32).with_columns(
        budget=pl.lit(48, pl.Int64), share=pl.lit("25%"), value=pl.col("value") / 1.5
    )
    error = over_budgets(pl.concat([share, table])).axes[0]

    assert [tick.get_text() for tick in error.get_xticklabels()] == ["32", "25%", "64"]
    for line in error.lines:
        assert line.get_xdata().tolist() == [0, 1, 2]
        assert (np.diff(line.get_ydata()) < 0).all()


def test_bytes_are_axes_of_the_front(table):
    """A panel for each metric and each cost that is named, in bytes on a logarithmic axis."""
    sizes = table.filter(metric="entries_seen")
    costs = [
        sizes.with_columns(metric=pl.lit(name), value=pl.col("value") * factor)
        for name, factor in (("bytes_held", 1000.0), ("bytes_read", 500.0))
    ]
    figure = pareto(pl.concat([table, *costs]), ["output_error", "bytes_held", "bytes_read"])
    figure.draw_without_rendering()
    held, read = figure.axes

    assert held.get_xlabel() == "bytes of the cache, mean over rows"
    assert read.get_xlabel() == "bytes of the cache that a row reads, mean"
    assert held.get_xscale() == read.get_xscale() == "log"
    lines = {line.get_label(): line.get_xdata() for line in read.lines}
    assert lines["tova"] == pytest.approx([16_000, 32_000])


def test_the_front_is_marked(table):
    """At equal size only the better policy is on the front."""
    axis = pareto(table).axes[0]
    filled = [line for line in axis.lines if line.get_markersize() == 7]

    assert [list(line.get_xdata()) for line in filled] == [[], [32.0, 64.0]]
    assert axis.get_xlabel() == "entries that a row sees, mean"


def test_the_ranking_shows_order_and_verdicts(table):
    """A panel per budget: policies from the best, filled where they could be the best."""
    errors = table.filter(metric="output_error")
    many = pl.concat(
        errors.with_columns(
            trace=pl.col("trace") + f"-{copy}", value=pl.col("value") + 0.001 * copy
        )
        for copy in range(4)
    )
    few, enough = ranking(errors.filter(pl.col("trace") < "3")), ranking(many)

    for figure, faces in ((few, {"white"}), (enough, {"white", "#d55e00"})):
        for axis, budget in zip(figure.axes, ("32", "64"), strict=True):
            names = [text.get_text() for text in axis.get_yticklabels()]
            points = [line for line in axis.lines if line.get_marker() == "o"]
            assert axis.get_title() == f"budget {budget}"
            assert names == ["ams", "tova"]
            assert {point.get_markerfacecolor() for point in points} == faces
            assert points[1].get_markerfacecolor() == "white"
    assert [line.get_xdata()[0] for line in few.axes[0].lines if line.get_marker() == "o"] == (
        pytest.approx([0.41, 0.51])
    )
    assert few.axes[0].get_xlabel() == "output error (relative, lower is better)"
    assert few.get_suptitle() == (
        "Mean over 3 prompts\nfilled: could be the best; dotted: the best mean (fidelity: open)"
    )
    assert [axis.get_title() for axis in ranking(table, ["output_error", "wipeout"]).axes] == (
        ["budget 32", "budget 64"] * 2
    )


@pytest.mark.parametrize("draw", [over_budgets, pareto])
def test_one_budget_is_a_ranking(table, draw):
    """Lines of one point would show nothing: policies are ranked, of metrics with a direction."""
    axes = draw(table.filter(budget=32), ["output_error", "wipeout", "burst_share"]).axes

    assert [axis.get_xlabel().partition(" (")[0] for axis in axes] == ["output error", "wipeout"]
    assert [text.get_text() for text in axes[0].get_yticklabels()] == ["ams", "tova"]


def test_figures_open_with_what_ranks_the_policies(table):
    """The best evidence that the table has, as in a verdict."""
    kl = table.filter(metric="output_error").with_columns(
        metric=pl.lit("response_kl"), fidelity=pl.lit("judged", table.schema["fidelity"])
    )

    for values, name in ((table, "output error"), (pl.concat([table, kl]), "response kl")):
        for draw in (over_budgets, pareto, ranking):
            axis = draw(values).axes[0]
            label = axis.get_xlabel() if draw is ranking else axis.get_ylabel()
            assert label.replace("_", " ").startswith(name)


def test_a_table_without_the_metrics_is_an_error(table):
    """It says what the table has."""
    with pytest.raises(PolicyError, match="no mean of regret; it has output_error"):
        over_budgets(table, ["regret"])
    with pytest.raises(PolicyError, match="unknown metric 'wipout'; did you mean 'wipeout'"):
        over_budgets(table, ["wipout"])
    with pytest.raises(PolicyError, match=r"needs entries_seen.*--metric .*entries_seen"):
        pareto(table.filter(pl.col("metric") != "entries_seen"))
