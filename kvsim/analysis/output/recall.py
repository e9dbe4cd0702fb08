"""Attention of rows on entries that were gone: mass on wiped-out regions, top-k recall.

Both need the whole attention of every row after the prompt, entry by entry. The walk goes from the
last row to the first, once for all records: what later rows attend to is then a running sum, and a
block of rows is all that stands in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from kvsim.analysis.arrays import EvictedAt, Floats, Ints, share
from kvsim.analysis.attention.windows import log_attention, row_blocks
from kvsim.analysis.kept.retention import LENGTHS, RECENT, SINK, THRESHOLDS, event_rows
from kvsim.core.lazy import Tensor, torch
from kvsim.core.reading import Reads
from kvsim.core.record import Record
from kvsim.core.trace import Trace

#: Entries of a row that recall asks for: more than a sink and the row's neighbours, which every
#: policy keeps, and fewer than any budget in use, so that all of them could have been kept.
TOP = 10

# Rows of a block, and the most weights of all heads that a block holds.
_ROWS, _WEIGHTS = 64, 1 << 24


@dataclass(frozen=True)
class Attended:
    """Recall and wiped-out mass of one record; rows are those after the prompt.

    recall: share of the `top` entries with the most full attention (of equal ones the lower
    positions; fewer in a row that has fewer) that the row still sees: under a reader, that it
    reads; float32 [layer, qhead, row]. seen: share of all entries before it that the row sees,
    which is the recall of a random choice; float32 [layer, head, row], of a reader's heads.

    events: for each layer the rows of its events [E]. wiped: for each layer, by (length,
    threshold), the share of the mass that all rows after an event put on the regions counted there
    that lay in regions wiped out by then; [head, E], NaN without a region or a later row. Heads are
    those of the record, and the mass is that of all their query heads.
    """

    recall: NDArray[np.float32]
    seen: NDArray[np.float32]
    events: tuple[Ints, ...]
    wiped: tuple[Mapping[tuple[int, float], Floats], ...]


def attended(
    trace: Trace,
    records: Sequence[Record],
    device: str = "cpu",
    *,
    lengths: Sequence[int] = LENGTHS,
    thresholds: Sequence[float] = THRESHOLDS,
    top: int = TOP,
    sink: int = SINK,
    recent: int = RECENT,
) -> list[Attended]:
    """Walk over the attention of each layer once, for all records of the trace.

    Regions count and are wiped out as in the metric `wipeout`. The mass
    is full attention of the trace, as the model computed it, not what eviction makes of it.
    """
    width = max(1, min(_ROWS, _WEIGHTS // (trace.n_qheads * trace.n_pos)))
    blocks = row_blocks(trace.prompt_len, trace.n_pos, width)[::-1]
    unit = gcd(*lengths)
    walks = [
        {
            record.layers[index]: _Walk(
                trace, gone, lengths, thresholds, sink, recent, record.reads, index
            )
            for index, gone in enumerate(record.gone_after)
        }
        for record in records
    ]
    for layer in sorted({layer for by_layer in walks for layer in by_layer}):
        of_layer = [by_layer[layer] for by_layer in walks if layer in by_layer]
        # mass that all later rows put on each unit of positions
        later = np.zeros((trace.n_heads, trace.group, trace.n_pos // unit))
        for rows, z in log_attention(trace, layer, blocks, device=device):
            entries, real = strongest(z, top)
            # what is incomplete at the end of the block is counted at no event in it or before it
            n = rows.stop // unit
            mass = z.exp_()[..., : n * unit].unflatten(-1, (n, unit)).sum(-1).double().cpu().numpy()
            mass = mass[:, :, ::-1].cumsum(2)[:, :, ::-1] + later[:, :, None, :n]
            later[:, :, :n] = mass[:, :, 0]
            for walk in of_layer:
                walk.look_up(rows, entries, real)
                walk.lose(rows, mass, unit)
    return [
        Attended(
            np.stack([x.recall for x in by_layer.values()]),
            np.stack([x.seen for x in by_layer.values()]),
            tuple(x.events for x in by_layer.values()),
            tuple(x.shares for x in by_layer.values()),
        )
        for by_layer in walks
    ]


def strongest(z: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The `top` largest of each row of z [..., n], of equal ones the lower; at most n.

    Returns their places [..., top], and which of them are above -inf.
    """
    n = z.shape[-1]
    values, places = z.topk(min(top + 1, n), dim=-1)
    real = values[..., :top] > -torch.inf
    if n > top:  # torch takes any of equal values: look again where the cut lies between equals
        cut = values[..., top - 1]
        tied = (cut == values[..., top]) & (cut > -torch.inf)
        rows, least = z[tied], cut[tied].unsqueeze(-1)
        above, equal = rows > least, rows == least
        room = top - above.sum(-1, keepdim=True)
        places = places[..., :top].contiguous()
        chosen = above | (equal & (equal.cumsum(-1) <= room))
        places[tied] = chosen.nonzero()[:, -1].view(len(rows), top)
    return places, real


class _Walk:
    """One layer of one record, filled from its last row up.

    gone [H, T]: its `gone_after`. reads, at: the record's account, and the layer's place in it.
    """

    def __init__(
        self,
        trace: Trace,
        gone: EvictedAt,
        lengths: Sequence[int],
        thresholds: Sequence[float],
        sink: int,
        recent: int,
        reads: Reads | None,
        at: int,
    ) -> None:
        self.last, self.recent = torch.from_numpy(gone), recent
        self.reads, self.at = reads if reads is None or not reads.dense(at) else None, at
        heads, total = gone.shape
        row = np.arange(trace.prompt_len, total)
        self.start = trace.prompt_len
        self.recall = np.full((trace.n_qheads, len(row)), np.nan, np.float32)
        # an entry that left before a row is at a position before it
        ordered = np.sort(gone, axis=-1)
        n_gone = np.stack([np.searchsorted(of_head, row) for of_head in ordered])
        self.seen = (1 - n_gone / (row + 1)).astype(np.float32)
        if reads is not None:  # all layers have the heads of the account
            self.seen = self.seen.repeat(max(1, reads.bits.shape[1] // heads), 0)
        self.events = event_rows(gone)
        # by length: the first region, and the row after which each is wiped out [threshold, H, R]
        self.first = {length: -(-sink // length) for length in lengths}
        self.deaths = []
        for length, first in self.first.items():
            count = max(0, total // length - first)
            spans = gone[:, first * length : (first + count) * length]
            ordered = np.sort(spans.reshape(heads, count, length), axis=-1)
            # as wipeout: 0.1 * 30 is a little above 3
            least = [int(np.floor(threshold * length + 1e-9)) for threshold in thresholds]
            self.deaths.append(np.stack([ordered[..., length - x - 1] for x in least]))
        shape = heads, len(self.events)
        self.shares = {(x, t): np.full(shape, np.nan) for x in lengths for t in thresholds}

    def look_up(self, rows: slice, entries: Tensor, real: Tensor) -> None:
        """Look up the strongest entries [H, G, w, top] of a block of rows, where they are real."""
        last = self.last.to(entries.device)
        place = slice(rows.start - self.start, rows.stop - self.start)
        row = torch.arange(rows.start, rows.stop, device=entries.device)
        if self.reads is None:
            heads = entries.flatten(0, 1).unflatten(0, (len(last), -1))
            seen = last.gather(1, heads.flatten(1)).view(entries.shape) >= row[:, None]
        else:
            read = self.reads.entries(self.at, rows, last)
            self.seen[:, place] = (read.sum(-1) / (row + 1)).cpu().numpy()
            heads = entries.flatten(0, 1).unflatten(0, (len(read), -1))
            seen = read[:, None].expand(-1, heads.shape[1], -1, -1).gather(-1, heads)
        seen = seen.view(entries.shape) & real
        self.recall[:, place] = (seen.sum(-1) / real.sum(-1)).flatten(0, 1).cpu().numpy()

    def lose(self, rows: slice, later: Floats, unit: int) -> None:
        """Look at events just before a block's rows; later [H, G, w, n]: mass of rows from each on.

        n counts units of positions, the complete ones at the end of the block.
        """
        low, high = np.searchsorted(self.events + 1, [rows.start, rows.stop])
        if low == high:
            return
        if len(self.last) == len(later):
            later = later.sum(1, keepdims=True)
        events = self.events[low:high]
        heads, group, *shape = later.shape
        mass = later.reshape(heads * group, *shape)[:, events + 1 - rows.start]  # [H, e, n]
        shares = iter(self.shares.values())
        for (length, first), deaths in zip(self.first.items(), self.deaths, strict=True):
            each = length // unit
            count = max(0, mass.shape[-1] // each - first)
            spans = mass[..., first * each : (first + count) * each]
            of_region = spans.reshape(*mass.shape[:2], count, each).sum(-1)  # [H, e, R]
            ends = (np.arange(first, first + count) + 1) * length
            of_region = of_region * (ends <= events[:, None] + 1 - self.recent)
            whole = of_region.sum(-1)
            for death in deaths:
                lost = of_region * (death[:, None, :count] <= events[:, None])
                next(shares)[:, low:high] = share(lost.sum(-1), whole)
