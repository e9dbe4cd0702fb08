"""`kvsim demo`: a comparison of policies on traces of two models."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli.shared import Json, Stop, path_option, quiet_transformers
from kvsim.cli.show import (
    bar,
    cells,
    echo_json,
    echo_results,
    echo_text,
    echo_verdict,
    fidelity_shares,
    verdict,
)
from kvsim.errors import OutputError, TraceError
from kvsim.files import check_writable, published, refused
from kvsim.samples import sample_judged, sample_trace

if TYPE_CHECKING:
    from kvsim.core.trace import Trace
    from kvsim.sweeps import Run

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
            document = _Demo(draft, quiet=as_json).run()
            (draft / MARKER).write_text(json.dumps(document, indent=2) + "\n", "utf-8")
            _check_target(out)
    except KeyboardInterrupt:
        state = "is unchanged" if out.exists() else "was not written"
        raise Stop(f"interrupted, {out} {state}", 130) from None
    except TraceError as error:  # a full disk: the message is about a trace that is gone by now
        if isinstance(error.__cause__, OSError):
            raise refused(out, error.__cause__) from error
        raise
    if as_json:
        echo_json({"out": str(out), **document})
    else:
        typer.echo(f"Written to {out}: {', '.join(sorted(_FILES))}.")


def _check_target(out: Path) -> None:
    """Raise OutputError if `out` exists and is not just an earlier demo."""
    if not out.exists() and not out.is_symlink():
        return
    problem = "exists and is not of `kvsim demo`"
    if not out.is_symlink() and (out / MARKER).is_file():
        foreign = sorted({path.name for path in out.iterdir()} - _FILES)
        problem = f"has {', '.join(foreign)}, which is not of a demo" if foreign else ""
    if problem:
        advice = "give another --out or move that away, nothing was changed"
        raise OutputError(f"{out} {problem}; {advice}")


class _Demo:
    """One demo in a folder."""

    def __init__(self, folder: Path, *, quiet: bool) -> None:
        self.folder, self.quiet = folder, quiet

    def run(self) -> dict[str, Any]:
        """Do all steps, print on the way, and return what `--json` prints."""
        from kvsim.store import open_trace

        trace, facts = self._record()
        tiny = self._compare(trace, "", TINY_HEAD, _read_tiny, judge=True)
        trace = open_trace(sample_trace("smollm2"))
        layers = ", ".join(map(str, trace.layer_ids))
        self._echo(
            f"\nNow a real model, from a trace that ships with kvsim (`{trace.name}`): layers "
            f"{layers} of SmolLM2-135M-Instruct as it reads {trace.n_pos} tokens of Python's "
            "documentation. A sentence with a code is hidden in the prompt, and nothing but the "
            "end of the text asks for it, after the policies have evicted. KL and what stands with "
            "it were judged by the whole model, in which all 30 layers evict."
        )
        smollm2 = self._compare(trace, SMOLLM2, SMOLLM2_HEAD, _read_smollm2, judge=False)
        return {"trace": facts, **tiny, "smollm2": smollm2}

    def _echo(self, text: str) -> None:
        if not self.quiet:
            echo_text(text)

    def _record(self) -> tuple[Trace, dict[str, Any]]:
        from kvsim.recorder import capture, load_model
        from kvsim.studies.language.tasks import prompts

        quiet_transformers()
        model, tokenizer = load_model("tiny")
        sample = prompts(1, task="walk")[0]
        options: dict[str, Any] = {"name": "demo", "o_proj": False, "progress": True}
        trace = capture(model, tokenizer, sample.prompt, out=self.folder / "trace.zarr", **options)
        check, wrote = trace.meta["answer_check"], trace.n_pos - trace.prompt_len
        self._echo(
            f"tiny ({sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters) read a "
            f"prompt of {trace.prompt_len} tokens and wrote {wrote}; its answer {check['answer']} "
            f"is {'right' if check['right'] else f'wrong, expected {sample.answer}'}."
        )
        names = ("name", "digest", "prompt_len")
        return trace, {
            **{name: getattr(trace, name) for name in names},
            "tokens": trace.n_pos,
            "answer": check["answer"],
            "answer_right": check["right"],
        }

    def _compare(
        self,
        trace: Trace,
        prefix: str,
        head: tuple[int, int],
        read: Callable[[Sequence[Mapping[str, Any]], str], str],
        *,
        judge: bool,
    ) -> dict[str, Any]:
        """Replay, draw, save and print, and return what `--json` prints of it.

        prefix: of the names of the files. head: layer and KV head of the retention map. read:
        returns sentences about the cells of the table, given the metric that ranks them. judge: by
        `tiny`, or else by what is stored.
        """
        from kvsim.analysis.evidence import ranking
        from kvsim.analysis.overview import SUMMARY, summarise
        from kvsim.analysis.table import available
        from kvsim.cli.replaying import fidelity_line, means

        run, shown = _replayed(trace, judge=judge), available(SUMMARY, [trace])
        self._draw(trace, run, prefix, head)
        run.save(self.folder / f"{prefix}run")
        summary = summarise(run.table)
        rows, best = cells(summary), verdict(run.table, shown)
        if not self.quiet:
            number = f"{len(POLICIES)} policies at {len(BUDGETS)} budgets"
            echo_text(f"Replayed {number}, at one interval.\n")
            echo_verdict(best)
            echo_results(summary)
            echo_text(f"\n{means(run.table, shown)}" if judge else "")
            by = next(name for name in ranking(run.table, shown) if name in rows[0])
            echo_text(f"{fidelity_line(run.table)}\n{read(rows, by)}")
        shares = fidelity_shares(run.table)
        return {**run.describe(), **best, "cells": rows, "fidelity": shares}

    def _draw(self, trace: Trace, run: Run, prefix: str, head: tuple[int, int]) -> None:
        from kvsim.plots import over_budgets, retention_map
        from kvsim.plots.style import picture

        records = [record for record in run.records if record.policy != "full"]
        figures = {
            "retention.png": retention_map(trace, records, layer=head[0], head=head[1]),
            "budgets.png": over_budgets(run.table),
        }
        for name, figure in figures.items():
            (self.folder / f"{prefix}{name}").write_bytes(picture(figure, "png"))


def _replayed(trace: Trace, *, judge: bool) -> Run:
    """Return the sweep; judge: by `tiny`, else by what is stored."""
    import polars as pl

    from kvsim.analysis.table import in_order
    from kvsim.policies import policy
    from kvsim.sweeps.driver import replay_all

    policies = [policy(name) for name in POLICIES]
    with bar("cells") as report:
        run = replay_all(
            [trace], policies, BUDGETS, interval=INTERVAL, judge=judge, progress=report
        ).whole()
    if run.failures:
        raise TraceError(f"a replay failed: {run.failures[0].error}")
    if judge:
        return run
    return replace(run, table=in_order([run.table, pl.read_parquet(sample_judged())]))


def _read_tiny(rows: Sequence[Mapping[str, Any]], by: str) -> str:
    small = _ranked(rows, by, min(BUDGETS))
    streaming = next(row for row in small if row["policy"] == "streaming_llm")
    return (
        f"At budget {min(BUDGETS)}, streaming_llm, which reads no attention, wipes out "
        f"{streaming['wipeout']:.0%} of the regions of the sequence, {small[0]['policy']} "
        f"{small[0]['wipeout']:.0%}."
    )


def _ranked(rows: Sequence[Mapping[str, Any]], by: str, budget: int) -> list[Mapping[str, Any]]:
    """Return the cells of a budget, but for `full`, the best by a metric first."""
    from kvsim.analysis.registry import METRICS

    cells = [row for row in rows if row["budget"] == budget and row["policy"] != "full"]
    return sorted(cells, key=lambda row: float(row[by]), reverse=METRICS[by].better == "higher")


def _read_smollm2(rows: Sequence[Mapping[str, Any]], by: str) -> str:
    parts = []
    for budget in BUDGETS:
        recall = {row["policy"]: row["needle_recall"] for row in _ranked(rows, by, budget)}
        chance = recall.pop("random")
        most = max(recall, key=recall.__getitem__)
        parts.append(f"{recall[most]:.0%} at budget {budget} ({most}; random {chance:.0%})")
    return (
        "No policy knows what will be asked: of the sentence with the code (the needle) rows see "
        f"at most {' and '.join(parts)}."
    )
