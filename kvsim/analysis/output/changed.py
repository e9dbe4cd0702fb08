"""Rows that a Record changes, and their visible entries, for measurements and the judge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvsim.core.lazy import Tensor, torch
from kvsim.core.merging import Merger, fold, unknown
from kvsim.core.policy import Schedule
from kvsim.core.reading import Reads, visible
from kvsim.core.record import Record
from kvsim.core.storing import Clock, Quantizer, advance, round_marked
from kvsim.core.trace import Trace
from kvsim.policies.naming import stored_piece
from kvsim.schema import NEVER


def first_row(record: Record, trace: Trace) -> int:
    """The first row that sees quantized entries: the one after the first prefill event."""
    return record.schedule.ends(trace.prompt_len, trace.header.context_len)[0]


def first_moved(record: Record, trace: Trace, gone: Tensor) -> int:
    """The first row with other entries than with the full cache, or quantized; gone: [H, T]."""
    begin = min(int(gone.min()) + 1, trace.n_pos)
    if isinstance(stored_piece(record.storage), Quantizer):
        return min(begin, first_row(record, trace))
    return begin if record.reads is None else min(begin, record.reads.first)


def prompt_parts(schedule: Schedule, trace: Trace, count: int) -> dict[str, slice]:
    """The rows of the prompt after its first event, by variant of the metrics that have them.

    Of its last `count` rows; a part that begins before these is left out. With an event after the
    context, rows of the question are a separate variant.
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
    """Logarithms of the weights of rows over the entries that they read [qhead, w, rows.stop].

    index: the layer in the account; gone: the row after which each entry leaves, int [H, T]; q [H,
    G, w, d] of the rows and k [H, T, d], in the rows' layout. None without weights.
    """
    if reads is None or not reads.weighted or reads.dense(index) or rows.stop <= reads.first:
        return None
    weighing = stored_piece(reads.sparse).weights
    late = slice(max(rows.start, reads.first), rows.stop)
    k, skip, first = k[:, : rows.stop], late.start - rows.start, reads.first + 1
    learned = weighing.learned(k[:, :first], visible(gone, slice(first - 1, first))[:, 0])
    weights = weighing.log_weights(q[:, :, skip:], k, visible(gone, late), learned)
    return torch.nn.functional.pad(weights.flatten(0, 1), (0, 0, skip, 0))


def stored_after(evicted_at: Tensor, clock: Clock, first: int) -> Tensor:
    """The row after which each entry is quantized, int32 [L, H, T]; NEVER if it leaves before.

    evicted_at: int32 [L, H, T]. first: the row after which the first entries are quantized.
    """
    out = torch.full_like(evicted_at, NEVER)
    n_pos = evicted_at.shape[-1]
    events = [e for e in evicted_at.unique().tolist() if first < e < n_pos]
    for start, stop in pairwise([first, *([first + 1] if clock.once else [*events, n_pos])]):
        advance(out, evicted_at, clock, start, stop)
    return out


@dataclass(frozen=True)
class Stored:
    """Keys or values of a layer: exact and quantized [H, T, d], and the row after which [H, T]."""

    exact: Tensor
    rounded: Tensor
    after: Tensor

    @classmethod
    def as_recorded(cls, exact: Tensor) -> Stored:
        """Return keys or values without quantization."""
        return cls(exact, exact, exact.new_full(exact.shape[:2], NEVER, dtype=torch.int32))

    def at(self, head: int, entries: Tensor, rows: slice) -> Tensor:
        """Return entries [m] of a head as the first of the rows sees them, [m, d]."""
        late = (self.after[head, entries] >= rows.start).unsqueeze(-1)
        exact, rounded = self.exact[head, entries], self.rounded[head, entries]
        out: Tensor = torch.where(late, exact, rounded)
        return out

    def changing(self, head: int, entries: Tensor, rows: slice) -> Tensor:
        """Return the indices of the entries [m] that are quantized while the rows run."""
        after = self.after[head, entries]
        places: Tensor = ((after >= rows.start) & (after < rows.stop - 1)).nonzero()[:, 0]
        return places


def rounded(
    quantizer: Quantizer, trace: Trace, layer: int, gone: Tensor, last: int, exact: Sequence[Tensor]
) -> list[Stored]:
    """Keys and values of a layer, each quantized after its row.

    layer: its index in the trace; gone: the row after which each entry leaves, int [H, T]; last:
    the row after which the first entries are quantized; exact: keys and values [H, T, d].
    """
    out, channels, quantizer = [], None, quantizer.of_layer(trace.owners[layer])
    if quantizer.reads.last:
        channels = kept_channels(quantizer, trace, layer, gone, last)
    for which, (clock, numbers) in enumerate(zip(quantizer.clocks, exact, strict=True)):
        after, new = stored_after(gone, clock, last), numbers.clone()
        round_marked(quantizer, which, new, after != NEVER, channels)
        out.append(Stored(numbers, new, after))
    return out


def shortened(
    storage: object, layer: int, gone: Tensor, last: int, dims: tuple[int, int]
) -> list[tuple[Tensor, float]]:
    """Rows after which keys and values are quantized, and their bits; empty without a quantizer.

    layer: the owner of the entries; dims: of a key and of a value; other arguments as in `rounded`.
    """
    if not isinstance(storage, Quantizer):
        return []
    storage = storage.of_layer(layer)
    bits = storage.bits(dims[0])[0], storage.bits(dims[1])[1]
    pairs = zip(storage.clocks, bits, strict=True)
    return [(stored_after(gone, clock, last), of_entry) for clock, of_entry in pairs]


def kept_channels(
    quantizer: Quantizer, trace: Trace, layer: int, gone: Tensor, last: int
) -> Tensor:
    """Channels of a layer's keys that are stored, bool [H, d]; arguments as in `rounded`."""
    owner, pos = trace.owners[layer], torch.arange(last + 1, device=gone.device)
    computed = (
        (gone[:, : last + 1] >= pos).any(0).nonzero()[-quantizer.reads.last :, 0].cpu()
    )  # rows
    rows = slice(int(computed[0]), last + 1)
    every = [trace.read("q", slice(i, i + 1), rows)[0] for i in trace.header.readers(owner)]
    queries = [q.unflatten(0, (len(gone), -1))[:, :, computed - computed[0]] for q in every]
    keys = trace.read("k", slice(owner, owner + 1), slice(0, last + 1))[0].to(gone.device)
    held = (gone[:, : last + 1] > last).unsqueeze(-1)
    return quantizer.channels(torch.cat(queries, dim=1).to(gone.device), keys.where(held, 0.0))


def folds(
    merger: Merger, keys: Tensor, values: Tensor, evicted_at: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """Overwrite keys and values [H, T, d] event by event; yields its row and the changed entries.

    evicted_at: the row after which each entry leaves, int [H, T].
    """
    threshold = unknown(keys)
    pos = torch.arange(keys.shape[1], device=keys.device)
    for row in events(evicted_at):
        kept = (evicted_at > row) & (pos <= row)
        changed, threshold = fold(merger, keys, values, evicted_at == row, kept, threshold)
        yield row, changed


def events(evicted_at: Tensor) -> list[int]:
    """The rows after which an entry leaves, ascending."""
    return [row for row in evicted_at.unique().tolist() if row != NEVER]
