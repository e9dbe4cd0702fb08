"""Text of tokens: repetition, and which token strings a policy keeps."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

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
    """Return tokens that form a text; a blank follows each where none has one: they are words."""
    blank = any(character.isspace() for piece in texts for character in piece)
    return texts if blank else [f"{piece} " for piece in texts]


#: Columns of `retention_lift` and their types.
LIFT: dict[str, Any] = {
    "token": pl.String,
    **dict.fromkeys(("count", "retained"), pl.Int64),
    **dict.fromkeys(("rate", "low", "high", "mean", "lift"), pl.Float64),
}


def retention_lift(
    trace: Trace,
    record: Record,
    layer: int,
    *,
    sink: int = 0,
    recent: int = 0,
) -> pl.DataFrame:
    """Return the share kept of each token string, next to the share kept of all tokens.

    G-KV (arXiv 2512.00504), App. I, counts the kept tokens of one head of the last layer, which
    shows frequent tokens; the rate and the lift do not.

    Args:
        trace: with the text of its tokens.
        record: of the trace.
        layer: index in the trace; its cache after its last event.
        sink: first positions left out, which policies keep whatever they are.
        recent: last positions up to the event left out, for the same reason.

    Returns:
        One row per token string, the largest lift first: token (halves of surrogate pairs
        escaped), count (positions that hold it), retained (entries kept, over all heads), rate (of
        the entries), low and high (Wilson's 95 % interval of the rate), mean (the rate of all
        tokens), lift (rate / mean, null where nothing is kept).

        A position counts once in the interval, with the share of the heads that keep it: heads
        choose alike, so as independent draws they would make it too narrow. Positions of one
        string are taken as independent, which neighbours are not.

    Raises NeedsError for a trace without text of tokens, PolicyError for a layer that is not there.
    """
    text_of(trace)  # or an error
    text = list(trace.token_text or ())
    gone = record.gone_after[record_layer(record, trace_layer(trace, layer))]
    row, n_heads = event_row(gone, None), len(gone)
    last = max(sink, row + 1 - recent)
    names, inverse = np.unique(np.array(text[sink:last], dtype=object), return_inverse=True)
    kept = (gone[:, sink:last] > row).sum(0)  # heads that keep the position
    count = np.bincount(inverse, minlength=len(names))
    retained = np.bincount(inverse, weights=kept, minlength=len(names)).astype(np.int64)
    rate = retained / (count * n_heads)
    mean = retained.sum() / max(1, count.sum() * n_heads)
    low, high = _wilson(retained / n_heads, count)
    tokens = [name.encode("utf-8", "backslashreplace").decode("utf-8") for name in names]
    lift = share(rate, np.asarray(mean))
    columns = [tokens, count, retained, rate, low, high, np.full(len(rate), mean), lift]
    table = pl.DataFrame(columns, schema=LIFT)
    return table.with_columns(pl.col("lift").fill_nan(None)).sort(
        ["lift", "count", "token"], descending=[True, True, False], nulls_last=True
    )


def _wilson(hits: Floats, n: Ints) -> tuple[Floats, Floats]:
    """Wilson's 95 % interval of hits / n (Wilson 1927, J. Am. Stat. Assoc. 22:209).

    Hits are means over heads; `scipy.stats.binomtest` has the interval of whole numbers alone.
    """
    z = 1.959964
    centre = (hits + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * np.sqrt(hits * (n - hits) / n + z * z / 4)
    return np.maximum(0.0, centre - half), np.minimum(1.0, centre + half)


def is_punctuation(text: Iterable[str]) -> Bools:
    """Return which strings are punctuation and nothing else (Unicode P*), spaces aside."""
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
