"""The most memory that a process of a sweep takes, with and without --memory.

    python tests/benchmarks/worker_memory.py   # a minute

Two processes sweep a random trace on disk that is several times as large as the memory that they
may use. The peak is the resident memory of the larger one at its highest (VmHWM of Linux), with
Python, torch and all that it imports; the small sample trace shows what that alone takes.
"""

from __future__ import annotations

import tempfile
from multiprocessing import active_children
from pathlib import Path

import torch

import kvsim
from harness import options, publish
from kvsim.store import describe
from kvsim.sweeps import Run

LAYERS, QHEADS, HEADS, TOKENS, DIM = 38, 4, 2, 4096, 64
MEMORY = 96 << 20


def record(path: Path) -> int:
    """Store a random trace, all layers of which are the same; return the bytes of its arrays."""
    torch.manual_seed(0)
    sizes = (QHEADS, HEADS, HEADS)
    q, k, v = (torch.randn(1, heads, TOKENS, DIM) for heads in sizes)
    rest = {"prompt_len": TOKENS // 2, "rope": kvsim.Rope.default(DIM)}
    layer = kvsim.Trace.from_arrays(q, k, v, **rest)
    arrays = {"q": q, "k": k, "v": v, "attn_out": layer.attn_out, "lse": layer.lse}
    arrays = {name: x.expand(LAYERS, *[-1] * (x.dim() - 1)) for name, x in arrays.items()}
    kvsim.Trace.from_arrays(**arrays, **rest).save(path)
    return sum(array["bytes"] for array in describe(path)["arrays"].values())


def peaks() -> list[int]:
    """The highest resident memory of each process of the sweep by now, in bytes."""
    found = []
    for process in active_children():
        status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        found += [int(x.split()[1]) * 1024 for x in status if x.startswith("VmHWM")]
    return found


def sweep(path: Path, memory: int | None) -> tuple[int, Run]:
    """The highest peak of two processes, and the Run."""
    highest = [0]
    run = kvsim.sweep(
        traces=[str(path)],
        policies=["tova", "snapkv", "h2o"],
        budgets=[64, 512],
        intervals=512,
        memory=memory,
        jobs=2,
        progress=lambda _: highest.extend(peaks()),
    )
    assert not run.failures, run.failures
    return max(highest), run


def run() -> list[str]:
    """Lines of the report."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.zarr"
        size = record(path)
        lines = [f"a trace of {size / 2**20:.0f} MiB, two processes; peak of the larger one"]
        base, _ = sweep(kvsim.sample_trace(), None)
        lines.append(f"{'the sample':16}{base / 2**20:6.0f} MiB")
        tables = []
        for memory in (None, MEMORY):
            peak, swept = sweep(path, memory)
            tables.append(swept.table)
            label = "no --memory" if memory is None else f"--memory {memory >> 20}MiB"
            lines.append(f"{label:16}{peak / 2**20:6.0f} MiB")
    assert tables[0].equals(tables[1])
    return lines


if __name__ == "__main__":
    publish(run(), options(__doc__).parse_args().doc, "worker memory")
