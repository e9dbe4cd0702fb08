"""What policies cost: choosing against a loop over heads, scoring against measuring the outcome.

    python tests/benchmarks/policies.py            # the sizes of the aim, a few minutes
    python tests/benchmarks/policies.py --smallest # seconds; what the test suite runs

Prints
* AMS and AdaKV: the time from scores (and AMS's usage) to the kept set, 28 layers x 4 heads x 1,024
  entries at once, against loops: numpy head by head and segment by segment, and plain Python entry
  by entry.
* for every policy the time of a whole replay (scoring and choosing at all events) in units of the
  ideal time of its output error: 4 x dim x the entries that query heads see in rows after the
  prompt, at the fp32 matrix rate.

With `--doc docs/performance.md` the report is put into that page.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import kvsim
from kvsim.core.select import compete, select
from kvsim.policies import CATALOGUE, names
from kvsim.policies.adakv import AdaKV
from kvsim.policies.ams import AMS, Segments, normalise

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from probes import repeated
from replay import Size, arrays, best, fresh, matrix_rate, put

from reference import allocation

BEGIN, END = "<!-- begin policies -->", "<!-- end policies -->"


@dataclass(frozen=True)
class Choice:
    """Shapes of one choice."""

    layers: int
    heads: int
    entries: int
    budget: int
    repeats: int


AIM_CHOICE = Choice(28, 4, 1024, 512, repeats=5)
AIM = Size(1, 4, 7, 128, tokens=4096, prompt=512, budget=512, interval=512, repeats=3)
SMALLEST_CHOICE = Choice(2, 2, 128, 64, repeats=1)
SMALLEST = Size(1, 2, 2, 32, tokens=320, prompt=128, budget=64, interval=64, matrix=256, repeats=1)


# ------------------------------------------------------------------- choosing, all heads at once


def choose_ams(ams: AMS, usage: Tensor, scores: Tensor, protected: Tensor, budget: int) -> Tensor:
    """From usage and scores [L, H, n] to the kept set."""
    live = torch.ones_like(protected)
    mass = normalise(usage, live)
    parts = Segments.of(ams.segment(mass, live), mass, protected, live)
    quotas = ams.share(parts, torch.full(usage.shape[:2], budget))
    return select(scores, quotas.units, protected, live, parts.group)


def choose_adakv(ada: AdaKV, scores: Tensor, protected: Tensor, budget: int) -> Tensor:
    """From scores [L, H, n] to the kept set."""
    layers, heads, n = scores.shape
    live, pos = torch.ones_like(protected), torch.arange(n).expand_as(scores)
    safe = protected.sum(-1) + int(ada.floor * budget)
    total = torch.full((layers,), heads * budget)
    quotas = compete(scores, safe.clamp(max=budget), total, protected, live, pos)
    return select(scores, quotas, protected, live)


# ------------------------------------------------------------------- the same, a head at a time


def loop_ams(
    ams: AMS, usage: np.ndarray, scores: np.ndarray, protected: np.ndarray, budget: int
) -> np.ndarray:
    """AMS in strict mode as one would write it first: heads, segments and entries one by one."""
    keep = np.zeros(scores.shape, dtype=bool)
    for at in np.ndindex(*scores.shape[:2]):
        mass = (usage[at] + 1e-12) / (usage[at] + 1e-12).sum()
        starts = _segment_one(ams, mass.cumsum())
        ends = [*starts[1:], len(mass)]
        parts = [slice(a, b) for a, b in zip(starts, ends, strict=True)]
        must = [int(protected[at][p].sum()) for p in parts]
        least = [
            max(r, min(ams.min_quota, p.stop - p.start)) for r, p in zip(must, parts, strict=True)
        ]
        weight = [float(mass[p].sum()) for p in parts]
        quotas = _share_one(least, [p.stop - p.start for p in parts], weight, budget)
        for p, quota in zip(parts, quotas, strict=True):
            ranked = np.argsort(np.where(protected[at][p], -np.inf, -scores[at][p]), kind="stable")
            keep[at][p.start + ranked[:quota]] = True
    return keep


def _segment_one(ams: AMS, cumulative: np.ndarray) -> list[int]:
    n, starts = len(cumulative), [0]
    for k in range(1, math.ceil(1 / ams.segment_mass - 1e-9)):
        crossing = np.flatnonzero(cumulative >= k * ams.segment_mass)
        if len(crossing):
            starts.append(max(1, int(crossing[0])))
    starts = sorted(set(starts))
    merged = [0]
    for start in starts[1:]:
        if start >= merged[-1] + ams.min_segment:
            merged.append(start)
    if len(merged) > 1 and n - merged[-1] < ams.min_segment:
        merged.pop()
    out = []
    for start, end in zip(merged, [*merged[1:], n], strict=True):
        pieces = -(-(end - start) // ams.max_segment)
        out += [start + -(-i * (end - start) // pieces) for i in range(pieces)]
    return out


def _share_one(least: list[int], size: list[int], weight: list[float], budget: int) -> list[int]:
    """Capped proportional shares by filling up again and again, then largest remainders."""
    share = [float(x) for x in least]
    open_ = [i for i in range(len(least)) if size[i] > least[i]]
    left = budget - sum(least)
    while left > 1e-9 and open_:
        total = sum(weight[i] for i in open_)
        full = [i for i in open_ if share[i] + left * weight[i] / total >= size[i]]
        if not full:
            for i in open_:
                share[i] += left * weight[i] / total
            break
        for i in full:
            left -= size[i] - share[i]
            share[i] = float(size[i])
        open_ = [i for i in open_ if i not in full]
    whole = [math.floor(x + 1e-9) for x in share]
    order = sorted(range(len(share)), key=lambda i: (whole[i] - share[i], i))
    for i in order[: budget - sum(whole)]:
        whole[i] += 1
    return whole


def loop_adakv(ada: AdaKV, scores: np.ndarray, protected: np.ndarray, budget: int) -> np.ndarray:
    """AdaKV with a sort per head and one per layer."""
    keep = np.zeros(scores.shape, dtype=bool)
    heads, n = scores.shape[1:]
    for layer in range(len(scores)):
        for head in range(heads):
            rank = np.where(protected[layer, head], -np.inf, -scores[layer, head])
            safe = min(budget, int(protected[layer, head].sum()) + int(ada.floor * budget))
            keep[layer, head, np.argsort(rank, kind="stable")[:safe]] = True
        rest = np.where(keep[layer], np.inf, -scores[layer]).T.ravel()  # by position, then head
        chosen = np.argsort(rest, kind="stable")[: heads * budget - int(keep[layer].sum())]
        keep[layer].T[np.unravel_index(chosen, (n, heads))] = True
    return keep


def plain_ams(
    ams: AMS, usage: np.ndarray, scores: np.ndarray, protected: np.ndarray, budget: int
) -> np.ndarray:
    """AMS by the steps of the naive reference."""
    keep = np.zeros(scores.shape, dtype=bool)
    n = scores.shape[-1]
    for at in np.ndindex(*scores.shape[:2]):
        mass = allocation.mass(usage[at].tolist())
        starts, _ = allocation.cuts(mass, ams.segment_mass, strict=True)
        starts = allocation.repair(starts, n, ams.min_segment, ams.max_segment, strict=True)
        parts = [range(a, b) for a, b in zip(starts, [*starts[1:], n], strict=True)]
        required = set(np.flatnonzero(protected[at]).tolist())
        weight = [sum(mass[i] for i in part) for part in parts]
        quotas, _ = allocation.strict_quotas(
            [len(part) for part in parts],
            weight,
            weight,
            [sum(i in required for i in part) for part in parts],
            budget,
            ams.min_quota,
        )
        kept, _ = allocation.pick_strict(parts, quotas, dict(enumerate(scores[at])), required)
        keep[at][list(kept)] = True
    return keep


def plain_adakv(ada: AdaKV, scores: np.ndarray, protected: np.ndarray, budget: int) -> np.ndarray:
    """AdaKV with Python's own sort."""
    keep = np.zeros(scores.shape, dtype=bool)
    heads, n = scores.shape[1:]
    for layer in range(len(scores)):
        score, always = scores[layer].tolist(), protected[layer].tolist()
        rest = []
        for h in range(heads):
            order = [(not always[h][i], -score[h][i], i) for i in range(n)]
            order.sort()
            safe = min(budget, sum(always[h]) + int(ada.floor * budget))
            keep[layer, h, [i for _, _, i in order[:safe]]] = True
            rest += [(negative, i, h) for _, negative, i in order[safe:]]
        for _, i, h in sorted(rest)[: heads * budget - int(keep[layer].sum())]:
            keep[layer, h, i] = True
    return keep


def choosing(size: Choice) -> tuple[dict[str, float], list[str]]:
    """How many times faster the choice is than the loop, by allocator."""
    generator = torch.Generator().manual_seed(0)
    shape = (size.layers, size.heads, size.entries)
    # usage with a heavy tail, a sink and recent entries, as attention has
    usage = torch.rand(shape, generator=generator, dtype=torch.float64) ** 8
    usage[..., 0] += 20
    scores = torch.rand(shape, generator=generator)
    protected = torch.zeros(shape, dtype=torch.bool)
    protected[..., :4] = protected[..., -32:] = True
    ams, ada = AMS(), AdaKV()
    flat: tuple[Any, ...] = (usage.numpy(), scores.numpy(), protected.numpy())
    ways = {
        "ams": (
            lambda: choose_ams(ams, usage, scores, protected, size.budget),
            lambda: loop_ams(ams, *flat, size.budget),
            lambda: plain_ams(ams, *flat, size.budget),
        ),
        "adakv": (
            lambda: choose_adakv(ada, scores, protected, size.budget),
            lambda: loop_adakv(ada, *flat[1:], size.budget),
            lambda: plain_adakv(ada, *flat[1:], size.budget),
        ),
    }
    ratios, lines = {}, [f"{size}"]
    for name, (ours, loop, plain) in ways.items():
        for other in (loop, plain):
            if not (ours().numpy() == other()).all():
                raise AssertionError(f"{name}: {other} keeps other entries")
        fast, slow = best(ours, size.repeats * 4), best(loop, size.repeats)
        slowest = best(plain, 1)
        ratios[name] = slowest / fast
        lines.append(
            f"{name:6} {fast * 1e3:6.2f} ms; numpy by heads and segments {slow * 1e3:.1f} ms, "
            f"{slow / fast:.1f} times; Python by entries {slowest * 1e3:.0f} ms, "
            f"{slowest / fast:.0f} times"
        )
    return ratios, lines


# -------------------------------------------------------------------------------------- scoring


def scoring(size: Size) -> tuple[dict[str, float], list[str]]:
    """Replay of each policy in units of the ideal output-error time."""
    given = arrays(size)
    generator = torch.Generator().manual_seed(1)
    hidden = size.heads * size.group * size.dim
    given["o_proj"] = torch.randn(
        (size.layers, size.heads * size.group, size.dim, hidden), generator=generator
    )
    given |= repeated(given["q"], given["k"], size.prompt)
    rate = matrix_rate(size.matrix)
    units, lines = {}, [f"{size}"]
    for name in (*names(), "ams+expected_attention", "adakv+expected_attention"):
        if name in ("full", "oracle", "random"):
            continue
        base = name.partition("+")[0]
        entry = CATALOGUE[base.partition("@")[0]]
        if entry.kind == "propagation":  # part of the prefill, not of an event
            continue
        full = name if "+" in name or entry.innermost or entry.default else f"{name}+tova"
        # the prompt fills the budget here; a policy that pins it would keep nothing else
        pinned = {"protect_prompt": False} if "protect_prompt" in entry.parameters else {}
        policy = kvsim.policy(full, **entry.required, **pinned)
        if name == "rpc":
            continue  # its cache grows, so there is no ideal time at this budget
        trace = fresh(size, given)
        record = kvsim.replay(trace, policy, size.budget, interval=size.interval)
        seconds = best(
            lambda p=policy: kvsim.replay(
                fresh(size, given), p, size.budget, interval=size.interval
            ),
            size.repeats,
        )
        per_head = size.group if record.evicted_at.shape[1] == size.heads else 1
        seen = sum(int(record.kept(row).sum()) for row in range(size.prompt, size.tokens))
        ideal = 4 * size.dim * seen * per_head / rate
        units[full] = seconds / ideal
        rate = max(rate, matrix_rate(size.matrix)) if len(units) % 10 == 0 else rate
    for name, unit in sorted(units.items(), key=lambda pair: pair[1]):
        lines.append(f"{name:34} {unit:6.3f}")
    return units, lines


def run(choice: Choice, size: Size) -> tuple[dict[str, float], list[str]]:
    """Both reports."""
    ratios, lines = choosing(choice)
    units, more = scoring(size)
    head = [f"threads {torch.get_num_threads()}, torch {torch.__version__}"]
    return {**ratios, **units}, [*head, *lines, *more]


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smallest", action="store_true", help="seconds instead of minutes")
    parser.add_argument("--doc", type=Path, help="put the report into this page, between its marks")
    options = parser.parse_args()
    sizes = (SMALLEST_CHOICE, SMALLEST) if options.smallest else (AIM_CHOICE, AIM)
    _, lines = run(*sizes)
    print("\n".join(lines))
    if options.doc:
        put(options.doc, lines, BEGIN, END)


if __name__ == "__main__":
    main()
