"""What eviction adds to the residual stream: against loops, a live model, and over layers."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch

import kvsim
from kvsim.analysis.output.error import output_error
from kvsim.analysis.overview import summarise
from kvsim.analysis.registry import METRICS
from kvsim.analysis.summaries import averages, stages
from kvsim.errors import NeedsError
from kvsim.recorder import load_model
from kvsim.schema import NEVER
from kvsim.studies.language import tasks
from kvsim.sweeps.driver import replay_all
from reference import metrics as loop_metrics
from tests.reference.masked import masked_logits

PROMPT, HIDDEN = 20, 12


def make_trace(layers=3, tokens=90, name="memory", without=(), seed=0):
    """A random trace with output projections, unless `without` names them."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    arrays = {
        "q": 2 * normal(layers, 4, tokens, 8),
        "k": normal(layers, 2, tokens, 8),
        "v": normal(layers, 2, tokens, 8),
        "o_proj": normal(layers, 4, 8, HIDDEN),
    }
    present = {key: array for key, array in arrays.items() if key not in without}
    rope = kvsim.Rope.default(8)
    return kvsim.Trace.from_arrays(**present, prompt_len=PROMPT, rope=rope, name=name)


def expected_of(trace, record):
    """Layer errors by the definition [layer]."""
    found = loop_metrics.outputs(*map(trace.read, "qkv"), record.evicted_at)
    added = loop_metrics.added(found, trace.read("o_proj"))[:, PROMPT:]
    return np.sqrt((added**2).mean(1))


@pytest.mark.parametrize(
    ("name", "interval"), [("tova", 1), ("snapkv", None), ("adakv+snapkv", 20), ("random", 9)]
)
def test_the_values_are_those_of_a_loop_over_layers_heads_and_rows(name, interval):
    """RMS over the rows after the prompt, a row per layer."""
    trace = make_trace()
    params = {"window": 6} if "snapkv" in name else {}
    record = kvsim.replay(trace, kvsim.policy(name, **params), budget=14, interval=interval)

    table = kvsim.measure(trace, record, "layer_error")

    assert table.select("head", "qhead", "event", "chance").null_count().row(0) == (3,) * 4
    expected = expected_of(trace, record)
    assert table["layer"].to_list() == [0, 1, 2]
    assert table["unit"].unique().to_list() == ["absolute"]
    assert expected.min() > 0.01
    np.testing.assert_allclose(table["value"], expected, rtol=1e-6)


def with_sensitivity(trace, values):
    """The same trace, whose capture measured the sensitivity of its layers."""
    header = replace(trace.header, meta={"layer_sensitivity": values})
    return kvsim.Trace(trace.source, header, dtype=trace.dtype)


@pytest.mark.parametrize("layers", [None, [0, 2]])
def test_the_weighted_error_is_that_of_a_loop(layers):
    """Sensitivity of the layer times the mean square of its rows, also of some layers; nats."""
    trace = with_sensitivity(make_trace(), [0.5, 2.0, 3])
    record = kvsim.replay(trace, kvsim.policy("tova"), budget=14, interval=9, layers=layers)

    table = kvsim.measure(trace, record, ["weighted_error", "layer_error"])

    found = {row["layer"]: row for row in table.filter(metric="weighted_error").to_dicts()}
    errors = dict(table.filter(metric="layer_error").select("layer", "value").iter_rows())
    if layers is None:
        np.testing.assert_allclose([*errors.values()], expected_of(trace, record), rtol=1e-6)
    assert [*found] == (layers or [0, 1, 2])
    for layer, row in found.items():
        assert row["value"] == pytest.approx([0.5, 2.0, 3.0][layer] * errors[layer] ** 2, rel=1e-9)
        assert row["unit"] == "nats"


def test_it_is_what_a_model_adds_to_its_residual_stream_when_one_layer_evicts():
    """A run of the model `tiny` with masked attention in one layer moves its stream by as much."""
    model, tokenizer = load_model("tiny")
    sample = tasks.prompts(1, 3, task="walk", facts=6, lines=4, kinds=2)[0]
    trace = kvsim.capture(
        model, tokenizer, sample.prompt, max_new_tokens=20, o_proj=True, residual=True
    )
    record = kvsim.replay(trace, kvsim.policy("tova"), budget=24, interval=4, prefill=True)
    table = kvsim.measure(trace, record, "layer_error")
    for layer, module in enumerate(model.model.layers):
        alone = np.full_like(record.evicted_at, NEVER)
        alone[layer] = record.evicted_at[layer]
        streams = []
        hooks = [
            # behind the attention, before the norm of the MLP
            module.post_attention_layernorm.register_forward_pre_hook(
                lambda _, args, to=streams: to.append(args[0])
            ),
        ]
        nothing = np.full_like(alone, NEVER)
        both = [replace(record, evicted_at=evicted_at) for evicted_at in (nothing, alone)]
        masked_logits(model, trace.tokens, both)
        for hook in hooks:
            hook.remove()

        full, evicting = torch.cat(streams[-2:]).double()  # of the rows after the prompt
        added = (evicting - full).norm(dim=-1)
        value = table.filter(layer=layer)["value"].item()
        assert value == pytest.approx(float(added.square().mean().sqrt()), rel=1e-4)
        assert value > 1e-3


@pytest.mark.parametrize(
    ("without", "metric", "advice"),
    [
        (["o_proj"], "layer_error", "no array 'o_proj', .* record it again with --o-proj"),
        ([], "weighted_error", "no array 'layer_sensitivity', .* again with --o-proj and --sensi"),
    ],
)
def test_a_trace_without_what_it_needs_is_refused_by_name_and_left_out_otherwise(
    without, metric, advice
):
    """One line with the option that records it; a sweep says so before it starts."""
    trace = make_trace(without=without)
    record = kvsim.replay(trace, kvsim.policy("tova"), budget=9)

    with pytest.raises(NeedsError, match=advice):
        kvsim.measure(trace, record, [metric])
    with pytest.raises(NeedsError, match=advice):
        replay_all([trace], [kvsim.policy("tova")], [9], metrics=["entries_seen", metric])
    for table in (
        kvsim.measure(trace, record),
        replay_all([trace], [kvsim.policy("tova")], [9]).table,
    ):
        assert metric not in set(table["metric"])
        assert "output_error" in set(table["metric"])
    with pytest.raises(NeedsError, match="record it again with --o-proj"):
        output_error(make_trace(without=["o_proj"]), [record], projected=True)


@pytest.fixture(scope="module")
def run():
    """Two policies on two traces of different lengths, with every default metric."""
    traces = [make_trace(layers=7, tokens=n, name=str(n), seed=n) for n in (80, 110)]
    policies = [kvsim.policy("tova"), kvsim.policy("streaming_llm")]
    return replay_all(traces, policies, [12, "25%"], interval=16)


def expected_sum(table, **cell):
    """Mean over traces of the sum over layers, by hand."""
    by_trace = {}
    for row in table.filter(metric="layer_error", **cell).to_dicts():
        by_trace[row["trace"]] = by_trace.get(row["trace"], 0) + row["value"]
    return sum(by_trace.values()) / len(by_trace)


def test_summaries_add_up_its_layers_and_average_those_of_other_metrics(run):
    """In averages, paired differences, the summary of a sweep and by stage alike."""
    table = run.table
    assert [name for name, entry in METRICS.items() if entry.layers == "sum"] == [
        "layer_error",
        "weighted_error",
        "bytes_held",
        "bytes_read",
    ]
    wide = summarise(table, ["layer_error", "output_error"])
    for policy in ("tova", "streaming_llm"):
        cell = {"policy": policy, "share": "25%"}
        expected = expected_sum(table, **cell)
        assert wide.filter(**cell)["layer_error"].item() == pytest.approx(expected)
        (mean,) = averages(table).filter(policy=policy, requested="25%", metric="layer_error")[
            "mean"
        ]
        assert mean == pytest.approx(expected)
        by_stage = averages(stages(table), ["stage"])
        parts = by_stage.filter(policy=policy, requested="25%", metric="layer_error")["mean"]
        assert len(parts) == 3
        assert parts.sum() == pytest.approx(expected)
        by_layer = averages(table, ["layer"])
        parts = by_layer.filter(policy=policy, requested="25%", metric="layer_error")["mean"]
        assert len(parts) == 7
        assert parts.sum() == pytest.approx(expected)
        other = table.filter(metric="output_error", **cell)
        mean = other.group_by("trace").agg(pl.col("value").mean())
        assert wide.filter(**cell)["output_error"].item() == pytest.approx(mean["value"].mean())
