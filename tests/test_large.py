"""A trace of 32,768 tokens: written, verified, replayed and measured in less memory than it has."""

import json
import subprocess
import sys

#: Tokens of the trace, and how many of them are the prompt.
TOKENS, PROMPT = 32_768, 32_000
LAYERS, QHEADS, HEADS, DIM = 6, 2, 1, 64

#: Bytes of all arrays, and of those of one layer.
LAYER = TOKENS * 4 * (DIM * (2 * QHEADS + 2 * HEADS) + QHEADS)
WHOLE = LAYERS * LAYER
#: What each step may take beside what Python and torch take: two layers and a block of logits.
MEMORY = 2 * LAYER + (64 << 20)

CHILD = """
import json, resource, sys
import torch
import kvsim
from kvsim import store
from kvsim.attention import Formula, Rope, causal_attention
from kvsim.store.header import Header

tokens, prompt, layers, qheads, heads, dim, path = json.loads(sys.argv[1])


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Made:
    # a layer at a time; attention of the last is random, of the others uniform: its keys are 0
    def __init__(self):
        self.layer, self.arrays = None, {}

    @property
    def shapes(self):
        rows, entries = (layers, qheads, tokens, dim), (layers, heads, tokens, dim)
        return {"q": rows, "k": entries, "v": entries, "attn_out": rows, "lse": rows[:3]}

    def read(self, name, part, pos):
        layer = part.start
        if layer != self.layer:
            self.arrays.clear()
            some = torch.Generator().manual_seed(layer)
            q = 1.5 * torch.randn(qheads, tokens, dim, generator=some)
            k, v = (torch.randn(heads, tokens, dim, generator=some) for _ in "kv")
            if layer < layers - 1:
                k.zero_()
                count = torch.arange(1.0, tokens + 1)
                out = (v.double().cumsum(1) / count[:, None]).float().expand(qheads, -1, -1)
                lse = count.log().expand(qheads, -1)
            else:
                out, lse = causal_attention(q, k, v, Formula(dim**-0.5))
            self.arrays |= {"q": q, "k": k, "v": v, "attn_out": out, "lse": lse}
            self.layer = layer
        return self.arrays[name][None]


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
store.verify(small.save(path + ".small"), deep=True)
kvsim.measure(
    small, kvsim.replay(small, kvsim.policy("snapkv"), 64, interval=16), metrics=["output_error"]
)
before = peak()
kvsim.Trace(Made(), header).save(path)
said["written"] = peak() - before
said["ok"] = store.verify(path).ok
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


def test_a_long_trace_takes_the_memory_of_its_layers(tmp_path):
    """No step holds more than two layers beside its logits, whatever the trace has."""
    facts = json.dumps([TOKENS, PROMPT, LAYERS, QHEADS, HEADS, DIM, str(tmp_path / "long.zarr")])
    done = subprocess.run(
        [sys.executable, "-c", CHILD, facts, str(MEMORY)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    print(f"{WHOLE / 2**20:.0f} MiB of arrays, budget {MEMORY / 2**20:.0f} MiB: {found}")
    assert MEMORY < 0.6 * WHOLE
    assert found["written"] < MEMORY
    assert found["all"] < MEMORY
    assert found["ok"]
    assert 1024 <= found["kept"] <= 1024 + 256
    assert found["values"] > 0
    assert 0.5 < found["error"] < 50
