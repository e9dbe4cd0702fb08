"""What a look at the dashboard costs: seconds from a click to the last change of the page.

    python tests/benchmarks/dashboard.py                            # a minute; needs Chromium
    python tests/benchmarks/dashboard.py --doc docs/dashboard.md    # also puts them into that page

The server is warm: every page was opened once. A time begins with the click, or with the opening of
a link, and ends with the last change of the page. CPU seconds are those of server and browser until
the page stands still; other work on the machine does not change them much.
Nothing here is asserted; what causes the times is (tests/dashboard).
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

import kvsim
from kvsim.samples import sample_trace
from kvsim.sweeps.driver import replay_all

sys.path.append(str(Path(__file__).parents[1]))
from browsing import PAGES, Tab, chromium, home, serve

from harness import options, publish

#: Tokens of the long trace, whose map of attention is opened.
LONG = 4096


def random(seed: int, layers: int, heads: int, tokens: int, name: str) -> kvsim.Trace:
    """A trace of random numbers, two query heads to a KV head."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(layers, n, tokens, 8, generator=generator) for n in (2 * heads, heads, heads)
    )
    rope = kvsim.Rope.default(8)
    return kvsim.Trace.from_arrays(q, k, v, prompt_len=tokens // 2, rope=rope, name=name)


def fill(folder: Path) -> None:
    """The sample, a run of twelve prompts, six policies and three budgets, and a long trace."""
    shutil.copytree(sample_trace(), folder / "sample.zarr")
    random(0, 1, 1, LONG, "long").save(folder / "long.zarr")
    names = ("streaming_llm", "tova", "snapkv", "ams", "h2o", "keydiff")
    traces = [random(seed, 6, 2, 300, f"random-{seed}") for seed in range(12)]
    policies = [kvsim.policy(name) for name in names]
    run = replay_all(traces, policies, [64, 96, 128], interval=32, fit=True, regret=True)
    run.save(folder / "runs" / "twelve")


def looks(tab: Tab, address: str) -> Iterator[tuple[str, Callable[[], float]]]:
    """What is done, by name; each returns its seconds."""
    sample = {"trace": "sample.zarr"}
    for page in PAGES:
        tab.open(address, page, **sample)  # warm
    for page in PAGES[1:]:
        yield "open the next page with a click", lambda page=page: tab.follow(page)
    controls: dict[str, tuple[Callable[[], float], ...]] = {
        "retention": (
            lambda: tab.choose("Layer", "1"),
            lambda: tab.choose("Policy", "snapkv"),
            lambda: tab.step("Budget")[1],
        ),
        "segments": (lambda: tab.choose("KV head", "2"), lambda: tab.step("Budget")[1]),
        "compare": (
            lambda: tab.choose("Metric", "wipeout"),
            lambda: tab.choose("Split by", "stage"),
        ),
        "trace": (lambda: tab.choose("Layer", "0"),),
        "layers": (lambda: tab.choose("Layer", "0"),),
    }
    for page, actions in controls.items():
        tab.open(address, page, **sample)
        for action in actions:
            yield "choose another layer, policy, metric or parameter", action
    for page in PAGES:
        yield "open a page from its link", lambda page=page: tab.open(address, page, **sample)
    # a second time: the attention is computed once
    for _ in range(2):
        name = f"open the attention of {LONG:,} rows by {LONG:,} positions from its link"
        yield name, lambda: tab.open(address, "trace", trace="long.zarr")


def spent() -> float:
    """CPU seconds of the server and the browser so far."""
    total = 0.0
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            total += times.user + times.system
    return total


def run(folder: Path) -> list[dict[str, Any]]:
    """Look at the pages; what was done, its seconds, CPU seconds, and bytes."""
    rows = []
    with serve(folder) as link, chromium(link) as context:
        tab = Tab(context.new_page())
        for name, action in looks(tab, home(link)):
            received, before = len(tab.received), spent()
            seconds = action()
            size = sum(tab.received[received:])
            rows.append({"what": name, "s": seconds, "cpu": spent() - before, "bytes": size})
            print(f"{name}: {seconds:.2f} s, {rows[-1]['cpu']:.2f} CPU s, {size / 1e6:.2f} MB")
    return rows


def report(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each kind of look, with the ends of its ranges."""
    names = list(dict.fromkeys(row["what"] for row in rows))
    wide = max(map(len, names))
    lines = [f"{'':{wide}}  {'seconds':>12}  {'CPU seconds':>13}  {'sent, MB':>12}"]
    for what in names:
        ends = []
        for key, unit in (("s", 1), ("cpu", 1), ("bytes", 1e6)):
            values = [row[key] / unit for row in rows if row["what"] == what]
            ends.append(f"{min(values):.2f} to {max(values):.2f}")
        lines.append(f"{what:{wide}}  {ends[0]:>12}  {ends[1]:>13}  {ends[2]:>12}")
    return lines


if __name__ == "__main__":
    given = options(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as place:
        fill(Path(place))
        publish(report(run(Path(place))), given.doc, "dashboard")
