"""Means over prompts, their intervals and paired differences, against plain loops."""

import re

import numpy as np
import polars as pl
import pytest

import kvsim
from kvsim.analysis.overview import summarise
from kvsim.analysis.summaries import (
    RESAMPLES,
    Interval,
    averages,
    per_prompt,
    stages,
)
from kvsim.analysis.table import COLUMNS
from kvsim.errors import PolicyError
from kvsim.schema import FIDELITY
from kvsim.sweeps.driver import replay_all
from tests.facts import facts


def row(trace, policy, value, **more):
    """One value of a Table."""
    known = {"metric": "output_error", "variant": "", "unit": "relative", "params": "{}"}
    known |= {"budget": 64, "layer": 0, "fidelity": "open"}
    return {"trace": trace, "policy": policy, "value": value, **facts(policy), **known, **more}


def table(*rows):
    """A Table of some values."""
    full = [{name: one.get(name) for name in COLUMNS} for one in rows]
    return pl.DataFrame(full, schema=COLUMNS)


def test_an_interval_is_that_of_resampled_means():
    """The percentiles of means that a plain loop over the same resamples gives."""
    values = np.array([0.1, 0.4, 0.35, np.nan, 0.9, 0.2, 0.6])
    known = values[~np.isnan(values)]
    rng = np.random.default_rng(0)
    places = rng.integers(6, size=(RESAMPLES, 6))
    means = sorted(sum(known[at] for at in sample) / 6 for sample in places)
    (found,) = Interval.of_each([values])

    assert found.n == 6
    assert found.mean == pytest.approx(known.mean())
    assert found.low == pytest.approx(np.percentile(means, 2.5))
    assert found.high == pytest.approx(np.percentile(means, 97.5))


@pytest.mark.parametrize("prompts", range(7))
def test_fewer_than_six_prompts_have_a_mean_and_no_interval(prompts):
    """Little is known of other prompts; without a value there is no mean either."""
    values = np.append(np.arange(1.0, prompts + 1), np.nan)
    (one, again), text = Interval.of_each([values] * 2), f"{(prompts + 1) / 2:.1f}"

    assert (one.n, str(one)) == (prompts, str(again))
    assert np.isnan([one.low, one.high]).all() == (prompts < 6)
    assert one.text(".1f") == (f"{text} [2.2, 4.8]" if prompts == 6 else text * bool(prompts))


def test_a_prompt_counts_once_however_many_values_it_has():
    """The mean of means; the weakest fidelity speaks for all."""
    values = table(
        *(row("a", "tova", 1.0, layer=layer) for layer in range(9)),
        row("b", "tova", 3.0, fidelity="exact"),
    )
    each = per_prompt(values)
    (found,) = averages(values).to_dicts()

    assert each["value"].to_list() == [1.0, 3.0]
    assert each["fidelity"].to_list() == ["open", "exact"]
    assert (found["mean"], found["n"], found["of"], found["fidelity"]) == (2.0, 2, 2, "open")
    assert found["requested"] == "64"
    assert (found["low"], found["high"]) == (None, None)  # of two prompts


def test_what_cannot_be_measured_is_counted_and_not_zero():
    """A null is left out of the mean and stays in the count; so does a trace without a row."""
    values = table(
        row("a", "tova", 0.2),
        row("b", "tova", None),
        row("c", "tova", 0.1, metric="retained_iou"),
        row("a", None, 0.7, metric="window_overlap"),
    )
    found = {one["metric"]: one for one in averages(values).to_dicts()}

    assert (found["output_error"]["n"], found["output_error"]["of"]) == (1, 3)
    assert (found["window_overlap"]["n"], found["window_overlap"]["of"]) == (1, 3)
    assert found["output_error"]["mean"] == pytest.approx(0.2)
    assert found["output_error"]["low"] is None


@pytest.mark.parametrize(
    ("n_layers", "expected"), [(28, (8, 12, 8)), (3, (1, 1, 1)), (12, (3, 6, 3)), (1, (0, 1, 0))]
)
def test_stages_are_the_outer_sevenths(n_layers, expected):
    """Two sevenths of the layers are early and two late; 28 layers as in AMS, Table 14."""
    values = table(*(row("a", "tova", 1.0, layer=layer) for layer in range(n_layers)))
    found = stages(values, n_layers)["stage"].cast(pl.String).to_list()

    assert tuple(found.count(name) for name in ("early", "middle", "late")) == expected
    assert found == sorted(found, key=("early", "middle", "late").index)


def test_stages_and_labels_split_the_averages():
    """`by` takes any column; a value without a layer has no stage."""
    values = table(
        row("a", "tova", 0.2, domain="ore", layer=0),
        row("a", "tova", 0.4, domain="ore", layer=2),
        row("b", "tova", 0.6, domain="fruit", layer=2),
        row("b", None, 0.8, layer=None),
    )
    found = averages(stages(values, 3), by=["stage", "domain"])

    assert found.select("stage", "domain", "mean").rows() == [
        ("early", "ore", 0.2),
        ("late", "ore", 0.4),
        ("late", "fruit", 0.6),
        (None, None, 0.8),
    ]


def test_listed_events_leave_every_summary_as_it_is():
    """Of wipe-out the last event counts; means split by event have each of them."""
    trace = kvsim.open_trace(kvsim.sample_trace())
    policies = [kvsim.policy("tova"), kvsim.policy("streaming_llm")]
    plain, each = (
        replay_all([trace], policies, [64], interval=64, metrics=["wipeout"], events=events).table
        for events in (False, True)
    )

    assert each.height > plain.height
    assert per_prompt(each).equals(per_prompt(plain))
    assert averages(each).equals(averages(plain))
    assert averages(each, metrics="wipeout").equals(averages(plain, metrics="wipeout"))
    assert kvsim.compare(each, "wipeout").table.equals(kvsim.compare(plain, "wipeout").table)
    assert summarise(each, ["wipeout"]).equals(summarise(plain, ["wipeout"]))
    by_event = averages(each, "event", metrics="wipeout").filter(policy="tova")
    assert by_event.height == each["event"].n_unique() > 1


def test_a_head_counts_once_however_many_events_have_a_value():
    """Where events are listed, as where they are not; layers and heads act at different ones."""
    unit = {"metric": "burst_share", "variant": "length=32", "unit": "share"}
    first = [row("a", "tova", x, event=at, head=0, **unit) for at, x in ((9, 0.3), (19, 0.6))]
    last = [row("a", "tova", x, event=at, head=1, **unit) for at, x in ((9, None), (29, 0.05))]
    values = table(*first, *last)

    assert per_prompt(values)["value"].to_list() == [pytest.approx((0.45 + 0.05) / 2)]
    assert summarise(values, ["burst_share"])["burst_share"][0] == pytest.approx(0.25)


@pytest.mark.parametrize("mean", [averages, per_prompt, kvsim.compare])
def test_replays_and_live_runs_have_no_common_mean(mean):
    """Nor with judged ones, of one policy or of two; the error names both. Each alone is fine."""
    live = table(*(row("a", name, 0.12, fidelity="closed") for name in ("tova", "ams")))
    replayed = table(*(row("a", name, 0.07) for name in ("tova", "h2o")))

    for one, names in ((replayed, "tova, h2o"), (replayed.filter(policy="h2o"), "h2o")):
        with pytest.raises(PolicyError, match=rf"live runs \(tova, ams\) and of replays \({names}"):
            mean(pl.concat([one, live]))
    judged = live.with_columns(fidelity=pl.lit("judged", pl.Enum(FIDELITY)))
    for other, kinds in ((live, "live runs (tova, ams) and of judged"), (replayed, "judged")):
        with pytest.raises(PolicyError, match=re.escape(f"output_error is of {kinds} replays (")):
            mean(pl.concat([judged, other]))
    assert mean(judged) is not None
    assert mean(replayed) is not None
    other = live.with_columns(metric=pl.lit("entries_seen"))
    assert averages(pl.concat([replayed, other])).height == 4  # of two metrics


@pytest.mark.parametrize("mean", [averages, per_prompt, kvsim.compare])
def test_several_models_have_no_common_mean(mean):
    """The error names them with their traces; split by model, means are those of each alone."""
    rows = [row(x, name, 0.1, model=x[0]) for x in ("a1", "a2", "b1") for name in ("tova", "ams")]
    both, unnamed = table(*rows), table(*rows[:4], row("c", "tova", 0.3), row("c", "ams", 0.3))

    with pytest.raises(PolicyError, match=r"several models: a \(a1, a2\), b \(b1\); expected one"):
        mean(both)
    assert mean(unnamed) is not None
    assert (
        averages(both, "model").filter(model="a").drop("model").equals(averages(table(*rows[:4])))
    )
    assert mean(both.drop("model")) is not None  # of an earlier version
