"""CPU seconds of this checkout over those of another one, the two in turn on the same machine.

    git worktree add ../before COMMIT
    python tests/benchmarks/against.py ../before            # some minutes
    python tests/benchmarks/against.py ../before --smallest # seconds; what the test suite runs

Each turn runs in a new process with one thread: a grid of replays with their metrics, policies that
evict after every row, and the output error of one record. A ratio is that of the fastest turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import kvsim
from harness import cpu_seconds
from kvsim.analysis.output.error import output_error


@dataclass(frozen=True)
class Size:
    """Shapes of one run."""

    layers: int
    heads: int
    group: int
    dim: int
    tokens: int
    prompt: int
    budget: int
    interval: int | None
    repeats: int = 3
    matrix: int = 2048


POLICIES = (
    *("streaming_llm", "h2o", "tova", "snapkv", "pyramidkv", "knorm"),
    *("keydiff", "lagkv", "expected_attention", "gkv", "rkv", "ams"),
)
HERE = Path(__file__).resolve().parents[2]
AIM = Size(1, 4, 7, 128, tokens=2048, prompt=512, budget=256, interval=128, repeats=2)
SMALLEST = Size(1, 2, 2, 32, tokens=192, prompt=96, budget=48, interval=32, repeats=1)


def arrays(size: Size) -> dict[str, torch.Tensor]:
    """Random q, k, v with their full attention."""
    torch.manual_seed(0)
    rows = (size.layers, size.heads * size.group, size.tokens, size.dim)
    entries = (size.layers, size.heads, size.tokens, size.dim)
    given = {"q": torch.randn(rows), "k": torch.randn(entries), "v": torch.randn(entries)}
    if size.interval != 1:
        trace = fresh(size, given)
        given["attn_out"], given["lse"] = trace.full()
    return given


def fresh(size: Size, given: dict[str, torch.Tensor]) -> kvsim.Trace:
    """A trace that has cached nothing."""
    rope = kvsim.Rope.default(size.dim)
    return kvsim.Trace.from_arrays(**given, prompt_len=size.prompt, rope=rope)


def turn(size: Size) -> dict[str, float]:
    """CPU seconds of each stage, of the kvsim that is imported."""
    torch.set_num_threads(1)
    given, found = arrays(size), dict[str, float]()
    kvsim.replay(fresh(size, given), kvsim.policy("knorm"), size.budget)  # what is built once
    record = kvsim.replay(
        fresh(size, given), kvsim.policy("tova"), size.budget, interval=size.interval
    )
    trace = fresh(size, given)
    found["output error of one record"], _ = cpu_seconds(lambda: output_error(trace, [record]))
    for name in ("tova", "h2o"):
        trace, policy = fresh(size, given), kvsim.policy(name)
        of_policy = cpu_seconds(
            lambda x=trace, y=policy: kvsim.replay(x, y, size.budget, interval=1)
        )
        found[f"{name} after every row"], _ = of_policy
    budgets = [size.budget, size.budget // 2, size.budget // 4]
    grid = {"traces": fresh(size, given), "policies": [*POLICIES], "budgets": budgets}
    called = f"grid of {len(POLICIES)} policies, {len(budgets)} budgets"
    grid["intervals" if kvsim.__version__ == "0.1.0" else "interval"] = [size.interval]
    found[called], _ = cpu_seconds(lambda: kvsim.sweep(**grid))
    return found


def run(size: Size, other: Path) -> tuple[dict[str, float], list[str]]:
    """Ratios by stage, and lines of the report; other: the folder of the other checkout."""
    folders, turns = (other.resolve(), HERE), list[dict[str, float]]()
    more = ["--turn", *(["--smallest"] if size == SMALLEST else [])]
    for folder in folders * size.repeats:
        given = os.environ | {"PYTHONPATH": str(folder)}
        command = [sys.executable, __file__, str(folder), *more]
        done = subprocess.run(command, env=given, capture_output=True, text=True, check=True)
        turns.append(json.loads(done.stdout.splitlines()[-1]))
    before, now = (
        {stage: min(each[stage] for each in turns[first::2]) for stage in turns[0]}
        for first in (0, 1)
    )
    ratios = {stage: now[stage] / before[stage] for stage in now}
    lines = [f"torch {torch.__version__}, one thread, {size.repeats} turns each; {size}"]
    lines.append(f"{'CPU seconds':40}{'other':>10}{'this':>10}{'ratio':>10}")
    for stage, ratio in ratios.items():
        lines.append(f"{stage:40}{before[stage]:10.2f}{now[stage]:10.2f}{ratio:10.2f}")
    return ratios, lines


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--smallest", action="store_true", help="the size of the test suite")
    parser.add_argument("other", type=Path, help="the folder of the other checkout")
    parser.add_argument("--turn", action="store_true", help="one turn, of the kvsim on the path")
    given = parser.parse_args()
    size = SMALLEST if given.smallest else AIM
    if given.turn:
        assert Path(kvsim.__file__).resolve().parents[1] == given.other, kvsim.__file__
        sys.stdout.write(json.dumps(turn(size)) + "\n")
        return
    _, lines = run(size, given.other)
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
