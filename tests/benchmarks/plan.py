"""What commands take, next to what `--plan` says: bytes, files, memory and time.

    python tests/benchmarks/plan.py                  # tiny, SmolLM2, a sweep, a live run: minutes
    python tests/benchmarks/plan.py --smallest       # one prompt of tiny, and a sweep: seconds

Each command runs in a process of its own, in a temporary folder, and prints its plan and what it
took with `--json`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from harness import report
from kvsim.studies.language.tasks import prompts

TWELVE = (
    "streaming_llm,snapkv,tova,h2o,knorm,keydiff,pyramidkv,expected_attention,lagkv,gkv,rkv,ams"
)
TEXT = "the quick brown fox jumps over the lazy dog. " * 100  # a thousand tokens
WORDS = {"PROMPTS": "prompts.jsonl", "TEXT": TEXT, "TWELVE": TWELVE}
COMMANDS = {
    "capture of tiny, 40 prompts": "capture --model tiny --prompts PROMPTS --out tiny",
    "capture of SmolLM2, 1,000 + 40 tokens": (
        "capture --model smollm2 --prompt TEXT --max-new-tokens 40 --out smollm2.zarr"
    ),
    "sweep, 12 policies, 3 budgets, 2 traces": (
        "sweep sample sample-smollm2 --budget 32,64,128 --policy TWELVE --out sweep"
    ),
    "live, 2 policies": "live sample --model tiny --policy snapkv,tova --budget 64 --out live",
}
SMALLEST = {
    "capture of tiny, a prompt": (
        "capture --model tiny --prompts PROMPTS --limit 1 --max-new-tokens 9 --out tiny"
    ),
    "sweep, 2 policies": "sweep sample --budget 64 --policy tova,knorm --out sweep",
}


def run(commands: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Run commands; returns plan and outcome of each by name, and the lines of the report."""
    plans: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        rows = (json.dumps(each.row(str(place))) for place, each in enumerate(prompts(40)))
        Path(folder, "prompts.jsonl").write_text("\n".join(rows) + "\n")
        for name, arguments in commands.items():
            given = [WORDS.get(each, each) for each in arguments.split()]
            command = [sys.executable, "-m", "kvsim", *given, "--json"]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
            plans[name] = json.loads(done.stdout)["plan"]
    lines = [f"{'planned / took':40} {'MB':>15} {'files':>13} {'memory, MB':>15} {'seconds':>13}"]
    for name, plan in plans.items():
        both = plan, plan["actual"]
        columns = [" / ".join(f"{each['bytes'] / 1e6:.2f}" for each in both)]
        columns += [" / ".join(str(each["files"]) for each in both)]
        columns += [" / ".join(f"{each['memory'] / 1e6:.0f}" for each in both)]
        columns += [" / ".join(f"{each['seconds']:.1f}" for each in both)]
        widths = (15, 13, 15, 13)
        cells = " ".join(f"{x:>{n}}" for x, n in zip(columns, widths, strict=True))
        lines.append(f"{name:40} {cells}")
    return plans, lines


if __name__ == "__main__":
    report(__doc__, run, (COMMANDS,), (SMALLEST,))
