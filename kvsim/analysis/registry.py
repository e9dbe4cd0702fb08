"""The metrics by name: what each says, in which unit, and which direction is better."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvsim.analysis.attention.overlap import default_window, window_overlap
from kvsim.analysis.attention.sparsity import Sparsity, attention_sparsity, compressed_sparsity
from kvsim.analysis.kept.bursts import dense_share
from kvsim.analysis.kept.coverage import kept_coverage, retained_positions
from kvsim.analysis.kept.retention import entries_seen, event_rows, retained_iou, retention_ratio
from kvsim.analysis.kept.segments import AMS, noted
from kvsim.analysis.kept.similarity import key_similarities
from kvsim.analysis.kept.text import NGRAMS, is_punctuation, max_loop, punctuation_lift, repetition
from kvsim.analysis.kept.values import value_norm_overlaps
from kvsim.analysis.output.recall import TOP, attended
from kvsim.analysis.subject import Cells, Subject
from kvsim.core.trace import Trace
from kvsim.errors import PolicyError, suggest

Floats = NDArray[np.float64]

#: What events note of how they deal the budget to segments.
QUOTA_NOTES = ("quota_by_mass", "quota_minimum", "infeasible")
#: What they note of the segments.
SEGMENT_NOTES = frozenset({"segment_length"})


@dataclass(frozen=True)
class Metric:
    """A named function from a trace and a record to Cells.

    kind: "sets" reads what events kept and decided alone, "rows" what rows of attention become,
    "trace" no record.
    better: the direction in which a policy is better, None where there is none. over_events: what
    stands for all events in a Table that does not list them. beside_oracle: compares the record
    with one of the mass oracle, which is replayed on request alone. main: the variant that stands
    for the others where there is room for one number. notes: what it reads of what allocators note
    at events (`Allocator.notes`, `kvsim.replay(..., internals=...)`).
    """

    summary: str
    kind: Literal["sets", "rows", "trace"]
    unit: str
    better: Literal["higher", "lower"] | None
    source: str
    cells: Callable[[Subject], Iterable[Cells]]
    over_events: Literal["last", "mean"] = "mean"
    beside_oracle: bool = False
    main: str = ""
    notes: frozenset[str] = frozenset()


def _wipeout(kind: Literal["cumulative", "hazard"]) -> Callable[[Subject], Iterator[Cells]]:
    def cells(subject: Subject) -> Iterator[Cells]:
        for layer, variant, found in subject.wipeouts:
            rates, chance = getattr(found, kind), getattr(found, f"{kind}_chance")
            yield Cells(layer, rates, "head", variant, chance, found.rows)
        if kind == "hazard":
            for layer, variant, of_slots in subject.slot_wipeouts:
                rates, chance = of_slots.hazard, of_slots.hazard_chance
                yield Cells(layer, rates, "head", variant, chance, of_slots.rows)

    return cells


def _iou(subject: Subject) -> Iterator[Cells]:
    for layer, evicted_at in subject.layers():
        found = retained_iou(evicted_at)
        yield Cells(layer, found.iou, "head", "", found.chance, found.rows)
        for universe, values in (("old", found.survival), ("middle", found.middle)):
            variant = f"universe={universe}"
            yield Cells(layer, values, "head", variant, found.survival_chance, found.rows)


def _coverage(subject: Subject) -> Iterator[Cells]:
    for layer, evicted_at in subject.layers():
        found = kept_coverage(evicted_at)
        flat, rows = found.overall, found.rows
        yield Cells(layer, found.middle, "head", "", flat, rows)
        yield Cells(layer, found.edges, "head", "edges", flat, rows)
        yield Cells(layer, found.ratio, "head", "ratio", np.ones_like(flat), rows)


def _burst_length(subject: Subject) -> Iterator[Cells]:
    for layer, found in subject.bursts:
        yield Cells(layer, found.mean, "head", "", found.mean_chance, found.rows)
        for name in ("p95", "longest"):
            values = getattr(found, name).astype(np.float64)
            yield Cells(layer, values, "head", name, events=found.rows)


def _burst_share(subject: Subject) -> Iterator[Cells]:
    for layer, found in subject.bursts:
        each = zip(found.lengths, found.shares, found.shares_chance, strict=True)
        for length, values, chance in each:
            yield Cells(layer, values, "head", f"length={length}", chance, found.rows)


def _burst_count(subject: Subject) -> Iterator[Cells]:
    for layer, found in subject.bursts:
        yield Cells(layer, found.per_1000, "head", "", found.per_1000_chance, found.rows)


def _dense(subject: Subject) -> Iterator[Cells]:
    for layer, evicted_at in subject.layers():
        yield Cells(layer, dense_share(evicted_at), "head", events=event_rows(evicted_at))


def _segment_count(subject: Subject) -> Iterator[Cells]:
    for layer, kind, found in subject.segments:
        count = found.count.astype(np.float64)
        yield Cells(layer, count, "head", kind, found.count_chance, found.rows)


def _segment_length(subject: Subject) -> Iterator[Cells]:
    for layer, kind, found in subject.segments:
        mean = f"{kind},mean"
        yield Cells(layer, found.length, "head", mean, found.length_chance, found.rows)
        yield Cells(layer, found.pooled_length, "head", f"{kind},pooled")


def _boundaries(name: Literal["shift", "f1"]) -> Callable[[Subject], Iterator[Cells]]:
    def cells(subject: Subject) -> Iterator[Cells]:
        for layer, kind, found in subject.segments:
            yield Cells(layer, getattr(found, name), "head", kind, events=found.rows[:-1])

    return cells


def _quota_share(subject: Subject) -> Iterator[Cells]:
    for layer in subject.record.layers:
        found = (noted(subject.record, layer, name) for name in QUOTA_NOTES)
        mass, minimum, infeasible = found
        if mass is None or minimum is None or infeasible is None:
            continue
        shares = {"mass": mass.by_event, "minimum": minimum.by_event}
        shares["rounding"] = 1.0 - shares["mass"] - shares["minimum"]
        shares["infeasible"] = infeasible.by_event
        for variant, values in shares.items():
            yield Cells(layer, values, "head", variant, events=mass.rows)


def _suffix_mass(subject: Subject) -> Iterator[Cells]:
    for layer in subject.record.layers:
        found = noted(subject.record, layer, "suffix_mass")
        if found is not None:
            yield Cells(layer, found.by_event, "head", events=found.rows)


def _position(subject: Subject) -> Iterator[Cells]:
    for layer, evicted_at in subject.layers():
        found = retained_positions(evicted_at)
        if found is None:
            continue
        yield Cells(layer, found.mean, "head", chance=np.full_like(found.mean, 0.5))
        yield Cells(layer, found.tail, "head", "tail")
        yield Cells(layer, found.distance, "head", "distance")
        older = found.older(subject.record.budget // 2)
        yield Cells(layer, older, "head", "older", np.full_like(older, 0.5))


def _ratio(subject: Subject) -> Iterator[Cells]:
    trace = subject.trace
    nominal = np.array([min(1.0, subject.record.budget / trace.n_pos)])
    for layer, evicted_at in subject.layers():
        found = retention_ratio(evicted_at, trace.prompt_len)
        yield Cells(layer, found.rows, "head", "rows")
        yield Cells(layer, found.final, "head", "final")
        yield Cells(layer, nominal, variant="nominal")


def _entries(subject: Subject) -> Iterator[Cells]:
    for layer, evicted_at in subject.layers():
        yield Cells(layer, entries_seen(evicted_at, subject.trace.prompt_len), "head")


def _overlap(subject: Subject) -> Iterator[Cells]:
    trace = subject.trace
    window = default_window(trace.n_pos)
    if window < 1:
        return
    for layer in subject.record.layers:
        found = window_overlap(trace, layer, window=window)
        names = [f"share={share:g}" for share in found.shares]
        for i, name in enumerate(names):
            share, union = found.chance[i : i + 1], found.chance_union[i : i + 1]
            for block in range(3):
                before = found.before[block, i : i + 1]
                yield Cells(layer, before, variant=f"{name},block={block + 1}", chance=share)
            yield Cells(layer, found.union[i : i + 1], variant=f"{name},union", chance=union)
            equal = found.equal_budget[i : i + 1]
            yield Cells(layer, equal, variant=f"{name},equal_budget", chance=share)


def _rows(name: str) -> Callable[[Subject], Iterator[Cells]]:
    def cells(subject: Subject) -> Iterator[Cells]:
        values = getattr(subject.output(), name)[:, :, subject.rows].astype(np.float64)
        if not values.shape[-1]:
            return
        for layer, of_layer in zip(subject.record.layers, values, strict=True):
            yield Cells(layer, mean_known(of_layer), "qhead")

    return cells


def _norms(subject: Subject) -> Iterator[Cells]:
    found = subject.walk(value_norm_overlaps)
    for layer, of_layer in zip(subject.record.layers, found, strict=True):
        yield Cells(layer, of_layer.overlap, "head", chance=of_layer.chance)


def _similarity(subject: Subject) -> Iterator[Cells]:
    found = subject.walk(key_similarities)
    for layer, of_layer in zip(subject.record.layers, found, strict=True):
        yield Cells(layer, of_layer.mean, "head", chance=of_layer.chance)


def _punctuation(subject: Subject) -> Iterator[Cells]:
    text = subject.trace.token_text
    if text is None:
        return
    marks = is_punctuation(text)
    for layer, evicted_at in subject.layers():
        yield Cells(layer, punctuation_lift(evicted_at, marks), "head")


def _gap(subject: Subject) -> Iterator[Cells]:
    for layer, found in subject.gaps.items():
        yield Cells(
            layer, found.mean_gap, "head", subject.gaps_variant, chance=found.chance_mean_gap
        )


def _return(subject: Subject) -> Iterator[Cells]:
    for layer, found in subject.gaps.items():
        name = subject.gaps_variant
        yield Cells(
            layer, found.after_gap, "head", f"{name},returns", chance=found.chance_after_gap
        )
        yield Cells(layer, found.keys_back, "head", f"{name},keys", chance=found.chance_keys_back)


def _sparsity(subject: Subject) -> Iterator[Cells]:
    for layer in subject.record.layers:
        found = attention_sparsity(subject.trace, layer)
        yield from _sparsities(layer, found, ("sequence", "behind_sink", "domain"))


def _sparsity_compressed(subject: Subject) -> Iterator[Cells]:
    for layer, found in zip(subject.record.layers, subject.walk(compressed_sparsity), strict=True):
        yield from _sparsities(layer, found, ("sequence", "behind_sink"))


def _sparsities(layer: int, found: Sparsity, names: Sequence[str]) -> Iterator[Cells]:
    for i, share in enumerate(found.shares):
        for name in names:
            yield Cells(layer, getattr(found, name)[i], "head", f"p={share:g},max={name}")


def _lost_mass(subject: Subject) -> Iterator[Cells]:
    found = subject.walk(attended)
    for layer, rows, wiped in zip(subject.record.layers, found.events, found.wiped, strict=True):
        for (length, threshold), shares in wiped.items():
            variant = f"length={length},threshold={threshold:g}"
            yield Cells(layer, shares, "head", variant, events=rows)


def _recall(subject: Subject) -> Iterator[Cells]:
    found = subject.walk(attended)
    if not found.recall.shape[-1]:
        return
    recall, seen = found.recall.mean(-1, np.float64), found.seen.mean(-1, np.float64)
    chance = seen.repeat(recall.shape[1] // seen.shape[1], axis=1)
    for layer, values, random in zip(subject.record.layers, recall, chance, strict=True):
        yield Cells(layer, values, "qhead", f"k={TOP}", chance=random)


def _repetition(subject: Subject) -> Iterator[Cells]:
    tokens = _response(subject.trace)
    if tokens is None:
        return
    for n in NGRAMS:
        yield Cells(None, np.array([repetition(tokens, n)]), variant=f"n={n}")


def _max_loop(subject: Subject) -> Iterator[Cells]:
    tokens = _response(subject.trace)
    if tokens is not None:
        yield Cells(None, np.array([max_loop(tokens)]))


def _response(trace: Trace) -> NDArray[np.int64] | None:
    """Token ids after the prompt, None where they are not known."""
    tokens = trace.tokens
    return None if tokens is None else tokens[trace.prompt_len :].numpy()


def _regret(subject: Subject) -> Iterator[Cells]:
    if subject.oracle is None:  # no budget binds the policy, so no oracle is comparable
        return
    missing, least = (
        made().missing[:, :, subject.rows] for made in (subject.output, subject.oracle)
    )
    if not missing.shape[-1]:
        return
    for layer, more in zip(subject.record.layers, missing.astype(np.float64) - least, strict=True):
        yield Cells(layer, mean_known(more), "qhead")


METRICS: Mapping[str, Metric] = {
    "wipeout": Metric(
        "share of text regions of which (almost) nothing is left, per event",
        "sets", "share", "lower", "named by AMS, defined here", _wipeout("cumulative"),
        over_events="last", main="length=32,threshold=0",
    ),
    "wipeout_hazard": Metric(
        "share of the regions still alive that an event wipes out",
        "sets", "share", "lower", "as wipeout", _wipeout("hazard"),
        main="length=32,threshold=0",
    ),
    "retained_iou": Metric(
        "intersection over union of the sets kept after consecutive events, beside chance",
        "sets", "share", None, "AMS, Table 14", _iou,
    ),
    "middle_coverage": Metric(
        "share kept of the middle third of the text, beside that of the whole",
        "sets", "share", None, "AMS, Fig. 4", _coverage,
    ),
    "burst_length": Metric(
        "mean length of a run of dropped positions, beside chance",
        "sets", "entries", None, "AMS, Fig. 2", _burst_length,
    ),
    "burst_share": Metric(
        "share of the dropped positions that lie in long runs, beside chance",
        "sets", "share", None, "as burst_length", _burst_share, main="length=32",
    ),
    "burst_count": Metric(
        "runs of dropped positions per 1,000 positions, beside chance",
        "sets", "per 1,000", None, "as burst_length", _burst_count,
    ),
    "dense_drops": Metric(
        "share of the text in windows of 64 positions of which at least 95% are dropped",
        "sets", "share", None, "as burst_length", _dense,
    ),
    "segment_count": Metric(
        "segments into which a policy cuts the cache at an event; runs of what stays as a proxy",
        "sets", "segments", None, "AMS, Table 14", _segment_count,
        main=AMS, notes=SEGMENT_NOTES,
    ),
    "segment_length": Metric(
        "entries of such a segment: mean over events, and over all segments",
        "sets", "entries", None, "AMS, Table 14", _segment_length,
        main=f"{AMS},mean", notes=SEGMENT_NOTES,
    ),
    "boundary_shift": Metric(
        "positions from a segment's start to the nearest one of the event before",
        "sets", "entries", None, "named by AMS, defined here", _boundaries("shift"),
        main=AMS, notes=SEGMENT_NOTES,
    ),
    "boundary_f1": Metric(
        "agreement of consecutive events in where segments start, within 8 positions",
        "sets", "share", None, "as boundary_shift", _boundaries("f1"),
        main=AMS, notes=SEGMENT_NOTES,
    ),
    "quota_share": Metric(
        "share of the budget that segments are dealt by their mass, as a minimum, by rounding",
        "sets", "share", None, "kvsim, of AMS", _quota_share,
        main="mass", notes=frozenset(QUOTA_NOTES),
    ),
    "suffix_mass": Metric(
        "share of the mass, by which segments are cut, that lies on the window's own entries",
        "sets", "share", None, "kvsim, of AMS", _suffix_mass,
        notes=frozenset({"suffix_mass"}),
    ),
    "retained_position": Metric(
        "mean relative position of what the last event keeps, beside 1/2 for uniform sets",
        "sets", "relative", None, "G-KV, Fig. 7", _position,
    ),
    "retention_ratio": Metric(
        "share of the full cache that is used: by rows after the prompt, in the end, nominally",
        "sets", "share", None, "G-KV, Fig. 6", _ratio, main="rows",
    ),
    "entries_seen": Metric(
        "entries that a row sees, mean over rows after the prompt: the cache a policy really used",
        "sets", "entries", None, "kvsim", _entries,
    ),
    "window_overlap": Metric(
        "share of the last rows' top keys that were top keys of earlier rows, beside chance",
        "trace", "share", None, "G-KV, Fig. 1", _overlap,
    ),
    "sparsity": Metric(
        "share of the last 512 keys that score below p x maximum in the last 16 rows",
        "trace", "share", None, "G-KV, Fig. 9", _sparsity,
    ),
    "attention_gap": Metric(
        "windows without a key between two that have it in their top tenth, beside chance",
        "trace", "windows", None, "G-KV; defined here", _gap,
    ),
    "attention_return": Metric(
        "share of the returns to a top, and of the keys, that come after such a gap, beside chance",
        "trace", "share", None, "as attention_gap", _return,
    ),
    "repetition": Metric(
        "n-gram repetition rate of the response: 1 - distinct / all n-grams",
        "trace", "share", None, "AMS, without an n", _repetition,
    ),
    "max_loop": Metric(
        "longest ending of the response that repeats up to 64 tokens at least twice",
        "trace", "tokens", None, "kvsim", _max_loop,
    ),
    "value_norm_overlap": Metric(
        "share of the entries kept behind the sinks that the largest values would keep too, "
        "after the last event, beside chance",
        "sets", "share", None, "after Expected Attention", _norms,
    ),
    "key_similarity": Metric(
        "mean cosine of two keys that a head keeps, after the last event, beside chance",
        "sets", "cosine", None, "G-KV, section 4", _similarity,
    ),
    "punctuation_lift": Metric(
        "share kept of punctuation over the share kept of all tokens, after the last event",
        "sets", "ratio", None, "G-KV, App. I", _punctuation,
    ),
    "output_error": Metric(
        "|o_full - o_seen| / |o_full| of the attention output, mean over rows after the prompt",
        "rows", "relative", "lower", "kvsim", _rows("error"),
    ),
    "retained_mass": Metric(
        "share of full attention on what a row sees and on the model's own sinks, mean over rows "
        "after the prompt",
        "rows", "share", "higher", "kvsim", _rows("mass"),
    ),
    "missing_mass": Metric(
        "first factor of the output error: attention on evicted entries",
        "rows", "share", "lower", "error = missing x distance", _rows("missing"),
    ),
    "error_distance": Metric(
        "second factor: |o_evicted - o_seen| / |o_full|, where at least 1e-5 is missing",
        "rows", "relative", None, "as missing_mass", _rows("distance"),
    ),
    "sparsity_compressed": Metric(
        "sparsity over the entries that the last row still sees, attention over what rows see",
        "rows", "share", None, "G-KV, Fig. 9", _sparsity_compressed,
        main="p=0.01,max=sequence",
    ),
    "wipeout_mass": Metric(
        "share of later rows' attention on regions that lay in wiped out ones, mean over events",
        "rows", "share", "lower", "as wipeout", _lost_mass,
        main="length=32,threshold=0",
    ),
    "topk_recall": Metric(
        "share of the ten entries with the most full attention that a row still sees, mean over "
        "rows after the prompt, beside chance",
        "rows", "share", "higher", "kvsim", _recall,
        main="k=10",
    ),
    "regret": Metric(
        "mass that a mass oracle retains on the same terms, minus retained mass; needs --regret",
        "rows", "share", "lower", "kvsim", _regret, beside_oracle=True,
    ),
}  # fmt: skip


def mean_known(values: Floats) -> Floats:
    """Mean over the last axis of what is not NaN; NaN where nothing is."""
    known = ~np.isnan(values)
    count = known.sum(-1)
    out = np.full(values.shape[:-1], np.nan)
    np.divide(np.where(known, values, 0.0).sum(-1), count, out=out, where=count > 0)
    return out


def metric(name: str) -> Metric:
    """The metric called `name`; PolicyError with a suggestion otherwise."""
    if name not in METRICS:
        known = ", ".join(METRICS)
        raise PolicyError(f"unknown metric {name!r}{suggest(name, METRICS)}; known: {known}")
    return METRICS[name]
