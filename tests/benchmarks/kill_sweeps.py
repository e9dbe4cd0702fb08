"""Sweeps that are killed at random moments and resumed, and what is left of them.

    python tests/benchmarks/kill_sweeps.py --kills 200   # about a quarter of an hour

Processes sweep the same cells into one folder; each is ended by SIGKILL, SIGTERM or SIGINT after a
random part of the time that an undisturbed sweep takes, and the next one resumes. After each it is
looked at: no finished cell is gone, and a folder without `run.json` is refused. A folder that is
complete holds exactly the results of the undisturbed sweep, and the next process begins another.
Every second sweep has two workers, and none of them may outlive it.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

import kvsim
from kvsim.errors import OutputError
from kvsim.report import read_run
from kvsim.store.records import read_records
from kvsim.sweeps import Run, cells, replay_all

POLICIES = ("tova", "snapkv", "ams+tova", "random")
BUDGETS = (32, 64, "25%")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


def run(out: Path | None, jobs: int = 1) -> Run:
    """Sweep twelve cells of the sample, or what is left of them in a folder."""
    trace = kvsim.open_trace(kvsim.sample_trace())
    policies = [kvsim.policy(name, **{"window": 16} if "ams" in name else {}) for name in POLICIES]
    metrics = ["wipeout", "entries_seen", "output_error", "segment_count", "sparsity"]
    return replay_all(
        *([trace], policies, BUDGETS),
        interval=64,
        metrics=metrics,
        jobs=jobs,
        out=out,
        resume=True,
    )


def parts(folder: Path) -> set[str]:
    """Return the names of the parts in a folder."""
    return {path.name for path in folder.glob("parts/*.part")}


def look(folder: Path, before: set[str], whole: Run) -> str:
    """Check a folder after a child has ended; return what is in it."""
    if not folder.exists():
        assert not before
        return "nothing yet"
    if not (folder / "sweep.json").exists() and (folder / "run.json").exists():
        assert read_run(folder).table.equals(whole.table)
        records = read_records(folder / "records.zarr")
        for record, expected in zip(records, whole.records, strict=True):
            assert (record.evicted_at == expected.evicted_at).all()
        return "complete"
    assert before <= parts(folder)
    if (folder / "run.json").exists():  # interrupted, and published with what was done
        table = read_run(folder).table
        assert table.height <= whole.table.height
        assert table.join(whole.table, on=table.columns, how="anti", nulls_equal=True).is_empty()
        return "partial"
    try:
        read_run(folder)
    except OutputError:
        return "unfinished"
    raise AssertionError("an unfinished run was read")


def kill_many(kills: int, root: Path, seed: int = 0) -> Counter[str]:
    """Kill so many children; return what was left of each."""
    begin = time.perf_counter()
    whole = run(root / "whole")
    seconds = time.perf_counter() - begin
    draw = random.Random(seed)  # noqa: S311  no cryptography
    left: Counter[str] = Counter()
    number = 0
    for kill in range(kills):
        folder = root / str(number)
        before = parts(folder)
        sent = SIGNALS[kill % len(SIGNALS)]
        jobs = 1 + kill // len(SIGNALS) % 2
        child(folder, sent, draw.uniform(0, seconds * jobs), jobs)
        outcome = look(folder, before, whole)
        left[f"{outcome} after {sent.name}"] += 1
        number += outcome == "complete"
    run(root / str(number))
    assert look(root / str(number), set(), whole) == "complete"
    return left


def child(folder: Path, sent: signal.Signals, after: float, jobs: int) -> None:
    """Sweep in another process and end it after so many seconds, unless it has ended before."""
    command = [sys.executable, __file__, "--child", str(folder), "--jobs", str(jobs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # everything is imported
        time.sleep(after)
        process.send_signal(sent)
        process.communicate(timeout=60)  # workers have the same standard output: all have ended
    assert process.returncode in (0, 130, -sent), "a child failed, see above"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--jobs", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells.TOGETHER = 3
    if options.child is not None:
        print("ready", flush=True)
        try:
            run(options.child, options.jobs)
        except KeyboardInterrupt:
            sys.exit(130)
        return
    with tempfile.TemporaryDirectory() as folder:
        for outcome, count in sorted(kill_many(options.kills, Path(folder), options.seed).items()):
            print(f"{count:4} {outcome}")


if __name__ == "__main__":
    main()
