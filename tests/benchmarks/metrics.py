"""What measuring costs beside replaying: twelve records of one trace, measured in one process.

    python tests/benchmarks/metrics.py            # 2,048 tokens, one layer: a minute or two
    python tests/benchmarks/metrics.py --smallest # seconds; what the test suite runs

With `--doc docs/performance.md` the report is put into that page.

Prints the time of one replay and output error (`snapkv` at the first budget), then for each kind of
metric the time for one record and for all twelve, in units of it. Set metrics come from records
alone. What needs attention walks the trace once for all of them: what is left of its cost when
eleven records more are measured is the part that belongs to a record.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import kvsim
from kvsim import Record, Trace
from kvsim.analysis.output.error import output_error
from kvsim.analysis.registry import METRICS

sys.path.append(str(Path(__file__).parent))
from replay import Size, arrays, best, fresh, put

BEGIN, END = "<!-- begin metrics -->", "<!-- end metrics -->"

AIM = Size(1, 4, 7, 128, tokens=2048, prompt=512, budget=512, interval=256, repeats=1)
SMALLEST = Size(1, 2, 2, 32, tokens=512, prompt=128, budget=64, interval=64, repeats=1)

POLICIES = ("snapkv", "tova", "streaming_llm", "knorm", "keydiff", "random")

#: Metrics that stand in one line; `output` is what the output error gives, `layer` the output error
#: with the layer error behind the projection, `attended` the walk over full attention, `all` the
#: default metrics of a trace without output projections.
PARTS = {
    "sets": [name for name, one in METRICS.items() if one.kind == "sets"],
    "trace": [name for name, x in METRICS.items() if x.kind == "trace" and x.default],
    "output": ["output_error", "retained_mass", "missing_mass", "error_distance"],
    "layer": ["output_error", "layer_error"],
    "attended": ["wipeout_mass", "topk_recall"],
    "compressed": ["sparsity_compressed"],
    "all": [x for x, m in METRICS.items() if m.default and not (m.beside or m.arrays)],
}


def replayed(size: Size, trace: Trace) -> list[Record]:
    """Two budgets of each policy."""
    return [
        kvsim.replay(trace, kvsim.policy(name), budget=budget, interval=size.interval)
        for budget in (size.budget, size.budget // 2)
        for name in POLICIES
    ]


def seconds(size: Size, trace: Trace, records: Sequence[Record], names: Sequence[str]) -> float:
    """Seconds of measuring these metrics of the records."""
    return best(lambda: kvsim.measure(trace, records, names), size.repeats)


def run(size: Size) -> tuple[dict[str, float], list[str]]:
    """Ratios by name, and the report line by line."""
    hidden = size.heads * size.group * size.dim
    o_proj = torch.randn(size.layers, size.heads * size.group, size.dim, hidden)
    trace = fresh(size, arrays(size) | {"o_proj": o_proj})
    policy = kvsim.policy("snapkv")

    def replay() -> None:
        record = kvsim.replay(trace, policy, budget=size.budget, interval=size.interval)
        output_error(trace, [record])

    unit = best(replay, size.repeats)
    records = replayed(size, trace)
    ratios = {}
    lines = [
        f"threads {torch.get_num_threads()}, torch {torch.__version__}",
        f"{size}",
        f"a replay of snapkv with its output error: {unit * 1e3:.0f} ms; in units of it,",
    ]
    for part, names in PARTS.items():
        one, every = (seconds(size, trace, of, names) / unit for of in (records[:1], records))
        ratios[part] = every
        lines.append(f"{part:10} {one:6.2f} for 1 record, {every:6.2f} for {len(records)}")
    return ratios, lines


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smallest", action="store_true", help="seconds instead of a minute")
    parser.add_argument("--doc", type=Path, help="put the report into this page, between its marks")
    options = parser.parse_args()
    _, lines = run(SMALLEST if options.smallest else AIM)
    print("\n".join(lines))
    if options.doc:
        put(options.doc, lines, BEGIN, END)


if __name__ == "__main__":
    main()
