# ruff: noqa: INP001, T201 - a script, not a module, and it says what it did
"""Does the model still find the needle? Right answers by depth and length: needle.md.

    python docs/needle.py                 both models, half an hour on one core; resumes
    python docs/needle.py --write-only    the page of what is measured already: seconds
    python docs/needle.py --out FILE --traces DIR --models tiny --rounds N

What was measured of a prompt is kept in `--traces` and used again. A round is one prompt of every
length and depth, so that the grid is even after each.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import polars as pl
import torch
from scipy.stats import fisher_exact
from study import NAMED, ROOT, finished, picture

import kvsim
from apps.tiny.card import fill, proportion
from apps.tiny.card import table as markdown
from kvsim import Policy
from kvsim.plots.haystack import needle as haystack
from kvsim.recorder import Prompt, load_model
from kvsim.recorder.models import load_tokenizer
from kvsim.recorder.prompts import token_count
from kvsim.studies.language.tasks import Sample, make
from kvsim.text.tasks import sample
from results_page.plan import SMALL, Plan, Sizes
from results_page.policies import scaled
from results_page.traces import DEPTHS, weights

PAGE = ROOT / "docs" / "needle.md"
#: Policies of four kinds: by position, by the question's attention, by expected queries, and by
#: segments.
NAMES = ("streaming_llm", "snapkv", "expected_attention", "ams")
METRICS = ("answer_right", "needle_recall")
SEED = 9

_model, _tokenizer = cache(load_model), cache(load_tokenizer)


@dataclass(frozen=True)
class Grid:
    """Needles of a model by depth and length of the prompt, and what evicts.

    rounds: prompts of each length and depth. budgets: shares of prompt and response. new_tokens: of
    a response, at most.
    """

    model: str
    lengths: tuple[int, ...]
    rounds: int
    budgets: tuple[str, ...]
    interval: int
    new_tokens: int
    depths: tuple[float, ...] = DEPTHS
    sizes: Sizes = field(default=SMALL, hash=False)

    @property
    def policies(self) -> list[Policy]:
        """The policies, with parameters that fit the prompts."""
        return [scaled(self.sizes, name) for name in NAMES]

    def prompt(self, number: int) -> Prompt:
        """A prompt with its needle, answer and labels; numbers count depths, lengths, rounds."""
        at, depth = divmod(number, len(self.depths))
        turn, length = divmod(at, len(self.lengths))
        draw = _ledger if self.model == "tiny" else _real
        return draw(self, self.lengths[length], self.depths[depth], turn)

    @property
    def weights(self) -> str:
        """SHA-256 of the weights."""
        return weights(Plan(self.model, lengths=() if self.model == "tiny" else self.lengths))


TINY = Grid("tiny", (300, 450, 650, 900), 8, ("50%", "75%"), 16, 32)
SMOLLM2 = Grid(
    "smollm2",
    (256, 512, 1024),
    4,
    ("25%", "50%"),
    32,
    8,
    sizes=Sizes(SMALL.largest | {"window": 16}, SMALL.ams, SMALL.recent, 16),
)
GRIDS = {"tiny": TINY, "smollm2": SMOLLM2}

# ----------------------------------------------------------------------------------------- prompts

#: How far a needle of tiny may be from its depth, and a prompt from its length.
_AWAY, _OFF = 0.12, 0.06
#: Facts on a page of tiny, two of which are asked for.
_PAGE = 12


def _ledger(_: Grid, length: int, depth: float, turn: int) -> Prompt:
    """A needle in the language of tiny: both facts that are asked for stand near the depth."""
    rng = random.Random(f"needle {SEED} {length} {depth} {turn}")
    filler = (length - 88) / (6.5 * _PAGE)  # sentences before each fact
    while True:
        drawn = make(rng, task="needle", facts=_PAGE, lines=2, kinds=6, filler=filler)
        needles, depths = _facts(drawn)
        near = all(abs(place - depth) <= _AWAY for place in depths)
        if near and abs(drawn.prompt_words / length - 1) <= _OFF:
            break
    labels = {"task": "needle", "length": length, "depth": depth}
    name = f"tiny-needle-{length}-{depth}-{turn}"
    return Prompt(name, drawn.prompt, drawn.answer, labels=labels, needle=needles)


def _facts(drawn: Sample) -> tuple[tuple[str, ...], list[float]]:
    """The facts that the response takes, as text, and the share of the page before each."""
    words = drawn.prompt.split()
    starts = [read.path[0] - 1 for read in drawn.retrievals if read.purpose == "successor"]
    needles = tuple(" ".join(words[at : at + 3]) for at in starts)
    return needles, [at / words.index("key") for at in starts]


def _real(grid: Grid, length: int, depth: float, turn: int) -> Prompt:
    """A needle in the documentation of Python."""
    count = partial(token_count, tokenizer=_tokenizer(grid.model))
    drawn = sample(SEED, turn, count, task="needle", length=length, depth=depth)
    labels = {"task": "needle", "length": length, "depth": depth}
    name = f"{grid.model}-needle-{length}-{depth}-{turn}"
    return Prompt(name, drawn.prompt, drawn.answer, labels=labels, needle=drawn.needles)


# ------------------------------------------------------------------------------------- measurement


def measured(grid: Grid, folder: Path, *, measure: bool = True) -> pl.DataFrame:
    """The rows of all prompts; with `measure` those that are missing are measured first."""
    torch.set_num_threads(1)
    tables = []
    for number in range(grid.rounds * len(grid.lengths) * len(grid.depths)):
        prompt = grid.prompt(number)
        stored = folder / f"{prompt.id}-{_key(grid, prompt)}.parquet"
        if measure and not stored.exists():
            stored.parent.mkdir(parents=True, exist_ok=True)
            part = stored.with_suffix(".part")
            _measure(grid, prompt).write_parquet(part)
            part.rename(stored)
        if stored.exists():
            tables.append(pl.read_parquet(stored))
    cells = len(grid.lengths) * len(grid.depths)
    whole = len(tables) // cells * cells  # complete rounds, which come one after the other
    if not whole:
        raise SystemExit(f"{folder}: no round of {grid.model} is measured; leave --write-only out")
    return pl.concat(tables[:whole])


def _key(grid: Grid, prompt: Prompt) -> str:
    """Of everything that decides what is measured."""
    policies = [(each.name, each.params) for each in grid.policies]
    terms = grid.weights, grid.budgets, grid.interval, grid.new_tokens, METRICS
    return hashlib.sha256(repr((prompt, policies, terms)).encode()).hexdigest()[:12]


def _measure(grid: Grid, prompt: Prompt) -> pl.DataFrame:
    """Record a prompt with the full cache, and run it under every policy at every budget."""
    model, tokenizer = _model(grid.model)
    trace = kvsim.capture(
        model,
        tokenizer,
        prompt.content,
        answer=prompt.answer,
        labels=prompt.labels,
        needle=prompt.needle,
        name=prompt.id,
        max_new_tokens=grid.new_tokens,
        stop=() if grid.model == "tiny" else "\n",
    )
    run = kvsim.live(
        model,
        [trace],
        grid.policies,
        grid.budgets,
        tokenizer=tokenizer,
        interval=grid.interval,
        prefill=True,
        max_new_tokens=grid.new_tokens,
        metrics=METRICS,
    )
    check = trace.meta["answer_check"]
    return finished(run).table.with_columns(
        tokens=pl.lit(trace.prompt_len), full_right=pl.lit(check["right"])
    )


# ---------------------------------------------------------------------------------------- the page

#: Depths of each place; the middle is what models and policies are said to lose.
PLACES = {"beginning": (0.0, 0.2), "middle": (0.3, 0.7), "end": (0.8, 1.0)}
#: Chance of one false difference or more among those that the page names.
LEVEL = 0.05


def answers(table: pl.DataFrame) -> pl.DataFrame:
    """A row per prompt, policy and budget: labels, `right`, `recall`; full_right is of the prompt.

    recall: the share of the needle's entries that the rows of the response see, mean over layers
    and heads.
    """
    keys = ("trace", "tokens", "length", "depth", "full_right", "policy", "share")
    means = table.group_by(*keys, "metric", maintain_order=True).agg(pl.col("value").mean())
    wide = means.pivot(on="metric", values="value", maintain_order=True)
    place = pl.coalesce(
        pl.when(pl.col("depth").is_between(*span)).then(pl.lit(name))
        for name, span in PLACES.items()
    )
    return wide.rename({"needle_recall": "recall"}).with_columns(
        right=pl.col("answer_right") == 1, place=place
    )


def parts(found: Mapping[str, pl.DataFrame]) -> dict[str, str]:
    """The parts of the page; found: the rows of each model."""
    of = {model: answers(rows) for model, rows in found.items()}
    kept = {model: rows.filter("full_right") for model, rows in of.items()}
    by_model = {model: f"{_full(rows)}\n\n{_places(kept[model])}" for model, rows in of.items()}
    lines = [f"* {NAMED[model]}: {_middle(rows)}" for model, rows in kept.items()]
    unread = filter(None, map(_unread, kept, kept.values()))
    recall = "\n\n".join([_recall(kept), *unread])
    prompts = "\n".join(map(_prompts, of, of.values()))
    return {"prompts": prompts, **by_model, "middle": "\n".join(lines), "recall": recall}


def _prompts(model: str, rows: pl.DataFrame) -> str:
    grid, prompts = GRIDS[model], rows["trace"].n_unique()
    each = prompts // rows.select("length", "depth").n_unique()
    return (
        f"* {NAMED[model]}: {prompts} prompts, {each} of each length and depth; budgets "
        f"{' and '.join(grid.budgets)} of prompt and response; an event after the prompt, and "
        f"every {grid.interval} rows."
    )


def _full(rows: pl.DataFrame) -> str:
    prompts = rows.group_by("trace").agg(pl.col("full_right").first())["full_right"]
    tokens = rows["tokens"]
    return (
        f"Prompts of {tokens.min()} to {tokens.max()} tokens. With the full cache "
        f"{proportion(int(prompts.sum()), len(prompts))} are answered right; only these "
        "count below."
    )


def _each(rows: pl.DataFrame) -> Iterator[tuple[str, str, pl.DataFrame]]:
    """Policies, budgets, and the rows of each."""
    for (policy, share), of in rows.group_by("policy", "share", maintain_order=True):
        yield str(policy), str(share), of


def _places(rows: pl.DataFrame) -> str:
    body = []
    for policy, share, of in _each(rows):
        parts = [of.filter(place=place) for place in PLACES]
        right = [proportion(int(x["right"].sum()), len(x)) for x in [*parts, of] if len(x)]
        recall = [_percent(x["recall"]) for x in parts]
        body.append([f"`{policy}`", share, *right, *recall])
    head = ["policy", "budget", *PLACES, "all", *(f"recall, {place}" for place in PLACES)]
    return markdown(head, body)


def _percent(values: pl.Series) -> str:
    mean = values.mean()
    return "-" if mean is None else f"{100 * float(str(mean)):.0f} %"


def middle(rows: pl.DataFrame) -> list[tuple[str, int, int, int, int, float]]:
    """For each policy and budget: failures in the middle, of so many, at the ends, of so many, p."""
    out = []
    for policy, share, of in _each(rows):
        inside = of.filter(pl.col("place") == "middle")["right"]
        outside = of.filter(pl.col("place") != "middle")["right"]
        a, c = (int((~x).sum()) for x in (inside, outside))
        b, d = len(inside), len(outside)
        p = float(fisher_exact([[a, b - a], [c, d - c]]).pvalue)
        out.append((f"`{policy}` at {share}", a, b, c, d, p))
    return out


def _middle(rows: pl.DataFrame) -> str:
    tests = middle(rows)
    parts: dict[str, list[str]] = {"more": [], "less": []}
    for name, a, b, c, d, p in tests:
        if p < LEVEL / len(tests):
            kind = "more" if a * d > c * b else "less"
            parts[kind].append(f"{name} ({a} of {b} against {c} of {d}, p = {p:.2g})")
    texts = [f"{kind} often in the middle: {', '.join(x)}" for kind, x in parts.items() if x]
    rest = len(tests) - sum(map(len, parts.values()))
    others = f"no difference found in {rest} of {len(tests)} cells of a policy and a budget"
    by_content = [test for test in tests if NAMES[0] not in test[0]]
    a, b, c, d = (sum(test[at] for test in by_content) for at in (1, 2, 3, 4))
    total = f"Without `{NAMES[0]}`, which goes by place"
    total += f", {a} of {b} fail in the middle, and {c} of {d} at the ends"
    return f"{'; '.join([*texts, others])}. {total}."


def pairs(rows: pl.DataFrame) -> tuple[float, int]:
    """Share of pairs of a right and a wrong answer where the right one has more recall; pairs."""
    above, count = 0.0, 0
    for _, _, of in _each(rows):
        right, wrong = (of.filter(pl.col("right") == x)["recall"].to_numpy() for x in (True, False))
        gap = right[:, None] - wrong[None]
        above += float((gap > 0).sum() + (gap == 0).sum() / 2)
        count += gap.size
    return above / max(1, count), count


def _recall(of: Mapping[str, pl.DataFrame]) -> str:
    body = []
    for name in NAMES:
        cells = []
        for rows in of.values():
            share, count = pairs(rows.filter(policy=name))
            cells.append(f"{share:.0%} of {count}" if count else "no pair")
        body.append([f"`{name}`", *cells])
    return markdown(["policy", *(NAMED[model] for model in of)], body)


def _unread(model: str, rows: pl.DataFrame) -> str:
    """The policy and budget that keeps most of the needle, at least half, with few right."""
    few = [cell for cell in _each(rows) if cell[2]["right"].sum() < len(cell[2]) / 4]
    most = [cell for cell in few if float(cell[2]["recall"].sum()) >= len(cell[2]) / 2]
    if not most:
        return ""
    policy, share, of = max(most, key=lambda cell: float(cell[2]["recall"].sum()))
    return (
        f"On {NAMED[model]}, `{policy}` at {share} keeps {_percent(of['recall'])} of the needle and "
        f"answers {of['right'].sum()} of {len(of)} right: what is left was not enough, or not in "
        "the heads that read it."
    )


def draw(rows: pl.DataFrame, path: Path) -> None:
    """The figure of a model: that of `kvsim plot needle --metric answer_right`."""
    picture(haystack(rows, ["answer_right"]), path, dpi=100, metadata={"Software": None})


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the page and its figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write-only", action="store_true", help="of what is measured already")
    parser.add_argument("--out", type=Path, default=PAGE, metavar="FILE")
    parser.add_argument("--traces", type=Path, default=ROOT / "traces" / "needle", metavar="DIR")
    parser.add_argument("--models", choices=GRIDS, nargs="+", default=list(GRIDS))
    parser.add_argument("--rounds", type=int, metavar="N", help="the first so many of each model")
    args = parser.parse_args(arguments)
    start = time.perf_counter()
    grids = [GRIDS[model] for model in args.models]
    grids = [replace(grid, rounds=args.rounds or grid.rounds) for grid in grids]
    by_model = {
        grid.model: measured(grid, args.traces, measure=not args.write_only) for grid in grids
    }
    for model, rows in by_model.items():
        draw(rows, args.out.parent / f"figures/needle-{model}.png")
    args.out.write_text(fill(PAGE.read_text("utf-8"), parts(by_model)), "utf-8")
    print(f"{args.out} written after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
