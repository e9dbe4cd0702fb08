"""Rows that a Record changes, and what they see: measurements and the judge take it from here."""

from __future__ import annotations

from kvsim.core.lazy import Tensor, torch
from kvsim.core.policy import Schedule
from kvsim.core.reading import Reads, Weights, visible
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.policies.naming import stored_piece


def first_row(record: Record, trace: Trace) -> int:
    """The first row that sees rounded entries: the one after the first prefill event."""
    return record.schedule.ends(trace.prompt_len, trace.header.context_len)[0]


def first_moved(record: Record, trace: Trace, gone: Tensor) -> int:
    """The first row that may see other entries than with the full cache, or other numbers of them.

    gone: after which row each entry of a layer has left, int [H, T].
    """
    begin = min(int(gone.min()) + 1, trace.n_pos)
    if "stored" in record.facts.access:
        return min(begin, first_row(record, trace))
    return begin if record.reads is None else min(begin, record.reads.first)


def prompt_parts(schedule: Schedule, trace: Trace, count: int) -> dict[str, slice]:
    """The rows of the prompt behind its first event, by variant of the metrics that have them.

    Of its last `count` rows, from the first of which they are counted; a part that begins before is
    left out. With an event after the context, rows of the question are apart.
    """
    end, context = trace.prompt_len, trace.header.context_len
    first, start = schedule.ends(end, context)[0], end - count
    parts = {"rows=prompt": (first, end)}
    if context and schedule.compress.startswith(("context", "both")):
        parts = {"rows=context": (first, context), "rows=question": (context, end)}
    return {
        variant: slice(first - start, stop - start)
        for variant, (first, stop) in parts.items()
        if start <= first < stop
    }


def log_weights(
    reads: Reads | None, index: int, rows: slice, gone: Tensor, q: Tensor, k: Tensor
) -> Tensor | None:
    """Logarithms of the weights that rows give the entries that they read [qhead, w, rows.stop].

    index: the layer's place in the account; gone: after which row each entry left, int [H, T]; q
    [H, G, w, d] of the rows and k [H, T, d], as the rows have them. None without weights.
    """
    if reads is None or not reads.weighted or reads.dense(index) or rows.stop <= reads.first:
        return None
    weighing: Weights = stored_piece(reads.reader).weights
    late = slice(max(rows.start, reads.first), rows.stop)
    k, skip, first = k[:, : rows.stop], late.start - rows.start, reads.first + 1
    learned = weighing.learned(k[:, :first], visible(gone, slice(first - 1, first))[:, 0])
    weights = weighing.log_weights(q[:, :, skip:], k, visible(gone, late), learned)
    return torch.nn.functional.pad(weights.flatten(0, 1), (0, 0, skip, 0))
