"""Changes the parts of unfinished sweeps, and continues them.

    python tests/benchmarks/part_mutations.py --cases 300 --seed 0

Files of `parts/` change places, alone or with all files of their name, replace each other, get new
names, are cut, removed and damaged. Then the same call goes on. It must end with the Table of the
undisturbed sweep and without missing cells; anything else is a finding, printed with the seed of
its case.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import polars as pl

import kvsim
import mutations as traces
from campaign import campaign, options
from kvsim.sweeps import tasks

POLICIES, BUDGETS, METRICS = ("tova", "random", "streaming_llm"), (48, 64), ("wipeout",)


class Sweep:
    """A finished `kvsim.sweep` of small tasks."""

    def __init__(self, folder: Path, paths: list[str]) -> None:
        self.path = folder / "sweep"
        self._grid: dict[str, Any] = {"traces": paths, "policies": list(POLICIES)}
        self._grid |= {"budgets": list(BUDGETS), "intervals": [32], "metrics": list(METRICS)}
        self._grid["records"] = True
        self.table, _ = self.go_on(self.path)

    def go_on(self, path: Path) -> tuple[pl.DataFrame, int]:
        """Return the Table of the sweep in a folder, and how many cells are missing."""
        with mock.patch.object(tasks, "_TOGETHER", 2):
            run = kvsim.sweep(**self._grid, out=path)
        return run.table, run.parameters["missing"]


def mutate(rng: random.Random, folder: Path) -> None:
    """Change one to three files, or files of a name."""
    for _ in range(rng.randint(1, 3)):
        files = sorted(path for path in folder.iterdir() if path.stat().st_size)
        one = rng.choice(files)
        other = rng.choice([path for path in files if path.suffix == one.suffix and path != one])
        how = rng.choice(("exchange", "exchange all", "copy", "rename", "cut", "remove", "damage"))
        if how.startswith("exchange"):
            for path in files if how == "exchange all" else [one]:
                target = other.with_suffix(path.suffix)
                if path.stem == one.stem and target.exists():
                    path.rename(folder / ".aside")
                    target.rename(path)
                    (folder / ".aside").rename(target)
        elif how == "copy":
            shutil.copy(one, other)
        elif how == "rename":
            name = one.name.translate(str.maketrans("0123", "1032"))
            one.replace(folder / name)
        elif how == "remove":
            one.unlink()
        else:
            data = bytearray(one.read_bytes())
            at = rng.randrange(len(data))
            data[at] ^= 1 << rng.randrange(8)
            one.write_bytes(data[:at] if how == "cut" else data)


def run_case(original: Sweep, seed: int, folder: Path) -> str:
    """Return what became of a changed folder: "whole", or a finding."""
    rng = random.Random(seed)  # noqa: S311  cases, not secrets
    path = folder / "case"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(original.path, path)
    mutate(rng, path / "parts")
    table, missing = original.go_on(path)
    if missing:
        return f"FINDING: {missing} cells are missing"
    return "whole" if table.equals(original.table) else "FINDING: another Table"


def make_original(folder: Path) -> Sweep:
    """Record two traces, and sweep them."""
    paths = []
    for seed in range(2):
        paths.append(str(folder / f"t{seed}.zarr"))
        trace = traces.make(seed, mixed=False)
        header = replace(trace.header, name=f"t{seed}")
        kvsim.Trace(trace.source, header, dtype=trace.dtype).save(paths[-1])
    return Sweep(folder, paths)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        original = make_original(Path(name))
        campaign(
            lambda seed: run_case(original, seed, Path(name)), options(__doc__, 300).parse_args()
        )
