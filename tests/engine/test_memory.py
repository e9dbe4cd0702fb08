"""A trace much larger than the memory budget replays within it."""

import gc
import json
import subprocess
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import kvsim
from kvsim.core.policy import Schedule
from kvsim.engine.block import Block
from kvsim.engine.checks import Setup
from kvsim.engine.layers import apart, layers_per_block, runs
from kvsim.errors import MemoryLimitError, PolicyError
from kvsim.policies.naming import names
from kvsim.store.verification import describe
from traces import random_trace

BUDGET = 96 << 20

#: What is imported and built once is measured first, with a small trace.
REPLAY = """
import json, pathlib, sys
import torch
import kvsim
from kvsim.sweeps import replay_all


def peak():
    # not ru_maxrss, which a process inherits from the one that started it
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def failures(trace, memory):
    options = {"metrics": ["output_error", "wipeout"], "memory": memory}
    cells = replay_all([trace], [kvsim.policy("tova")], [512], interval=1024, **options)
    # as a process of a sweep works, task after task
    tasks = kvsim.sweep(
        traces=[trace], policies=["snapkv"], budgets=[512], interval=1024, **options
    )
    return len(cells.failures) + len(tasks.failures)


small = torch.randn(3, 4, 2, 1100, 64)
small = kvsim.Trace.from_arrays(*small, prompt_len=1000, rope=kvsim.Rope.default(64))
failures(small, None)
large = kvsim.open_trace(sys.argv[1])  # imports zarr
before = peak()
failed = failures(large, int(sys.argv[2]))
print(json.dumps({"peak": peak() - before, "failures": failed}))
"""


@pytest.fixture
def large_trace(tmp_path):
    """A stored trace of more than four times BUDGET; every layer holds the same numbers."""
    torch.manual_seed(0)
    layers, qheads, heads, tokens, dim = 38, 4, 2, 4096, 64
    q = torch.randn(1, qheads, tokens, dim).expand(layers, -1, -1, -1)
    k, v = (torch.randn(1, heads, tokens, dim).expand(layers, -1, -1, -1) for _ in range(2))
    # attention output and log-sum-exp are given, whatever their values: they are read like any
    out, lse = torch.randn(1, qheads, tokens, dim), torch.randn(1, qheads, tokens) + 20
    trace = kvsim.Trace.from_arrays(
        q,
        k,
        v,
        prompt_len=3000,
        rope=kvsim.Rope.default(dim),
        attn_out=out.expand(layers, -1, -1, -1),
        lse=lse.expand(layers, -1, -1),
    )
    path = kvsim.save_trace(trace, tmp_path / "large.zarr")
    assert sum(array["bytes"] for array in describe(path)["arrays"].values()) > 4 * BUDGET
    return path


@pytest.mark.deep
def test_replay_of_a_trace_four_times_the_memory_budget_stays_within_it(large_trace, warm_python):
    """A replay, and a process of a sweep, grow by the budget at most."""
    command = [warm_python, "-c", REPLAY, str(large_trace), str(BUDGET)]

    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"peak {found['peak'] / 2**20:.0f} MiB, memory budget {BUDGET / 2**20:.0f} MiB")
    assert found["failures"] == 0
    assert found["peak"] <= BUDGET


def test_a_memory_budget_below_one_layer_is_refused_with_what_is_needed():
    """The error names the memory that one layer needs."""
    small_trace = random_trace(layers=1, heads=1, n=32, dim=4)

    with pytest.raises(MemoryLimitError, match="give at least --set memory="):
        kvsim.replay(small_trace, kvsim.policy("tova"), budget=16, memory=1 << 20)


#: Blocks of rows are small here, so that what grows with the trace is what counts.
EVENTS = """
import ctypes, json, pathlib, sys
import torch
import kvsim
from kvsim.core.parts import by_query_head
from kvsim.engine import layers
from kvsim.engine.layers import apart

ctypes.CDLL("libc.so.6").mallopt(-3, 1 << 18)  # arrays go back to the system when they are freed
torch.set_num_threads(1)
for module in [*sys.modules.values()]:
    if hasattr(module, "LOGIT_BYTES"):
        module.LOGIT_BYTES = 1 << 20


def status(name):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def taken(policy):
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    kvsim.replay(sys.argv[1], policy, 2500, interval=64, prefill=True, memory=1 << 34)
    return status("VmHWM") - before


for name in sys.argv[2:]:
    set_to = {"protect_prompt": False} if name == "raas" else {}
    policy, trace = kvsim.policy(name, **set_to), kvsim.open_trace(sys.argv[1])
    source = by_query_head(trace) if policy.per_query_head else trace
    taken(policy)  # what is imported and built once
    counted = layers.replay_bytes(source, policy) + 4 * layers.LOGIT_BYTES
    print(json.dumps([name, taken(policy), counted]))
"""


@pytest.mark.deep
def test_replays_take_no_more_than_is_counted(tmp_path, warm_python):
    """Keys, what is gathered and rearranged, and one copy of a window's attention."""
    q, k, v = (torch.randn(1, heads, 3100, 64) for heads in (16, 4, 4))
    trace = kvsim.Trace.from_arrays(q, k, v, prompt_len=3000, rope=kvsim.Rope.default(64))
    command = [warm_python, "-c", EVENTS, str(kvsim.save_trace(trace, tmp_path / "a.zarr"))]
    command += ["snapkv@original", "ams", "raas", "dropkv", "compactor"]

    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)

    assert done.returncode == 0, done.stderr
    for name, taken, counted in map(json.loads, done.stdout.splitlines()):
        print(f"{name}: {taken / 2**20:.0f} of {counted / 2**20:.0f} MiB")
        assert taken <= counted, name


def test_a_layer_of_32768_tokens_fits_the_default_memory():
    """Policies that go layer by layer, and CAKE, replay Llama-3.1-8B's heads within 2 GiB."""
    shapes = {"o_proj": (1, 32, 128, 4096), "attn_out": (1,)}
    shapes |= {"probe_q": (1, 32, 34_000, 128), "probe_k": (1, 8, 34_000, 128)}
    size = {"n_qheads": 32, "n_pos": 32_768 + 1024, "dim": 128, "value_dim": 128}
    size |= {"owners": range(32), "windowed": ()}
    size |= {
        "dtype": torch.float32,
        "has": lambda _: True,
        "source": SimpleNamespace(shapes=shapes),
    }
    fitting = []
    for name in [*names(), "ams+expected_attention", "criticalkv+snapkv@kvpress", "snapkv+int4"]:
        try:
            policy = kvsim.policy(name)
        except PolicyError:  # needs a scorer, or a calibration
            continue
        if apart(policy) or not policy.across_layers:
            trace = SimpleNamespace(**size, n_heads=32 if policy.per_query_head else 8)
            fitting.append(layers_per_block(trace, policy, 2 << 30))

    assert len(fitting) > 60
    assert min(fitting) >= 1


@pytest.mark.parametrize("each", [1, 2])
def test_layers_that_share_a_budget_are_scored_apart(each, monkeypatch):
    """Kept sets, scores and budgets are those of all layers together, bit for bit."""
    trace = random_trace(layers=5, heads=2, n=160, dim=16)
    options = {"interval": 40, "prefill": True, "internals": True}
    cake = kvsim.policy("cake", window=8, decoding=True)
    together = kvsim.replay(trace, cake, 40, **options)

    sizes, read = [], kvsim.Trace.read

    def noted(*args, stored=False):
        part = read(*args, stored=stored)
        sizes.append(len(part) * bool(part.numel()) * stored)
        return part

    monkeypatch.setattr(sys.modules["kvsim.engine.layers"], "layers_per_block", lambda *_: each)
    monkeypatch.setattr(kvsim.Trace, "read", noted)
    apart = kvsim.replay(trace, cake, 40, **options)

    assert max(sizes) == each
    assert np.array_equal(apart.evicted_at, together.evicted_at)
    assert len({tuple(plans.budgets) for plans in apart.internals}) > 1
    for mine, expected in zip(apart.internals, together.internals, strict=True):
        assert np.array_equal(mine.budgets, expected.budgets)
        assert np.array_equal(mine.scores, expected.scores, equal_nan=True)


def test_a_block_is_freed_without_the_collector():
    """No cycle keeps the layers of a block while those of the next one are loaded."""
    trace = random_trace(layers=1, heads=1, n=32, dim=4)
    setup = Setup(trace, kvsim.policy("tova+int8"), 16, Schedule(interval=8))
    (run,) = runs(trace, [0], setup.policy)
    gc.disable()
    try:
        block = Block(run.source("cpu", 1 << 20), setup.policy, setup.setting(), [0])
        block.fire([15, 23], internals=False)
        freed = weakref.ref(block)
        del block
        assert freed() is None
    finally:
        gc.enable()
