"""What the optimum costs: seconds, certified gap, and CPU seconds against events and entries.

    python tests/benchmarks/optimum.py                # a minute or two
    python tests/benchmarks/optimum.py --trace PATH   # of a recorded trace, every interval as well
    python tests/benchmarks/optimum.py --smallest     # seconds; what the test suite runs

One process, one thread. Of each size the CPU seconds of the attention that entries get between
events (`mass`), of the kept sets and prices that follow from it (`solve`), their sum over the CPU
seconds of the output error of one replay (`ratio`), and the largest gap of a head between what the
kept sets retain and what their prices prove possible. A slope is that of the logarithm of the
seconds of `solve` over the logarithm of the size, by least squares: 1 is linear, 2 quadratic.
"""

from pathlib import Path

import numpy as np
import torch

import kvsim
from harness import cpu_seconds, options, publish, random_trace
from kvsim.analysis.output.error import output_error
from kvsim.core.policy import Schedule
from kvsim.engine.source import TraceSource
from kvsim.policies import future
from kvsim.policies.optimum import solve

#: Tokens and intervals of random traces: of two layers of two heads, a quarter of it prompt.
AIM = (
    ((2048, 64), (2048, 16), (2048, 4), (2048, 1)),
    ((512, 16), (1024, 16), (2048, 16), (4096, 16)),
)
SMALLEST = (((128, 32), (128, 16)), ((64, 16), (128, 16)))


def measured(trace: kvsim.Trace, interval: int, budget: int, error: float) -> dict[str, float]:
    """Figures of one optimum; error: CPU seconds of the output error of a replay."""
    events = Schedule(interval).rows(trace.prompt_len, trace.n_pos)
    first = np.searchsorted(events, np.arange(trace.n_pos))
    spent, gap = {"mass": 0.0, "solve": 0.0}, 0.0
    each = max(1, future.MASS_BYTES // (8 * trace.n_heads * trace.n_pos * len(events)))
    for layer in range(0, trace.n_layers, each):
        layers = range(layer, min(layer + each, trace.n_layers))
        source = TraceSource(trace, layers, torch.device("cpu"))
        taken, mass = cpu_seconds(lambda s=source: future.future_mass(s, events, trace.prompt_len))
        spent["mass"] += taken
        mass = mass.numpy().reshape(-1, *mass.shape[2:])
        places = np.full((len(mass), len(events)), budget)
        taken, optimum = cpu_seconds(lambda m=mass, p=places: solve(m, first, p))
        spent["solve"] += taken
        gap = max(gap, float((1 - optimum.retained / optimum.bound).max()))
    return spent | {"ratio": sum(spent.values()) / error, "gap": gap, "events": len(events)}


def error_seconds(trace: kvsim.Trace, budget: int) -> float:
    """CPU seconds of the output error of one replay, the faster of two."""
    record = kvsim.replay(trace, kvsim.policy("tova"), budget, interval=64)
    return min(cpu_seconds(lambda: output_error(trace, [record]))[0] for _ in range(2))


def line(trace: kvsim.Trace, interval: int, budget: int, figures: dict[str, float]) -> str:
    """A row of the report."""
    size = f"{trace.n_layers * trace.n_heads:6}{trace.n_pos:8}{interval:10}"
    return (
        f"{size}{figures['events']:8.0f}{budget:8}{figures['mass']:9.2f}{figures['solve']:9.2f}"
        f"{figures['ratio']:8.1f}{figures['gap']:10.0e}"
    )


HEADER = (
    f"{'heads':>6}{'tokens':>8}{'interval':>10}{'events':>8}{'budget':>8}"
    f"{'mass':>9}{'solve':>9}{'ratio':>8}{'gap':>10}"
)


def run(
    sizes: tuple[tuple[tuple[int, int], ...], ...], path: Path | None = None
) -> tuple[dict[str, float], list[str]]:
    """Slopes of `solve` and the largest gap, and lines of the report."""
    torch.set_num_threads(1)
    lines, slopes, worst = [f"torch {torch.__version__}, one thread", HEADER], {}, 0.0
    if path is not None:
        trace = kvsim.open_trace(path).loaded()
        error = error_seconds(trace, 256)
        for interval, budget in ((64, 128), (64, 256), (64, 512), (16, 256), (4, 256), (1, 256)):
            lines.append(line(trace, interval, budget, measured(trace, interval, budget, error)))
    for label, shapes in zip(("events", "tokens"), sizes, strict=True):
        points = []
        for tokens, interval in shapes:
            # attention is far from uniform, as that of trained models
            trace = random_trace(n=tokens, dim=32, size=2.25, prompt_len=tokens // 4)
            budget = tokens // 8
            figures = measured(trace, interval, budget, error_seconds(trace, budget))
            lines.append(line(trace, interval, budget, figures))
            worst = max(worst, figures["gap"])
            points.append((figures["events"] if label == "events" else tokens, figures["solve"]))
        x, y = np.log2(np.array(points)).T
        slopes[label] = float(np.polyfit(x, y, 1)[0])
        lines.append(f"slope of solve against {label}: {slopes[label]:.2f}")
    return slopes | {"gap": worst}, lines


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--trace", type=Path, help="a recorded trace to measure first")
    given = parser.parse_args()
    publish(run(SMALLEST if given.smallest else AIM, given.trace)[1], given.doc, "optimum")
