"""Mutations of dumps of kept sets for `mutations.py --dumps`, in both of their formats.

Bits, bytes and runs of bytes change, are exchanged, cut or repeated, half of them near the end of
the file, where its index is. A case is refused in one line, or its sets are those of the original.
"""

from __future__ import annotations

import random
from pathlib import Path

import kvsim
from kvsim.errors import DumpError
from kvsim.studies.referee.dump import Dump, read_dump

#: Bytes at the end of a file in which half of the mutations are.
_INDEX = 1500


class Originals:
    """A dump of the sample, and its files."""

    def __init__(self, folder: Path) -> None:
        record = kvsim.replay(kvsim.sample_trace(), "tova", 64, interval=32)
        self.dump = Dump.of_record(record)
        paths = (self.dump.save(folder / f"dump{ending}") for ending in (".parquet", ".npz"))
        self.files = {path.suffix: path.read_bytes() for path in paths}


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Return a file with one change."""
    start = max(0, len(data) - _INDEX) if rng.random() < 0.5 else 0
    at, length, other = rng.randrange(start, len(data)), rng.randrange(1, 9), rng.randrange(256)
    kind = rng.choice(("bit", "byte", "zeros", "cut", "repeated", "exchanged", "end"))
    changed = {
        "bit": bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :],
        "byte": bytes([other]) + data[at + 1 :],
        "zeros": bytes(length) + data[at + length :],
        "cut": data[at + length :],
        "repeated": data[at : at + length] + data[at:],
        "exchanged": data[at + 1 : at + 2] + data[at : at + 1] + data[at + 2 :],
        "end": b"",
    }
    return data[:at] + changed[kind]


def run_case(case: Originals, seed: int, folder: Path) -> str:
    """Run one case and return its outcome; AssertionError for a finding."""
    rng = random.Random(seed)  # noqa: S311  repeatable on purpose
    ending = rng.choice(tuple(case.files))
    path = folder / f"case{ending}"
    path.write_bytes(mutate(rng, case.files[ending]))
    try:
        dump = read_dump(path)
    except DumpError as error:
        return "refused" if "\n" not in str(error) else "FINDING: several lines"
    same = dump.layers == case.dump.layers and dump.kept.keys() == case.dump.kept.keys()
    assert same, "another table"
    assert all((dump.kept[row] == kept).all() for row, kept in case.dump.kept.items()), "other sets"
    return "identical"
