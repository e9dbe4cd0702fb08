"""What a sweep costs: processes beside threads, and one pass beside one replay after another.

    python tests/benchmarks/sweep.py            # a few minutes
    python tests/benchmarks/sweep.py --smallest # seconds; what the test suite runs

The same grid on random traces on disk, in turns: `replay_all`, cell by cell; `kvsim.sweep`
in one process with one thread and with two, and in two processes with one thread each. Seconds are
of the fastest turn; processes count from their start, with all that they import. The Tables are
compared.
"""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import torch

import kvsim
from harness import random_trace, report
from kvsim.sweeps.driver import replay_all

POLICIES = ("tova", "snapkv", "streaming_llm", "knorm", "keydiff", "expected_attention")


@dataclass(frozen=True)
class Shape:
    """Traces and their shape, budgets, and turns."""

    traces: int
    layers: int
    heads: int
    group: int
    tokens: int
    dim: int
    budgets: tuple[int, ...]
    turns: int


AIM = {
    "large layers": Shape(2, 2, 4, 7, 4096, 128, (128, 256, 384, 512, 768, 1024), 1),
    "small layers": Shape(8, 6, 3, 3, 512, 64, (64, 128, 256), 2),
}
SMALLEST = {"smallest": Shape(1, 2, 2, 2, 128, 8, (64,), 1)}


def record(shape: Shape, folder: Path) -> list[str]:
    """Store random traces; three quarters of each are prompt."""
    sizes = {x: getattr(shape, x) for x in ("layers", "heads", "group", "dim")}
    sizes |= {"n": shape.tokens, "prompt_len": shape.tokens * 3 // 4}
    return [
        str(random_trace(**sizes, seed=i, name=str(i)).save(folder / f"{i}.zarr"))
        for i in range(shape.traces)
    ]


def ways(shape: Shape, paths: list[str], *, processes: bool) -> dict[str, Callable[[], Any]]:
    """What is timed: the same grid computed in several ways, each gives its Table."""
    metrics = ["output_error", "retained_mass", "wipeout"]
    policies = [kvsim.policy(name) for name in POLICIES]
    traces = [kvsim.open_trace(path) for path in paths]
    grid = {"traces": paths, "policies": list(POLICIES), "budgets": list(shape.budgets)}
    grid |= {"intervals": 64, "metrics": metrics}

    def threads(count: int, compute: Callable[[], pl.DataFrame]) -> pl.DataFrame:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            return compute()
        finally:
            torch.set_num_threads(before)

    def swept(jobs: int = 1) -> pl.DataFrame:
        return kvsim.sweep(**grid, jobs=jobs).table

    def in_turn() -> pl.DataFrame:
        run = replay_all(traces, policies, shape.budgets, interval=64, metrics=metrics)
        return run.table

    one = {
        "cell after cell": lambda: threads(1, in_turn),
        "one process, one thread": lambda: threads(1, swept),
    }
    two = {
        "one process, two threads": lambda: threads(2, swept),
        "two processes": lambda: swept(2),
    }
    return one | (two if processes else {})


def difference(table: pl.DataFrame, other: pl.DataFrame) -> float:
    """The largest difference of two values in the same row."""
    assert table.drop("value", "chance").equals(other.drop("value", "chance"))
    apart = (table["value"] - other["value"]).abs().max()
    assert isinstance(apart, float)
    return apart


def run(shapes: dict[str, Shape], processes: bool = True) -> tuple[dict[str, float], list[str]]:
    """Time every way, compare the Tables; return ratios to one process and thread, and a report."""
    ratios: dict[str, float] = {}
    lines = [f"torch {torch.__version__}, {os.cpu_count()} processors"]
    for name, shape in shapes.items():
        with tempfile.TemporaryDirectory() as folder:
            timed = ways(shape, record(shape, Path(folder)), processes=processes)
            seconds = dict.fromkeys(timed, float("inf"))
            tables = []
            for _ in range(shape.turns):
                for label, compute in timed.items():
                    began = time.perf_counter()
                    tables.append(compute())
                    seconds[label] = min(seconds[label], time.perf_counter() - began)
        cells = shape.traces * len(POLICIES) * len(shape.budgets)
        apart = max(difference(table, tables[0]) for table in tables)
        told = f"differ by {apart:.0e} at most" if apart else "equal"
        lines.append(f"{name}: {cells} cells, values {told}; {shape}")
        base = seconds["one process, one thread"]
        for label, taken in seconds.items():
            ratios[f"{name}: {label}"] = base / taken
            lines.append(f"  {label:26}{taken:7.2f} s {base / taken:6.2f} x")
    return ratios, lines


if __name__ == "__main__":
    report(__doc__, run, (AIM,), (SMALLEST, False), "sweep")
