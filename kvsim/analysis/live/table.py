"""Runs of a model under policies: their Table as of `measure`, and the texts that it wrote."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import polars as pl

from kvsim.analysis.definition import Metric
from kvsim.analysis.live.metrics import KL_TOKENS
from kvsim.analysis.measuring import subjects_of
from kvsim.analysis.registry import METRICS, metric
from kvsim.analysis.results import REQUESTED, labelled
from kvsim.analysis.table import RowArrays, blocks_of, table_of
from kvsim.core.outcome import Outcome
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.errors import PolicyError

#: Metrics of rows that a live run has, next to metrics of sets and of kind "live".
LIVE_ROWS = ("output_error", "layer_error")


def measure_live(
    trace: Trace,
    records: Sequence[Record],
    outcomes: Iterable[Outcome],
    metrics: Sequence[str] | None = None,
    *,
    events: bool = False,
) -> pl.DataFrame:
    """A Table of what a model did, as `measure` makes it of replays: live, or under kept sets.

    outcomes: of each record. metrics: by name; by default those of kind "live", those of sets that
    are quick, and the output error. Raises PolicyError for an unknown metric, or one of rows that
    only a replay has.
    """
    chosen, blocks = choose_live(metrics), list[RowArrays]()
    subjects = subjects_of(trace, records, {}, "cpu", projected=False)
    for subject, outcome in zip(subjects, outcomes, strict=True):
        output = None if outcome.forced is None else outcome.forced.output
        live = replace(subject, outcome=outcome, output=partial(getattr, outcome.forced, "output"))
        for name, entry in chosen.items():
            there = output is not None and (name != "layer_error" or output.added is not None)
            if there or entry.kind != "rows":
                blocks += blocks_of(live, name, entry, events=events)
    return table_of(blocks)


def choose_live(metrics: Sequence[str] | None) -> dict[str, Metric]:
    """The metrics of a live run by name, or the default ones."""
    known = [name for name, x in METRICS.items() if x.kind in ("live", "sets") or name in LIVE_ROWS]
    if metrics is None:
        sets = {name for name, x in METRICS.items() if x.kind == "sets" and not x.default}
        return {name: METRICS[name] for name in known if name not in {KL_TOKENS, *sets}}
    mean = ["response_kl"] * (KL_TOKENS in metrics)  # without it a summary would be empty
    chosen = {name: metric(name) for name in (*mean, *metrics)}
    if other := next((name for name in chosen if name not in known), None):
        raise PolicyError(
            f"{other} is computed from recorded attention; expected a metric of a running model: "
            f"{', '.join(choose_live(None))}; take kvsim replay for {other}"
        )
    return chosen


def kl_by_token(table: pl.DataFrame, trace: Trace) -> dict[tuple[str, str], pl.DataFrame]:
    """KL of the tokens of a trace's response by label of the policy and requested budget.

    Columns: position, ascending, kl in nats, changed: 1 where the most likely token is another one.
    Raises PolicyError where the Table has no `response_kl_tokens` of the trace, or of other tokens.
    """
    rows = labelled(table).filter(metric=KL_TOKENS, trace=trace.name).drop_nulls("value")
    if not rows["event"].is_between(trace.prompt_len, trace.n_pos - 1).all() or not rows.height:
        raise PolicyError(
            f"the table has no {KL_TOKENS} of the tokens of {trace.name}; expected those of "
            f"`kvsim replay {trace.path or 'TRACE'} ... --judge --metric {KL_TOKENS} --out DIR`"
        )
    wide = rows.with_columns(requested=REQUESTED).pivot(
        "variant", index=["policy", "requested", "event"], values="value"
    )
    wide = wide.rename({"event": "position", "": "kl"})
    return wide.partition_by("policy", "requested", include_key=False, as_dict=True)


#: Columns of `responses`.
_COLUMNS: dict[str, Any] = {
    **dict.fromkeys(("trace", "policy"), pl.String),
    "budget": pl.Int64,
    "share": pl.String,
    "right": pl.Boolean,
    **dict.fromkeys(("tokens", "same_tokens"), pl.Int64),
    "text": pl.String,
    "full_right": pl.Boolean,
    "full_tokens": pl.Int64,
    "full_text": pl.String,
}


def responses(records: Iterable[Record]) -> pl.DataFrame:
    """A row for each record of a live run whose model wrote a response of its own.

    trace, policy, budget, share: of the record. right: whether the response has the right answer,
    null where no answer is known. tokens: their number; same_tokens: those before the first
    that differs from the response with the full cache. text: null without a tokenizer. full_right,
    full_tokens, full_text: of the response with the full cache. The token ids themselves are in
    `Record.response`.
    """
    rows = [
        {
            **{name: getattr(record, name) for name in ("trace", "policy", "budget")},
            "share": record.facts.share,
            **{name: getattr(x, name) for name in ("right", "same_tokens", "text")},
            **{name: getattr(x, name) for name in ("full_right", "full_text")},
            "tokens": len(x.tokens),
            "full_tokens": len(x.full_tokens),
        }
        for record in records
        if (x := record.response) is not None
    ]
    return pl.DataFrame(rows, schema=_COLUMNS)
