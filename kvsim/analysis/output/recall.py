"""What rows attend to in full, and how much of it was gone: mass on wiped regions, top-k recall.

Both need the whole attention of every row after the prompt, entry by entry, which the output error
does without (it attends over what is seen alone, in a fused kernel). So this is a walk of its own,
once for all records. It goes from the last row to the first: what later rows
attend to is then a running sum, and a block of rows is all that stands in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvsim.analysis.attention.windows import log_attention, row_blocks
from kvsim.analysis.kept.retention import LENGTHS, RECENT, SINK, THRESHOLDS, event_rows
from kvsim.core.record import Record
from kvsim.core.trace import Trace

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

#: Entries of a row that recall asks for: more than a sink and the row's neighbours, which every
#: policy keeps, and fewer than any budget in use, so that all of them could have been kept.
TOP = 10

# Rows of a block, and the most weights of all heads that a block holds.
_ROWS, _WEIGHTS = 64, 1 << 24


@dataclass(frozen=True)
class Attended:
    """Of one record; rows are those after the prompt.

    recall: share of the `top` entries with the most full attention (of equal ones the lower
    positions; fewer in a row that has fewer) that the row still sees; float32 [layer, qhead, row].
    seen: share of all entries before it that the row sees, which is the recall of a random choice;
    float32 [layer, head, row].

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

    Regions, what counts them and what wipes them out are those of the metric `wipeout`. The mass
    is full attention of the trace, as the model computed it, not what eviction makes of it.
    """
    found = [_Walk(trace, record) for record in records]
    width = max(1, min(_ROWS, _WEIGHTS // (trace.n_qheads * trace.n_pos)))
    blocks = row_blocks(trace.prompt_len, trace.n_pos, width)[::-1]
    unit = gcd(*lengths)
    for layer in sorted({layer for record in records for layer in record.layers}):
        own = [one for one in found if layer in one.record.layers]
        for one in own:
            one.enter(layer, lengths, thresholds, sink, recent)
        # mass that all later rows put on each unit of positions
        later = np.zeros((trace.n_heads, trace.group, trace.n_pos // unit))
        for rows, z in log_attention(trace, layer, blocks, device=device):
            entries, real = strongest(z, top)
            # what is incomplete at the end of the block is counted at no event in it or before it
            n = rows.stop // unit
            mass = z.exp_()[..., : n * unit].unflatten(-1, (n, unit)).sum(-1).double().cpu().numpy()
            mass = mass[:, :, ::-1].cumsum(2)[:, :, ::-1] + later[:, :, None, :n]
            later[:, :, :n] = mass[:, :, 0]
            for one in own:
                one.recall(rows, entries, real)
                one.lose(rows, mass, unit)
    return [one.done() for one in found]


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
    """One record on the way: what is known of it so far, and the layer that it is in."""

    def __init__(self, trace: Trace, record: Record) -> None:
        self.record, self.first = record, trace.prompt_len
        n_rows = trace.n_pos - self.first
        shape = len(record.layers), trace.n_qheads, n_rows
        self._recall = np.full(shape, np.nan, np.float32)
        self._seen = np.full((shape[0], record.evicted_at.shape[1], n_rows), np.nan, np.float32)
        self._regions: list[_Regions] = []
        self._at, self._last = 0, torch.empty(0)

    def enter(
        self,
        layer: int,
        lengths: Sequence[int],
        thresholds: Sequence[float],
        sink: int,
        recent: int,
    ) -> None:
        """Go to a layer of the trace; layers come in ascending order."""
        self._at = self.record.layers.index(layer)
        gone = self.record.gone_after[self._at]
        self._last = torch.from_numpy(gone)
        self._regions.append(_Regions(gone, lengths, thresholds, sink, recent))
        row = np.arange(self.first, self.record.n_pos)
        before = np.sort(gone, axis=-1)
        for head, left in enumerate(before):
            # an entry that left before a row is at a position before it
            self._seen[self._at, head] = 1 - np.searchsorted(left, row) / (row + 1)

    def recall(self, rows: slice, entries: Tensor, real: Tensor) -> None:
        """Look up the strongest entries [H, G, w, top] of a block of rows, where they are real."""
        last = self._last.to(entries.device)
        heads = entries if len(last) == len(entries) else entries.flatten(0, 1)
        row = torch.arange(rows.start, rows.stop, device=entries.device)[:, None]
        seen = (last.gather(1, heads.flatten(1)).view(entries.shape) >= row) & real
        share = seen.sum(-1) / real.sum(-1)
        own = slice(rows.start - self.first, rows.stop - self.first)
        self._recall[self._at, :, own] = share.flatten(0, 1).cpu().numpy()

    def lose(self, rows: slice, later: Floats, unit: int) -> None:
        """Look at the events just before a block's rows; later as in `_Regions.add`."""
        regions = self._regions[-1]
        if len(regions.deaths[0][0]) == len(later):
            later = later.sum(1, keepdims=True)
        heads, group, *shape = later.shape
        regions.add(rows, later.reshape(heads * group, *shape), unit)

    def done(self) -> Attended:
        """What was found, layers in the order of the record."""
        order = np.argsort(np.argsort(self.record.layers))
        regions = [self._regions[i] for i in order]
        return Attended(
            self._recall,
            self._seen,
            tuple(one.rows for one in regions),
            tuple(one.shares for one in regions),
        )


class _Regions:
    """When the regions of a layer of a record were wiped out, and the mass that lay there."""

    def __init__(
        self,
        gone: NDArray[np.int32],
        lengths: Sequence[int],
        thresholds: Sequence[float],
        sink: int,
        recent: int,
    ) -> None:
        self.rows = event_rows(gone)
        self.recent = recent
        heads, total = gone.shape
        # by length: the first region, and the row after which each is wiped out [threshold, H, R]
        self.first = {length: -(-sink // length) for length in lengths}
        self.deaths = []
        for length, first in self.first.items():
            count = max(0, total // length - first)
            spans = gone[:, first * length : (first + count) * length]
            ordered = np.sort(spans.reshape(heads, count, length), axis=-1)
            # as wipeout: 0.1 * 30 is a little above 3
            left = [int(np.floor(threshold * length + 1e-9)) for threshold in thresholds]
            self.deaths.append(np.stack([ordered[..., length - x - 1] for x in left]))
        shape = heads, len(self.rows)
        self.shares = {(x, t): np.full(shape, np.nan) for x in lengths for t in thresholds}

    def add(self, rows: slice, later: Floats, unit: int) -> None:
        """Events before the rows of a block; later [H, w, n]: mass of all rows from each one on.

        n counts units of positions, the complete ones at the end of the block.
        """
        low, high = np.searchsorted(self.rows + 1, [rows.start, rows.stop])
        if low == high:
            return
        events = self.rows[low:high]
        mass = later[:, events + 1 - rows.start]  # [H, e, n]
        names = iter(self.shares.values())
        for (length, first), deaths in zip(self.first.items(), self.deaths, strict=True):
            each = length // unit
            count = max(0, mass.shape[-1] // each - first)
            spans = mass[..., first * each : (first + count) * each]
            of_region = spans.reshape(*mass.shape[:2], count, each).sum(-1)  # [H, e, R]
            ends = (np.arange(first, first + count) + 1) * length
            of_region = of_region * (ends <= events[:, None] + 1 - self.recent)
            whole = of_region.sum(-1)
            for death in deaths:
                lost = (of_region * (death[:, None, :count] <= events[:, None])).sum(-1)
                out = next(names)[:, low:high]
                np.divide(lost, whole, out=out, where=whole > 0)
