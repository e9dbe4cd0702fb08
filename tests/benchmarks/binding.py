"""Measures what the binding of a trace costs: opening, and reading compared with unbound arrays.

    python tests/benchmarks/binding.py --rounds 40

The same files are read in turns, with the listed checksums of chunks and without; the ratio is that
of the medians of the pairs. The third figure is what a SHA-256 of each chunk would take.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

import kvsim
from kvsim.store.place import Folder
from kvsim.store.reader import StoredTrace


def save_trace(path: Path, n_pos: int) -> Path:
    """Write a trace of four layers with heads as a small model has them."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(4, heads, n_pos, 64, generator=generator) for heads in (8, 2, 2))
    trace = kvsim.Trace.from_arrays(q, k, v, prompt_len=n_pos // 2, rope=kvsim.Rope.default(64))
    return Path(trace.save(path))


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def read_all(stored: StoredTrace) -> None:
    """Read every number of a trace."""
    for name in ("q", "k", "v"):
        for layer in range(stored.shapes[name][0]):
            stored.read(name, slice(layer, layer + 1), slice(None))


def hash_all(stored: StoredTrace, place: Folder) -> None:
    """Compute the SHA-256 of every chunk."""
    for name in ("q", "k", "v"):
        array = stored.arrays[name]
        for index in array.indices():
            hashlib.sha256(place.read(array.key(index), array.encoded)).digest()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args(argv)
    sample = kvsim.sample_trace()
    opening = statistics.median(seconds(lambda: StoredTrace(sample)) for _ in range(30))
    print(f"opening the sample: {opening * 1e3:.1f} ms")
    with tempfile.TemporaryDirectory() as name:
        bound = StoredTrace(save_trace(Path(name, "a.zarr"), options.tokens))
        unbound = StoredTrace(bound.path)
        unbound.arrays = {name: replace(x, crcs=None) for name, x in unbound.arrays.items()}
        read_all(bound)
        ratios, times = [], []
        for turn in range(options.rounds):
            pair = (bound, unbound) if turn % 2 else (unbound, bound)
            took = {id(stored): seconds(lambda stored=stored: read_all(stored)) for stored in pair}
            ratios.append(took[id(bound)] / took[id(unbound)])
            times.append(took[id(unbound)])
        hashing = seconds(lambda: hash_all(bound, Folder(Path(bound.path))))
    base = statistics.median(times)
    print(f"reading, bound over unbound: {statistics.median(ratios):.3f} ({base * 1e3:.0f} ms)")
    print(f"a SHA-256 of each chunk would add {hashing / base:.0%}")


if __name__ == "__main__":
    main()
