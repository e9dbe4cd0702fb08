"""What 60 cells cost beside the ideal time of their output errors, and what each part takes.

    python tests/benchmarks/cells.py            # some minutes
    python tests/benchmarks/cells.py --smallest # seconds; what the test suite runs

Twelve policies at five budgets are replayed and measured together, as a task of a sweep does it, in
one process with one thread. The ideal is `4 x dim x` the entries that query heads see in rows after
the prompt, at the fp32 rate of a matrix product of the same thread; seconds are of its processor
time. Beside it milliseconds a cell on the sample trace, where every operation is small.
"""

import time
from dataclasses import dataclass

import numpy as np
import torch

import kvsim
from harness import matrix_rate, random_trace, report
from kvsim.analysis.output.error import output_error
from kvsim.analysis.overview import SUMMARY
from kvsim.analysis.table import available, measure
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.samples import sample_trace

POLICIES = (
    *("streaming_llm", "h2o", "tova", "snapkv", "pyramidkv", "knorm"),
    *("keydiff", "lagkv", "expected_attention", "gkv", "rkv", "ams"),
)


@dataclass(frozen=True)
class Shape:
    """A random trace and the terms of its cells."""

    layers: int
    heads: int
    group: int
    tokens: int
    prompt: int
    dim: int
    interval: int
    budgets: tuple[int, ...]
    matrix: int = 2048


AIM = Shape(1, 4, 7, 8192, 2048, 128, 128, (256, 512, 1024, 1536, 2048))
SMALLEST = Shape(1, 2, 2, 192, 96, 16, 32, (32, 48), matrix=128)
SAMPLE_BUDGETS = (32, 48, 64, 96, 128)


def replayed(
    trace: Trace, budgets: tuple[int, ...], interval: int | None
) -> tuple[list[Record], dict[str, float]]:
    """The records of all cells, and the processor time of each policy."""
    records, seconds = [], {}
    for name in POLICIES:
        policy = kvsim.policy(name)
        began = time.process_time()
        records += [kvsim.replay(trace, policy, budget, interval=interval) for budget in budgets]
        seconds[name] = time.process_time() - began
    return records, seconds


def ideal_seconds(trace: Trace, records: list[Record], rate: float) -> float:
    """Seconds of the products of queries and values with what rows after the prompt see."""
    rows = np.arange(trace.prompt_len, trace.n_pos)
    entries = 0
    for record in records:
        left = np.searchsorted(np.sort(record.gone_after, axis=None), rows)
        heads = record.evicted_at[..., 0].size
        entries += int((heads * (rows + 1) - left).sum())
    return float(4 * trace.dim * trace.group * entries / rate)


def run(shape: Shape, sample_budgets: tuple[int, ...]) -> tuple[dict[str, float], list[str]]:
    """Ratios to the ideal by part, and the report line by line."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        sizes = {x: getattr(shape, x) for x in ("layers", "heads", "group", "dim")}
        trace = random_trace(**sizes, n=shape.tokens, prompt_len=shape.prompt)
        trace.full()
        rates = [matrix_rate(shape.matrix, time.process_time)]
        records, seconds = replayed(trace, shape.budgets, shape.interval)
        rates.append(matrix_rate(shape.matrix, time.process_time))
        began = time.process_time()
        output_error(trace, records)
        errors = time.process_time() - began
        began = time.process_time()
        measure(trace, records, available(SUMMARY, [trace]))
        measuring = time.process_time() - began
        rates.append(matrix_rate(shape.matrix, time.process_time))
        sample = kvsim.open_trace(sample_trace())
        sample = sample.loaded(slice(0, sample.n_layers))
        began = time.process_time()
        small, _ = replayed(sample, sample_budgets, None)
        middle = time.process_time()
        measure(sample, small, available(SUMMARY, [sample]))
        end = time.process_time()
    finally:
        torch.set_num_threads(threads)
    ideal = ideal_seconds(trace, records, max(rates))
    parts = {
        "replays": sum(seconds.values()),
        "output errors": errors,
        "other metrics": max(0.0, measuring - errors),
    }
    ratios = {name: taken / ideal for name, taken in parts.items()}
    ratios["all"] = (parts["replays"] + measuring) / ideal
    a_cell = [1e3 * x / len(small) for x in (middle - began, end - middle)]
    ratios["ms on the sample"] = sum(a_cell)
    share = len(POLICIES) / ideal  # in units of the policy's own cells
    slow, fast = (f"{rate(rates) / 1e9:.0f}" for rate in (min, max))
    lines = [
        f"torch {torch.__version__}, 1 thread, {slow} to {fast} Gop/s",
        f"{len(records)} cells; {shape}",
        f"{ratios['all']:.2f} times the ideal time of their output errors, {ideal:.1f} s: "
        + ", ".join(f"{name} {ratios[name]:.2f}" for name in parts),
        "replays of each policy, in units of the mean of a policy's ideal: "
        + ", ".join(f"{name} {x * share:.2f}" for name, x in seconds.items()),
        (
            f"{len(small)} cells of the sample, each policy's own interval, in ms a cell: "
            f"{sum(a_cell):.1f}, replay {a_cell[0]:.1f}, metrics {a_cell[1]:.1f}"
        ),
    ]
    return ratios, lines


if __name__ == "__main__":
    report(__doc__, run, (AIM, SAMPLE_BUDGETS), (SMALLEST, (64,)), "cells")
