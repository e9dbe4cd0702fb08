"""A cache in blocks: what compaction costs, what it frees, and after how many rows it has paid.

    python tests/benchmarks/paged.py            # shapes of SmolLM2-135M, 4,096 entries: a minute
    python tests/benchmarks/paged.py --smallest # a second; what the test suite runs

All layers of one sequence are compacted once, from all entries to the budget, to a random set for
each head. Reading is `paged_attention` of one row in all layers, before and after. Times are CPU
times of the process; rows to pay: time of the compaction / time that a row saves.
"""

import time
from dataclasses import dataclass
from functools import partial

import torch

from harness import best, report
from kvsim.core.attention import Formula
from kvsim.runner.blocks import Pool, Sequences, paged_attention


@dataclass(frozen=True)
class Cache:
    """Shapes of one run; ragged: heads keep between a half and three halves of the budget."""

    layers: int
    heads: int
    group: int
    dim: int
    entries: int
    budget: int
    repeats: int


AIM = Cache(layers=30, heads=3, group=3, dim=64, entries=4096, budget=512, repeats=3)
SMALLEST = Cache(layers=2, heads=2, group=2, dim=8, entries=256, budget=16, repeats=1)


def filled(cache: Cache, size: int, together: int) -> Sequences:
    """All layers full: a sequence for each block table."""
    pool = Pool(size, together, torch.empty(0), cache.dim)
    sequences = Sequences(pool, cache.layers * cache.heads // together)
    rows = torch.randn(cache.entries, together, cache.dim)
    for at in range(len(sequences.tables)):
        sequences.append(at, rows, rows)
    return sequences


def counts_of(cache: Cache, *, ragged: bool) -> list[int]:
    """Entries that each head of a layer keeps."""
    if not ragged:
        return [cache.budget] * cache.heads
    half = cache.budget // 2
    return [half + 2 * half * head // max(1, cache.heads - 1) for head in range(cache.heads)]


def read(cache: Cache, sequences: Sequences, q: torch.Tensor) -> None:
    """One row in all layers."""
    formula = Formula(cache.dim**-0.5)
    for at, table in enumerate(sequences.tables):
        paged_attention(q, sequences.pool, table, sequences.lengths[at], formula)


def compact(sequences: Sequences, index: list[torch.Tensor]) -> None:
    """Compact all layers."""
    for at, kept in enumerate(index):
        sequences.compact(at, kept)


def measured(cache: Cache, size: int, together: int, *, ragged: bool) -> dict[str, float]:
    """Seconds of a compaction and of a row before and after, blocks freed, share of empty slots."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(together, cache.group, 1, cache.dim)
    counts = counts_of(cache, ragged=ragged)
    seconds = []
    for _ in range(cache.repeats):
        sequences = filled(cache, size, together)
        before = min(
            best(partial(read, cache, sequences, q), 1, time.process_time)
            for _ in range(cache.repeats)
        )
        blocks = sequences.pool.use.blocks
        index = []
        for at in range(len(sequences.tables)):
            heads = [(at * together + i) % cache.heads for i in range(together)]
            n = max(counts[head] for head in heads)
            kept = torch.full((together, n), -1)
            for i, head in enumerate(heads):
                chosen = torch.randperm(cache.entries, generator=generator)[: counts[head]]
                kept[i, n - counts[head] :] = chosen.sort().values
            index.append(kept)
        seconds.append(best(partial(compact, sequences, index), 1, time.process_time))
    after = best(partial(read, cache, sequences, q), cache.repeats, time.process_time)
    slots = sequences.pool.use.blocks * size * together
    return {
        "compaction": min(seconds),
        "before": before,
        "after": after,
        "freed": (blocks - sequences.pool.use.blocks) * sequences.pool.block_bytes / 2**20,
        "blocks": blocks - sequences.pool.use.blocks,
        "empty": 1 - cache.layers * sum(counts) / slots,
    }


def run(cache: Cache) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Figures of each layout, and the lines of a table."""
    out = {}
    columns = ("blocks freed", "MiB freed", "empty slots", "compaction, ms", "row before, ms")
    headers = ("block table per", "heads", "block", *columns, "after, ms", "rows to pay")
    lines = [f"| {' | '.join(headers)} |", "| --- | --- " + "| --: " * 8 + "|"]
    for together, ragged in ((cache.heads, False), (cache.heads, True), (1, True)):
        for size in (1, 16, 64):
            figures = measured(cache, size, together, ragged=ragged)
            name = "head" if together == 1 else "layer"
            saved = figures["before"] - figures["after"]
            pay = f"{figures['compaction'] / saved:.1f}" if saved > 0 else "never"
            times = (f"{1e3 * figures[x]:.1f}" for x in ("compaction", "before", "after"))
            kind = "ragged" if ragged else "equal"
            out[f"{name} {kind} {size}"] = figures
            lines.append(
                f"| {name} | {kind} | {size} | {figures['blocks']:,.0f} | {figures['freed']:.1f} | "
                f"{figures['empty']:.1%} | {' | '.join(times)} | {pay} |"
            )
    return out, lines


if __name__ == "__main__":
    report(__doc__, run, (AIM,), (SMALLEST,))
