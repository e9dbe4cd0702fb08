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
all of them, and those stored before, go to scoring-results.parquet. A change of the code is not
noticed: remove both. scoring_plan.py has the plan, which was committed before a value was measured,
and scoring_page.py what the page says.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
import torch
from scoring_page import write
from scoring_plan import (
    ALLOCATED,
    ENDS,
    LEAST,
    LRU,
    NOTHING,
    PROMPT,
    RANDOM,
    SMALLEST,
    STREAMING,
    TURN_TOKENS,
    WINDOW,
    WINDOW_ROWS,
    WORKLOADS,
    Workload,
)
from scoring_prompts import prompt_of
from study import ROOT, finished

import kvsim
from kvsim import Policy
from kvsim.analysis.live.table import measure_live
from kvsim.core.policy import Protection
from kvsim.policies import parameters
from kvsim.recorder import capture, load_model
from kvsim.runner.judging import Judge
from kvsim.runner.model import RunningModel
from kvsim.sweeps import replay_all

RESULTS, PAGE = ROOT / "docs" / "scoring-results.parquet", ROOT / "docs" / "scoring.md"


@cache
def _model(workload: Workload, file: Path | None) -> tuple[Any, Any]:
    if workload.model == "1.5b" and file is None:
        raise SystemExit("the 1.5B is read from a file; give --file FILE.gguf")
    return load_model(file if workload.model == "1.5b" and file else workload.model)


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
    chat = {"chat": True, "max_new_tokens": TURN_TOKENS} if workload.kind == "turns" else {}
    prompt = prompt_of(workload, number, tokenizer)
    if prompt.response is None and not chat:
        chat = {"max_new_tokens": workload.response}
    trace = capture(model, tokenizer, prompt, sensitivity=False, **chat)
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
        table = measure_live(trace, [record], [outcome], ["response_kl"])
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
    """Measure the steps that are neither stored nor among the pieces."""
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
    gather(stored, args.pieces)
    write(values(stored), PAGE, args.out)


if __name__ == "__main__":
    main()
