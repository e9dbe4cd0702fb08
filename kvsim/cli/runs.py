"""Saved runs, and the texts of models in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsim.cli import show
from kvsim.schema import merged, object_at, plural, visible

if TYPE_CHECKING:
    import polars as pl

#: Cells whose responses are shown unless all are requested, and characters of each.
_CELLS, _CHARACTERS = 6, 600
#: Where the text of a policy parts from that of the full cache.
_MARK = "\u00a6"
_INDENT = "    "


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
    """Print the model's text under each policy, and with the full cache.

    whole: all of every text; otherwise the first cells, and of each the part around the place where
    it parts from that of the full cache.
    """
    rows = [row for row in rows if row["text"] is not None]
    if not rows:
        return
    shown = rows if whole else rows[:_CELLS]
    limit = None if whole else _CHARACTERS
    show.echo_text(
        f"\nWhat the model wrote; {_MARK} marks where a text parts from that of the full cache."
    )
    trace = None
    for row in shown:
        if row["trace"] != trace:
            trace = row["trace"]
            show.echo_text(f"\n{show.one_line(trace)}")
            show.echo_text(f"  full cache: {_verdict(row, 'full_')}")
            show.echo_text(_indented(_excerpt(row["full_text"] or "", None, limit)))
        budget = show.budget_text(row["budget"], row["share"])
        differs = row["same_tokens"] < max(row["tokens"], row["full_tokens"])
        same = f"parts after {row['same_tokens']}" if differs else "the same"
        where = f"{show.one_line(row['policy'])}, budget {budget}"
        show.echo_text(f"  {where}: {_verdict(row)}, {same}")
        if differs:
            at = _parting(row["text"], row["full_text"] or "")
            show.echo_text(_indented(_excerpt(row["text"], at, limit)))
    more = len(rows) - len(shown)
    if more:
        show.echo_text(f"\n{plural(more, 'more response')}; --show-text prints all.")


def _verdict(row: dict[str, Any], prefix: str = "") -> str:
    verdict = {True: "right", False: "wrong", None: "not checked"}[row[f"{prefix}right"]]
    return f"{verdict}, {plural(row[f'{prefix}tokens'], 'token')}"


def _parting(text: str, full: str) -> int:
    """Return the start of the first word at which two texts differ."""
    pairs = enumerate(zip(text, full, strict=False))
    at = next((at for at, (a, b) in pairs if a != b), min(len(text), len(full)))
    between_words = not any(each[at : at + 1].strip() for each in (text, full))
    return at if between_words else at - len(re.split(r"\s", text[:at])[-1])


def _excerpt(text: str, at: int | None, limit: int | None) -> str:
    """Return a text with a mark at character `at`; of a longer one than `limit` the part around."""
    limit = len(text) if limit is None else limit
    start = 0 if at is None else max(0, min(at - limit // 2, len(text) - limit))
    stop = min(len(text), start + limit)
    part = text[start:stop]
    if at is not None:
        part = f"{text[start:at]}{_MARK}{text[at:stop]}"
    return "... " * (start > 0) + part + " ..." * (stop < len(text))


def _indented(text: str) -> str:
    """Return untrusted text that no line of output can be mistaken for."""
    return "\n".join(_INDENT + line for line in visible(text).split("\n"))
