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
from kvsim.schema import plural

#: Protections as the page calls them.
CALLED = {NOTHING: "nothing", ENDS: "both ends", PROMPT: "the prompt"}
MODELS = {"smollm2": "SmolLM2", "tiny": "`tiny`", "1.5b": "Qwen2.5-Coder-1.5B"}
#: The policies that the second paper compares, as far as kvsim has them; the others of them to LRU.
COMPARED = (RANDOM, LRU, "h2o", "snapkv", ALLOCATED)
TO_LRU = (RANDOM, STREAMING, "h2o", "snapkv", ALLOCATED)
#: Workloads whose ratios stand in a table; those of all are in the figure.
TABLED = ("answers", "needles")
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
    x, y = values.kl(protection, policy), values.kl(protection, RANDOM)
    if max(not_worse(x, y), not_worse(y, x)) <= MARGIN:
        return SAME
    return BETTER if better(x, y) <= ALPHA else WORSE if better(y, x) <= ALPHA else OPEN


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


def counts(every: Mapping[str, Values]) -> str:
    """How many scorers are shown to be better than random sets, equivalent, and worse."""
    head = ["workload", "protected", "prompts", BETTER, SAME, WORSE, OPEN]
    head += ["`random` in the set of the best", "`random` over the best, at most"]
    lines = []
    for values in every.values():
        of = values.workload
        for protection in of.protections:
            shown = [against_random(values, protection, each) for each in of.scorers]
            numbers = [str(shown.count(each)) for each in (BETTER, SAME, WORSE, OPEN)]
            matrices = [values.matrix(protection, share) for share in range(len(of.shares))]
            in_set = sum(bool(best_set(x)[1][0]) for x in matrices)
            bounds = [excess(x)[0].max() for x in matrices]
            line = [title(of), CALLED[protection], str(values.prompts), *numbers]
            line += [f"{in_set} of {len(matrices)}", _times(max(bounds))]
            lines.append(line)
    return markdown(head, lines)


def policies(every: Mapping[str, Values]) -> str:
    """KL over that of random sets at the middle budget, and what is shown at all of them."""
    shown_of = [every[name] for name in TABLED if name in every]
    columns = [(x, protection) for x in shown_of for protection in x.workload.protections]
    names = [*shown_of[0].workload.policies[1:]] if shown_of else []
    head = ["policy", *(f"{x.workload.kind}: {CALLED[protection]}" for x, protection in columns)]
    lines = []
    for name in names:
        line = [f"`{name}`"]
        for values, protection in columns:
            x, y = values.kl(protection, name), values.kl(protection, RANDOM)
            middle = x.shape[1] // 2
            mean, low, high = ratio(x[:, middle], y[:, middle])
            mark = {BETTER: " ▼", WORSE: " ▲", SAME: " =", OPEN: ""}
            shown = mark[against_random(values, protection, name)]
            line.append(f"{mean:.2f} [{low:.2f}, {high:.2f}]{shown}")
        lines.append(line)
    return markdown(head, lines)


def claims(every: Mapping[str, Values]) -> str:
    """Each sentence of the papers on each workload."""
    lines = []
    for name, sentence in CLAIMS.items():
        test, fits = TESTS[name]
        cells = []
        for values in every.values():
            if fits(values.workload):
                verdict, detail = test(values)
                cells.append(f"{title(values.workload)}: {verdict} ({detail})")
        lines.append([name, sentence, "; ".join(cells) or "not measured yet"])
    return markdown(["", "claim, and how it is tested", "result"], lines)


def opening(every: Mapping[str, Values]) -> str:
    """The answer: what is shown of scorers and random sets under each protection."""
    sentences, most = [], []
    for protection, called in CALLED.items():
        shown = [
            against_random(values, protection, each)
            for values in every.values()
            if protection in values.workload.protections
            for each in values.workload.scorers
        ]
        if not shown:
            continue
        numbers = {each: shown.count(each) for each in (BETTER, WORSE, SAME, OPEN)}
        most.append(next((name for name, n in numbers.items() if 2 * n > len(shown)), OPEN))
        better = f"{numbers[BETTER]} of {len(shown)}"
        if not sentences:
            better += " pairs of a scorer and a workload are better than random sets at all budgets"
        sentences.append(
            f"With {called} protected, {better} ({numbers[WORSE]} worse, {numbers[SAME]} "
            f"equivalent within {100 * MARGIN:.0f} %, {numbers[OPEN]} not decided)."
        )
    prompts = [values.prompts for values in every.values()]
    planned = max(each.prompts for each in WORKLOADS.values())
    if len(every) < len(WORKLOADS) or min(prompts) < planned:
        sentences.append(
            f"Measured so far: {len(every)} of {len(WORKLOADS)} workloads, at least {min(prompts)} "
            f"of {planned} prompts each; what is said may still change."
        )
    first = {BETTER: "It does here.", WORSE: "It harms here.", SAME: "It hardly does here."}
    alike = len({*most}) == 1
    answer = first.get(most[0], "That is not decided.") if alike else "It depends on protection."
    return " ".join([answer, *sentences])


def state(stored: pl.DataFrame) -> str:
    """How many prompts of each workload have values, and what a prompt takes."""
    lines = []
    for name, of in WORKLOADS.items():
        rows = stored.filter(workload=name)
        lengths, seconds, number = "", "", rows["number"].n_unique() if len(rows) else 0
        if number:
            shown = (rows[each] for each in ("prompt_tokens", "tokens"))
            lengths = ", ".join(f"{each.min()} to {each.max()}" for each in shown)
            seconds = f"{rows['seconds'].unique().mean():.0f}"
        protected = ", ".join(CALLED[each] for each in of.protections)
        size = f"{len(of.scorers)} scorers, {len(of.shares)} budgets"
        count = f"{number} of {of.prompts}"
        lines.append([f"`{name}`", title(of), protected, size, count, lengths, seconds])
    head = ["`--workloads`", "workload", "protected", "of each prompt", "prompts measured"]
    return markdown([*head, "tokens of the prompt, of all", "CPU seconds of a prompt"], lines)


def figure(every: Mapping[str, Values], path: Path) -> None:
    """Draw KL over that of random sets at the middle budget, by policy and protection."""
    shown = [*every.values()]
    across = max(1, min(4, len(shown)))
    down = max(1, -(-len(shown) // across))
    drawn = Figure(figsize=(10, 0.6 + 2.9 * down), layout="constrained")
    axes = drawn.subplots(down, across, squeeze=False, sharex=True, sharey=True).ravel()
    names = [*next(iter(WORKLOADS.values())).policies[1:]]
    for ax, values in zip(axes, shown, strict=False):
        ax.axvspan(1 / (1 + MARGIN), 1 + MARGIN, color="0.9")
        for at, (protection, called) in enumerate(CALLED.items()):
            if protection not in values.workload.protections:
                continue
            for row, name in enumerate(names):
                if name not in values.workload.policies:
                    continue
                x, y = values.kl(protection, name), values.kl(protection, RANDOM)
                middle, place = x.shape[1] // 2, row + 0.25 * (at - 1)
                mean, low, high = ratio(x[:, middle], y[:, middle])
                ax.plot([low, min(high, 99)], [place, place], color=f"C{at}", lw=1)
                label = called if row == 0 else None
                ax.plot(mean, place, "o", color=f"C{at}", ms=3, label=label)
        ax.set_xscale("log")
        ax.set_title(f"{title(values.workload)} ({values.prompts})".replace("`", ""), fontsize=8)
    for ax in axes[len(shown) :]:
        ax.set_axis_off()
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    for ax in axes:
        ax.tick_params(labelsize=7)
    drawn.supxlabel("KL over that of random sets, middle budget (log)", fontsize=8)
    handles, labels = axes[0].get_legend_handles_labels()
    for ax in axes[1 : len(shown)]:
        more_handles, more_labels = ax.get_legend_handles_labels()
        if len(more_labels) > len(labels):
            handles, labels = more_handles, more_labels
    drawn.legend(handles, labels, loc="outside upper right", ncols=3, fontsize=8, title=None)
    picture(drawn, path, dpi=100)


def parts(stored: pl.DataFrame) -> dict[str, str]:
    """The generated parts of the page by name."""
    every = read(stored)
    few = f"Fewer than {plural(FEWEST, 'prompt')} of each workload have values."
    if not every:
        return dict.fromkeys(("opening", "counts", "policies", "claims"), few) | {
            "state": state(stored)
        }
    return {
        "opening": opening(every),
        "counts": counts(every),
        "policies": policies(every),
        "claims": claims(every),
        "state": state(stored),
    }


def write(stored: pl.DataFrame, template: Path, page: Path) -> None:
    """Write the page with its parts, and its figure beside it."""
    page.write_text(fill(template.read_text("utf-8"), parts(stored)), "utf-8")
    if every := read(stored):
        figure(every, page.parent / "figures" / "scoring.png")
