"""How often the verdict is wrong, and what it decides, where the truth is known.

    python tests/benchmarks/verdict_rates.py               # 150 draws of each case: some minutes
    python tests/benchmarks/verdict_rates.py --draws 1000  # its own standard error a third
    python tests/benchmarks/verdict_rates.py --smallest    # seconds; what the test suite runs

Prompts are drawn with replacement from the judged KL of the results pages, 14 policies at eight
budgets of three models, so that the page's means are the truth: as measured, or with the best three
rescaled to equal means, the hardest case. What pages lack is simulated: extreme skew, ties, tasks.
"""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from harness import options, publish
from kvsim.analysis.significance import best_set, excess, rank_intervals
from kvsim.analysis.summaries import Interval

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


def margins(draws: int, prompts: tuple[int, ...] = PROMPTS) -> dict[str, list[Figures]]:
    """False "within 10 or 25 %" at exactly that margin, and true ones of three equal policies."""
    rates: dict[str, list[Figures]] = {}
    cases = (case for case in populations() if not case[0].startswith("as measured"))
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


def intervals(draws: int, prompts: tuple[int, ...] = PROMPTS) -> dict[str, list[Figures]]:
    """How often the interval of a policy's mean holds it."""
    rates: dict[str, list[Figures]] = {}
    for name, x in panels().items():
        for n in prompts:
            rng, each = np.random.default_rng(n), []
            for _ in range(draws):
                ends = Interval.of_each([*some(rng, x, n).T])
                each.append([y.low <= m <= y.high for y, m in zip(ends, x.mean(0), strict=True)])
            rates.setdefault(f"mean, {name}", []).append({"holds it": float(np.mean(each))})
    return rates


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
SECTIONS = {
    "Set of the best": (sets, 1),
    "Within a margin": (margins, 4),
    "Rank intervals": (ranked, 1),
    "Interval of a mean": (intervals, 1),
}


def run(draws: int, prompts: tuple[int, ...] = PROMPTS) -> tuple[Figures, list[str]]:
    """Rates of all sections, and the report."""
    figures: Figures = {}
    error = np.sqrt(0.05 * 0.95 / draws)
    lines = [f"{draws} draws of a case (of the set); standard error of a rate 0.05: {error:.3f}"]
    for title, (section, share) in SECTIONS.items():
        rates = section(max(share * draws, 2), prompts)
        lines += lines_of(title, prompts, rates)
        for name, each in rates.items():
            for n, of in zip(prompts, each, strict=True):
                figures |= {f"{name}, {column}, {n}": float(value) for column, value in of.items()}
    return figures, lines


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--draws", type=int, default=150)
    asked = parser.parse_args()
    _, report = run(2, (6,)) if asked.smallest else run(asked.draws)
    publish(report, asked.doc, "verdict rates")
