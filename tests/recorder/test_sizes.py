"""Layers of several sizes: what a trace has of them, in memory and stored."""

import json
import re

import numpy as np
import polars as pl
import pytest
import torch
from sized_models import MODELS, SIZES, sized

import kvsim
from kvsim import store
from kvsim.analysis.table import choose
from kvsim.errors import CaptureError, NeedsError, PolicyError, TraceError
from kvsim.recorder.hooks import intercepting

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
    assert (trace.meta["notes"], store.describe(trace.path)["format"]) == ([], 6)
    assert trace.digest == memory.digest
    assert store.verify(trace.path, deep=True).ok
    for layer, call in seen.items():
        for array in ("q", "k", "v", "attn_out"):
            stored, own = of_layer(trace, array, layer), getattr(call, array)
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
def test_keys_before_rope_are_those_of_their_token(name):
    """The first layer knows nothing else; the rotation is over its own dimensions."""
    trace = kvsim.capture(sized(name), None, [3, 8, 5] * 20, max_new_tokens=0)

    for array in "qk":
        rows = trace.ropes[0].unrotate(of_layer(trace, array, 0), torch.arange(60))
        of_tokens = rows.unflatten(1, (20, 3))  # [head, repetition, token, dim]
        gap = of_tokens.amax(1) - of_tokens.amin(1)
        assert float(gap.max()) < 1e-4 * float(rows.abs().max())
        assert float((of_tokens[:, 0, 0] - of_tokens[:, 0, 1]).abs().max()) > 0.1


def test_a_trace_without_its_sizes_is_refused(tmp_path):
    """They are part of the header, which the seal binds."""
    trace = kvsim.capture(sized("llama"), None, IDS, max_new_tokens=0, out=tmp_path / "a.zarr")
    path = trace.path / "zarr.json"
    document = json.loads(path.read_text("utf-8"))
    del document["attributes"]["sizes"]
    path.write_text(json.dumps(document), "utf-8")

    with pytest.raises(TraceError, match="its seal does not fit"):
        kvsim.open_trace(trace.path)


def test_a_copy_is_the_same_trace(tmp_path):
    """Saved from memory and from a file, with the sizes, and all numbers of a replay."""
    trace = kvsim.capture(sized("llama"), None, IDS, max_new_tokens=6, o_proj=True)
    first = kvsim.open_trace(trace.save(tmp_path / "a.zarr"))
    second = kvsim.open_trace(first.save(tmp_path / "b.zarr"))

    for copy in (first, second):
        assert (copy.sizes, copy.digest) == (trace.sizes, trace.digest)
        record = kvsim.replay(copy, "h2o", 24)
        assert np.array_equal(record.evicted_at, kvsim.replay(trace, "h2o", 24).evicted_at)
        assert kvsim.measure(copy, record).height
    assert kvsim.to_xarray(first).attrs["sizes"] == [list(size) for size in trace.sizes]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", ["h2o", "criticalkv+knorm", "pyramidkv", "lagkv"])
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


def test_layers_of_several_sizes_are_not_read_together():
    """One line says which sizes there are; layers of one size are read as ever."""
    trace = kvsim.capture(sized("llama"), None, IDS, max_new_tokens=6)

    line = r"layers 0, 2 \(6, 2, 16, 16\), layer 1 \(6, 3, 16, 16\); expected layers of one size"
    for read in (lambda: trace.q, lambda: trace.n_heads, lambda: trace.attn_out):
        with pytest.raises(NeedsError, match=line):
            read()
    assert trace.row_size == (2 + 3 + 2) * 32
    assert trace.alike([0, 2]).n_heads == 2
    assert trace.alike([1]).n_heads == 3
    with pytest.raises(PolicyError, match="layer 1 of llama has heads of another size"):
        kvsim.replay(trace, "h2o", 24, layers=[1])


@pytest.mark.parametrize("options", [{"attention": "full"}, {"probe": "repeat"}])
def test_what_has_one_shape_for_all_layers_is_refused(options, tmp_path):
    """Dense attention and probes, before the model runs over the prompt."""
    options = {**options, "out": tmp_path / "a.zarr"}

    with pytest.raises(CaptureError, match="are those of layers of one size"):
        kvsim.capture(sized("llama"), None, IDS, max_new_tokens=6, **options)


@pytest.mark.parametrize(
    "sizes",
    [
        [(6, 2, 16, 16)] * 2,
        [(6, 2, 16, 16)] * 3,
        [(6, 2, 16, 16), (6, 3, 16, 16), (6, 4, 16, 16)],
        [(6, 2, 16, 16), (6, 3, 16, 16), (6, 0, 16, 16)],
        [(6, 2, 16), (6, 3, 16), (6, 3, 16)],
        [(6, 2, 16, 16), (6, 3, 16, 16), (6, 2, 1.5, 16)],
    ],
)
def test_sizes_that_do_not_fit_the_arrays_are_refused(sizes):
    """One for each layer, of whole numbers, of which the arrays have the largest."""
    trace = kvsim.capture(sized("llama"), None, IDS, max_new_tokens=6)
    arrays = {name: trace.source.read(name, slice(None), slice(None)) for name in "qkv"}

    with pytest.raises(TraceError, match=re.escape("expected query heads, KV heads, dim")):
        kvsim.Trace.from_arrays(
            **arrays, prompt_len=60, rope=trace.ropes, formulas=trace.formulas, sizes=sizes
        )
