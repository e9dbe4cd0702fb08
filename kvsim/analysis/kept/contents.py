"""Contents of kept entries: lengths of values, likeness of keys, text of tokens."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from kvsim.analysis.arrays import Bools, EvictedAt, Floats, Ints, share
from kvsim.analysis.axes import record_head, record_layer, trace_layer
from kvsim.analysis.kept.retention import RECENT, SINK, event_row, last_event
from kvsim.analysis.walk import by_layer
from kvsim.core.lazy import torch
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.errors import NeedsError, PolicyError


class WithChance(NamedTuple):
    """Of one layer after its last event, [H]; `chance` is that of random sets of the size."""

    value: Floats
    chance: Floats


def value_norm_overlap(evicted_at: EvictedAt, norms: Floats, sink: int = SINK) -> WithChance:
    """Share of the kept entries behind the sinks that the largest values would keep too.

    With c entries kept at positions from `sink` on, after the last event at which the layer evicted
    anything: those of the c largest norms of the value (the lower position first among equals) that
    are kept, over c. The first `sink` positions are left out because most policies protect them,
    and their values are small. A question of Expected Attention (arXiv 2510.00636), whose score has
    the norm of the value as a factor.

    evicted_at [H, T]; norms [H, T] of the values of each head. NaN where a head has lost nothing
    behind the sinks, or keeps nothing there.
    """
    last = last_event(evicted_at)
    kept = evicted_at[:, sink : last + 1] > last
    count, n = kept.sum(-1), kept.shape[-1]
    order = np.argsort(-norms[:, sink : last + 1], axis=-1, kind="stable")
    largest = np.arange(n) < count[:, None]
    both = (np.take_along_axis(kept, order, -1) & largest).sum(-1)
    chosen = (count > 0) & (count < n)
    chance = np.where(chosen, count / max(1, n), np.nan)
    return WithChance(share(both, np.where(chosen, count, 0)), chance)


def value_norm_overlaps(
    trace: Trace, records: Sequence[Record], device: str = "cpu"
) -> list[list[WithChance]]:
    """For each record the overlap of each of its layers."""

    def norms(layer: int) -> Floats:
        values = trace.read("v", slice(layer, layer + 1))[0].to(device)
        lengths: Floats = values.norm(dim=-1).cpu().numpy()
        return lengths

    return _by_layer(records, norms, value_norm_overlap)


def key_similarity(evicted_at: EvictedAt, keys: Floats) -> WithChance:
    """Mean cosine of two different keys that a head holds after the layer's last event.

    G-KV (arXiv 2512.00504, section 4.2) takes the cosine of keys after RoPE for redundancy. Chance
    is the mean over all pairs of the positions there at the event: in a random set every pair is as
    likely. A key of length 0 is like no other.

    evicted_at [H, T]; keys [H, T, d]. NaN where nothing has been evicted and for less than two
    keys.
    """
    last = last_event(evicted_at)
    kept = evicted_at[:, : last + 1] > last
    length = np.linalg.norm(keys[:, : last + 1], axis=-1, keepdims=True)
    unit = keys[:, : last + 1] / np.where(length > 0, length, 1.0)
    return WithChance(_mean_cosine(unit, kept), _mean_cosine(unit, np.ones_like(kept)))


def _mean_cosine(unit: Floats, chosen: Bools) -> Floats:
    """Mean over the pairs of the chosen [H, n] of unit vectors [H, n, d]; [H]."""
    # the square of their sum has every pair twice, and each vector with itself
    weight = chosen.astype(np.float64)
    total = (weight[:, None] @ unit)[:, 0]
    itself = (weight * (unit**2).sum(-1)).sum(-1)
    count = chosen.sum(-1)
    return share((total**2).sum(-1) - itself, count * (count - 1))


def key_similarities(
    trace: Trace, records: Sequence[Record], device: str = "cpu"
) -> list[list[WithChance]]:
    """For each record the similarity in each of its layers."""

    def keys(layer: int) -> Floats:
        read = trace.read("k", slice(layer, layer + 1))[0]
        return read.to(device, torch.float64).cpu().numpy()

    return _by_layer(records, keys, key_similarity)


def _by_layer(
    records: Sequence[Record],
    read: Callable[[int], Floats],
    statistic: Callable[[EvictedAt, Floats], WithChance],
) -> list[list[WithChance]]:
    """Return what `of` computes from `evicted_at` and what is read, both of the record's heads."""

    def compute(record: Record, index: int, array: Floats) -> WithChance:
        gone = record.gone_after[index]
        return statistic(gone, array.repeat(len(gone) // len(array), axis=0))

    return by_layer(records, read, compute)


#: Lengths of n-grams; the AMS paper names none.
NGRAMS = (2, 3, 4, 8)

#: Longest period of a loop.
PERIOD = 64


def repetition(tokens: Ints, n: int) -> float:
    """Return 1 - distinct / all n-grams of the tokens [T], as AMS does; NaN for fewer than n."""
    if len(tokens) < n:
        return np.nan
    grams = np.lib.stride_tricks.sliding_window_view(tokens, n)
    return 1.0 - len(np.unique(grams, axis=0)) / len(grams)


def max_loop(tokens: Ints, period: int = PERIOD) -> float:
    """Return the length in tokens of the longest ending that repeats at most `period` tokens.

    Two whole periods at least; 0 without a loop, NaN for fewer than two tokens.
    """
    total = len(tokens)
    if total < 2:
        return np.nan
    longest = 0
    for p in range(1, min(period, total // 2) + 1):
        differs = np.flatnonzero(tokens[p:] != tokens[:-p])
        same = total - p - (int(differs[-1]) + 1 if len(differs) else 0)
        if same >= p:
            longest = max(longest, same + p)
    return float(longest)


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
    row: int | None = None,
    *,
    heads: Sequence[int] | None = None,
    sink: int = 0,
    recent: int = 0,
) -> pl.DataFrame:
    """Return the share kept of each token string, next to the share kept of all tokens.

    G-KV (arXiv 2512.00504), App. I, counts the kept tokens of one head of the last layer, which
    shows frequent tokens; the rate and the lift do not.

    Args:
        trace: with the text of its tokens.
        record: of the trace.
        layer: index in the trace.
        row: the cache after the event that follows this row; the layer's last event by default.
        heads: heads of the record, all by default.
        sink: first positions left out, which policies keep whatever they are.
        recent: last positions up to `row` left out, for the same reason.

    Returns:
        One row per token string, the largest lift first: token (halves of surrogate pairs
        escaped), count (positions that hold it), retained (entries kept, over all heads), rate (of
        the entries), low and high (Wilson's 95 % interval of the rate), mean (the rate of all
        tokens), lift (rate / mean, null where nothing is kept).

        A position counts once in the interval, with the share of the heads that keep it: heads
        choose alike, so as independent draws they would make it too narrow. Positions of one
        string are taken as independent, which neighbours are not.

    Raises NeedsError for a trace without text of tokens, PolicyError for no heads and for a layer
    or a head that is not there, PositionError for such a row.
    """
    text = trace.token_text
    if text is None:
        raise NeedsError(
            f"{trace.name}: the trace has no text of its tokens, so none can be counted; record it "
            "with a tokenizer (kvsim capture)"
        )
    if heads is not None and not len(heads):
        raise PolicyError("no head is given; expected at least one head of the record")
    gone = record.gone_after[record_layer(record, trace_layer(trace, layer))]
    chosen = None if heads is None else [record_head(record, head) for head in heads]
    row = event_row(gone, row)
    at_row = (gone if chosen is None else gone[chosen])[:, : row + 1] > row
    last = max(sink, row + 1 - recent)
    names, inverse = np.unique(np.array(text[sink:last], dtype=object), return_inverse=True)
    kept = at_row[:, sink:last].sum(0)  # heads that keep the position
    count = np.bincount(inverse, minlength=len(names))
    retained = np.bincount(inverse, weights=kept, minlength=len(names)).astype(np.int64)
    n_heads = len(at_row)
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
