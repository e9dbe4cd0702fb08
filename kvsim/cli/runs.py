"""Results of a run, in memory or saved: one JSON document, and the same as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any

from kvsim.cli import show
from kvsim.schema import PREFILL, object_at, plural, schedule, visible

if TYPE_CHECKING:
    import polars as pl

    from kvsim.core.record import Record

#: Most lines of a table that are printed.
_LINES = 200
#: Most responses that are printed, and characters of each.
_CELLS, _CHARACTERS = 6, 600
_OPEN_LOOP = (
    "open: computed from the recorded queries, keys and values; in a live run errors also add up "
    "from layer to layer and the model may generate other tokens."
)


def document_of(
    parameters: Mapping[str, Any],
    table: pl.DataFrame,
    records: Sequence[Record],
    metrics: Sequence[str],
) -> tuple[dict[str, Any], list[str]]:
    """Return the document of a run, and of its measured metrics."""
    import polars as pl

    from kvsim.analysis.live.table import responses
    from kvsim.analysis.overview import PREDICTIONS, summarise
    from kvsim.analysis.sentences import answer
    from kvsim.analysis.table import selection_fidelity

    measured = set(table["metric"])
    shown = [name for name in dict.fromkeys([*PREDICTIONS, *metrics]) if name in measured]
    of_trace = table.filter(pl.col("policy").is_null() & pl.col("metric").is_in(shown))
    of_trace = of_trace.group_by("trace", "metric", "variant", maintain_order=True).agg(
        pl.col("value").mean(), pl.col("chance").mean()
    )
    comparison, verdict_text = answer(table, shown)
    document = {
        **parameters,
        "verdict": [x.describe() for x in comparison.verdicts] if comparison else [],
        "verdict_text": verdict_text,
        "cells": show.cells(summarise(table, shown)),
        "trace_metrics": of_trace.to_dicts(),
        "fidelity": show.fidelity_shares(table),
        "selections": [
            {name: getattr(record, name) for name in ("trace", "policy", "budget")}
            | {**asdict(record.selection), "fidelity": selection_fidelity(record)}
            for record in records
            if record.selection is not None
        ],
        "responses": responses(records).to_dicts(),
    }
    return document, shown


def echo_document(document: Mapping[str, Any], table: pl.DataFrame, shown: Sequence[str]) -> None:
    """Print the results of a run."""
    from kvsim.analysis.overview import summarise

    if document["verdict_text"]:
        show.echo_text("\n".join(document["verdict_text"]) + "\n")
    summary = summarise(table, shown)
    if summary.height:
        _echo_results(summary.head(_LINES))
        hidden = summary.height - _LINES
        show.echo_text(f"... and {plural(hidden, 'line')}\n" if hidden > 0 else "")
    if document["trace_metrics"]:
        numbers = ("value", "chance")
        show.echo_rows(
            [
                {k: show.number(x, ".3f") if k in numbers else str(x) for k, x in row.items()}
                for row in document["trace_metrics"]
            ],
            right=3,
        )
        show.echo_text()
    if shown:
        show.echo_text(_means(table, shown))
        show.echo_text(fidelity_line(table))
    else:
        show.echo_text("No values: none of the metrics can be computed on these traces.")
    for each in document["selections"]:
        where = f"{show.one_line(each['trace'])}: {each['policy']}, budget {each['budget']}"
        after = ", ".join(map(str, each["dropped"]))
        outcome = f"rows are dropped after layer {after}, {each['counts'][-1]} tokens go on"
        again = " from the start" * each["restarted"]
        show.echo_text(f"{where}: {outcome + again if after else 'no rows are dropped'}.")
    show.echo_notes(document.get("remarks", ()))
    echo_responses(document["responses"])


def _echo_results(summary: pl.DataFrame) -> None:
    """Print a sweep, a line per policy and budget, or per policy if the budget has no effect."""
    import polars as pl

    from kvsim.analysis.results import labelled
    from kvsim.analysis.table import OF_RECORD

    keys = (*OF_RECORD, "model")
    shown = [name for name in summary.columns if name not in keys and summary[name].count()]
    model = ["model"] if "model" in summary else []
    once = pl.struct("policy", "params", *model).is_first_distinct()
    summary = summary.filter(once | (pl.col("bounds") != ""))
    labels = labelled(summary.with_columns(interval=None, prefill=None))["policy"]
    rows = []
    for row, label in zip(summary.to_dicts(), labels, strict=True):
        bounded = bool(row["bounds"])
        budget = budget_text(row["budget"], row["share"], row["per_query_head"])
        params = json.loads(row["params"])
        given = {name: params[name] for name in PREFILL if name in params}
        after = schedule(row["interval"], prefill=row["prefill"], **given)
        evicts = {"held", "heads"} & {*(row["bounds"] or "").split(",")}
        line = {
            "policy": label,
            "budget": budget if bounded else "-",
            "evicts after": after if evicts else "never",
        }
        line |= {name: row[name] or "unknown" for name in model}
        line |= {x.replace("_", "\n"): show.number(row[x], show.metric_format(x)) for x in shown}
        rows.append(line)
    common = {row["evicts after"] for row in rows if row["budget"] != "-"}
    if len(common) == 1 and common != {"never"}:
        show.echo_text(
            f"Every policy evicts after: {common.pop()}. Budgets are entries per KV head.\n"
        )
        for row in rows:
            del row["evicts after"]
    show.echo_rows(rows, right=2 + ("evicts after" in rows[0]) + len(model))


def budget_text(budget: int, share: str | None, per_query_head: bool = False) -> str:
    """Return the entries, and the share of the trace if the budget was given as a share.

    A policy that keeps a set for each query head is marked, because it holds several times as many.
    """
    text = str(budget) if share is None else f"{budget} ({share})"
    return text + " per query head" * per_query_head


def _means(table: pl.DataFrame, shown: Sequence[str]) -> str:
    """Describe the means in a table of these metrics."""
    import polars as pl

    from kvsim.analysis.overview import PREDICTIONS
    from kvsim.analysis.results import of_model

    traces = table.drop_nulls("value").filter(pl.col("metric").is_in(list(shown)))["trace"]
    over = "the traces of each model" if of_model(table) else plural(traces.n_unique(), "trace")
    tokens = "" if {*PREDICTIONS}.isdisjoint(shown) else ", or over the tokens of the response"
    return (
        f"Means over layers, heads and {over}; within a trace over the rows after the prompt"
        f"{tokens}. `kvsim metrics NAME` defines each."
    )


def fidelity_line(table: pl.DataFrame) -> str:
    """Describe the fidelity of the values of a run."""
    shares = show.fidelity_shares(table)
    parts = ", ".join(f"{share:.0%} {name}" for name, share in shares.items())
    return f"Fidelity of the values: {parts}. {_OPEN_LOOP if 'open' in shares else ''}".rstrip()


def describe_run(path: Path | str) -> tuple[dict[str, Any], pl.DataFrame, list[str]]:
    """Return the document of a saved run, its Table and the shown metrics."""
    from kvsim.analysis.folder import RECORDS, read_run
    from kvsim.analysis.overview import LIVE_SUMMARY, SUMMARY
    from kvsim.store.records import read_records

    saved = read_run(path)
    usual = LIVE_SUMMARY if saved.parameters.get("loop") == "closed" else SUMMARY
    given = saved.parameters.get("metrics")
    metrics = saved.table["metric"].unique(maintain_order=True).to_list() if given else usual
    kept = Path(path) / RECORDS  # a sweep keeps records only on request
    records = read_records(kept) if kept.exists() else []
    parameters = {"run": str(path), **saved.parameters, "remarks": saved.remarks}
    document, shown = document_of(parameters, saved.table, records, metrics)
    return document, saved.table, shown


def echo_run(document: Mapping[str, Any], table: pl.DataFrame, shown: Sequence[str]) -> None:
    """Print the origin of a saved run, and its results."""
    loop = "live, on the running model" if document.get("loop") == "closed" else "replay"
    traces = [show.one_line(name) for name in document.get("traces", {})]
    versions = object_at(document, "versions")
    first = ", ".join(traces[:3]) + ", ..." * (len(traces) > 3)
    show.echo_fields(
        {
            "run": f"{show.one_line(document['run'])} ({loop})",
            "traces": f"{len(traces)}: {first}",
            "computed": str(document.get("created", "at an unknown time")),
            "by": " ".join(f"{k} {v}" for k, v in versions.items()) or "unknown versions",
        }
    )
    show.echo_text()
    echo_document(document, table, shown)


def echo_responses(rows: list[dict[str, Any]]) -> None:
    """Print responses under each policy with the number of tokens equal to the full cache's."""
    rows = [row for row in rows if row["text"] is not None]
    trace = None
    for row in rows[:_CELLS]:
        if row["trace"] != trace:
            trace = row["trace"]
            show.echo_text(f"\n{show.one_line(trace)}\n  full cache: {_verdict(row, 'full_')}")
            show.echo_text(_text(row["full_text"] or ""))
        budget = budget_text(row["budget"], row["share"])
        where = f"{show.one_line(row['policy'])}, budget {budget}"
        show.echo_text(f"  {where}: {_verdict(row)}, the first {row['same_tokens']} the same")
        if row["same_tokens"] < max(row["tokens"], row["full_tokens"]):
            show.echo_text(_text(row["text"]))
    if len(rows) > _CELLS:
        show.echo_text(f"\n{plural(len(rows) - _CELLS, 'more response')}; --json has all.")


def _verdict(row: dict[str, Any], prefix: str = "") -> str:
    verdict = {True: "right", False: "wrong", None: "not checked"}[row[f"{prefix}right"]]
    return f"{verdict}, {plural(row[f'{prefix}tokens'], 'token')}"


def _text(text: str) -> str:
    """Return the end of untrusted text, marked so that no line looks like output."""
    cut = text if len(text) <= _CHARACTERS else f"... {text[-_CHARACTERS:]}"
    return indent(visible(cut), "    ", lambda _: True)
