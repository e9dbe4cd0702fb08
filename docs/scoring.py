# ruff: noqa: INP001, T201 - a script, not a module, and it says what it did
"""Does scoring matter? Scorers against random sets under three protections: scoring.md.

    python docs/scoring.py                       measure what is missing, write the page; hours
    python docs/scoring.py --file FILE.gguf      the same with Qwen2.5-Coder-1.5B from a file
    python docs/scoring.py --workloads answers needles --prompts 12
    python docs/scoring.py --stored              the page of the values that are there: seconds
    python docs/scoring.py --smallest            one prompt of tiny: seconds; what a test runs
    python docs/scoring.py --pieces DIR --out FILE

A step is one prompt of one workload: recorded, replayed under every policy, protection and budget,
and judged. Each is a file in `--pieces`, so that a run that is stopped loses one prompt; values of
all of them, and those stored before, go to scoring-results.parquet. `Workload` and the constants
below are the plan, which was committed before a value was measured, but for the seconds of one
prompt that is not in it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import polars as pl
import torch
import turns
from study import ROOT, finished

import kvsim
from kvsim import Policy
from kvsim.analysis.live.table import measure_judged
from kvsim.core.policy import Protection
from kvsim.policies import parameters
from kvsim.recorder import Options, Prompt, load_model
from kvsim.recorder.capturing import capture_one
from kvsim.recorder.prompts import token_count
from kvsim.runner.judging import Judge
from kvsim.runner.model import RunningModel
from kvsim.sweeps import replay_all
from kvsim.text.tasks import sample
from needle import TINY as LEDGER
from qwen_card import SHEET
from results_page.plan import FULL
from results_page.traces import ANSWERS, DEPTHS, samples

RESULTS, PAGE = ROOT / "docs" / "scoring-results.parquet", ROOT / "docs" / "scoring.md"

# ----------------------------------------------------------------------------------------- the plan

#: Two policies are equivalent if neither may be worse by more than this share of the other's KL.
MARGIN = 0.10
#: Without a score: random sets (the mean over seeds is one value), the most recent entries, the
#: entries that were attended to most recently, and the most recent ones behind four sinks.
RANDOM, WINDOW, LRU, STREAMING = "random", "window", "lru", "streaming_llm"
UNSCORED = (RANDOM, WINDOW, LRU, STREAMING)
SEEDS = (0, 1, 2)
SCORERS = (
    *("h2o", "tova", "snapkv", "dropkv", "rkv", "gkv", "triattention", "expected_attention"),
    *("capkv", "keydiff", "knorm", "lagkv"),
)
#: A scorer whose heads share a budget, of which the second paper speaks.
ALLOCATED = "adakv+snapkv"
#: Protected: nothing beyond the rows of a scorer's own window; as many of the first and of the last
#: entries as a tenth of the budget, at least four (arXiv 2605.18053); or the prompt, with as many
#: of the last, and the budget over the prompt (arXiv 2609.03430).
NOTHING, ENDS, PROMPT = "nothing", "ends", "prompt"
#: Budgets as shares: of prompt and response, or of the response if the prompt is protected.
SHARES = (0.125, 0.25, 0.5)
#: Tokens of a scorer's window, and of LagKV's partitions; the smallest budget.
WINDOW_ROWS, LEAST = 8, 12


@dataclass(frozen=True)
class Workload:
    """Prompts of a kind on a model, and what is replayed over them.

    kind: names the function that makes a prompt. interval: rows between events, one of which
    follows the prompt. response: tokens of a given response, or the most of one that is generated.
    protections: without `PROMPT` where hardly more than the prompt is there to evict.
    """

    kind: str
    model: str = "smollm2"
    interval: int = 32
    response: int = 16
    protections: tuple[str, ...] = (NOTHING, ENDS)
    shares: tuple[float, ...] = SHARES
    scorers: tuple[str, ...] = SCORERS
    seeds: tuple[int, ...] = SEEDS
    prompts: int = 24

    @property
    def name(self) -> str:
        """The workload as `--workloads` calls it."""
        given = [] if self.model == "smollm2" else [self.model]
        return "-".join([*given, self.kind, *[str(self.interval)] * (self.interval == 8)])

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies of tables, random first."""
        return (*UNSCORED, *self.scorers, ALLOCATED)


EVERY = (NOTHING, ENDS, PROMPT)
FEWER = ("h2o", "tova", "snapkv", "rkv", "triattention", "expected_attention", "capkv", "keydiff")
#: In the order in which they are measured.
WORKLOADS = {
    each.name: each
    for each in (
        Workload("needles"),
        Workload("answers", response=160, protections=EVERY),
        Workload("needles", "tiny", 16, response=32),
        Workload("answers", "tiny", 16, response=160, protections=EVERY),
        Workload("turns", response=turns.NEW_TOKENS),
        Workload("documents", response=128, protections=EVERY),
        Workload(
            *("answers", "1.5b"),
            response=160,
            protections=EVERY,
            shares=SHARES[:2],
            scorers=FEWER,
            seeds=SEEDS[:2],
        ),
        Workload("sheets", response=320, protections=EVERY),
        Workload("answers", interval=8, response=160, protections=EVERY),
    )
}
SMALLEST = Workload(
    "answers", "tiny", 16, 160, EVERY, SHARES[1:2], ("snapkv", "keydiff"), SEEDS[:1], 1
)
#: What the papers claim, and how it is tested on a workload: each sentence by one test over its
#: prompts, at all budgets together, at 5 %. "Not worse" and "equivalent" are by `MARGIN`.
CLAIMS = {
    "R1": "With the prompt protected, random sets are as good as the strongest scorer "
    "(arXiv 2609.03430, abstract, 4.2): `random` is not worse than any scorer. Against it: one "
    "scorer is better than `random`, p times the number of scorers.",
    "R2": "Protecting the prompt closes most of the gap between scorers and random sets (5.1): the "
    "mean log ratio of `random` to the scorers is less than half of that with nothing protected. "
    "Against it: it is more than half.",
    "R3": "With the prompt protected, the most recent entries come near the best scorer (5.1): "
    "`window` is not worse than any scorer. Against it: as for R1.",
    "R4": "A fact that is stated once is what a score still finds, R-KV's above all (5.3): `rkv` "
    "is better than `random` with nothing protected, on needles and turns. Against it: worse. "
    "The paper's fact is in the response, behind a protected prompt.",
    "P1": "Without protection all policies collapse, and a tenth of the budget at both ends mends "
    "it (arXiv 2605.18053, abstract): each of `random`, `lru`, `h2o`, `snapkv` and `adakv+snapkv` "
    "is better with protected ends. Against it: one of them is worse, p times five.",
    "P2": "With protected ends, policies are equivalent to LRU when they evict every 32 rows "
    "(abstract): `random`, `streaming_llm`, `h2o`, `snapkv` and `adakv+snapkv` are. Against it: "
    "one differs from it by more than the margin, p times ten.",
    "P3": "Protection dominates, scores are secondary (abstract): what protecting the ends gains "
    "`lru` is more than any of these policies differs from it then. Against it: it is less than "
    "one differs, p times ten.",
    "P4": "When they evict every 8 rows, `h2o`, `snapkv` and `adakv+snapkv` are better than `lru` "
    "(abstract), with protected ends. Against it: one is worse, p times three.",
    "P5": "Budgets by head add to a score (abstract): `adakv+snapkv` is better than `snapkv` with "
    "protected ends. Against it: it is worse.",
}

# ---------------------------------------------------------------------------------------- prompts


@cache
def _model(workload: Workload, file: Path | None) -> tuple[Any, Any]:
    if workload.model == "1.5b" and file is None:
        raise SystemExit("the 1.5B is read from a file; give --file FILE.gguf")
    return load_model(file if workload.model == "1.5b" and file else workload.model)


def prompt_of(workload: Workload, number: int, tokenizer: Any) -> Prompt:
    """Prompt `number` of a workload, from 0."""
    name = f"{workload.name}-{number:02}"
    if workload.model == "tiny":
        plan = replace(FULL, seed=65, prompts=workload.prompts)
        made = samples(plan)[number + 1]
        if workload.kind == "needles":
            made = LEDGER.prompt(40 + number)
        return replace(made, id=name)
    return PROMPTS[workload.kind](workload, number, name, tokenizer)


def _cut(workload: Workload, name: str, row: dict[str, Any], tokenizer: Any) -> Prompt:
    """A question, and the beginning of what the 1.5B wrote with the full cache."""
    ids = tokenizer(row["response"], add_special_tokens=False)["input_ids"]
    question = [{"role": "user", "content": row["prompt"]}]
    return Prompt(name, question, response=ids[: workload.response])


def _written(sheet: bool) -> list[dict[str, Any]]:
    rows = map(json.loads, ANSWERS.read_text("utf-8").splitlines())
    return [
        row
        for row in rows
        if row["model"] == "1.5B" and row.get("ended") and row.get("prompt")
        if (row["task"] == SHEET) == sheet and (sheet or row["right"])
        if row["response_tokens"] >= 200
    ]


def _answer(workload: Workload, number: int, name: str, tokenizer: Any) -> Prompt:
    """A right answer of at least 200 tokens; the first was used to measure seconds."""
    return _cut(workload, name, _written(sheet=False)[number + 1], tokenizer)


def _sheet(workload: Workload, number: int, name: str, tokenizer: Any) -> Prompt:
    """Answers to three questions, right or not."""
    return _cut(workload, name, _written(sheet=True)[number], tokenizer)


def _needle(_: Workload, number: int, name: str, tokenizer: Any) -> Prompt:
    """Needles and quotes in 512 tokens, in turn."""
    count = partial(token_count, tokenizer=tokenizer)
    task, depth = ("needle", "quote")[number % 2], DEPTHS[number % len(DEPTHS)]
    one = sample(65, number, count, task=task, length=512, depth=depth)
    return Prompt(name, one.prompt, one.answer, needle=one.needles)


def _document(workload: Workload, number: int, name: str, tokenizer: Any) -> Prompt:
    """Text of 1,024 tokens, and the text that continues it."""
    count = partial(token_count, tokenizer=tokenizer)
    one = sample(65, number, count, task="text", length=1024)
    ids = tokenizer(one.response, add_special_tokens=False)["input_ids"]
    return Prompt(name, one.prompt, response=ids[: workload.response])


def _turns(_: Workload, number: int, name: str, tokenizer: Any) -> Prompt:
    """Three questions on one document, others than those of turns.md."""
    context, (first, *later) = turns.document(100 + number, tokenizer)
    return Prompt(
        name,
        str(first.question),
        answer=first.answer,
        context=context,
        answer_prefix=first.answer_prefix,
        turns=later,
    )


PROMPTS: dict[str, Callable[..., Prompt]] = {
    "answers": _answer,
    "sheets": _sheet,
    "needles": _needle,
    "documents": _document,
    "turns": _turns,
}

# ------------------------------------------------------------------------------------ measurement


def build(name: str, budget: int, protect: Protection) -> Policy:
    """A policy without sinks of its own, `streaming_llm` excepted; budget: without the prompt."""
    accepted = parameters(name)
    given: dict[str, Any] = {each: WINDOW_ROWS for each in ("window", "lag") if each in accepted}
    given |= {"sink": 0} if "sink" in accepted and name != STREAMING else {}
    given |= {"protect_prompt": False} if "protect_prompt" in accepted else {}
    given |= {"calibration": "prefix:32"} if "calibration" in accepted else {}
    given |= {"recent": budget // 2} if name == "h2o" else {}
    return kvsim.policy(name, protect=protect, **given)


def policies_of(workload: Workload, budget: int, protect: Protection) -> Iterator[Policy]:
    """The policies of a workload, each by its name, random ones with their seed behind it."""
    for seed in workload.seeds:
        one = kvsim.policy("random", seed=seed, protect=protect)
        yield replace(one, name=f"{RANDOM} {seed}")
    window = kvsim.policy("streaming_llm", sink=0, protect=protect)
    yield replace(window, name=WINDOW)
    # an entry is attended to where it is among the tenth of the largest weights of a row
    lru = kvsim.policy("raas", share=0.1, protect_prompt=False, protect=protect)
    yield replace(lru, name=LRU)
    for name in (STREAMING, *workload.scorers, ALLOCATED):
        yield replace(build(name, budget, protect), name=name)


def measure(workload: Workload, number: int, file: Path | None) -> pl.DataFrame:
    """Judged KL of a prompt by protection, share and policy, in nats per token."""
    torch.set_num_threads(1)
    start = time.process_time()
    model, tokenizer = _model(workload, file)
    chat = {"chat": True, "max_new_tokens": turns.NEW_TOKENS} if workload.kind == "turns" else {}
    prompt = prompt_of(workload, number, tokenizer)
    if prompt.response is None and not chat:
        chat = {"max_new_tokens": workload.response}
    trace = capture_one(model, tokenizer, prompt, None, Options(sensitivity=False, **chat))
    records, cells = [], []
    for protection in workload.protections:
        before = trace.prompt_len if protection == PROMPT else 0
        for share in workload.shares:
            budget = max(LEAST, round(share * (trace.n_pos - before)))
            ends = max(4, budget // 10)
            protect = {
                NOTHING: Protection(),
                ENDS: Protection(sink=ends, recent=ends),
                PROMPT: Protection(recent=ends, prompt=True),
            }[protection]
            options: Any = {"interval": workload.interval, "prefill": True}
            policies = [*policies_of(workload, budget, protect)]
            run = finished(
                replay_all([trace], policies, before + budget, metrics=["entries_seen"], **options)
            )
            records += run.records
            cells += [(protection, share, budget)] * len(run.records)
    outcomes = Judge(RunningModel(model), trace).outcomes(records)
    rows = []
    for (protection, share, budget), record, outcome in zip(cells, records, outcomes, strict=True):
        table = measure_judged(trace, [record], [outcome], ["response_kl"])
        policy, _, seed = record.policy.partition(" ")
        row = {"protection": protection, "share": share, "budget": budget, "policy": policy}
        rows.append(row | {"seed": int(seed or 0), "kl": table["value"].mean()})
    of_prompt = {
        "workload": workload.name,
        "number": number,
        "digest": trace.digest[7:23],
        "tokens": trace.n_pos,
        "prompt_tokens": trace.prompt_len,
        "seconds": time.process_time() - start,
    }
    return pl.DataFrame([of_prompt | row for row in rows])


def steps(workloads: Sequence[Workload], prompts: int | None) -> Iterator[tuple[Workload, int]]:
    """Workloads with the numbers of their prompts."""
    for workload in workloads:
        yield from ((workload, at) for at in range(min(prompts or 99, workload.prompts)))


def extend(
    stored: Path,
    pieces: Path,
    workloads: Sequence[Workload],
    prompts: int | None,
    file: Path | None,
) -> None:
    """Measure the steps that are neither stored nor among the pieces, and store them."""
    pieces.mkdir(parents=True, exist_ok=True)
    done = set(values(stored).select("workload", "number").iter_rows())
    for workload, number in steps(workloads, prompts):
        piece = pieces / f"{workload.name}-{number:02}.parquet"
        if (workload.name, number) in done or piece.exists():
            continue
        if workload.model == "1.5b" and file is None:
            print(f"{workload.name} is left out: it needs --file FILE.gguf")
            break
        table = measure(workload, number, file)
        part = piece.with_suffix(".part")
        table.write_parquet(part)
        part.rename(piece)
        print(f"{piece.stem}: {table['seconds'][0]:.0f} s", flush=True)
    gather(stored, pieces)


def gather(stored: Path, pieces: Path) -> None:
    """Store the values of all pieces, beside those stored before."""
    tables = [values(stored), *map(pl.read_parquet, sorted(pieces.glob("*.parquet")))]
    tables = [table for table in tables if len(table)]
    if not tables:
        return
    keys = ["workload", "number", "protection", "share", "policy", "seed"]
    exact = {"number": pl.Int16, "budget": pl.Int16, "tokens": pl.Int16, "prompt_tokens": pl.Int16}
    small = exact | {"seed": pl.Int8, "share": pl.Float32, "kl": pl.Float32, "seconds": pl.Float32}
    together = pl.concat([table.cast(small) for table in tables], how="diagonal")
    whole = together.unique(keys, keep="first").sort(keys)
    whole.write_parquet(stored, compression="zstd")


def values(stored: Path) -> pl.DataFrame:
    """The stored values, none without the file."""
    empty = {"workload": pl.String, "number": pl.Int16}
    return pl.read_parquet(stored) if stored.exists() else pl.DataFrame(schema=empty)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workloads", nargs="*", choices=[*WORKLOADS], default=[*WORKLOADS])
    parser.add_argument("--prompts", type=int, metavar="N", help="the first so many of each")
    parser.add_argument("--file", type=Path, metavar="FILE.gguf", help="Qwen2.5-Coder-1.5B")
    parser.add_argument("--pieces", type=Path, metavar="DIR", default=ROOT / "traces" / "scoring")
    parser.add_argument("--out", type=Path, metavar="FILE", default=PAGE, help="the page")
    parser.add_argument("--stored", action="store_true", help="write the page of the values there")
    parser.add_argument("--smallest", action="store_true", help="one prompt of tiny")
    args = parser.parse_args(arguments)
    stored = args.out.with_name(RESULTS.name)
    chosen = [SMALLEST] if args.smallest else [WORKLOADS[name] for name in args.workloads]
    if not args.stored:
        extend(stored, args.pieces, chosen, args.prompts, args.file)


if __name__ == "__main__":
    main()
