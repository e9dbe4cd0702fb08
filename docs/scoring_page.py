# ruff: noqa: INP001 - a module of a script, in docs/, which is no package
"""The page of docs/scoring.py: sets, bounds and sentences from the values of every prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import polars as pl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scoring_plan import (
    ALLOCATED,
    CLAIMS,
    ENDS,
    LRU,
    MARGIN,
    NOTHING,
    PROMPT,
    RANDOM,
    STREAMING,
    WINDOW,
    WORKLOADS,
    Workload,
)
from study import picture

from apps.tiny.card import fill
from apps.tiny.card import table as markdown
from kvsim.analysis.arrays import Floats
from kvsim.analysis.significance import ALPHA, FEWEST, at_least, best_set, excess
from kvsim.plots.style import COLOURS
from kvsim.schema import plural

#: Protections as the page calls them.
CALLED = {NOTHING: "nothing", ENDS: "both ends", PROMPT: "the prompt"}
MODELS = {"smollm2": "SmolLM2", "tiny": "`tiny`", "1.5b": "Qwen2.5-Coder-1.5B"}
#: The policies that the second paper compares, as far as kvsim has them; the others of them to LRU.
COMPARED = (RANDOM, LRU, "h2o", "snapkv", ALLOCATED)
TO_LRU = (RANDOM, STREAMING, "h2o", "snapkv", ALLOCATED)
WORSE, BETTER, SAME, OPEN = "worse", "better", "equivalent", "not decided"
HOLDS, FAILS = "holds", "**does not hold**"


@dataclass(frozen=True)
class Values:
    """The values of a workload."""

    workload: Workload
    rows: pl.DataFrame

    @cached_property
    def prompts(self) -> int:
        """How many prompts have values."""
        return self.rows["digest"].n_unique()

    @cached_property
    def _cells(self) -> dict[tuple[str, str], Floats]:
        keys = ["protection", "policy", "share", "digest"]
        means = self.rows.group_by(keys).agg(pl.col("kl").cast(pl.Float64).mean()).sort(keys)
        return {
            (str(protection), str(policy)): of["kl"].to_numpy().reshape(-1, self.prompts).T
            for (protection, policy), of in means.group_by("protection", "policy")
        }

    @cached_property
    def verdicts(self) -> dict[tuple[str, str], str]:
        """The results of `against_random`, which several parts of the page read."""
        return {}

    def kl(self, protection: str, policy: str) -> Floats:
        """Judged KL [prompt, share] in nats per token, the mean over seeds, prompts by digest."""
        return self._cells[protection, policy]

    def matrix(self, protection: str, share: int) -> Floats:
        """Judged KL [prompt, policy] at a budget."""
        policies = self.workload.policies
        return np.stack([self.kl(protection, each)[:, share] for each in policies], axis=1)


def read(stored: pl.DataFrame) -> dict[str, Values]:
    """The values of each workload with enough prompts for a test, in the order of the plan."""
    of = {name: Values(each, stored.filter(workload=name)) for name, each in WORKLOADS.items()}
    return {name: each for name, each in of.items() if each.prompts >= FEWEST}


# --------------------------------------------------------------------------------------- statements


def more(x: Floats, y: Floats) -> float:
    """The most by which x [prompt] exceeds y in the mean, as a share of it; 95 % on its own."""
    return float(excess(np.stack([x, y], axis=1))[0, 1])


def ratio(x: Floats, y: Floats) -> tuple[float, float, float]:
    """The mean of x over that of y, and bounds from both sides, each 95 % on its own."""
    # `excess` stops at equality, which is far from both of what is scaled
    high = (1 + more(100 * x, y)) / 100
    low = 100 / (1 + more(100 * y, x))
    return x.mean() / y.mean(), low, high


def better(x: Floats, y: Floats) -> float:
    """P-value of "x [prompt, share] is below y at all budgets"."""
    return at_least(y - x, x.shape[1])


def not_worse(x: Floats, y: Floats) -> float:
    """The most by which x [prompt, share] exceeds y at any budget, as a share."""
    return max(map(more, x.T, y.T))


def against_random(values: Values, protection: str, policy: str) -> str:
    """What is shown of a policy and random sets, at all budgets together."""
    if (found := values.verdicts.get((protection, policy))) is None:
        x, y = values.kl(protection, policy), values.kl(protection, RANDOM)
        found = BETTER if better(x, y) <= ALPHA else WORSE if better(y, x) <= ALPHA else OPEN
        if max(not_worse(x, y), not_worse(y, x)) <= MARGIN:
            found = SAME
        values.verdicts[protection, policy] = found
    return found


Verdict = tuple[str, str]


def _decided(holds: bool, p_against: float, detail: str) -> Verdict:
    return HOLDS if holds else FAILS if p_against <= ALPHA else OPEN, detail


def _p(value: float) -> str:
    return f"p = {value:.3f}" if value >= 0.001 else "p < 0.001"


def _least(of: Mapping[str, float]) -> tuple[float, str]:
    """The smallest of several p-values, times their number, and whose it is, if below 5 %."""
    name = min(of, key=of.__getitem__)
    p = min(1.0, len(of) * of[name])
    return p, _p(p) + f", `{name}`" * (p <= ALPHA)


def _as_good(values: Values, policy: str) -> Verdict:
    """Whether a policy is not worse than any scorer with the prompt protected."""
    x = values.kl(PROMPT, policy)
    scorers = {each: values.kl(PROMPT, each) for each in values.workload.scorers}
    bound = max(not_worse(x, y) for y in scorers.values())
    against, whose = _least({name: better(y, x) for name, y in scorers.items()})
    return _decided(bound <= MARGIN, against, f"{_at_most(bound)}; {whose}")


def _times(bound: float) -> str:
    return f"{1 + bound:.3g}" if np.isfinite(bound) else "no bound"


def _at_most(bound: float) -> str:
    return f"at most {_times(bound)} times" if np.isfinite(bound) else "no bound"


def _gap(values: Values) -> Verdict:
    def log_ratio(protection: str) -> Floats:
        logs = [np.log(values.kl(protection, each)) for each in values.workload.scorers]
        return np.log(values.kl(protection, RANDOM)) - np.mean(logs, axis=0)

    before, after = log_ratio(NOTHING), log_ratio(PROMPT)
    closed, cells = before / 2 - after, before.shape[1]
    said = f"{np.exp(before.mean()):.2f} to {np.exp(after.mean()):.2f}"
    p, against = at_least(closed, cells), at_least(-closed, cells)
    return _decided(p <= ALPHA, against, f"{said}; {_p(min(p, against))}")


def _needs_a_score(values: Values) -> Verdict:
    x, y = values.kl(NOTHING, "rkv"), values.kl(NOTHING, RANDOM)
    p, against = better(x, y), better(y, x)
    return _decided(p <= ALPHA, against, _p(min(p, against)))


def _mended(values: Values) -> Verdict:
    gains = {each: values.kl(NOTHING, each) - values.kl(ENDS, each) for each in COMPARED}
    cells = np.concatenate([*gains.values()], axis=1)
    p = at_least(cells, cells.shape[1])
    against, whose = _least({each: at_least(-x, x.shape[1]) for each, x in gains.items()})
    return _decided(p <= ALPHA, against, _p(p) if p < against else whose)


def _equivalent(values: Values) -> Verdict:
    lru, far = values.kl(ENDS, LRU), 1 + MARGIN
    others = {each: values.kl(ENDS, each) for each in TO_LRU}
    bound = max(max(not_worse(x, lru), not_worse(lru, x)) for x in others.values())
    ways = {f"{each} better": better(far * x, lru) for each, x in others.items()}
    ways |= {f"{each} worse": better(far * lru, x) for each, x in others.items()}
    against, whose = _least(ways)
    return _decided(bound <= MARGIN, against, f"{_at_most(bound)}; {whose}")


def _dominates(values: Values) -> Verdict:
    lru = values.kl(ENDS, LRU)
    gain = values.kl(NOTHING, LRU) - lru
    others = [values.kl(ENDS, each) for each in TO_LRU]
    cells = [gain - sign * (lru - x) for x in others for sign in (1, -1)]
    together = np.concatenate(cells, axis=1)
    p = at_least(together, together.shape[1])
    against = min(1, len(cells) * min(at_least(-each, each.shape[1]) for each in cells))
    return _decided(p <= ALPHA, against, _p(min(p, against)))


def _scores_win(values: Values) -> Verdict:
    lru = values.kl(ENDS, LRU)
    others = [values.kl(ENDS, each) for each in ("h2o", "snapkv", ALLOCATED)]
    cells = np.concatenate([lru - x for x in others], axis=1)
    p = at_least(cells, cells.shape[1])
    against = min(1, len(others) * min(better(lru, x) for x in others))
    return _decided(p <= ALPHA, against, _p(min(p, against)))


def _by_head(values: Values) -> Verdict:
    x, y = values.kl(ENDS, ALLOCATED), values.kl(ENDS, "snapkv")
    p, against = better(x, y), better(y, x)
    return _decided(p <= ALPHA, against, _p(min(p, against)))


def _has_prompt(of: Workload) -> bool:
    return PROMPT in of.protections and of.interval != 8


TESTS: Mapping[str, tuple[Callable[[Values], Verdict], Callable[[Workload], bool]]] = {
    "R1": (lambda values: _as_good(values, RANDOM), _has_prompt),
    "R2": (_gap, _has_prompt),
    "R3": (lambda values: _as_good(values, WINDOW), _has_prompt),
    "R4": (_needs_a_score, lambda of: of.kind in ("needles", "turns")),
    "P1": (_mended, lambda of: of.interval != 8),
    "P2": (_equivalent, lambda of: of.interval != 8),
    "P3": (_dominates, lambda of: of.interval != 8),
    "P4": (_scores_win, lambda of: of.interval == 8),
    "P5": (_by_head, lambda of: of.interval != 8),
}

# -------------------------------------------------------------------------------------------- parts


def title(of: Workload) -> str:
    """The workload as tables call it."""
    every = f", every {of.interval} rows" * (of.interval == 8)
    return f"{of.kind}{every}, {MODELS[of.model]}"


def shown(values: Values, protection: str) -> list[str]:
    """What is shown of each scorer and random sets, at all budgets together."""
    return [against_random(values, protection, each) for each in values.workload.scorers]


def workloads(every: Mapping[str, Values]) -> str:
    """How many scorers are shown to be better than random sets, worse, and equivalent."""
    lines, cells, in_set = [], 0, 0
    for values in every.values():
        of = values.workload
        tokens = values.rows["tokens"]
        line = [title(of), str(values.prompts), f"{tokens.min()} to {tokens.max()}"]
        for protection in CALLED:
            if protection not in of.protections:
                line.append("")
                continue
            verdicts = shown(values, protection)
            numbers = [verdicts.count(each) for each in (BETTER, WORSE, SAME, OPEN)]
            line.append(", ".join(map(str, numbers)))
            matrices = [values.matrix(protection, share) for share in range(len(of.shares))]
            cells += len(matrices)
            in_set += sum(bool(best_set(x)[1][0]) for x in matrices)
        lines.append(line)
    table = markdown(["workload", "prompts", "tokens", *CALLED.values()], lines)
    best = f"`random` could be the best of all policies (95 %) in {in_set} of {cells} cases "
    best += "(a workload, a protection and a budget)."
    return f"{table}\n\n{best}"


def policies(every: Mapping[str, Values]) -> str:
    """On how many workloads each policy is shown to be better than random sets, and worse."""
    lines = []
    for name in [*next(iter(WORKLOADS.values())).policies[1:]]:
        line = [f"`{name}`"]
        for protection in CALLED:
            verdicts = [
                against_random(values, protection, name)
                for values in every.values()
                if protection in values.workload.protections and name in values.workload.policies
            ]
            better, worse = verdicts.count(BETTER), verdicts.count(WORSE)
            line.append(f"{better}/{len(verdicts)}" + f", {worse} worse" * (worse > 0))
        lines.append(line)
    return markdown(["policy", *CALLED.values()], lines)


def claims(every: Mapping[str, Values]) -> str:
    """Each sentence of the papers, and the workloads on which it holds, does not, or is open."""
    lines = []
    for name, sentence in CLAIMS.items():
        test, fits = TESTS[name]
        found: dict[str, list[str]] = {HOLDS: [], FAILS: [], OPEN: []}
        for values in every.values():
            if fits(values.workload):
                verdict, detail = test(values)
                of = title(values.workload)
                found[verdict].append(of if verdict == OPEN else f"{of} ({detail})")
        lines.append(f"* {name}. {sentence}")
        lines += [f"  * {verdict}: {'; '.join(of)}" for verdict, of in found.items() if of]
        lines += [] if any(found.values()) else ["  * not measured yet"]
    return "\n".join(lines)


def gain(values: Values, protection: str) -> Floats:
    """Log of the KL of random sets over the geometric mean of scorers, middle budget [prompt]."""
    kl = [values.kl(protection, each) for each in (RANDOM, *values.workload.scorers)]
    by_policy = np.log([each[:, each.shape[1] // 2] for each in kl])
    return np.asarray(by_policy[0] - by_policy[1:].mean(0))


def opening(every: Mapping[str, Values]) -> str:
    """The answer: KL of random sets over that of scorers, and what is shown, by protection."""
    always, sometimes, lines = list[str](), list[str](), list[str]()
    for protection, called in CALLED.items():
        of = [values for values in every.values() if protection in values.workload.protections]
        if not of:
            continue
        by_size = sorted((gain(values, protection).mean(), title(values.workload)) for values in of)
        (always if by_size[0][0] > 0 else sometimes).append(called)
        ends = dict.fromkeys((by_size[0], by_size[-1]))
        times = " to ".join(f"{np.exp(size):.2g} times ({name})" for size, name in ends)
        verdicts = [verdict for values in of for verdict in shown(values, protection)]
        numbers = [f"{verdicts.count(each)} {each}" for each in (WORSE, SAME, OPEN)]
        better = f"{verdicts.count(BETTER)} of {len(verdicts)} better ({', '.join(numbers)})"
        lines.append(f"* {called[0].upper()}{called[1:]} protected: {times}; {better}")
    does = [f"on all workloads with {' or '.join(always)} protected"] * bool(always)
    does += [f"not on all with {' or '.join(sometimes)} protected"] * bool(sometimes)
    answer = (
        f"On average scorers are better than random sets {', and '.join(does)}. The list has the "
        "KL of random sets over that of scorers (geometric mean at the middle budget, lowest and "
        "highest workload), and in how many pairs of a scorer and a workload the scorer is better "
        "at all budgets."
    )
    if len(every) < len(WORKLOADS):
        answer += f" Measured so far: {len(every)} of {len(WORKLOADS)} workloads."
    return "\n".join([answer, "", *lines])


def figure(every: Mapping[str, Values], path: Path) -> None:
    """Draw KL over that of random sets at the middle budget, by policy and protection."""
    down = -(-len(every) // 3)
    drawn = Figure(figsize=(8.6, 0.8 + 2.9 * down), layout="constrained")
    axes = drawn.subplots(down, 3, squeeze=False, sharex=True, sharey=True).ravel()
    names = [*next(iter(WORKLOADS.values())).policies[1:]]
    for ax, values in zip(axes, every.values(), strict=False):
        ax.axvspan(1 / (1 + MARGIN), 1 + MARGIN, color="0.9")
        for at, protection in enumerate(CALLED):
            if protection not in values.workload.protections:
                continue
            for row, name in enumerate(names):
                if name not in values.workload.policies:
                    continue
                x, y = values.kl(protection, name), values.kl(protection, RANDOM)
                middle, place = x.shape[1] // 2, row + 0.25 * (at - 1)
                mean, low, high = ratio(x[:, middle], y[:, middle])
                ax.plot([low, min(high, 99)], [place, place], color=COLOURS[at], lw=1)
                ax.plot(mean, place, "o", color=COLOURS[at], ms=3)
        ax.set_xscale("log")
        ax.set_xlim(0.01, 12)
        ax.set_title(f"{title(values.workload)} ({values.prompts})".replace("`", ""), fontsize=8.5)
        ax.tick_params(labelsize=8)
        ax.grid(axis="y", color="0.95")
    for ax in axes[len(every) :]:
        ax.set_axis_off()
    for ax in axes[max(0, len(every) - 3) : len(every)]:
        ax.tick_params(labelbottom=True)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    drawn.supxlabel("KL over that of random sets, middle budget (log)", fontsize=9)
    handles = [Line2D([], [], color=colour, marker="o", ms=3) for colour in COLOURS[: len(CALLED)]]
    labels = [f"protected: {called}" for called in CALLED.values()]
    drawn.legend(handles, labels, loc="outside upper center", ncols=3, fontsize=9)
    picture(drawn, path, dpi=116)


def parts(stored: pl.DataFrame) -> dict[str, str]:
    """The generated parts of the page by name."""
    every = read(stored)
    few = f"Fewer than {plural(FEWEST, 'prompt')} of each workload have values."
    if not every:
        return dict.fromkeys(("opening", "workloads", "policies", "claims"), few)
    return {
        "opening": opening(every),
        "workloads": workloads(every),
        "policies": policies(every),
        "claims": claims(every),
    }


def write(stored: pl.DataFrame, template: Path, page: Path) -> None:
    """Write the page with its parts, and its figure beside it."""
    page.write_text(fill(template.read_text("utf-8"), parts(stored)), "utf-8")
    if every := read(stored):
        figure(every, page.parent / "figures" / "scoring.png")
