"""What a running model wrote under each policy, as rows."""

from __future__ import annotations

from collections.abc import Iterable

import polars as pl

from kvsim.core.record import Record

_COLUMNS = {
    "trace": pl.String,
    "policy": pl.String,
    "budget": pl.Int64,
    "share": pl.String,
    "right": pl.Boolean,
    "tokens": pl.Int64,
    "same_tokens": pl.Int64,
    "text": pl.String,
    "full_right": pl.Boolean,
    "full_tokens": pl.Int64,
    "full_text": pl.String,
}


def responses(records: Iterable[Record]) -> pl.DataFrame:
    """A row for each record of a live run whose model wrote a response of its own.

    trace, policy, budget, share: of the record. right: whether the response has the right answer,
    null where nothing says what is right. tokens: their number; same_tokens: those before the first
    that differs from the response with the full cache. text: null without a tokenizer. full_right,
    full_tokens, full_text: of the response with the full cache. The token ids themselves are in
    `Record.response`.
    """
    rows = [
        {
            **{name: getattr(record, name) for name in ("trace", "policy", "budget", "share")},
            **{name: getattr(x, name) for name in ("right", "same_tokens", "text")},
            **{name: getattr(x, name) for name in ("full_right", "full_text")},
            "tokens": len(x.tokens),
            "full_tokens": len(x.full_tokens),
        }
        for record in records
        if (x := record.response) is not None
    ]
    return pl.DataFrame(rows, schema=_COLUMNS)
