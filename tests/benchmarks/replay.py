"""How close replay comes to the hardware: ratios measured in one process.

    python tests/benchmarks/replay.py            # the sizes of the aim, about a minute
    python tests/benchmarks/replay.py --smallest # seconds; what the test suite runs

Prints
* the fp32 matrix-product rate of the machine, and the rate of replay with output error as a share
  of it. Useful operations are 4 x dim x the entries that query heads see, over rows after the
  prompt; time is scoring, selection, merging and the error, with the full output and log-sum-exp
  given. Rows before the first eviction are useful and free; the share without them stands beside.
* the rate of the two products and the exponential in between, with nothing else.
* for policies that evict after every row, the time of a row against reading the live keys once.
* the time that each part takes.
"""

import time
from dataclasses import dataclass

import torch

import kvsim
from harness import best, matrix_rate, report
from kvsim.analysis.output.error import output_error
from kvsim.analysis.output.seen import ROWS


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
    matrix: int = 2048
    repeats: int = 3


AIM = Size(1, 4, 7, 128, tokens=4096, prompt=512, budget=512, interval=512, repeats=5)
AIM_ROWS = Size(28, 4, 7, 128, tokens=2048, prompt=64, budget=256, interval=1, repeats=2)
SMALLEST = Size(1, 2, 2, 32, tokens=512, prompt=128, budget=64, interval=64, matrix=256)
SMALLEST_ROWS = Size(2, 2, 2, 32, tokens=256, prompt=64, budget=64, interval=1, matrix=256)


def bare_rate(size: Size) -> float:
    """Operations per second of logits, exponentials and products of a block, with nothing else."""
    rows, entries = size.group * ROWS, size.budget + (size.interval or 0) // 2
    q, k, v = (torch.randn(n, size.dim) for n in (rows, entries, entries))
    z, out = torch.empty(entries, rows), torch.empty(size.dim, rows)

    def block() -> None:
        torch.mm(k, q.mT, out=z).exp_()
        torch.mm(v.mT, z, out=out)

    q /= size.dim**0.5
    return 4 * size.dim * entries * rows / best(block, 40)


def arrays(size: Size) -> dict[str, torch.Tensor]:
    """Random q, k, v with their full attention."""
    torch.manual_seed(0)
    rows = (size.layers, size.heads * size.group, size.tokens, size.dim)
    entries = (size.layers, size.heads, size.tokens, size.dim)
    given = {"q": torch.randn(rows), "k": torch.randn(entries), "v": torch.randn(entries)}
    if size.interval != 1:
        trace = fresh(size, given)
        given["attn_out"], given["lse"] = trace.attn_out, trace.lse
    return given


def fresh(size: Size, given: dict[str, torch.Tensor]) -> kvsim.Trace:
    """A trace that has cached nothing."""
    rope = kvsim.Rope.default(size.dim)
    return kvsim.Trace.from_arrays(**given, prompt_len=size.prompt, rope=rope)


def error_rate(size: Size, name: str, given: dict[str, torch.Tensor]) -> dict[str, float]:
    """Operations per second of replay and output error, and the seconds of both parts."""
    outcome = {"rate": 0.0}
    policy = kvsim.policy(name)
    for _ in range(size.repeats):
        trace = fresh(size, given)
        start = time.perf_counter()
        record = kvsim.replay(trace, policy, budget=size.budget, interval=size.interval)
        middle = time.perf_counter()
        output_error(trace, [record])
        end = time.perf_counter()
        entries = [int(record.kept(row).sum()) for row in range(size.prompt, size.tokens)]
        # rows before the first eviction see everything and have nothing to compute
        idle = sum(entries[: record.events[0] + 1 - size.prompt]) / sum(entries)
        rate = 4 * size.dim * sum(entries) * size.group / (end - start)
        if rate > outcome["rate"]:
            outcome = {
                "rate": rate,
                "idle": idle,
                "replay_s": middle - start,
                "error_s": end - middle,
            }
    return outcome


def row_cost(size: Size, name: str, given: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Seconds per row that evicts, and seconds of reading the live keys of all layers once."""
    policy = kvsim.policy(name)
    total = best(lambda: kvsim.replay(fresh(size, given), policy, size.budget), size.repeats)
    live = torch.randn(size.layers, size.heads, size.budget, size.dim)
    read = best(live.sum, 50)
    return total / (size.tokens - max(size.prompt, size.budget)), read


def run(size: Size, rows: Size) -> tuple[dict[str, float], list[str]]:
    """Ratios by name, and the report line by line."""
    ratios = {}
    lines = [f"threads {torch.get_num_threads()}, torch {torch.__version__}", f"{size}"]
    given = arrays(size)
    rate = matrix_rate(size.matrix)
    measured, bare = {}, 0.0
    for name in ("tova", "snapkv"):
        measured[name] = error_rate(size, name, given)
        # the best that the machine showed: one that was busy just then would flatter us
        rate, bare = max(rate, matrix_rate(size.matrix)), max(bare, bare_rate(size))
    for name, found in measured.items():
        ratios[name] = found["rate"] / rate
        lines.append(
            f"{name:7} {found['rate'] / 1e9:6.1f} of {rate / 1e9:.1f} Gop/s: {ratios[name]:.2f}, "
            f"{ratios[name] * (1 - found['idle']):.2f} without the rows before the first eviction "
            f"(replay {found['replay_s'] * 1e3:.0f} ms, error {found['error_s'] * 1e3:.0f} ms)"
        )
    ratios["bare"] = bare / rate
    lines.append(
        f"product, exponential, product: {bare / 1e9:.1f} Gop/s, {ratios['bare']:.2f}; nothing else"
    )
    lines.append(f"{rows}")
    given = arrays(rows)
    products = 2 * rows.dim * rows.layers * rows.heads * rows.group * rows.budget
    for name in ("tova", "h2o"):
        cost, read = row_cost(rows, name, given)
        ratios[f"{name} row"] = cost / read
        lines.append(
            f"{name:7} {cost * 1e3:.2f} ms per row: {cost / read:.1f} times reading the live keys "
            f"once ({read * 1e3:.3f} ms), {cost * rate / products:.1f} times the products of its "
            "queries with them at the matrix rate"
        )
    return ratios, lines


if __name__ == "__main__":
    report(__doc__, run, (AIM, AIM_ROWS), (SMALLEST, SMALLEST_ROWS))
