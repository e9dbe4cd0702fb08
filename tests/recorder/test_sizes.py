"""Layers of several sizes: what a trace has of them, in memory and stored."""

import numpy as np
import polars as pl
import pytest
import torch
from sized_models import MODELS, SIZES, sized

import kvsim
from kvsim.analysis.measuring import choose
from kvsim.errors import CaptureError
from kvsim.recorder.hooks import intercepting
from kvsim.store.verification import describe, verify

IDS = [(7 * i * i + 3 * i) % 64 for i in range(60)]


def of_layer(trace, name, layer):
    """One layer of an array."""
    return trace.read(name, slice(layer, layer + 1))[0]


@pytest.mark.parametrize("name", MODELS)
def test_each_layer_has_its_own_heads_and_dimensions(name, tmp_path):
    """Arrays are those of one forward, attention follows in float64, and the file says the same."""
    model, seen = sized(name), {}
    trace = kvsim.capture(model, None, IDS, max_new_tokens=6, out=tmp_path / "a.zarr")
    memory = kvsim.capture(model, None, IDS, max_new_tokens=6, o_proj=True)
    with torch.no_grad(), intercepting(model, lambda call: seen.update({call.layer: call})):
        model(trace.tokens[None])
    future = torch.ones(trace.n_pos, trace.n_pos, dtype=torch.bool).triu(1)

    assert trace.sizes == memory.sizes == SIZES[name]
    assert (trace.meta["notes"], describe(trace.path)["format"]) == ([], 6)
    assert trace.digest == memory.digest
    assert verify(trace.path, deep=True).ok
    for layer, call in seen.items():
        for array in ("q", "k", "v", "attn_out"):
            stored = of_layer(trace, array, layer)
            own = call.out if array == "attn_out" else getattr(call, array)
            torch.testing.assert_close(stored, own, rtol=1e-3, atol=1e-4)
            assert torch.equal(stored, of_layer(memory, array, layer))
        q, k, v = (of_layer(trace, array, layer).double() for array in "qkv")
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        logits = (trace.formulas[layer].scale * q @ k.mT).masked_fill(future, -torch.inf)
        sinks = torch.tensor(trace.formulas[layer].sinks, dtype=torch.float64)
        if len(sinks):
            logits = torch.cat([logits, sinks[:, None, None].expand(-1, len(future), 1)], -1)
        out, lse = trace.full(slice(layer, layer + 1))
        shares = logits.softmax(-1)[..., : len(future)]
        torch.testing.assert_close(shares @ v, out[0].double(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(logits.logsumexp(-1), lse[0].double(), rtol=1e-4, atol=1e-5)
        weights = trace.attention(layer, slice(0, None)).double()
        torch.testing.assert_close(shares, weights, rtol=1e-3, atol=1e-5)
        projection = model.get_submodule(f"model.layers.{layer}.self_attn.o_proj").weight
        blocks = of_layer(trace, "o_proj", layer)
        assert torch.equal(blocks, projection.T.unflatten(0, q.shape[:1] + v.shape[2:]))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", ["h2o", "criticalkv+knorm", "pyramidkv"])
def test_a_replay_is_that_of_the_layers_recorded_alone(name, policy):
    """Kept sets and every number, bytes too, are those of a trace of the replayed layers."""
    model = sized(name)
    trace = kvsim.capture(model, None, IDS, max_new_tokens=6, o_proj=True)
    layers = [i for i, size in enumerate(SIZES[name]) if size == SIZES[name][-1]]
    alone = kvsim.capture(model, None, IDS, max_new_tokens=6, o_proj=True, layers=layers)
    rule = kvsim.policy(policy, **({"window": 8} if policy == "pyramidkv" else {}))
    metrics = {*choose(None), "layer_error", "bytes_held"} - {"weighted_error"}

    record, expected = (kvsim.replay(x, rule, 24, interval=4) for x in (trace, alone))
    table, numbers = (
        kvsim.measure(*pair, sorted(metrics)) for pair in ((trace, record), (alone, expected))
    )

    assert record.layers == tuple(layers) == tuple(alone.layer_ids)
    assert np.array_equal(record.evicted_at, expected.evicted_at)
    assert "heads of another size in layer" in record.remark
    assert alone.header.sizes == ()
    known = ["trace", "layer"]
    assert table.drop(known).equals(numbers.drop(known))
    places = pl.Series(table["layer"]).drop_nulls().unique().to_list()
    assert places == [x for x in layers if x in places]


def test_what_has_one_shape_for_all_layers_is_refused():
    """Probes, before the model runs over the prompt."""
    with pytest.raises(CaptureError, match="need layers of one size"):
        kvsim.capture(sized("llama"), None, IDS, max_new_tokens=6, probe="repeat")
