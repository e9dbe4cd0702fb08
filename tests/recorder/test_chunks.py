"""Chunked attention and layers without RoPE (Llama 4): recorded, replayed, judged and run live."""

import functools
import math

import numpy as np
import pytest
import torch

import kvsim
from families import Family
from kvsim.errors import CaptureError
from kvsim.runner.decoding import RunningModel
from kvsim.runner.judging import Judge
from kvsim.store.verification import verify
from live_runs import judged_logits, run_live

CHUNK, PROMPT, LENGTH, BUDGET = 16, 40, 60, 24
IDS = [(7 * i * i + 3 * i) % 64 for i in range(LENGTH)]
CHANGES = {
    "num_hidden_layers": 4,
    "intermediate_size_mlp": 64,
    "attention_chunk_size": CHUNK,
    "num_local_experts": 2,
    "floor_scale": 8,  # a factor of queries without RoPE, every eight positions another
    "attn_scale": 0.5,
    "pad_token_id": 0,
}


@functools.cache
def llama4(kernel="sdpa", floor_scale=8):
    """Three layers with chunks, and one without RoPE that sees the whole text."""
    changes = {**CHANGES, "floor_scale": floor_scale}
    return Family("Llama4", "", config="Llama4TextConfig", changes=changes).build(kernel)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_a_row_sees_its_own_chunk_alone(kernel, tmp_path):
    """The output of every layer is that of a float64 loop over the chunk of the row."""
    trace = kvsim.capture(
        llama4(kernel), None, IDS[:PROMPT], response=IDS[PROMPT:], out=tmp_path / "a.zarr"
    )

    assert [formula.chunk for formula in trace.formulas] == [CHUNK] * 3 + [None]
    assert [len(rope.inv_freq) for rope in trace.ropes] == [8] * 3 + [0]
    assert verify(trace.path, deep=True).ok
    q, k, v, out = (x.double().numpy() for x in (*map(trace.read, "qkv"), trace.full()[0]))
    for layer in range(4):
        for row in range(0, LENGTH, 7):
            first = row // CHUNK * CHUNK if layer < 3 else 0
            for i in range(trace.n_qheads):
                h = i // trace.group
                z = [0.25 * float(q[layer, i, row] @ k[layer, h, p]) for p in range(first, row + 1)]
                weights = [math.exp(x) for x in z]
                expected = sum(
                    w * v[layer, h, first + at] for at, w in enumerate(weights)
                ) / math.fsum(weights)
                assert np.allclose(out[layer, i, row], expected, atol=1e-4)


@pytest.mark.parametrize("floor_scale", [8, 8192])
def test_the_layer_that_sees_the_whole_text_evicts(floor_scale):
    """Live and in its replay alike; the judge gives the live run's logits, or refuses a factor."""
    rule, model = kvsim.policy("snapkv", window=4), llama4(floor_scale=floor_scale)
    trace = kvsim.capture(model, None, IDS[:PROMPT], response=IDS[PROMPT:])
    running = RunningModel(model)

    record = kvsim.replay(trace, rule, BUDGET, interval=5)
    live = run_live(running, rule, BUDGET, IDS, PROMPT, step=3, interval=5)

    assert record.layers == live.record.layers == (3,)
    assert np.array_equal(record.evicted_at, live.record.evicted_at)
    assert "chunks in layers 0-2 (16 tokens)" in record.remark
    if floor_scale == 8:
        with pytest.raises(CaptureError, match="have a factor of the length of the cache"):
            Judge(running, trace)
        return
    logits = judged_logits(Judge(running, trace), [record])[0]
    torch.testing.assert_close(logits, live.logits[PROMPT - 1 : -1], atol=1e-4, rtol=1e-4)
