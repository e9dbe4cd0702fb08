"""How long commands take that read tables or describe: each in a process of its own.

    python tests/benchmarks/commands.py            # a minute
    python tests/benchmarks/commands.py --smallest # seconds; what the test suite runs

A run of random traces is written first. Seconds are of the fastest turn, from the start of Python
to its end; processor seconds are of all threads. The aim is 2.5 seconds on two cores. Modules are
those loaded at the end, and the large libraries among them are named.
"""

from __future__ import annotations

import dataclasses
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sweep import Shape, record

import kvsim
from harness import report

#: 240 cells: 2 traces, 12 policies, 10 budgets.
AIM = Shape(2, 2, 4, 2, 512, 16, tuple(range(40, 240, 20)), 5)
SMALLEST = dataclasses.replace(AIM, tokens=128, budgets=(64,), turns=1)
POLICIES = ["ams", "cake", "expected_attention", "gkv", "h2o", "keydiff", "knorm", "lagkv"]
POLICIES += ["random", "snapkv", "streaming_llm", "tova"]
COMMANDS = {
    "compare": ("compare", "run"),
    "table": ("table", "run"),
    "plot pareto": ("plot", "pareto", "run", "--out", "{turn}.png"),
    "info": ("info", "run"),
    "policies ams": ("policies", "ams"),
}
LARGE = ("matplotlib", "polars", "scipy.stats", "torch", "transformers", "zarr")
_CODE = f"""
import sys
from kvsim.cli import main
try:
    main()
finally:
    print(len(sys.modules), *{{*{LARGE}}} & {{*sys.modules}}, file=sys.stderr)
"""


def processor_seconds() -> float:
    """Seconds of processor time of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(shape: Shape, names: tuple[str, ...] = tuple(COMMANDS)) -> tuple[dict, list[str]]:
    """Return the large libraries that each command loads, and the report line by line."""
    loaded, lines = {}, []
    with tempfile.TemporaryDirectory() as name:
        traces = record(shape, Path(name))
        grid = {"traces": traces, "policies": POLICIES, "budgets": list(shape.budgets)}
        table = kvsim.sweep(**grid, out=Path(name, "run")).table
        cells = table.drop_nulls("policy").n_unique(["trace", "policy", "budget"])
        lines.append(f"{cells} cells, {table.height} rows")
        for command in names:
            best = (float("inf"), 0.0)
            for turn in range(shape.turns):
                words = [word.format(turn=turn) for word in COMMANDS[command]]
                began, used = time.perf_counter(), processor_seconds()
                done = subprocess.run(
                    [sys.executable, "-c", _CODE, *words],
                    cwd=name,
                    check=True,
                    capture_output=True,
                    text=True,
                )
                best = min(best, (time.perf_counter() - began, processor_seconds() - used))
            modules, *large = done.stderr.splitlines()[-1].split()
            loaded[command] = {*large}
            lines.append(
                f"{command:13} {best[0]:5.2f} s, processor {best[1]:5.2f} s, {modules} modules: "
                f"{', '.join(sorted(large)) or 'none large'}"
            )
    return loaded, lines


if __name__ == "__main__":
    report(__doc__, run, (AIM,), (SMALLEST,))
