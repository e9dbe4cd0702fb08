"""How time and memory grow with the length of a sequence, from capture to the error of a replay.

    python tests/benchmarks/lengths.py            # some minutes
    python tests/benchmarks/lengths.py --smallest # seconds; what the test suite runs

A random model of one layer; the last 64 tokens are a given response. One thread: CPU seconds of
each stage, and how far its peak memory is above the memory before it. A slope is that of the
logarithm over the logarithm of the length, by least squares; the last is that of the last doubling.
1 is linear, 2 quadratic: a capture and a deep verification compute attention of all pairs of
tokens; the judge begins behind the recorded prompt.
"""

import ctypes
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

import kvsim
from harness import random_model, report
from kvsim import store
from kvsim.runner.judging import Judge
from kvsim.runner.model import RunningModel

T = TypeVar("T")

RESPONSE, BUDGET, INTERVAL = 64, 1024, 32
STAGES = ("capture", "verify", "replay", "error", "judge")
AIM = tuple(2048 << step for step in range(7))
SMALLEST = (512, 1024)


#: Of a random model of one layer, 2 query heads on 1 of dimension 32.
MODEL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 32}
MODEL |= {"num_attention_heads": 2, "num_key_value_heads": 1}


def resident(name: str) -> float:
    """A number of this process's status, in MiB."""
    for line in Path("/proc/self/status").read_text("utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise LookupError(name)


def taken(call: Callable[[], T]) -> tuple[dict[str, float], T]:
    """CPU seconds of a call and the MiB that its memory grows to at most, and its result."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", "utf-8")  # the peak begins anew
    before, began = resident("VmRSS"), time.process_time()
    result = call()
    spent = time.process_time() - began
    return {"seconds": spent, "memory": resident("VmHWM") - before}, result


def measured(n: int) -> dict[str, dict[str, float]]:
    """What each stage takes at a length."""
    found, model = {}, random_model(**MODEL, max_position_embeddings=n)
    ids = torch.randint(0, 64, (n,)).tolist()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.zarr")
        found["capture"], trace = taken(
            lambda: kvsim.capture(model, None, ids[:-RESPONSE], response=ids[-RESPONSE:], out=path)
        )
        found["verify"], report = taken(lambda: store.verify(path, deep=True))
        assert report.ok, report.problems
        found["replay"], record = taken(
            lambda: kvsim.replay(trace, kvsim.policy("snapkv"), BUDGET, interval=INTERVAL)
        )
        found["error"], _ = taken(lambda: kvsim.measure(trace, record))
        running = RunningModel(model)
        found["judge"], _ = taken(lambda: Judge(running, trace).outcomes([record]))
    parts = (f"{x} {found[x]['seconds']:.1f} s {found[x]['memory']:.0f} MiB" for x in STAGES)
    print(f"{n} tokens: {', '.join(parts)}", file=sys.stderr, flush=True)
    return found


def run(*lengths: int) -> tuple[dict[str, float], list[str]]:
    """Slopes of time and memory of each stage, and lines of the report."""
    torch.set_num_threads(1)
    measured(lengths[0])  # what is imported and built once
    return summary({n: measured(n) for n in lengths})


def summary(found: dict[int, dict[str, dict[str, float]]]) -> tuple[dict[str, float], list[str]]:
    """Slopes, and lines of the report, of what was measured at each length."""
    slopes, lengths = dict[str, float](), [*found]
    lines = [
        f"torch {torch.__version__}, one thread; {lengths[0]} to {lengths[-1]} tokens",
        "one layer, 2 query heads on 1, dim 32, budget 1024, an event every 32 rows of 64",
        f"{'stage':10}{'CPU seconds':>18}{'slope':>8}{'last':>8}{'MiB':>16}{'slope':>8}{'last':>8}",
    ]
    for stage in STAGES:
        line = f"{stage:10}"
        for kind, width, form in (("seconds", 18, ".2f"), ("memory", 16, ".0f")):
            values = [max(found[n][stage][kind], 0.01) for n in lengths]
            x, y = np.log2(lengths), np.log2(values)
            slopes[f"{stage}, {kind}"] = float(np.polyfit(x, y, 1)[0])
            extent = f"{values[0]:{form}} to {values[-1]:{form}}"
            slope, last = slopes[f"{stage}, {kind}"], float(y[-1] - y[-2])
            line += f"{extent:>{width}}{slope:8.2f}{last:8.2f}"
        lines.append(line)
    return slopes, lines


if __name__ == "__main__":
    report(__doc__, run, AIM, SMALLEST, "lengths")
