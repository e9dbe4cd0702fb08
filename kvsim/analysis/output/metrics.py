"""Metrics of rows: error of the attention output, and attention mass of evicted entries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from kvsim.analysis.arrays import Floats, mean_known
from kvsim.analysis.definition import Cells, Metric
from kvsim.analysis.output.changed import prompt_parts
from kvsim.analysis.subject import Subject
from kvsim.core.outcome import OutputDeviation


def _parts(subject: Subject) -> Iterator[tuple[str, int | None, slice, OutputDeviation]]:
    """Rows after the prompt, by turn, and rows of the prompt after an event, by variant."""
    trace, output = subject.trace, subject.output()
    if output.error.shape[-1]:
        for turn, rows in trace.answers:
            yield "", turn, rows, output
    if (before := output.before) is not None:
        parts = prompt_parts(subject.record.schedule, trace, before.error.shape[-1])
        for variant, rows in parts.items():
            yield variant, None, rows, before


def _rows(name: str) -> Callable[[Subject], Iterator[Cells]]:
    def cells(subject: Subject) -> Iterator[Cells]:
        for variant, turn, rows, part in _parts(subject):
            values = mean_known(getattr(part, name)[..., rows].astype(np.float64)).ravel()
            yield Cells(subject.record.layers, values, "qhead", variant, turn=turn)

    return cells


def _layer_error(subject: Subject) -> Iterator[Cells]:
    for variant, turn, rows, part in _parts(subject):
        added = np.asarray(part.added, np.float64)[:, rows]  # where a metric reads `o_proj`
        values = np.sqrt((added**2).mean(1))
        yield Cells(subject.record.layers, values, variant=variant, turn=turn)


def _sparsity_compressed(subject: Subject) -> Iterator[Cells]:
    from kvsim.analysis.attention.sparsity import compressed_sparsity

    each = zip(subject.record.layers, subject.walk(compressed_sparsity), strict=True)
    for layer, sparsity in each:
        for variant, values in sparsity.items():
            yield Cells(layer, values, "head", variant)


def _regret(subject: Subject) -> Iterator[Cells]:
    if subject.optimum is None:  # for a policy that no budget binds there is no optimum
        return
    missing, least = (each().missing for each in (subject.output, subject.optimum[1]))
    if missing.shape[-1]:
        more = missing.astype(np.float64) - least  # [layer, qhead, row]
        for turn, rows in subject.trace.answers:
            values = mean_known(more[..., rows]).ravel()
            yield Cells(subject.record.layers, values, "qhead", turn=turn)


def _means(
    values: Callable[[Subject], Floats | None], *, turns: bool = True
) -> Callable[[Subject], Iterator[Cells]]:
    """Means of values [layer, row] over rows, of each turn if `turns`."""

    def cells(subject: Subject) -> Iterator[Cells]:
        numbers = values(subject)
        if numbers is None or not numbers.shape[-1]:
            return
        for turn, rows in subject.trace.answers if turns else ((None, slice(None)),):
            yield Cells(subject.record.layers, numbers[..., rows].mean(-1), turn=turn)

    return cells


def _regret_gap(subject: Subject) -> Floats | None:
    if subject.optimum is None or subject.trace.n_pos == subject.trace.prompt_len:
        return None
    certificate = subject.optimum[0].internals[0].notes
    gap: Floats = certificate["bound"] - certificate["retained"]  # [layer, pool]
    return gap


def _added_weighted(subject: Subject) -> Floats:
    """Squares of the change of the residual stream, times the sensitivity [layer, row]."""
    added = np.asarray(subject.output().added, np.float64)  # where a metric reads `o_proj`
    sensitivity = np.array(subject.trace.header.layer_sensitivity)[[*subject.record.layers]]
    weighted: Floats = sensitivity[:, None] * added**2
    return weighted


def _all_heads(subject: Subject) -> Floats:
    """Relative error of the output of all heads [layer, row]; 0 for an unchanged output of 0."""
    from kvsim.analysis.output.error import head_lengths

    lengths = subject.walk(head_lengths)  # [layer, qhead, row]
    moved: Floats = np.sqrt(((subject.output().error * lengths) ** 2).sum(1))
    length: Floats = np.sqrt((lengths**2).sum(1))
    return np.divide(moved, length, out=np.zeros_like(moved), where=(length > 0) | (moved > 0))


def _bytes(place: int) -> Callable[[Subject], Iterator[Cells]]:
    def cells(subject: Subject) -> Iterator[Cells]:
        from kvsim.analysis.output.bytes import cache_bytes

        by_turn = subject.walk(cache_bytes)[place].sum(-1)  # [turn, layer]
        for (turn, _), of_turn in zip(subject.trace.answers, by_turn, strict=True):
            yield Cells(subject.record.layers, of_turn, turn=turn)

    return cells


METRICS: Mapping[str, Metric] = {
    "output_error": Metric(
        "|o_full - o_seen| / |o_full| of the attention output, mean over rows after the prompt",
        "rows", "relative", "lower", "kvsim", _rows("error")),
    "retained_mass": Metric(
        "share of full attention on visible entries and on the model's own sinks, mean over rows "
        "after the prompt",
        "rows", "share", "higher", "kvsim", _rows("mass")),
    "missing_mass": Metric(
        "first factor of the output error: attention on evicted entries",
        "rows", "share", "lower", "error = missing x distance", _rows("missing")),
    "error_distance": Metric(
        "second factor: |o_evicted - o_seen| / |o_full|, where at least 1e-4 is missing",
        "rows", "relative", None, "as missing_mass", _rows("distance")),
    "sparsity_compressed": Metric(
        "sparsity over the entries that the last row still sees, attention over visible entries",
        "rows", "share", None, "G-KV, Fig. 9", _sparsity_compressed, main="p=0.01,max=sequence"),
    "regret": Metric(
        "mass that the best possible kept sets retain on the same terms, minus retained mass",
        "rows", "signed share", "lower", "kvsim", _regret, beside="optimum"),
    "regret_gap": Metric(
        "upper bound of the mass that other kept sets could retain beyond the optimum that was "
        "found",
        "rows", "share", "lower", "kvsim", _means(_regret_gap, turns=False), beside="optimum"),
    "layer_error": Metric(
        "|W_o (o_full - o_seen)|, all heads of a layer together: change of the residual "
        "stream, RMS over rows after the prompt; summaries add up the layers",
        "rows", "absolute", "lower", "kvsim", _layer_error,
        layers="sum", arrays=("o_proj",)),
    "weighted_error": Metric(
        "square of layer_error times the sensitivity of the layer, the KL per squared error that "
        "the capture measured for the first rows after the prompt; summaries add up the layers",
        "rows", "nats", "lower", "kvsim", _means(_added_weighted),
        layers="sum", arrays=("o_proj", "layer_sensitivity")),
    "bytes_held": Metric(
        "bytes of the cache that a row after the prompt attends with: 16 bits for a number that "
        "is not rounded, scales and summaries of pages included; summaries add up the layers",
        "rows", "bytes", "lower", "kvsim", _bytes(0),
        default=False, layers="sum"),
    "bytes_read": Metric(
        "bytes of the cache that a row after the prompt reads: entries that any query head of a KV "
        "head reads, and bytes read to choose them; summaries add up the layers",
        "rows", "bytes", "lower", "as bytes_held", _bytes(1),
        default=False, layers="sum"),
    "concat_error": Metric(
        "|o_full - o_seen| / |o_full| with all heads of a layer as one vector, mean over rows "
        "after the prompt",
        "rows", "relative", "lower", "after Expected Attention, Fig. 6",
        _means(_all_heads), default=False),
}  # fmt: skip

#: Metrics that compare with the optimum.
REGRET = tuple(name for name, entry in METRICS.items() if entry.beside)
