# ruff: noqa: INP001, T201 - a script, not a module, and it says what it did
"""Does the shipped model still answer when a policy has evicted? Exact chains, for its card.

    python docs/eviction.py --results FILE [--n 48] [--model PATH] [--cells walk:2 get:2]
    python docs/eviction.py --results FILE --card docs/tiny-model-card.md --figure FILE.png

The first form measures and adds a line of JSON to the results for each task, unless it is there
already; the second writes a section of the card and a figure from them, and measures nothing.

Each sample is a prompt and its right response. The model reads it once with a full cache; every
policy is replayed over that trace; then the model reads it again for each Record, and every row
sees in every layer and KV head only what the Record left it. A chain is exact if each of its words
is the most likely one after the right words before it, and then greedy decoding under the same
evictions writes it too. Policies decide on the trace of the full cache, open loop: what eviction
does to the model does not reach their decisions.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import binomtest
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

import kvsim
from apps.tiny.card import fill, proportion, table
from apps.tiny.curriculum import collate
from apps.tiny.evaluate import Results, digest
from kvsim import Policy, Record, Trace, policy
from kvsim.runner.judging import Judge
from kvsim.runner.model import RunningModel
from kvsim.studies.language.tasks import TASKS, Sample, prompts
from kvsim.tiny import PATH

FULL, ORACLE = "full", "oracle"

#: Rows between events, the same for every policy; the first event follows the prompt.
INTERVAL = 16
#: Windows and partitions, made for thousands of tokens, as long as suits some hundred.
WINDOW = {"window": 16}
AMS = {"min_segment": 4, "max_segment": 32, "window": 16, "recent": 8, "min_quota": 1}

#: What is replayed, by what it looks at.
FAMILIES: dict[str, dict[str, dict[str, Any]]] = {
    "position": {"random": {}, "streaming_llm": {}},
    "keys and values": {"knorm": {}, "keydiff": {}, "lagkv": {"lag": 8}},
    "the last row": {"tova": {}},
    "a window": {"snapkv": WINDOW, "rkv": WINDOW, "cake": WINDOW, "rpc@ams": {}},
    "all rows": {"h2o": {}, "gkv": WINDOW},
    "expected queries": {"expected_attention": {}, "ams": AMS},
}


#: Of the first cell; training, development samples and other tables of the card use other seeds.
SEED = 7000


@dataclass(frozen=True)
class Plan:
    """Plan of the prompts: tasks with levels, budgets as shares of the length, samples of each."""

    cells: tuple[tuple[str, int], ...] = (
        ("walk", 1),
        ("fork", 1),
        ("wait", 1),
        ("get", 1),
        ("needle", 2),
    )
    budgets: tuple[float, ...] = (0.2, 0.3, 0.4, 0.5)
    n: int = 48
    policies: tuple[str, ...] = tuple(name for family in FAMILIES.values() for name in family)

    def wanted(self, task: str, level: int) -> dict[str, Any]:
        """Columns of the results that name a cell."""
        grid = {"budgets": list(self.budgets), "policies": list(self.policies)}
        seed = SEED + 10 * TASKS.index(task) + level
        return {
            "part": "eviction",
            "task": task,
            "level": level,
            "n": self.n,
            "seed": seed,
            **grid,
        }


@dataclass(frozen=True)
class Outcome:
    """How the model did on one sample.

    chain: every word of every line is right. reached: the share of the chain that is before its
    first wrong word. right: of the words of the response, the share that is right, each given the
    right words before it. answer: the last sum is right, given the right words before it.
    """

    chain: bool
    reached: float
    right: float
    answer: bool


@dataclass(frozen=True)
class Count:
    """One policy at one budget: exact chains and right answers of n samples, and mean shares."""

    policy: str
    budget: float
    n: int
    chain: int
    answer: int
    reached: float
    right: float

    @classmethod
    def of(cls, policy: str, budget: float, outcomes: Sequence[Outcome]) -> Count:
        """Counted."""
        n = len(outcomes)
        return cls(
            policy,
            budget,
            n,
            chain=sum(outcome.chain for outcome in outcomes),
            answer=sum(outcome.answer for outcome in outcomes),
            reached=round(sum(outcome.reached for outcome in outcomes) / n, 5),
            right=round(sum(outcome.right for outcome in outcomes) / n, 5),
        )

    @cached_property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the share of exact chains."""
        ends = binomtest(self.chain, self.n).proportion_ci(method="wilson")
        return float(ends.low), float(ends.high)


# ------------------------------------------------------------------------------- the measurement


def policies(plan: Plan) -> dict[str, Policy]:
    """The policies by name; `full` and the oracle first."""
    policies_by_name = {name: policy(name) for name in (FULL, ORACLE)}
    for family in FAMILIES.values():
        for name, params in family.items():
            if name in plan.policies:
                policies_by_name[name] = policy(name, **params)
    return policies_by_name


def gold_trace(model: PreTrainedModel, tokens: Tensor, prompt_len: int) -> Trace:
    """The trace of a right response: the model reads all tokens, and those behind are response."""
    whole = kvsim.capture(model, None, tokens.tolist(), max_new_tokens=0)
    return Trace.from_arrays(
        whole.q,
        whole.k,
        whole.v,
        tokens=tokens,
        attn_out=whole.attn_out,
        lse=whole.lse,
        prompt_len=prompt_len,
        rope=whole.rope,
        scale=whole.scale,
    )


def judge(sample: Sample, right: Tensor) -> Outcome:
    """right: bool, one for each word of the response; what follows them does not count."""
    words = sample.response.split()
    chain, right = right[: sample.chain_words], right[: len(words)]
    return Outcome(
        chain=bool(chain.all()),
        reached=float(chain.long().cumprod(0).float().mean()),
        right=float(right.float().mean()),
        answer=bool(right[words.index("#0") + 1]),
    )


def measure_sample(
    model: PreTrainedModel, sample: Sample, tried: Mapping[str, Policy], budgets: Sequence[float]
) -> dict[tuple[str, float], Outcome]:
    """Every policy at every budget; `full` at the first one alone."""
    tokens = collate([sample]).tokens[0]
    prompt_len = 1 + sample.prompt_words
    trace = gold_trace(model, tokens, prompt_len)
    records: dict[tuple[str, float], Record] = {}
    for name, rule in tried.items():
        for share in budgets[:1] if name == FULL else budgets:
            budget = round(share * len(tokens))
            records[name, share] = kvsim.replay(
                trace, rule, budget, interval=INTERVAL, prefill=True
            )
    likely = Judge(RunningModel(model), trace).logits(list(records.values())).argmax(-1)
    right = likely == tokens[prompt_len:]
    return {key: judge(sample, row) for key, row in zip(records, right, strict=True)}


def measure(
    model: PreTrainedModel, samples: Sequence[Sample], tried: Mapping[str, Policy], plan: Plan
) -> list[Count]:
    """All samples of a cell."""
    found: dict[tuple[str, float], list[Outcome]] = {}
    for sample in samples:
        for key, outcome in measure_sample(model, sample, tried, plan.budgets).items():
            found.setdefault(key, []).append(outcome)
    return [Count.of(*key, outcomes) for key, outcomes in found.items()]


# -------------------------------------------------------------------------------- what is separate


def parted(counts: Sequence[Count], parts: int = 3) -> list[list[Count]]:
    """Some policies in so many groups, from worst to best, with a gap between any two.

    As few policies as possible are left out: those whose interval reaches over a gap. Empty if
    there is no such division.
    """
    best: list[list[Count]] = []
    for cuts in combinations(sorted({count.interval[1] for count in counts}), parts - 1):
        edges = (-1.0, *cuts, 1.0)
        found = [
            [count for count in counts if low < count.interval[0] and count.interval[1] <= high]
            for low, high in pairwise(edges)
        ]
        if all(found) and sum(map(len, found)) > sum(map(len, best)):
            best = found
    return best


# ---------------------------------------------------------------------------------------- the page

#: The counts of each cell, (task, level).
Found = dict[tuple[str, int], list[Count]]


def page(by_cell: Found) -> str:
    """Tables and statements, for the card."""
    (n,) = {count.n for counts in by_cell.values() for count in counts}
    known = ", ".join(proportion(n * share // 4, n) for share in range(5))
    tried = ", ".join(f"`{name}`" for name in _by_policy(next(iter(by_cell.values()))))
    counted = (
        f"Counts are of {n} samples; Wilson's 95 % intervals: {known}. Of {tried}, those that a "
        "table does not list keep none."
    )
    parts = [METHOD, counted]
    for cell, counts in by_cell.items():
        parts += [f"{_title(cell)}:", _chains(counts)]
    parts.append(_separate(by_cell))
    return "\n\n".join(parts)


METHOD = (
    "Samples whose chain stays exact when a policy has evicted: the model reads prompt and right "
    "response, and in every layer and KV head rows of the response see only what the policy left. "
    "A chain is exact if each of its words is the most likely one after the right words before it; "
    "then greedy decoding under the same evictions writes it too. **Fidelity:** policies decide in "
    "a replay of the full cache's trace (open loop), so what eviction does to the model does not "
    "reach them, as it would in a live run. Budgets are shares of the whole length. All policies "
    f"evict after the prompt and every {INTERVAL} rows, with windows of {WINDOW['window']} rows, "
    "smaller sizes for `lagkv` and `ams`, and otherwise the parameters of the catalogue. Levels "
    "and budgets were chosen, on other samples, where policies differ."
)


def _title(cell: tuple[str, int]) -> str:
    return f"{cell[0]}, level {cell[1]}"


def budgets_of(counts: Sequence[Count]) -> list[float]:
    """Ascending."""
    return sorted({count.budget for count in counts})


def _by_policy(counts: Sequence[Count]) -> dict[str, dict[float, Count]]:
    """`full` and the oracle first, then the policies with the most exact chains."""
    by_policy: dict[str, dict[float, Count]] = {}
    for count in counts:
        by_policy.setdefault(count.policy, {})[count.budget] = count

    def place(name: str) -> tuple[bool, bool, int]:
        total = sum(count.chain for count in by_policy[name].values())
        return name not in (FULL, ORACLE), name == ORACLE, -total

    return {name: by_policy[name] for name in sorted(by_policy, key=place)}


def _chains(counts: Sequence[Count]) -> str:
    """Exact chains by policy and budget, without policies that keep none; equal ones share rows."""
    shares = budgets_of(counts)
    same: dict[tuple[str, ...], list[str]] = {}
    for name, cells in _by_policy(counts).items():
        row = [str(cells[b].chain) if b in cells else "" for b in shares]
        if name in (FULL, ORACLE) or {*row} != {"0"}:
            same.setdefault(tuple(row), []).append(f"`{name}`")
    rows = [[", ".join(names), *row] for row, names in same.items()]
    return table(["policy", *(f"{b:.0%}" for b in shares)], rows)


def _separate(by_cell: Found) -> str:
    """In which cells policies fall into three groups."""
    cells = []
    for cell, counts in by_cell.items():
        shares = []
        for share in budgets_of(counts):
            candidates = [x for x in counts if x.budget == share and x.policy not in (FULL, ORACLE)]
            if parted(candidates):
                shares.append(f"{share:.0%}")
        if shares:
            cells.append(f"{_title(cell)} ({', '.join(shares)})")
    where = "; ".join(cells) or "nowhere"
    return (
        f"Three groups of policies, intervals apart, some policies left out between them: {where}."
    )


# -------------------------------------------------------------------------------------- the figure

#: Okabe and Ito's colours, which the colour-blind tell apart; one for each family.
COLOURS = ("#999999", "#e69f00", "#009e73", "#0072b2", "#d55e00", "#cc79a7")
#: Of the policies of a family, markers and line styles.
MARKERS = {"o": "-", "s": "--", "D": ":", "^": "-."}


def figure(by_cell: Found) -> Figure:
    """Share of exact chains against the budget; a panel per task, a line per policy."""
    columns = min(3, len(by_cell))
    rows = -(-len(by_cell) // columns)
    image = Figure(figsize=(2.9 * columns + 1.9, 2.7 * rows + 0.7), dpi=110)
    axes = image.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for axis in axes[len(by_cell) :]:
        axis.set_axis_off()
    for axis, (cell, counts) in zip(axes, by_cell.items(), strict=False):
        _panel(axis, counts)
        axis.set_title(_title(cell), fontsize=9)
    for axis in axes[::columns]:
        axis.set_ylabel("exact chains (%)", fontsize=8)
    for axis in axes[max(0, len(by_cell) - columns) : len(by_cell)]:
        axis.set_xlabel("budget (% of the length)", fontsize=8)
        axis.tick_params(labelbottom=True)
    lines, names = axes[0].get_legend_handles_labels()
    image.legend(lines, names, loc="center right", fontsize=7.5, frameon=False)
    image.suptitle(
        "The model decodes under evictions that were decided on the full cache's trace", fontsize=9
    )
    image.tight_layout(rect=(0, 0, 1 - 1.6 / image.get_figwidth(), 1))
    return image


def _panel(axis: Axes, counts: Sequence[Count]) -> None:
    by_policy = _by_policy(counts)
    (full,) = by_policy[FULL].values()
    level = 100 * full.chain / full.n
    axis.axhline(level, color="black", linewidth=0.9, linestyle=":", label="full cache")
    for name, style in _styles().items():
        shown = sorted(by_policy.get(name, {}).values(), key=lambda x: x.budget)
        if shown:
            x, y = (
                [100 * count.budget for count in shown],
                [100 * count.chain / count.n for count in shown],
            )
            axis.plot(x, y, linewidth=1.2, label=name, **style)
    axis.set_xticks([100 * budget for budget in budgets_of(counts)])
    axis.set_ylim(-4, 104)
    axis.tick_params(labelsize=7.5)
    axis.grid(color="#e6e6e6", linewidth=0.5)
    axis.set_axisbelow(True)


def _styles() -> dict[str, dict[str, Any]]:
    """A colour for each family, a marker for each of its policies; the oracle is black."""
    out: dict[str, dict[str, Any]] = {ORACLE: {"color": "black", "marker": "*", "ms": 7}}
    for colour, family in zip(COLOURS, FAMILIES.values(), strict=True):
        for name, (marker, line) in zip(family, MARKERS.items(), strict=False):
            out[name] = {"color": colour, "marker": marker, "ms": 4.5, "ls": line}
    return out


# ------------------------------------------------------------------------------------- the program


def _fill_in(results: Results, plan: Plan, folder: Path) -> None:
    """Measure the cells that the results lack."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tried = policies(plan)
    for task, level in plan.cells:
        wanted = plan.wanted(task, level)
        if results.has(**wanted):
            continue
        began = time.perf_counter()
        samples = prompts(plan.n, wanted["seed"], task=task, level=level)
        counts = measure(model, samples, tried, plan)
        spent = round(time.perf_counter() - began, 1)
        results.add(**wanted, seconds=spent, counts=[asdict(count) for count in counts])
        print(f"{task}, level {level}: {plan.n} samples, {spent:.0f} s", flush=True)


def read(results: Results, plan: Plan) -> Found:
    """The counts of the plan's cells that were measured."""
    by_cell: Found = {}
    for task, level in plan.cells:
        wanted = plan.wanted(task, level)
        for row in results.rows():
            if wanted.items() <= row.items():
                by_cell[task, level] = [Count(**count) for count in row["counts"]]
    return by_cell


def _plan(options: argparse.Namespace) -> Plan:
    changes: dict[str, Any] = {}
    if options.n:
        changes["n"] = options.n
    if options.cells:
        pairs = (cell.split(":") for cell in options.cells)
        changes["cells"] = tuple((task, int(level)) for task, level in pairs)
    if options.budgets:
        changes["budgets"] = tuple(sorted(options.budgets))
    if options.policies:
        changes["policies"] = tuple(options.policies)
    return replace(Plan(), **changes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, or write the card's section and the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, required=True, help="file of measurements")
    parser.add_argument("--model", type=Path, default=PATH, help="folder; default: the shipped one")
    parser.add_argument("--n", type=int, help="samples of each task")
    parser.add_argument("--cells", nargs="+", help="tasks and levels, such as walk:2 get:1")
    parser.add_argument("--budgets", nargs="+", type=float, help="shares of the length: 0.1 0.2")
    parser.add_argument("--policies", nargs="+", help="without them, all of this script")
    parser.add_argument("--card", type=Path, help="Markdown file with markers to write into")
    parser.add_argument("--figure", type=Path, help="PNG file to write")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    logging.disable_progress_bar()
    results, plan = Results(options.results, digest(options.model)), _plan(options)
    if not (options.card or options.figure):
        _fill_in(results, plan, options.model)
    by_cell = read(results, plan)
    if len(by_cell) < len(plan.cells):
        raise SystemExit(f"{options.results} lacks some of these cells for these weights")
    print(page(by_cell))
    if options.card:
        card = options.card.read_text("utf-8")
        options.card.write_text(fill(card, {"eviction": page(by_cell)}), "utf-8")
    if options.figure:
        figure(by_cell).savefig(options.figure, metadata={"Software": None})


if __name__ == "__main__":
    main()
