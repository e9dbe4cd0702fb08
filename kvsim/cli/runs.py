"""Saved runs, and the texts of models in them."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any

from kvsim.cli import show
from kvsim.schema import merged, object_at, plural, visible

if TYPE_CHECKING:
    import polars as pl

#: Cells whose responses are shown unless all are requested, and characters of each.
_CELLS, _CHARACTERS = 6, 600


def describe_run(path: Path | str) -> tuple[dict[str, Any], pl.DataFrame]:
    """Return the document of a saved run, and the summary of its values."""
    from kvsim.analysis.folder import RECORDS, read_run
    from kvsim.analysis.live.table import responses
    from kvsim.analysis.overview import LIVE_SUMMARY, PREDICTIONS, SUMMARY, summarise
    from kvsim.store.records import read_records

    saved = read_run(path)
    closed = saved.parameters.get("loop") == "closed"
    measured = saved.table["metric"].unique(maintain_order=True).to_list()
    usual = LIVE_SUMMARY if closed else (*PREDICTIONS, *SUMMARY)
    requested = measured if saved.parameters.get("metrics") else usual
    shown = [name for name in requested if name in measured]
    summary = summarise(saved.table, shown)
    document = {"run": str(path), **saved.parameters, **show.verdict(saved.table, shown)}
    document |= {"remarks": saved.remarks, "cells": show.cells(summary)}
    # a sweep keeps records on request alone
    kept = Path(path) / RECORDS
    records = read_records(kept) if kept.exists() else []
    return document | {"responses": responses(records).to_dicts()}, summary


def echo_run(document: dict[str, Any], summary: pl.DataFrame, *, whole: bool) -> None:
    """Print the parameters and table of a saved run, and the texts of a live run."""
    loop = {"closed": "live, on the running model"}.get(str(document.get("loop")), "replay")
    traces = [show.one_line(name) for name in document.get("traces", {})]
    versions = object_at(document, "versions")
    first = ", ".join(traces[:3]) + ", ..." * (len(traces) > 3)
    show.echo_fields(
        {
            "run": f"{show.one_line(document['run'])} ({loop})",
            "traces": f"{len(traces)}: {first}",
            "computed": str(document.get("created", "at an unknown time")),
            "by": " ".join(f"{k} {v}" for k, v in versions.items()) or "unknown versions",
            **{
                f"note {i}": note
                for i, note in enumerate(merged(document.get("remarks", ())), start=1)
            },
        }
    )
    show.echo_text()
    if summary.height:
        show.echo_verdict(document)
        show.echo_results(summary)
    echo_responses(document["responses"], whole=whole)


def echo_responses(rows: list[dict[str, Any]], *, whole: bool) -> None:
    """Print the model's text under each policy, below that with the full cache; whole: all of it.

    What a text has in common with that of the full cache is a number of tokens.
    """
    rows = [row for row in rows if row["text"] is not None]
    shown = rows if whole else rows[:_CELLS]
    trace = None
    for row in shown:
        if row["trace"] != trace:
            trace = row["trace"]
            show.echo_text(f"\n{show.one_line(trace)}\n  full cache: {_verdict(row, 'full_')}")
            show.echo_text(_text(row["full_text"] or "", whole=whole))
        budget = show.budget_text(row["budget"], row["share"])
        where = f"{show.one_line(row['policy'])}, budget {budget}"
        show.echo_text(f"  {where}: {_verdict(row)}, the first {row['same_tokens']} the same")
        if row["same_tokens"] < max(row["tokens"], row["full_tokens"]):
            show.echo_text(_text(row["text"], whole=whole))
    if more := len(rows) - len(shown):
        show.echo_text(f"\n{plural(more, 'more response')}; --show-text prints all.")


def _verdict(row: dict[str, Any], prefix: str = "") -> str:
    verdict = {True: "right", False: "wrong", None: "not checked"}[row[f"{prefix}right"]]
    return f"{verdict}, {plural(row[f'{prefix}tokens'], 'token')}"


def _text(text: str, *, whole: bool) -> str:
    """Return untrusted text that no line of output can be mistaken for, the end of a long one."""
    cut = 0 if whole else max(0, len(text) - _CHARACTERS)
    return indent(visible("... " * (cut > 0) + text[cut:]), "    ", lambda _: True)
