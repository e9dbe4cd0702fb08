"""How close a replay of readers comes to the hardware: ratios measured in one process.

    python -m tests.benchmarks.reading            # the layer of the aim, a minute
    python -m tests.benchmarks.reading --smallest # seconds; what the test suite runs

Prints, for each reader, operations per second of replay (choosing what is read) and output error as
a share of the machine's fp32 matrix rate. Useful operations are 4 x dim x the entries that query
heads read, over rows after the prompt; scores of pages are no useful operations, though choosing
needs them. Neighbouring rows of a text read much the same pages, those of random queries do not:
`drift` is the share of a query that the next one takes over. Processor time of one thread, because
ratios of wall time say nothing on a busy machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import time

import numpy as np
import torch

import kvsim
from kvsim.analysis.output.error import output_error
from tests.benchmarks import replay
from tests.benchmarks.replay import SMALLEST, Size, fresh

AIM = dataclasses.replace(replay.AIM, repeats=2)

#: Share of a query that is the one before, by name.
DRIFTS = {"random rows": 0.0, "rows that drift": 0.95}
READERS = {
    "quest": {"dense_layers": 0},
    "quest heads=kv": {"dense_layers": 0, "heads": "kv"},
}


def matrix_rate(size: int) -> float:
    """fp32 operations per second of processor time of a square matrix product, the best of 8."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    times = []
    for _ in range(8):
        start = time.process_time()
        a @ b
        times.append(time.process_time() - start)
    return 2 * size**3 / min(times)


def arrays(size: Size, drift: float) -> dict[str, torch.Tensor]:
    """Keys, values and queries, each query partly the one before, with their full attention."""
    torch.manual_seed(0)
    entries = (size.layers, size.heads, size.tokens, size.dim)
    noise = torch.randn(size.layers, size.heads * size.group, size.tokens, size.dim)
    q = noise.clone()
    for row in range(1, size.tokens):
        q[:, :, row] = drift * q[:, :, row - 1] + (1 - drift**2) ** 0.5 * noise[:, :, row]
    given = {"q": q, "k": torch.randn(entries), "v": torch.randn(entries)}
    trace = fresh(size, given)
    return {**given, "attn_out": trace.attn_out, "lse": trace.lse}


def rate(size: Size, name: str, given: dict[str, torch.Tensor]) -> tuple[float, float, float]:
    """Useful operations per second, and seconds of replay and output error; the best of some."""
    policy = kvsim.policy(name.partition(" ")[0], **READERS[name])
    best = (0.0, 0.0, 0.0)
    for _ in range(size.repeats):
        trace = fresh(size, given)
        start = time.process_time()
        record = kvsim.replay(trace, policy, budget=size.budget)
        middle = time.process_time()
        output_error(trace, [record])
        end = time.process_time()
        pages = np.unpackbits(record.reads.bits).sum(dtype=np.int64)
        share = trace.n_qheads // record.reads.bits.shape[1]
        useful = 4 * size.dim * int(pages) * record.reads.page * share
        best = max(best, (useful / (end - start), middle - start, end - middle))
    return best


def run(size: Size) -> tuple[dict[str, float], list[str]]:
    """Shares of the matrix rate by name, and the report line by line."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        machine = matrix_rate(size.matrix)
        ratios, lines = {}, [f"{size}, one thread"]
        for label, drift in DRIFTS.items():
            given = arrays(size, drift)
            for name in READERS:
                done, replay, error = rate(size, name, given)
                machine = max(machine, matrix_rate(size.matrix))
                ratios[f"{name}, {label}"] = done / machine
                lines.append(
                    f"{name:15} {label:16} {done / 1e9:5.1f} of {machine / 1e9:.1f} Gop/s: "
                    f"{done / machine:.2f} (choosing {replay:.2f} s, error {error:.2f} s)"
                )
        bits = record_bytes(size)
        lines.append(f"the account of quest takes {bits / 2**20:.1f} MiB")
    finally:
        torch.set_num_threads(threads)
    return ratios, lines


def record_bytes(size: Size) -> int:
    """Bytes of the account of `quest`: a bit for each layer, query head, row and page."""
    pages = -(-size.tokens // 16)
    rows = size.tokens - size.prompt
    return size.layers * size.heads * size.group * rows * -(-pages // 8)


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smallest", action="store_true")
    options = parser.parse_args()
    _, lines = run(SMALLEST if options.smallest else AIM)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
