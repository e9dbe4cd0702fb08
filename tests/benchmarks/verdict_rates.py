"""How often the verdict is wrong, and what it decides, where the truth is known.

    python tests/benchmarks/verdict_rates.py               # 150 draws of each case: some minutes
    python tests/benchmarks/verdict_rates.py --draws 1000  # its own standard error a third
    python tests/benchmarks/verdict_rates.py --smallest    # seconds; what the test suite runs

Prompts are drawn with replacement from the judged KL of the results pages, 14 policies at eight
budgets of three models, so that the page's means are the truth: as measured, or with the best three
rescaled to equal means, the hardest case. What pages lack is simulated: equal policies, extreme
skew, ties, tasks. Next to the set of the best stands the rule before it, Holm's correction over all
pairs of all budgets.
"""

import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from harness import options, publish
from kvsim.analysis.significance import (
    at_least,
    best_set,
    excess,
    interaction,
    needed,
    one_best,
    rank_correlation,
    rank_intervals,
)

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {
    "results-qwen-1.5b": (64, 128),
    "results-smollm2": (128, 256),
    "results": (32, 48, 64, 96),
}
POLICIES = (
    *("adakv+snapkv", "ams", "ams+expected_attention", "cake", "expected_attention", "gkv", "h2o"),
    *("keydiff", "pyramidkv", "random", "rkv", "snapkv", "streaming_llm", "tova"),
)
PROMPTS = (6, 12, 24, 48)

Array = np.ndarray[Any, Any]
Figures = dict[str, float]


@cache
def panels() -> dict[str, Array]:
    """Judged KL [prompt, policy] of each page and budget, of prompts that all its budgets have."""
    found = {}
    for page, budgets in PAGES.items():
        table = (
            pl.scan_parquet(DOCS / f"{page}.parquet")
            .filter(
                pl.col("metric") == "response_kl",
                pl.col("fidelity") == "judged",
                pl.col("interval").is_not_null(),
                pl.col("policy").is_in(POLICIES),
                pl.col("budget").is_in(budgets),
            )
            .collect()
        )
        table = table.filter(pl.col("params") == pl.col("params").first().over("policy", "budget"))
        everywhere = pl.col("budget").n_unique().over("digest") == len(budgets)
        table = table.filter(everywhere).with_columns(pl.col("value").cast(pl.Float64))
        for budget in budgets:
            wide = table.filter(budget=budget).pivot("policy", index="digest", values="value")
            found[f"{page} {budget}"] = wide.sort("digest").select(POLICIES).to_numpy()
    return found


def rescaled(x: Array, best: int) -> Array:
    """The panel with its best policies scaled to the lowest mean."""
    mean = x.mean(0)
    equal = np.isin(np.arange(x.shape[1]), mean.argsort()[:best])
    return x * np.where(equal, mean.min() / mean, 1)


def some(rng: np.random.Generator, x: Array, n: int) -> Array:
    """Prompts drawn with replacement."""
    return x[rng.integers(0, len(x), n)]


def with_bad(rng: np.random.Generator, x: Array) -> Array:
    """The panel and three copies of policies, 5 to 20 times as large, with noise."""
    copies = x[:, rng.integers(0, x.shape[1], 3)] * rng.uniform(5, 20, 3)
    return np.c_[x, copies * np.exp(0.3 * rng.normal(size=copies.shape))]


Population = Callable[[np.random.Generator, int], tuple[Array, Array | None]]


def of_page(x: Array) -> Population:
    """Prompts of a page, drawn with replacement."""
    return lambda rng, n: (some(rng, x, n), None)


def skewed(rng: np.random.Generator, n: int) -> tuple[Array, None]:
    """Twelve policies; the first three have equal means and shared, lognormal prompts."""
    mean = np.array([1, 1, 1, *np.linspace(1.1, 3, 9)])
    noise = np.exp(0.4 * rng.normal(size=(n, 12)) - 0.08)
    return np.exp(rng.normal(size=(n, 1))) * mean * noise, None


def tailed(rng: np.random.Generator, n: int) -> tuple[Array, None]:
    """Errors of a t distribution with 3 degrees of freedom around the same means."""
    mean = np.array([1, 1, 1, *np.linspace(1.1, 3, 9)])
    return mean + 0.4 * rng.standard_t(3, (n, 12)) + rng.normal(size=(n, 1)), None


def tied(rng: np.random.Generator, n: int) -> tuple[Array, None]:
    """Counts of errors, most of them equal."""
    mean = np.array([1, 1, 1, *np.linspace(1.1, 3, 9)])
    return rng.poisson(mean, (n, 12)).astype(float), None


def tasked(rng: np.random.Generator, n: int) -> tuple[Array, Array]:
    """Three tasks with policies of their own; the first three have equal means over tasks."""
    tasks = np.arange(n) % 3
    effect = np.zeros((3, 12))
    effect[:, :3] = [[0.4, -0.2, -0.2], [-0.2, 0.4, -0.2], [-0.2, -0.2, 0.4]]
    mean = np.array([1, 1, 1, *np.linspace(1.1, 3, 9)]) + effect[tasks]
    return np.exp(0.5 * rng.normal(size=(n, 1))) * mean * rng.lognormal(-0.08, 0.4, (n, 12)), tasks


def extreme(rng: np.random.Generator, n: int) -> tuple[Array, None]:
    """Steady policies next to ones that are mostly better and rarely far worse; equal means."""
    spread = np.array([0.1, 1.0, 1.2, *np.full(9, 0.3)])
    mean = np.array([1, 1, 1, *np.linspace(1.1, 3, 9)])
    return mean * rng.lognormal(-(spread**2) / 2, spread, (n, 12)), None


def populations() -> Iterator[tuple[str, Population, list[int]]]:
    """Cases: a name, what draws prompts, and the policies that are the best of it."""
    for name, x in panels().items():
        best = x.mean(0).argsort()[:3].tolist()
        yield f"three best equal, {name}", of_page(rescaled(x, 3)), best
    for name, x in panels().items():
        yield f"as measured, {name}", of_page(x), [int(x.mean(0).argmin())]
    for draw in (skewed, tailed, tied, tasked, extreme):
        yield f"simulated, {draw.__name__}", draw, [0, 1, 2]


def sets(
    draws: int, prompts: tuple[int, ...] = PROMPTS, kind: str = ""
) -> dict[str, list[Figures]]:
    """Coverage of a best policy, size of the set, and what three bad policies change."""
    rates: dict[str, list[Figures]] = {}
    for name, population, best in populations():
        if not name.startswith(kind):
            continue
        for n in prompts:
            rng, each = np.random.default_rng(n), []
            for _ in range(draws):
                x, tasks = population(rng, n)
                inside = best_set(x, tasks)[1]
                more = best_set(with_bad(rng, x), tasks)[1]
                others, bad = (more[: len(inside)] != inside).any(), more[len(inside) :].any()
                each.append((inside[best].mean(), inside.sum(), others | bad, others))
            columns = ("coverage", "size", "changed by bad", "of these others")
            rates.setdefault(name, []).append(
                dict(zip(columns, np.mean(each, axis=0).tolist(), strict=True))
            )
    return rates


def holm_undecided(xs: list[Array], rng: np.random.Generator) -> float:
    """Policies that the rule before left open next to the leader, over all budgets [budget]."""
    n, pairs = len(xs[0]), [*combinations(range(len(POLICIES)), 2)]
    if n <= 17:
        flips = 1 - 2.0 * (np.arange(1 << (n - 1))[:, None] >> np.arange(n) & 1)
    else:
        flips = rng.integers(0, 2, (1 << 16, n)) * 2.0 - 1
    p = []
    for x in xs:
        gaps = x[:, [i for i, _ in pairs]] - x[:, [j for _, j in pairs]]
        least = np.abs(gaps.sum(0)) - 1e-12
        far = sum((np.abs(part @ gaps) >= least).sum(0) for part in np.array_split(flips, 16))
        p.append(far / len(flips) if n <= 17 else (far + 1) / (len(flips) + 1))
    every = np.concatenate(p)
    order = every.argsort()
    steps = np.maximum.accumulate(every[order] * np.arange(len(every), 0, -1))
    corrected = np.empty(len(every))
    corrected[order] = steps
    undecided = []
    for x, of in zip(xs, np.split(corrected, len(xs)), strict=True):
        lead = int(x.mean(0).argmin())
        open_ = [level > 0.05 for pair, level in zip(pairs, of, strict=True) if lead in pair]
        undecided.append(1 + sum(open_))
    return float(np.mean(undecided))


def power(draws: int, prompts: tuple[int, ...] = PROMPTS) -> dict[str, list[Figures]]:
    """Policies left open as measured: by the set, and by Holm over all budgets of a page."""
    rates: dict[str, list[Figures]] = {}
    for page, budgets in PAGES.items():
        xs = [panels()[f"{page} {budget}"] for budget in budgets]
        for n in prompts:
            rng, each = np.random.default_rng(n), []
            for _ in range(draws):
                at = rng.integers(0, len(xs[0]), n)
                drawn = [x[at] for x in xs]
                size = np.mean([best_set(x)[1].sum() for x in drawn])
                each.append((size, holm_undecided(drawn, rng)))
            figures = dict(zip(("set", "holm"), np.mean(each, axis=0).tolist(), strict=True))
            rates.setdefault(page, []).append(figures)
    return rates


def margins(draws: int, prompts: tuple[int, ...] = PROMPTS) -> dict[str, list[Figures]]:
    """False "within 10 or 25 %" at exactly that margin, and true ones of three equal policies."""
    rates: dict[str, list[Figures]] = {}
    cases: list[tuple[str, Population, list[int]]] = [
        *(case for case in populations() if not case[0].startswith("as measured")),
    ]
    for name, population, (a, b, c) in cases:
        for n in prompts:
            rng, each = np.random.default_rng(n), []
            for _ in range(draws):
                x, tasks = population(rng, n)
                x = x[:, [a, b, c]]
                apart = x * [1, 1.25, 1.25]  # at another margin these are the same draws
                bounds = excess(x, tasks).max(1)
                row = [(excess(apart, tasks)[1:, 0] <= 0.25).mean()]
                each.append(row + [(bounds <= margin).mean() for margin in (0.1, 0.25)])
            columns = ("false at the margin", "true 10 %", "true 25 %")
            figures = dict(zip(columns, np.mean(each, axis=0).tolist(), strict=True))
            rates.setdefault(name, []).append(figures)
    return rates


def sizes(draws: int, prompts: tuple[int, ...] = PROMPTS) -> dict[str, list[Figures]]:
    """How often the 80 % interval of prompts needed holds their number, and the power at it."""
    rates: dict[str, list[Figures]] = {}
    cases: dict[str, tuple[Array, Array]] = {}
    rng = np.random.default_rng(0)
    for effect in (0.3, 0.5, 1.0):
        gap = rng.normal(size=20_000)
        gap = (gap - gap.mean()) / gap.std() + effect
        cases[f"simulated, effect of {effect:g} sd"] = np.zeros(len(gap)), gap
    for name, x in panels().items():
        first, *_, fifth = x.mean(0).argsort()[:5]
        cases[f"first and fifth, {name}"] = x[:, first], x[:, fifth]
    for name, (x, y) in cases.items():
        true = needed(x, y)[0] if len(x) > 100 else needed(np.tile(x, 50), np.tile(y, 50))[0]
        for n in prompts:
            rng, each = np.random.default_rng(n), []
            for _ in range(draws):
                at = rng.integers(0, len(x), n)
                _, low, high = needed(x[at], y[at])
                at = rng.integers(0, len(x), int(min(np.ceil(true), 400)))
                shown = not best_set(np.c_[x[at], y[at]])[1][1]
                each.append((low <= true <= high, shown))
            columns = ("inside", "power")
            figures = dict(zip(columns, np.mean(each, axis=0).tolist(), strict=True))
            rates.setdefault(f"{name}: {true:.0f}", []).append(figures)
    return rates


def ranked(draws: int, prompts: tuple[int, ...] = PROMPTS) -> dict[str, list[Figures]]:
    """How often all rank intervals are right, and how wide they are."""
    rates: dict[str, list[Figures]] = {}
    kinds = {"as measured": lambda x: x, "14 equal": lambda x: rescaled(x, x.shape[1])}
    for kind, change in kinds.items():
        for name, x in panels().items():
            changed = change(x)
            mean = np.round(changed.mean(0), 9)
            above, below = (mean[:, None] > mean).sum(1), (mean[:, None] < mean).sum(1)
            for n in prompts:
                rng, each = np.random.default_rng(n), []
                for _ in range(draws):
                    low, high = rank_intervals(some(rng, changed, n))
                    right = (low <= 1 + above).all() and (high >= len(mean) - below).all()
                    each.append((right, (high - low + 1).mean()))
                figures = dict(zip(("right", "width"), np.mean(each, axis=0).tolist(), strict=True))
                rates.setdefault(f"{kind}, {name}", []).append(figures)
    return rates


def correlations(draws: int, prompts: tuple[int, ...] = (12, 24)) -> dict[str, list[Figures]]:
    """How often the interval of a rank correlation holds the true one; no interval is [-1, 1]."""
    rates: dict[str, list[Figures]] = {}
    for policies, true, noise in product((8, 12, 20), (0.0, 0.7, 0.95), (0.15, 0.3)):
        r = 2 * np.sin(np.pi * true / 6)  # of normal effects with this rank correlation
        for n in prompts:
            rng, each = np.random.default_rng(n), []
            for _ in range(draws):
                a, b = rng.normal(size=(2, policies))
                effects = np.stack([a, r * a + np.sqrt(1 - r**2) * b])
                errors = noise * np.sqrt(n) * rng.normal(size=(2, n, policies))
                x, y = effects[:, None] + errors + rng.normal(size=(n, 1))
                _, low, high = rank_correlation(x, y)
                low, high = (-1, 1) if np.isnan(low) else (low, high)
                each.append((low <= true <= high, high - low))
            means = np.mean(each, axis=0).tolist()
            name = f"{policies} policies, true r {true:g}, reliability {1 - noise**2:.2f}"
            figures = dict(zip(("inside", "width"), means, strict=True))
            rates.setdefault(name, []).append(figures)
    return rates


def claims(draws: int, prompts: tuple[int, ...] = PROMPTS) -> dict[str, list[Figures]]:
    """How often a sentence about cells is shown: false ones at the margin, and true ones."""

    def normal(*effects: float) -> Callable[[np.random.Generator, int], Array]:
        """Cells of the same prompts, correlated at 0.5."""
        half = np.sqrt(0.5)
        return lambda rng, n: (
            effects + half * (rng.normal(size=(n, 1)) + rng.normal(size=(n, len(effects))))
        )

    def uneven(rng: np.random.Generator, n: int) -> Array:
        """Better on each prompt, on one of them by far; and a cell without an effect."""
        return np.c_[rng.lognormal(0, 2, (n, 3)), rng.normal(size=n)]

    cases = {
        "all of 4, one equal: false": (normal(3, 3, 3, 0), 4),
        "all of 4, effect 0.5 sd": (normal(*[0.5] * 4), 4),
        "all of 4, effect 1 sd": (normal(*[1.0] * 4), 4),
        "most of 24, 12 strong and 12 equal: false": (normal(*[2.0] * 12, *[0.0] * 12), 13),
        "most of 24, 20 better by 0.8 sd": (normal(*[0.8] * 20, *[0.0] * 4), 13),
        "all of 4, one equal, three skewed and always better: false": (uneven, 4),
    }
    rates: dict[str, list[Figures]] = {}
    for name, (population, cells) in cases.items():
        for n in prompts:
            rng = np.random.default_rng(n)
            p = np.array([at_least(population(rng, n), cells) for _ in range(draws)])
            rates.setdefault(name, []).append({"shown": float((p <= 0.05).mean())})
    return rates


def by_task(draws: int, prompts: tuple[int, ...] = (6, 12, 24)) -> dict[str, list[Figures]]:
    """How often tasks are said to differ, and to have no common best; prompts are those of a task.

    Eight policies; the first two swap places between tasks by a factor, or do not (1). Others are
    worse than both by 1.65 to 4.5.
    """
    means = np.array([0, 0, *np.linspace(0.5, 1.5, 6)])
    rates: dict[str, list[Figures]] = {}
    for tasks in (2, 4):
        for factor, noise, uneven in (
            *((1.0, 0.3, False), (1.0, 0.3, True), (1.65, 0.3, False)),
            *((1.65, 0.5, False), (2.7, 0.3, False)),
        ):
            for n in prompts:
                rng, each = np.random.default_rng(n), []
                labels = np.repeat(np.arange(tasks), n)
                swap = labels % 2 == 1
                spread = noise * np.where(uneven & swap, 2, 1)
                for _ in range(draws):
                    logs = spread[:, None] * rng.normal(size=(len(labels), 8)) + means
                    logs += rng.normal(size=(len(labels), 1)) + 2 * uneven * labels[:, None]
                    logs[swap, 0] += np.log(factor)
                    logs[~swap, 1] += np.log(factor)
                    x = np.exp(logs)
                    each.append((interaction(x, labels) <= 0.05, one_best(x, labels).max() <= 0.05))
                what = f"factor {factor:g}" if factor > 1 else "same order"
                what += ", other scale and noise" if uneven else f", noise {noise:g}"
                shares = np.mean(each, axis=0).tolist()
                figures = dict(zip(("differ", "no common best"), shares, strict=True))
                rates.setdefault(f"{tasks} tasks, {what}", []).append(figures)
    return rates


def seconds(budgets: int = 5) -> Figures:
    """CPU seconds of 20 policies, 48 prompts and some budgets; of tasks there are four."""
    rng, tasks = np.random.default_rng(0), np.repeat(np.arange(4), 12)
    xs = [np.exp(rng.normal(size=(48, 20)) + np.linspace(0, 1.5, 20)) for _ in range(budgets)]
    calls: dict[str, Callable[[Array], object]] = {
        "set": best_set,
        "bounds": excess,
        "ranks": rank_intervals,
        "one_best": lambda x: one_best(x, tasks),
        "interaction": lambda x: interaction(x, tasks),
    }
    spent = {}
    for name, call in calls.items():
        start = time.process_time()
        for x in xs:
            call(x)
        spent[name] = time.process_time() - start
    return spent


def lines_of(title: str, prompts: tuple[int, ...], rates: dict[str, list[Figures]]) -> list[str]:
    """A table: a row for each case and figure, a column for each number of prompts."""
    wide = max(map(len, rates))
    columns = [*next(iter(rates.values()))[0]]
    head = "  ".join(f"{column:>{7 * len(prompts) - 1}}" for column in columns)
    count = "  ".join("".join(f"{n:>6} " for n in prompts)[:-1] for _ in columns)
    lines = ["", title, f"{'':{wide}}  {head}", f"{'prompts':{wide}}  {count}"]
    for name, figures in rates.items():
        cells = "  ".join(" ".join(f"{of[column]:6.2f}" for of in figures) for column in columns)
        lines.append(f"{name:{wide}}  {cells}")
    return lines


#: What is simulated: its function, and draws per draw of the set.
SECTIONS: dict[str, tuple[Callable[..., dict[str, list[Figures]]], float]] = {
    "Set of the best": (sets, 1),
    "Policies left open, as measured, by the set and by Holm over all pairs of all budgets": (
        power,
        0.2,
    ),
    "Within a margin": (margins, 4),
    "Prompts needed": (sizes, 2),
    "Rank intervals": (ranked, 1),
    "Rank correlations": (correlations, 1),
    "Claims": (claims, 4),
    "Tasks": (by_task, 1),
}


def run(draws: int, prompts: tuple[int, ...] | None = None) -> tuple[Figures, list[str]]:
    """Rates of all sections, and the report."""
    figures: Figures = {}
    lines = [f"{draws} draws of a case (of the set); standard error of a rate 0.05: "]
    lines[0] += f"{np.sqrt(0.05 * 0.95 / draws):.3f}"
    for title, (section, share) in SECTIONS.items():
        start = time.perf_counter()
        given = (prompts,) if prompts else ()
        rates = section(max(int(share * draws), 2), *given)
        default = (section.__defaults__ or (PROMPTS,))[0]
        lines += lines_of(title, prompts or default, rates)
        lines.append(f"{time.perf_counter() - start:.0f} s")
        for name, each in rates.items():
            for place, of in enumerate(each):
                for column, value in of.items():
                    figures[f"{name}, {column}, {place}"] = float(value)
    spent = seconds()
    lines += ["", "CPU seconds of 20 policies, 48 prompts and 5 budgets (four tasks): "]
    lines[-1] += ", ".join(f"{name} {value:.3f}" for name, value in spent.items())
    return figures | {f"{name}, seconds": value for name, value in spent.items()}, lines


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--draws", type=int, default=150)
    asked = parser.parse_args()
    _, report = run(2, (6,)) if asked.smallest else run(asked.draws)
    publish(report, asked.doc, "verdict rates")
