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


@pytest.mark.parametrize(
    ("share", "unit"),
    [
        ("25%", "share of the trace"),
        ("25%so-far", "share of the tokens so far"),
        ("64MiB@float32", "bytes of all heads"),
    ],
)
def test_the_axis_names_the_unit_of_budgets(table, share, unit):
    """Of all budgets one unit, of several each of them."""
    whole, given = pl.lit(share), pl.when(pl.col("budget") == 64).then(pl.lit(share))
    alone, both = (over_budgets(table.with_columns(share=each)).axes[0] for each in (whole, given))

    assert both.get_xlabel() == f"budget per KV head (entries or {unit})"
    assert alone.get_xlabel() == f"budget per KV head ({unit})"


def test_a_single_budget_has_its_interval_as_a_line(table):
    """A band between one budget and itself would not be seen."""
    error = over_budgets(table.filter(budget=32)).axes[0]

    ((bottom, top),) = error.collections[0].get_segments()[0][:, 1].reshape(1, 2)
    mean = error.lines[0].get_ydata()[0]
    assert bottom < mean < top


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


@pytest.mark.parametrize("name", ["quest", "tova+int8"])
def test_readers_and_codecs_are_compared_by_bytes(table, name):
    """Rows see entries that are not read, or stored in fewer bytes; entries only if requested."""
    known = {"policy": name, **facts(name)}
    other = pl.col("policy") == table["policy"][0]
    policies = [pl.when(other).then(pl.lit(x)).otherwise(y).alias(y) for y, x in known.items()]
    sizes = table.filter(metric="entries_seen")
    parts = [sizes.with_columns(metric=pl.lit(cost)) for cost in ("bytes_held", "bytes_read")]
    whole = pl.concat([table, *parts]).with_columns(policies)

    assert [axis.get_xlabel()[:5] for axis in pareto(whole, "output_error").axes] == ["bytes"] * 2
    (axis,) = pareto(whole, ["output_error", "entries_seen"]).axes
    assert axis.get_xlabel() == "entries that a row sees, mean"
    with pytest.raises(PolicyError, match=r"needs bytes_held and .* another axis: entries_seen"):
        pareto(table.with_columns(policies))


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
    with pytest.raises(PolicyError, match="expected one of them to rank by"):
        ranking(table, ["output_error", "wipeout"])


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


def test_a_ranking_of_many_policies_is_readable(table):
    """Means over three times the median are at the edge of their panel, and no colour repeats."""
    errors = table.filter(metric="output_error", policy="tova")
    factors = [1.0, 1.1, 1.2, 1.3, 1.4, 3.0, 8.0, 20.0]
    many = pl.concat(
        errors.with_columns(policy=pl.lit(f"p{place}"), value=pl.col("value") * factor)
        for place, factor in enumerate(factors)
    )

    for axis in ranking(many).axes:
        points = [line for line in axis.lines if line.get_marker() == "o"]
        edge = [line for line in axis.lines if line.get_marker() == ">"]
        assert (len(points), len(edge)) == (6, 2)
        assert {line.get_color() for line in points + edge} == {"#0072b2"}
        assert [line.get_xdata()[0] for line in edge] == [1, 1]  # of the panel's width
        assert axis.get_xlim()[1] < 4 * float(points[0].get_xdata()[0])
        assert len(axis.texts) == 2


def test_a_table_without_the_metrics_is_an_error(table):
    """It says what the table has."""
    with pytest.raises(PolicyError, match="no mean of regret in the table of output_error"):
        over_budgets(table, ["regret"])
    with pytest.raises(PolicyError, match="unknown metric 'wipout'; did you mean 'wipeout'"):
        over_budgets(table, ["wipout"])
    with pytest.raises(PolicyError, match=r"needs entries_seen.*--metric .*entries_seen"):
        pareto(table.filter(pl.col("metric") != "entries_seen"))


def test_a_metric_without_a_better_direction_has_no_front(table):
    """Its panel has points and no mark, and the caption says that others have one."""
    neutral = table.with_columns(
        metric=pl.col("metric").replace("wipeout", "middle_coverage"),
        variant=pl.when(pl.col("metric") == "wipeout").then(pl.lit("")).otherwise("variant"),
    )

    figure = pareto(neutral, ["output_error", "middle_coverage"])

    error, middle = figure.axes
    marks = [
        [len(line.get_xdata()) for line in axis.lines if line.get_markersize() == 7]
        for axis in (error, middle)
    ]
    assert marks == [[0, 2], [0, 0]]
    assert middle.get_ylabel() == "middle coverage (share)"
    assert "on the front, where one direction is better" in figure.get_suptitle()


def test_many_metrics_stand_in_rows_of_three(table):
    """Whatever was requested, a panel each."""
    names = ["output_error", "wipeout", "entries_seen"]
    parts = [table, *(table.filter(metric="output_error").with_columns(metric=pl.lit(name))
                      for name in ("missing_mass", "error_distance"))]  # fmt: skip

    figure = over_budgets(pl.concat(parts), [*names, "missing_mass", "error_distance"])

    assert [axis.get_ylabel().split(" (")[0] for axis in figure.axes] == [
        *("output error", "wipeout", "entries seen", "missing mass", "error distance")
    ]
    places = [axis.get_subplotspec() for axis in figure.axes]
    assert [(one.rowspan.start, one.colspan.start) for one in places] == [
        *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1))
    ]
