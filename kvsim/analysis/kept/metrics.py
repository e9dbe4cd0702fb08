"""Metrics of kept sets: positions of kept and evicted entries, and contents of the kept ones.

A metric is one function, which imports the module that computes it, and its entry below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Literal

import numpy as np

from kvsim.analysis.arrays import Bools, EvictedAt, Variants
from kvsim.analysis.definition import Cells, Metric
from kvsim.analysis.subject import Analysis, Subject
from kvsim.core.record import Record
from kvsim.core.trace import Trace

Values = Callable[[Subject], Iterator[Cells]]


def _heads(found: Callable[[Subject, EvictedAt], Variants]) -> Values:
    """Values by variant of the heads of layers with the same kept sets."""

    def cells(subject: Subject) -> Iterator[Cells]:
        for layers, evicted_at in subject.layer_groups:
            rows, variants = found(subject, evicted_at)
            for variant, (values, chance) in variants.items():
                yield Cells(layers, values, "head", variant, chance, rows)

    return cells


def _wipeout(_: Subject, evicted_at: EvictedAt) -> Variants:
    from kvsim.analysis.kept.retention import wipeouts

    return wipeouts(evicted_at)


def _iou(_: Subject, evicted_at: EvictedAt) -> Variants:
    from kvsim.analysis.kept.retention import retained_iou

    return retained_iou(evicted_at)


def _coverage(_: Subject, evicted_at: EvictedAt) -> Variants:
    from kvsim.analysis.kept.coverage import kept_coverage

    rows, _curve, overall, middle = kept_coverage(evicted_at, bins=1)
    return rows, {"": (middle, overall)}


def _bursts(subject: Subject) -> list[Any]:
    from kvsim.analysis.kept.bursts import burst_variants

    return [(layers, *burst_variants(evicted_at)) for layers, evicted_at in subject.layer_groups]


def _burst(chosen: Callable[[str], bool]) -> Values:
    def cells(subject: Subject) -> Iterator[Cells]:
        for layers, rows, variants in subject.of(_bursts):
            for variant, (values, chance) in variants.items():
                if chosen(variant):
                    yield Cells(layers, values, "head", variant, chance, rows)

    return cells


def _position(subject: Subject, evicted_at: EvictedAt) -> Variants:
    from kvsim.analysis.kept.coverage import position_variants

    return position_variants(evicted_at, subject.record.budget // 2)


def _ratio(subject: Subject) -> Iterator[Cells]:
    from kvsim.analysis.kept.retention import retention_ratio

    trace = subject.trace
    nominal = min(1.0, subject.record.budget / trace.n_pos)
    for layers, evicted_at in subject.layer_groups:
        rows, final = retention_ratio(evicted_at, trace.prompt_len)
        yield Cells(layers, rows, "head", "rows")
        yield Cells(layers, final, "head", "final")
        yield Cells(layers, np.full(len(layers), nominal), variant="nominal")


def _entries(subject: Subject, evicted_at: EvictedAt) -> Variants:
    from kvsim.analysis.kept.retention import entries_seen

    return None, {"": (entries_seen(evicted_at, subject.trace.prompt_len), None)}


def _needle(name: Literal["recall", "wipeout"]) -> Values:
    def cells(subject: Subject) -> Iterator[Cells]:
        from kvsim.analysis.kept.coverage import needle_visibility

        if spans := subject.trace.header.spans.get("needle"):
            record = subject.record
            for index, gone in enumerate(record.gone_after):
                needle = needle_visibility(gone, record.prompt_len, spans, record.reads, index)
                recall, chance, wipeout = needle
                values = (recall, chance) if name == "recall" else (wipeout, None)
                yield Cells(record.layers[index], values[0], "head", chance=values[1])

    return cells


#: Metrics of the positions of kept and evicted entries.
PLACES: Mapping[str, Metric] = {
    "wipeout": Metric(
        "share of text regions of which (almost) nothing is left, after the last event",
        "sets", "share", "lower", "named by AMS, defined here", _heads(_wipeout),
        over_events="last", main="length=32,threshold=0"),
    "retained_iou": Metric(
        "intersection over union of the sets kept after consecutive events, next to chance",
        "sets", "share", None, "AMS, Table 14", _heads(_iou)),
    "middle_coverage": Metric(
        "share kept of the middle third of the text, next to the share kept of all",
        "sets", "share", None, "AMS, Fig. 4", _heads(_coverage)),
    "burst_length": Metric(
        "mean length of a run of evicted positions, next to chance",
        "sets", "entries", None, "AMS, Fig. 2",
        _burst(lambda variant: variant in ("", "longest"))),
    "burst_share": Metric(
        "share of the evicted positions that lie in long runs, next to chance",
        "sets", "share", None, "as burst_length",
        _burst(lambda variant: variant.startswith("length")), main="length=32"),
    "retained_position": Metric(
        "mean relative position of entries after the last event, next to 1/2 for uniform sets",
        "sets", "relative", None, "G-KV, Fig. 7", _heads(_position)),
    "retention_ratio": Metric(
        "share of the full cache that is used: by rows after the prompt, in the end, nominally",
        "sets", "share", None, "G-KV, Fig. 6", _ratio, main="rows"),
    "entries_seen": Metric(
        "entries visible to a row, mean over rows after the prompt: the cache that a policy used",
        "sets", "entries", None, "kvsim", _heads(_entries)),
    "needle_recall": Metric(
        "share of the needle's entries that a row sees, mean over rows after the prompt, next to "
        "the share of all entries of the prompt",
        "sets", "share", "higher", "kvsim", _needle("recall")),
    "needle_wipeout": Metric(
        "share of needles of which a row sees no entry, mean over rows after the prompt",
        "sets", "share", "lower", "kvsim", _needle("wipeout")),
}  # fmt: skip


def _repetition(analysis: Analysis) -> Iterator[Cells]:
    from kvsim.analysis.kept.text import NGRAMS, repetition

    if (tokens := analysis.trace.tokens) is not None:
        rows = tokens[analysis.trace.prompt_len :].numpy()
        for (turn, answer), n in product(analysis.trace.answers, NGRAMS):
            value = np.array([repetition(rows[answer], n)])
            yield Cells(None, value, variant=f"n={n}", turn=turn)


def _vectors(walk: Literal["value_norm_overlaps", "key_similarities"]) -> Values:
    def cells(subject: Subject) -> Iterator[Cells]:
        from kvsim.analysis.kept import vectors

        of_layers = subject.walk(getattr(vectors, walk))
        for layer, (values, chance) in zip(subject.record.layers, of_layers, strict=True):
            yield Cells(layer, values, "head", chance=chance)

    return cells


def _marks(trace: Trace, records: Sequence[Record], _: str) -> Sequence[Bools | None]:
    """Which tokens of a trace are punctuation, the same for all records; None without a text."""
    from kvsim.analysis.kept.text import is_punctuation

    text = trace.token_text
    return [None if text is None else is_punctuation(text)] * len(records)


def _punctuation(subject: Subject, evicted_at: EvictedAt) -> Variants:
    from kvsim.analysis.kept.text import punctuation_lift

    marks = subject.walk(_marks)
    return None, {} if marks is None else {"": (punctuation_lift(evicted_at, marks), None)}


#: Metrics of the response's repetition, and of kept values, keys and tokens.
CONTENTS: Mapping[str, Metric] = {
    "repetition": Metric(
        "n-gram repetition rate of the response: 1 - distinct / all n-grams",
        "trace", "share", None, "AMS, without an n", _repetition),
    "value_norm_overlap": Metric(
        "share of the entries kept after the sinks that the largest values would keep too, "
        "after the last event, next to chance",
        "sets", "share", None, "after Expected Attention",
        _vectors("value_norm_overlaps")),
    "key_similarity": Metric(
        "mean cosine of two keys that a head keeps, after the last event, next to chance",
        "sets", "cosine", None, "G-KV, section 4",
        _vectors("key_similarities")),
    "punctuation_lift": Metric(
        "share kept of punctuation over the share kept of all tokens, after the last event",
        "sets", "ratio", None, "G-KV, App. I", _heads(_punctuation)),
}  # fmt: skip
