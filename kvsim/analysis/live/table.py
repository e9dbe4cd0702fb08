"""Tables of models running under policies, as of `measure`, and their responses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import polars as pl

from kvsim.analysis.live.metrics import KL_TOKENS
from kvsim.analysis.measuring import choose, subjects_of
from kvsim.analysis.results import REQUESTED, labelled
from kvsim.analysis.table import RowArrays, blocks_of, table_of
from kvsim.core.outcome import Outcome
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.errors import PolicyError


def measure_live(
    trace: Trace,
    records: Sequence[Record],
    outcomes: Iterable[Outcome],
    metrics: Sequence[str] | None = None,
    *,
    events: bool = False,
) -> pl.DataFrame:
    """Return the Table of a running model, as `measure` returns it of replays: live, or judged.

    outcomes: of each record. metrics: by name; by default kind "live", quick metrics of sets, and
    the output error. Raises PolicyError for an unknown metric, or one of rows that only a replay
    has.
    """
    chosen, blocks = choose(metrics, live=True), list[RowArrays]()
    subjects = subjects_of(trace, records)
    for subject, outcome in zip(subjects, outcomes, strict=True):
        output = None if outcome.forced is None else outcome.forced.output
        live = replace(subject, outcome=outcome, output=partial(getattr, outcome.forced, "output"))
        for name, entry in chosen.items():
            there = output is not None and (name != "layer_error" or output.added is not None)
            if there or entry.kind != "rows":
                blocks += blocks_of(live, name, entry, events=events)
    return table_of(blocks)


def kl_by_token(table: pl.DataFrame, trace: Trace) -> dict[tuple[str, str], pl.DataFrame]:
    """KL of the tokens of a trace's response by label of the policy and requested budget.

    Columns: position, ascending, kl in nats, changed: 1 where the most likely token differs. Raises
    PolicyError where the Table has no `response_kl_tokens` of the trace, or of other tokens.
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
    """Return a row for each record of a live run with a response of the model.

    trace, policy, budget, share: of the record. right: whether the answer is right, null where none
    is known. tokens: length of the response; same_tokens: tokens before the first difference from
    the response with the full cache. text: null without a tokenizer. full_right, full_tokens,
    full_text: of the response with the full cache. The token ids are in `Record.response`.
    """
    own = ("right", "same_tokens", "text", "full_right", "full_text")
    rows = [
        {
            **{name: getattr(record, name) for name in ("trace", "policy", "budget")},
            **{name: getattr(x, name) for name in own},
            **{name: len(getattr(x, name)) for name in ("tokens", "full_tokens")},
            "share": record.facts.share,
        }
        for record in records
        if (x := record.response) is not None
    ]
    return pl.DataFrame(rows, schema=_COLUMNS)
