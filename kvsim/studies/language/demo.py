"""`kvsim demo`: a comparison of policies on traces of two models."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli.shared import Json, Stop, path_option, quiet_transformers
from kvsim.cli.show import (
    cells,
    echo_json,
    echo_results,
    echo_text,
    echo_verdict,
    fidelity_shares,
    verdict,
)
from kvsim.errors import KvsimError, OutputError, TraceError
from kvsim.files import check_writable, published, writing
from kvsim.progress import progress_bar
from kvsim.samples import sample_judged, sample_trace

if TYPE_CHECKING:
    from kvsim.core.trace import Trace
    from kvsim.sweeps import Run

# Cells of a table.
Rows = list[dict[str, Any]]

#: `full` is the reference; `random` is chance.
POLICIES = ("full", "random", "streaming_llm", "h2o", "tova", "snapkv")
BUDGETS = (64, 128)
#: Rows between events, the same for every policy, so that policies differ only in what they keep.
INTERVAL = 32
#: The layer of the trace and the KV head of the retention maps, of `tiny` and of SmolLM2.
TINY_HEAD, SMOLLM2_HEAD = (1, 0), (0, 2)
#: Prefix of the files of the second comparison.
SMOLLM2 = "smollm2-"

MARKER = "demo.json"
_OUTPUTS = ("run", "retention.png", "budgets.png")
_FILES = frozenset({MARKER, "trace.zarr", *_OUTPUTS, *(SMOLLM2 + name for name in _OUTPUTS)})


def run(
    out: Annotated[
        Path,
        path_option(
            "DIR", "The folder for trace, run and figures; an earlier demo there is replaced."
        ),
    ] = Path("results/demo"),
    as_json: Json = False,
) -> None:
    """Compare six policies on traces of two models.

    Records the shipped model while it reasons, replays the policies at two budgets, prints a table,
    and writes trace, run and figures. Then does the same comparison on the shipped trace of a real
    language model, SmolLM2.
    """
    _check_target(out)
    check_writable(out.parent)
    try:
        with published(out, overwrite=True) as draft:
            draft.mkdir()
            document = _demo(draft, (lambda _: None) if as_json else echo_text)
            (draft / MARKER).write_text(json.dumps(document, indent=2) + "\n", "utf-8")
            _check_target(out)
    except KeyboardInterrupt:
        state = "is unchanged" if out.exists() else "was not written"
        raise Stop(f"interrupted, {out} {state}", 130) from None
    except KvsimError as error:  # a full disk: the message is about a trace that is gone by now
        if isinstance(error.__cause__, OSError):
            with writing(out):
                raise error.__cause__ from error
        raise
    if as_json:
        echo_json({"out": str(out), **document})
    else:
        typer.echo(f"Written to {out}: {', '.join(sorted(_FILES))}.")


def _check_target(out: Path) -> None:
    """Raise OutputError if `out` exists and is not just an earlier demo."""
    is_demo = not out.is_symlink() and (out / MARKER).is_file()
    foreign = {path.name for path in out.iterdir()} - _FILES if is_demo else {"no demo"}
    if foreign and (out.exists() or out.is_symlink()):
        raise OutputError(
            f"{out} has {', '.join(sorted(foreign))}, expected an earlier demo or nothing; give "
            "another --out or move that away, nothing was changed"
        )


def _demo(folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Do all steps in a folder, say on the way, and return what `--json` prints."""
    from kvsim.store.reader import open_trace

    trace, facts = _record(folder, say)
    tiny = _compare(trace, folder, TINY_HEAD, say)
    trace = open_trace(sample_trace("smollm2"))
    layers = ", ".join(map(str, trace.layer_ids))
    say(
        f"\nNow a real model, from a trace that ships with kvsim (`{trace.name}`): layers "
        f"{layers} of SmolLM2-135M-Instruct as it reads {trace.n_pos} tokens of Python's "
        "documentation. A sentence with a code is hidden in the prompt, and nothing but the end of "
        "the text asks for it, after the policies have evicted. KL and what stands with it were "
        "judged by the whole model, in which all 30 layers evict."
    )
    smollm2 = _compare(trace, folder, SMOLLM2_HEAD, say, SMOLLM2, sample_judged())
    say(_seen_needle(smollm2["cells"]))
    return {"trace": facts, **tiny, "smollm2": smollm2}


def _record(folder: Path, say: Callable[[str], None]) -> tuple[Trace, dict[str, Any]]:
    from kvsim.recorder import capture, load_model
    from kvsim.studies.language.tasks import prompts

    quiet_transformers()
    model, tokenizer = load_model("tiny")
    sample = prompts(1, task="walk")[0]
    options: dict[str, Any] = {"name": "demo", "o_proj": False, "progress": True}
    trace = capture(model, tokenizer, sample.prompt, out=folder / "trace.zarr", **options)
    check, wrote = trace.meta["answer_check"], trace.n_pos - trace.prompt_len
    say(
        f"tiny ({sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters) read a "
        f"prompt of {trace.prompt_len} tokens and wrote {wrote}; its answer {check['answer']} "
        f"is {'right' if check['right'] else f'wrong, expected {sample.answer}'}."
    )
    return trace, {
        **{name: getattr(trace, name) for name in ("name", "digest", "prompt_len")},
        "tokens": trace.n_pos,
        "answer": check["answer"],
        "answer_right": check["right"],
    }


def _compare(
    trace: Trace,
    folder: Path,
    head: tuple[int, int],
    say: Callable[[str], None],
    prefix: str = "",
    judged: Path | None = None,
) -> dict[str, Any]:
    """Replay, draw, save and print, and return what `--json` prints of it.

    head: layer and KV head of the retention map. prefix: of the names of files. judged: what a
    judge found before; by default `tiny` judges.
    """
    import polars as pl

    from kvsim.analysis.measuring import available
    from kvsim.analysis.overview import SUMMARY, summarise
    from kvsim.analysis.table import in_order
    from kvsim.cli.runs import fidelity_line, means
    from kvsim.policies import policy
    from kvsim.sweeps.driver import replay_all

    options: dict[str, Any] = {"interval": INTERVAL, "judge": judged is None}
    with progress_bar("cells") as report:
        policies = [policy(name) for name in POLICIES]
        run = replay_all([trace], policies, BUDGETS, **options, progress=report).whole()
    if run.failures:
        raise TraceError(f"a replay failed: {run.failures[0].error}")
    if judged is not None:
        run = replace(run, table=in_order([run.table, pl.read_parquet(judged)]))
    _draw(trace, run, folder, prefix, head)
    run.save(folder / f"{prefix}run")
    shown, summary = available(SUMMARY, [trace]), summarise(run.table)
    rows, best = cells(summary), verdict(run.table, shown)
    if say is echo_text:
        echo_text(
            f"Replayed {len(POLICIES)} policies at {len(BUDGETS)} budgets, at one interval.\n"
        )
        echo_verdict(best)
        echo_results(summary)
        echo_text("" if judged else f"\n{means(run.table, shown)}")
        echo_text(fidelity_line(run.table))
    shares = fidelity_shares(run.table)
    return {**run.describe(), **best, "cells": rows, "fidelity": shares}


def _draw(trace: Trace, run: Run, folder: Path, prefix: str, head: tuple[int, int]) -> None:
    from kvsim.plots import over_budgets, retention_map
    from kvsim.plots.style import picture

    records = [record for record in run.records if record.policy != "full"]
    retention = retention_map(trace, records, layer=head[0], head=head[1])
    for name, figure in {"retention": retention, "budgets": over_budgets(run.table)}.items():
        (folder / f"{prefix}{name}.png").write_bytes(picture(figure, "png"))


def _seen_needle(rows: Rows) -> str:
    parts = []
    for budget in BUDGETS:
        recall = {row["policy"]: row["needle_recall"] for row in rows if row["budget"] == budget}
        chance, _ = recall.pop("random"), recall.pop("full", None)
        most = max(recall, key=recall.__getitem__)
        parts.append(f"{recall[most]:.0%} at budget {budget} ({most}; random {chance:.0%})")
    return (
        "No policy knows what will be asked: of the sentence with the code (the needle) rows see "
        f"at most {' and '.join(parts)}."
    )
