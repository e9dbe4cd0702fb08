"""How the cost of a sweep grows: CPU seconds against tokens, layers, heads, policies and budgets.

    python tests/benchmarks/slopes.py            # some minutes
    python tests/benchmarks/slopes.py --smallest # seconds; what the test suite runs

Random traces on disk, with their attention outputs and log-sum-exp unless they are named as
missing; one process, one thread; `kvsim.sweep` from opening the trace to the Table. One size
doubles from one end of its range to the other while the others stay. A slope is that of the
logarithm of CPU seconds over the logarithm of the size, by least squares: 1 is linear, 2 quadratic.
The last one is that of the last doubling alone, where what every sweep costs once weighs least.
"""

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

import kvsim
from harness import random_trace, report

#: What is measured beside the replay; recorded: whether the trace has the outputs of attention.
ERRORS = ("output_error", "retained_mass", "missing_mass", "error_distance")
SETS = ("wipeout", "retained_iou", "entries_seen", "retained_position")
WALKS = ("topk_recall", "wipeout_mass")


@dataclass(frozen=True)
class Shape:
    """A trace, half of it prompt, and a grid: events every 64 rows, budgets about `budget`."""

    tokens: int = 2048
    layers: int = 2
    heads: int = 2
    dim: int = 32
    policies: int = 4
    budgets: int = 4
    budget: int = 256
    metrics: tuple[str, ...] | None = ERRORS
    recorded: bool = True


@dataclass(frozen=True)
class Range:
    """A size that doubles from `low` to `high`, with all else as in `shape`."""

    label: str
    size: str
    low: int
    high: int
    shape: Shape = Shape()

    def shapes(self) -> list[tuple[int, Shape]]:
        """Each size with its shape."""
        sizes = [self.low << step for step in range((self.high // self.low).bit_length())]
        return [(size, replace(self.shape, **{self.size: size})) for size in sizes]


_SIZES = {"layers": 32, "heads": 32, "policies": 32, "budgets": 32}
AIM = (
    Range("main metrics", "tokens", 1024, 32768, Shape(metrics=None)),
    Range("errors, outputs recorded", "tokens", 1024, 32768),
    Range("errors, outputs missing", "tokens", 1024, 32768, Shape(recorded=False)),
    Range("kept sets", "tokens", 1024, 32768, Shape(metrics=SETS)),
    Range("full attention", "tokens", 1024, 16384, Shape(metrics=WALKS)),
    *(Range("main metrics", size, 2, high, Shape(metrics=None)) for size, high in _SIZES.items()),
)
_TINY = Shape(tokens=128, layers=2, dim=8, policies=2, budgets=1, budget=65)
SMALLEST = (Range("errors, outputs recorded", "tokens", 128, 256, _TINY),)


def record(shape: Shape, path: Path) -> None:
    """Store a random trace, half of it prompt."""
    sizes = {x: getattr(shape, x) for x in ("layers", "heads", "dim")}
    facts = {"prompt_len": shape.tokens // 2, "computed": shape.recorded, "name": "random"}
    random_trace(**sizes, n=shape.tokens, **facts).save(path)


def policies(count: int) -> list[dict[str, dict[str, int]]]:
    """SnapKV and StreamingLLM in turns, each with another parameter."""
    return [
        {"snapkv": {"pool_kernel": number + 1}}
        if number % 2 == 0
        else {"streaming_llm": {"sink": number}}
        for number in range(count)
    ]


def seconds(shape: Shape) -> float:
    """CPU seconds of a sweep; of a short one, of the faster of two."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "random.zarr"
        record(shape, path)
        spent = swept(shape, path)
        return spent if spent > 2 else min(spent, swept(shape, path))


def swept(shape: Shape, path: Path) -> float:
    """CPU seconds of a sweep in this process, from opening the trace to the Table."""
    began = time.process_time()
    run = kvsim.sweep(
        traces=[str(path)],
        policies=policies(shape.policies),
        budgets=[shape.budget + 2 * n - shape.budgets for n in range(shape.budgets)],
        intervals=64,
        metrics=None if shape.metrics is None else list(shape.metrics),
    )
    spent = time.process_time() - began
    assert not run.failures, run.failures
    return spent


def run(ranges: tuple[Range, ...]) -> tuple[dict[str, float], list[str]]:
    """Slopes by what was measured and the size, and lines of the report."""
    torch.set_num_threads(1)
    seconds(_TINY)  # what is imported and built once
    slopes, base = {}, ranges[0].shape
    lines = [
        f"torch {torch.__version__}, one thread",
        f"{base.tokens} tokens, {base.layers} layers, {base.heads} heads of 2 query heads,",
        f"dim {base.dim}, {base.policies} policies, {base.budgets} budgets about {base.budget}",
        f"{'what is measured':26}{'size':10}{'range':16}{'CPU seconds':>18}{'slope':>8}{'last':>8}",
    ]
    for one in ranges:
        sizes, spent = zip(*((n, seconds(shape)) for n, shape in one.shapes()), strict=True)
        x, y = np.log2(sizes), np.log2(spent)
        slope, last = float(np.polyfit(x, y, 1)[0]), float(y[-1] - y[-2])
        slopes[f"{one.label}, {one.size}"] = slope
        extent, taken = f"{sizes[0]} to {sizes[-1]}", f"{spent[0]:.2f} to {spent[-1]:.2f}"
        lines.append(f"{one.label:26}{one.size:10}{extent:16}{taken:>18}{slope:8.2f}{last:8.2f}")
    return slopes, lines


if __name__ == "__main__":
    report(__doc__, run, (AIM,), (SMALLEST,), "slopes")
