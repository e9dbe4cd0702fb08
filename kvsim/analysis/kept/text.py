"""Text of tokens: repetition, and which token strings a policy keeps."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

import numpy as np
import polars as pl

from kvsim.analysis.arrays import Bools, EvictedAt, Floats, Ints, share
from kvsim.analysis.axes import record_layer, trace_layer
from kvsim.analysis.kept.retention import RECENT, SINK, event_row, last_event
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.errors import NeedsError

#: Lengths of n-grams; the AMS paper names none.
NGRAMS = (2, 3, 4, 8)


def repetition(tokens: Ints, n: int) -> float:
    """Return 1 - distinct / all n-grams of the tokens [T], as AMS does; NaN for fewer than n."""
    if len(tokens) < n:
        return np.nan
    grams = np.lib.stride_tricks.sliding_window_view(tokens, n)
    return 1.0 - len(np.unique(grams, axis=0)) / len(grams)


def text_of(trace: Trace) -> Sequence[str]:
    """Return the text of the tokens (`spaced`); NeedsError where the trace has none."""
    if trace.token_text is None:
        raise NeedsError(
            f"{trace.name}: the trace has no text of its tokens to show; record it with a "
            "tokenizer (kvsim capture)"
        )
    return spaced(trace.token_text)


def spaced(texts: Sequence[str]) -> Sequence[str]:
    """Return tokens that form a text: where none has a blank, one is appended to each."""
    blank = any(character.isspace() for piece in texts for character in piece)
    return texts if blank else [f"{piece} " for piece in texts]


def retention_lift(
    trace: Trace, record: Record, layer: int, *, sink: int = 0, recent: int = 0
) -> pl.DataFrame:
    """Return the share kept of each token string, next to the share kept of all tokens.

    G-KV (arXiv 2512.00504), App. I, counts the kept tokens of one head of the last layer. Counts
    favour frequent tokens; rate and lift do not.

    Args:
        trace: with the text of its tokens.
        record: of the trace.
        layer: index in the trace; its cache after its last event.
        sink: first positions left out, which most policies protect.
        recent: last positions up to the event left out, for the same reason.

    Returns:
        One row per token string, the largest lift first: token (halves of surrogate pairs
        escaped), count (positions that hold it), rate (share of its entries that is kept, over all
        heads), low and high (Wilson's 95 % interval of the rate: 1927, J. Am. Stat. Assoc. 22:209),
        mean (the rate of all tokens), lift (rate / mean, null where nothing is kept).

        A position counts once in the interval, with the share of the heads that keep it, because
        heads choose alike. Positions are taken as independent, which neighbours are not.

    Raises NeedsError for a trace without text of tokens, PolicyError for a layer that is not there.
    """
    return lifts(kept_positions(trace, record, layer, sink=sink, recent=recent))


def kept_positions(
    trace: Trace, record: Record, layer: int, *, sink: int = SINK, recent: int = RECENT
) -> pl.DataFrame:
    """Return the token of each position and the share of the heads that keep it (rate)."""
    text_of(trace)  # or an error
    gone = record.gone_after[record_layer(record, trace_layer(trace, layer))]
    row = event_row(gone, None)
    counted = slice(sink, max(sink, row + 1 - recent))
    kept = (gone[:, counted] > row).mean(0)
    text = [x.encode("utf-8", "backslashreplace").decode() for x in (trace.token_text or ())]
    schema = {"token": pl.String, "rate": pl.Float64}
    return pl.DataFrame([text[counted], kept], schema=schema).with_columns(count=pl.lit(1))


def lifts(positions: pl.DataFrame) -> pl.DataFrame:
    """Return the table of `retention_lift`; positions: sums of rate and count of a token."""
    totals = positions.group_by("token").agg(pl.col("rate", "count").sum())
    kept, whole = (float(totals[name].sum()) for name in ("rate", "count"))
    n, mean = pl.col("count"), kept / whole if whole else 0.0
    table, p, z2 = totals.with_columns(rate=pl.col("rate") / n), pl.col("rate"), 1.959964**2
    centre, half = (p * n + z2 / 2) / (n + z2), (z2 * (p * (1 - p) * n + z2 / 4)).sqrt() / (n + z2)
    return table.with_columns(
        low=(centre - half).clip(lower_bound=0.0),
        high=(centre + half).clip(upper_bound=1.0),
        mean=pl.lit(mean),
        lift=p / mean if mean else None,
    ).sort("lift", "count", "token", descending=[True, True, False], nulls_last=True)


def is_punctuation(text: Iterable[str]) -> Bools:
    """Return which strings are only punctuation (Unicode P*), ignoring spaces."""
    kinds = ([unicodedata.category(c)[0] for c in token.strip()] for token in text)
    return np.array([set(of_text) == {"P"} for of_text in kinds], dtype=np.bool_)


def punctuation_lift(
    evicted_at: EvictedAt, marks: Bools, *, sink: int = SINK, recent: int = RECENT
) -> Floats:
    """Share kept of the marked positions over the share kept of all, after the last event; [H].

    The first `sink` and the last `recent` positions are left out, as from regions. evicted_at
    [H, T] of one layer; marks [T]. NaN without an event, a mark or anything kept.
    """
    last = last_event(evicted_at)
    counted = slice(sink, max(sink, last + 1 - recent))
    kept, marked = evicted_at[:, counted] > last, marks[counted]
    if not marked.any():
        return np.full(len(evicted_at), np.nan)
    return share(kept[:, marked].mean(-1), kept.mean(-1))
