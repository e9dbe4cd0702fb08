"""A trace of 16,384 tokens: written, verified, replayed and measured in less memory than it has."""

import json
import os
import subprocess
import sys

import pytest

#: Tokens of the trace, and how many of them are the prompt.
TOKENS, PROMPT = 16_384, 16_000
LAYERS, QHEADS, HEADS, DIM = 16, 2, 1, 32

#: Bytes of all arrays, and of those of one layer.
LAYER = TOKENS * 4 * (DIM * (2 * QHEADS + 2 * HEADS) + QHEADS)
WHOLE = LAYERS * LAYER
#: What each step may take beside Python and torch: three layers and blocks of logits.
MEMORY = 3 * LAYER + (64 << 20)

CHILD = """
import functools, json, resource, sys
import torch
import kvsim
from kvsim.store.verification import verify
from kvsim.core.attention import Formula, Rope, causal_attention
from kvsim.core.header import Header

tokens, prompt, layers, qheads, heads, dim, path = json.loads(sys.argv[1])


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Made:
    positions = torch.arange(tokens)

    # attention of the last layer is random, of the others uniform, because their keys are 0
    @property
    def shapes(self):
        rows, entries = (layers, qheads, tokens, dim), (layers, heads, tokens, dim)
        return {"q": rows, "k": entries, "v": entries, "attn_out": rows, "lse": rows[:3]}

    def read(self, name, part, pos):
        layer, shape = part.start, self.shapes[name][1:]
        if name in ("q", "v") or (name == "k" and layer == layers - 1):
            some = torch.Generator().manual_seed(3 * layer + "qkv".index(name))
            return torch.randn(shape, generator=some)[None]
        if name == "k":
            return torch.zeros(shape)[None]
        if layer == layers - 1:
            return self.attention()[name][None]
        count = torch.arange(1.0, tokens + 1)
        if name == "lse":
            return count.log().expand(shape)[None]
        return (self.read("v", part, pos)[0].cumsum(1) / count[:, None]).expand(shape)[None]

    @functools.cache
    def attention(self):
        q, k, v = (self.read(name, slice(layers - 1, layers), None)[0] for name in "qkv")
        out, lse = causal_attention(q, k, v, Formula(dim**-0.5))
        return {"attn_out": out, "lse": lse}


said = {}
header = Header(
    prompt_len=prompt,
    formulas=(Formula(dim**-0.5),) * layers,
    ropes=(Rope.default(dim),) * layers,
    layer_ids=tuple(range(layers)),
    source_dtypes=dict.fromkeys(Made().shapes, "float32"),
)
# what a small trace takes first of all is no part of the question
small = kvsim.Trace.from_arrays(
    *torch.randn(3, 1, 1, 600, dim), prompt_len=500, rope=Rope.default(dim)
)
verify(kvsim.save_trace(small, path + ".small"), deep=True)
kvsim.measure(
    small, kvsim.replay(small, kvsim.policy("snapkv"), 64, interval=16), metrics=["output_error"]
)
before = peak()
kvsim.save_trace(kvsim.Trace(Made(), header), path)
said["written"] = peak() - before
said["ok"] = verify(path).ok
trace = kvsim.open_trace(path)
record = kvsim.replay(
    trace, kvsim.policy("snapkv"), 1024, interval=256, memory=int(sys.argv[2])
)
said["kept"] = int(record.kept(tokens - 1).sum(-1).max())
table = kvsim.measure(trace, record, metrics=["output_error", "retained_mass"])
said["values"], said["error"] = len(table), float(table["value"].max())
said["all"] = peak() - before
print(json.dumps(said))
"""


@pytest.mark.deep
def test_a_long_trace_takes_the_memory_of_its_layers(tmp_path):
    """No step holds more than three layers beside its logits, whatever the trace has."""
    facts = json.dumps([TOKENS, PROMPT, LAYERS, QHEADS, HEADS, DIM, str(tmp_path / "long.zarr")])
    done = subprocess.run(
        [sys.executable, "-c", CHILD, facts, str(MEMORY)],
        env=os.environ | {"MALLOC_ARENA_MAX": "1"},  # others keep what zarr's threads have freed
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    print(f"{WHOLE / 2**20:.0f} MiB of arrays, budget {MEMORY / 2**20:.0f} MiB: {found}")
    assert MEMORY < 0.7 * WHOLE
    assert found["written"] < MEMORY
    assert found["all"] < MEMORY
    assert found["ok"]
    assert 1024 <= found["kept"] <= 1024 + 256
    assert found["values"] > 0
    assert 0.5 < found["error"] < 50
