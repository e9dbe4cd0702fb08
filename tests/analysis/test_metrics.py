"""Metrics against naive loops and exact chance; tables and fidelity."""

import itertools
import json
from dataclasses import replace
from fractions import Fraction
from math import comb

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvsim
from kvsim.analysis import subject as subject_module
from kvsim.analysis.arrays import event_rows
from kvsim.analysis.kept import chance
from kvsim.analysis.kept.retention import entries_seen, wipeouts
from kvsim.analysis.output.error import output_error
from kvsim.analysis.registry import METRICS
from kvsim.analysis.table import COLUMNS, fidelity
from kvsim.errors import KvsimError, TraceError
from kvsim.policies.fit import fitted
from kvsim.schema import NEVER
from kvsim.sweeps import replay_all
from reference.strategies import evictions
from traces import changed, random_trace


def make_trace(n=60, prompt_len=20, dtype=torch.float64, **options):
    """A random trace whose attention is uneven."""
    return random_trace(n=n, prompt_len=prompt_len, dtype=dtype, **options)


def test_the_error_is_measured_against_what_the_model_computed():
    """A recorded output that is off by a known amount shows in the error of the full cache."""
    trace = make_trace(dtype=torch.float32)
    moved = changed(trace, attn_out=trace.full()[0] * 1.25, lse=trace.full()[1])
    record = kvsim.replay(trace, kvsim.policy("tova"), budget=58)

    (found,) = output_error(moved, [record])

    # only the row after the single event sees less; there 0.2 is the model's, the rest eviction's
    assert (found.error[..., :59] == 0).all()
    (same,) = output_error(trace, [record])
    assert (abs(found.error - same.error)[..., -1] <= 0.2 + 1e-6).all()
    assert (found.error[..., -1] > 0).all()


def test_a_record_of_another_stored_trace_is_refused_by_every_metric(tmp_path):
    """Traces of one shape are told apart by their digest."""
    paths = [kvsim.save_trace(make_trace(layers=n), tmp_path / f"{n}.zarr") for n in (1, 2)]
    one, other = (kvsim.open_trace(path) for path in paths)
    record = kvsim.replay(one, kvsim.policy("tova"), budget=8)

    with pytest.raises(TraceError, match="measure a record on the trace it was replayed from"):
        kvsim.measure(other, record, ["wipeout"])
    with pytest.raises(TraceError, match="measure a record on the trace it was replayed from"):
        kvsim.measure(make_trace(n=61), record, ["entries_seen"])


@pytest.mark.parametrize(("length", "threshold"), [(16, 0.0), (32, 0.1), (128, 0.1)])
def test_chance_of_a_wipe_out_is_hypergeometric(length, threshold):
    """At the first event, sum of C(length, s) C(N - length, K - s) / C(N, K), in whole numbers."""
    total, kept = 5000, 700
    last = np.full((1, total), total - 1, np.int32)
    last[0, ::7] = NEVER
    last[0, 700 * 7 :: 7] = total - 1

    ((_, found),) = wipeouts(last, [length], [threshold])[1].values()

    few = range(int(threshold * length) + 1)
    ways = sum(comb(length, s) * comb(total - length, kept - s) for s in few)
    chance = float(Fraction(ways, comb(total, kept)))
    assert found[0, 0] == pytest.approx(chance, rel=1e-9)


@given(evictions(), st.integers(1, 9), st.sampled_from([0.0, 0.1, 0.34, 0.5]), st.integers(0, 5))
def test_wipe_out_equals_a_loop(last, length, threshold, recent):
    """Counts, and what chance would wipe out of the same entries, by the definition."""
    ((found, random),) = wipeouts(last, [length], [threshold], 2, recent)[1].values()

    few, spans = int(threshold * length + 1e-9), range(0, last.shape[1] - length + 1, length)
    for j, row in enumerate(event_rows(last).tolist()):
        inside = [a for a in spans if a >= 2 and a + length <= row + 1 - recent]
        for head, leaves in enumerate(last):
            kept = (leaves[: row + 1] > row).sum()
            wiped = sum((leaves[a : a + length] > row).sum() <= few for a in inside)
            assert found[head, j] == pytest.approx(
                wiped / len(inside) if inside else np.nan, nan_ok=True
            )
            known = (leaves >= row).all() and inside
            ways = sum(
                comb(length, s) * comb(row + 1 - length, kept - s)
                for s in range(min(few, kept) + 1)
                if known
            )
            expected = ways / comb(row + 1, kept) if known else np.nan
            np.testing.assert_allclose(random[head, j], expected, atol=1e-9)


@given(st.integers(1, 6), st.integers(0, 6), st.integers(0, 6))
def test_the_iou_of_chance_is_the_mean_over_all_random_sets(first, second, since):
    """Every set of the size once, from what was kept and what came since."""
    kept, pool = set(range(first)), range(first + since)
    sets = [set(of) for of in itertools.combinations(pool, min(second, len(pool)))]
    expected = np.mean([len(kept & of) / len(kept | of) for of in sets])

    found = chance.iou(np.array([first]), min(second, len(pool)), len(pool))

    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)


def test_entries_seen_count_what_rows_see():
    """The mean over rows after the prompt of the entries in kept."""
    trace = make_trace()
    for name, interval in (("tova", 7), ("full", None), ("random", 1)):
        record = kvsim.replay(trace, kvsim.policy(name), budget=11, interval=interval)

        counts = np.mean([record.kept(row).sum(-1) for row in range(20, 60)], axis=0)

        for layer in range(2):
            np.testing.assert_allclose(entries_seen(record.evicted_at[layer], 20), counts[layer])


def test_a_table_is_tidy_and_carries_its_origin():
    """One row per value, with policy, parameters, budget, schedule, unit and fidelity."""
    trace = make_trace(token_text=["a", "."] * 30, tokens=np.arange(60) % 7)
    record = kvsim.replay(trace, kvsim.policy("snapkv", window=4), budget=9, interval=10)

    table = kvsim.measure(trace, record)

    assert dict(table.schema) == {k: t() if isinstance(t, type) else t for k, t in COLUMNS.items()}
    on_request = {name for name, one in METRICS.items() if one.beside or not one.default}
    decided = {"quota_share", "suffix_mass", "boundary_shift"}  # of policies with segments
    located = {"needle_recall", "needle_wipeout"}  # of prompts with a needle
    there = {"all_rows", "last_windows"}
    needing = {x for x, one in METRICS.items() if {*one.arrays} - there}  # arrays that it has not
    assert set(table["metric"]) == set(METRICS) - on_request - decided - located - needing
    assert {"regret", "concat_error", "expectation"} <= on_request
    of_trace = [name for name, one in METRICS.items() if one.kind == "trace"]
    measured = table.filter(~pl.col("metric").is_in(of_trace))
    assert set(measured["policy"]) == {"snapkv"}
    assert json.loads(measured["params"][0])["window"] == 4
    assert set(measured["budget"]) == {9}
    assert set(measured["interval"]) == {10}
    error = table.filter(pl.col("metric") == "output_error")
    assert error.select("layer", "qhead").rows() == [(i, j) for i in range(2) for j in range(4)]
    assert error["unit"].unique().to_list() == ["relative"]


@pytest.mark.parametrize("name", ["sample", "sample-smollm2"])
def test_a_share_is_from_0_to_1(name):
    """Every value with the unit share, of each metric, variant, head and event of the samples."""
    trace = kvsim.open_trace(name)
    shares = [x for x, one in METRICS.items() if "share" in one.unit and one.kind != "live"]
    policies = [fitted(kvsim.policy(x)) for x in ("tova", "ams+tova", "knorm", "streaming_llm")]
    shared = {"metrics": shares, "events": True}
    run = replay_all([trace], policies, [16], interval=32, **shared)
    values = run.table.drop_nulls("value").filter(pl.col("value").is_not_nan())
    outside = values.filter(~pl.col("value").is_between(-1e-9, 1 + 1e-6))

    assert set(values.filter(unit="share")["metric"]) >= {"middle_coverage", "retained_mass"}
    assert set(outside["unit"]) == {"signed share"}


def test_a_table_lists_events_on_request_and_their_summary_otherwise():
    """Cumulative rates are summarised by the last event, the others by their mean."""
    trace = make_trace(n=200, prompt_len=50)
    record = kvsim.replay(trace, kvsim.policy("tova"), budget=24, interval=15)
    names = ["wipeout", "retained_iou"]

    each = kvsim.measure(trace, record, names, events=True)
    short = kvsim.measure(trace, record, names)

    where = ["metric", "variant", "layer", "head"]
    mean = each.group_by(where).agg(pl.col("value").mean(), last=pl.col("value").last())
    both = short.join(mean, on=where, suffix="_each").filter(pl.col("value").is_not_null())
    assert len(both) > 20
    for row in both.iter_rows(named=True):
        expected = row["last"] if row["metric"] == "wipeout" else row["value_each"]
        assert row["value"] == pytest.approx(expected)
    assert set(each.filter(pl.col("metric") == "wipeout")["event"]) == set(record.events)


def test_layers_computed_together_have_the_values_of_each_alone(monkeypatch):
    """Layers are grouped by their events, a group has a limit, and rows stay in layer order."""
    trace = make_trace(layers=5, n=90)
    record = kvsim.replay(trace, "tova", budget=24, interval=8)
    gone = record.evicted_at.copy()
    gone[1::2][gone[1::2] == record.events[-1]] = NEVER  # some layers have an event less
    record = replace(record, evicted_at=gone)
    counts = [len(event_rows(gone)) for gone in record.gone_after]
    alone = pl.concat(
        kvsim.measure(trace, replace(record, layers=(layer,), evicted_at=gone[None]), events=True)
        for layer, gone in zip(record.layers, record.evicted_at, strict=True)
    )
    place = {name: at for at, name in enumerate(METRICS)}
    order = pl.col("metric").replace_strict(place, return_dtype=pl.Int64)
    expected = (
        alone.filter(pl.col("policy").is_not_null())
        .sort(order, maintain_order=True)
        .drop("fidelity")  # of a layer replayed alone
    )

    for most in (1 << 20, 2 * 2 * 90, 1):
        monkeypatch.setattr(subject_module, "TOGETHER", most)
        table = kvsim.measure(trace, record, events=True)
        together = table.filter(pl.col("policy").is_not_null()).drop("fidelity")

        assert together.equals(expected)
    assert 1 < len(set(counts)) < len(counts)


def test_records_per_query_head_count_query_heads():
    """What is kept per query head stands in the column of query heads."""
    trace = make_trace()
    record = kvsim.replay(trace, kvsim.policy("snapkv@original", window=4), budget=9, interval=9)

    table = kvsim.measure(trace, record, ["entries_seen", "output_error"])

    assert table["head"].is_null().all()
    assert set(table["qhead"]) == {0, 1, 2, 3}


def test_the_error_of_a_layer_is_that_of_all_heads_as_one_vector():
    """Mean over the rows after the prompt, relative to the full output; a row per layer."""
    trace = make_trace()
    record = kvsim.replay(trace, kvsim.policy("tova"), budget=9, interval=10)
    table = kvsim.measure(trace, record, ["concat_error"])

    full = trace.full(slice(0, 2))[0][:, :, 20:].double().numpy()  # [layer, qhead, row, dim]
    error = output_error(trace, [record])[0].error[:, :, 20:]
    moved = np.sqrt(((error * np.linalg.norm(full, axis=-1)) ** 2).sum(1))
    size = np.linalg.norm(full, axis=(1, 3))
    assert table["layer"].to_list() == [0, 1]
    np.testing.assert_allclose(table["value"], (moved / size).mean(-1), rtol=1e-6)
    assert table.select("head", "qhead", "event").null_count().row(0) == (2, 2, 2)


@pytest.mark.parametrize(
    ("record", "options", "message"),
    [
        (
            ...,
            {"metrics": ["output_eror"]},
            r"unknown metric 'output_eror'; did you mean 'output_e",
        ),
        (..., {"metrics": 5}, "^unknown metric 5; "),
        (..., {"metrics": [None]}, "^unknown metric None; "),
        (..., {"metrics": [["wipeout"]]}, r"^unknown metric \['wipeout'\]"),
        (5, {}, "^record is 5; expected Records of kvsim.replay"),
        ([5], {}, r"^record is \[5\]; expected Records of kvsim.replay"),
        (..., {"optima": [5]}, r"^optima are \[5\]; expected for each record"),
    ],
)
def test_what_measure_cannot_take_is_one_line(record, options, message):
    """Metrics, records and oracles of other types are named with what was expected."""
    trace = random_trace(layers=1, n=20)
    replayed = kvsim.replay(trace, kvsim.policy("tova"), 8)

    with pytest.raises(KvsimError, match=message) as caught:
        kvsim.measure(trace, replayed if record is ... else record, **options)

    assert "\n" not in str(caught.value)
    with pytest.raises(TraceError, match="trace is None; expected a Trace of"):
        kvsim.measure(None, replayed)


def test_fidelity_says_what_a_live_run_would_give_too():
    """Exact for the first layer, a layer alone, sets of the prefill event and the trace itself."""
    trace = make_trace()
    running = kvsim.replay(trace, kvsim.policy("tova"), budget=8)
    once = kvsim.replay(trace, kvsim.policy("snapkv", window=4), budget=8)
    alone = kvsim.replay(trace, kvsim.policy("tova"), budget=8, layers=[1])
    full = kvsim.replay(trace, kvsim.policy("full"), budget=8)

    assert fidelity(trace, running, "rows", 0) == "exact"
    assert fidelity(trace, running, "rows", 1) == "open"
    assert fidelity(trace, running, "sets", 1) == "open"
    assert fidelity(trace, running, "trace", 1) == "exact"
    assert fidelity(trace, running, "trace", None) == "exact"
    assert fidelity(trace, once, "sets", 1) == "exact"
    assert fidelity(trace, once, "rows", 1) == "open"
    assert fidelity(trace, alone, "rows", 1) == "exact"
    assert fidelity(trace, full, "rows", 1) == "exact"
