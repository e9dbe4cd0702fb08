"""What benchmarks share: clocks, options of a script, and the report and its place in a page."""

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch


def best(
    call: Callable[[], object], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds of the fastest of some calls."""
    times = []
    for _ in range(repeats):
        start = clock()
        call()
        times.append(clock() - start)
    return min(times)


def cpu_seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of a call, and its result."""
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


def matrix_rate(size: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """fp32 operations per second of a square matrix product."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / best(lambda: a @ b, 8, clock)


def random_model(**sizes: Any) -> Any:
    """A random model, as tests build it."""
    if (tests := str(Path(__file__).parents[1])) not in sys.path:
        sys.path.append(tests)
    return importlib.import_module("small_model").small(**sizes)


def options(doc: str | None) -> argparse.ArgumentParser:
    """The options that all scripts have."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--smallest", action="store_true", help="the size of the test suite")
    parser.add_argument("--doc", type=Path, help="put the report into this page, between its marks")
    return parser


def publish(lines: Sequence[str], page: Path | None, name: str) -> None:
    """Print a report, and replace what stands between its marks in a page."""
    print(*lines, sep="\n")
    if page is None:
        return
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    head, _, rest = page.read_text("utf-8").partition(begin)
    _, _, tail = rest.partition(end)
    report = "\n".join(["", "```text", *lines, "```", ""])
    page.write_text(head + begin + report + end + tail, "utf-8")


def report(
    doc: str | None,
    run: Callable[..., tuple[Any, Sequence[str]]],
    aim: Sequence[Any],
    smallest: Sequence[Any],
    name: str = "benchmark",
) -> None:
    """Run a script from the command line: `run` with the sizes of the aim, or the smallest."""
    given = options(doc).parse_args()
    _, lines = run(*(smallest if given.smallest else aim))
    publish(lines, given.doc, name)
