"""Large arrays as pictures of bounded size: attention, retention after each event, reads.

A tile has at most `SIDE` cells to a side, so the data sent to a browser does not grow with the
trace. A cell that covers several rows or positions shows their maximum, so that a single large
weight or a single retained entry stays visible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvsim.analysis.arrays import Ints
from kvsim.analysis.kept.retention import RECENT, SINK, event_rows
from kvsim.analysis.kept.states import held_entries, read_entries
from kvsim.core.attention import sees
from kvsim.core.record import Record
from kvsim.core.trace import Trace

#: Cells to a side of a tile, at most: about the pixels that a picture has on a page.
SIDE = 512
#: Rows of attention that are computed at once.
_BLOCK = 256


@dataclass(frozen=True)
class Tile:
    """A picture of rows and positions.

    values: [cell row, cell column]. rows, positions: the first row or position of each cell, and
    the end of the last cell.
    """

    values: NDArray[np.float32] | NDArray[np.uint8]
    rows: Ints
    positions: Ints

    @property
    def pooled(self) -> bool:
        """Whether a cell covers more than one row or position."""
        spans = (int(edges[-1] - edges[0]) for edges in (self.rows, self.positions))
        return self.values.shape != (*spans,)


def attention_tile(
    trace: Trace, layer: int, qhead: int, rows: range, positions: range, side: int = SIDE
) -> Tile:
    """Return full attention of one query head, the maximum in each cell; float32.

    rows, positions: windows without gaps, IndexError for one that is empty or reaches out of the
    trace. side: cells to a side, at most.
    """
    for name, window in (("rows", rows), ("positions", positions)):
        if not window or window.start < 0 or window.stop > trace.n_pos:
            raise IndexError(
                f"{name} are {window.start} to {window.stop}; expected a window within 0 to "
                f"{trace.n_pos}"
            )
    only, head = slice(layer, layer + 1), qhead // trace.group
    formula = trace.formulas[layer]
    keys = trace.read("k", only, slice(positions.start, positions.stop))[0, head].float()
    lse = (trace.read("lse", only) if trace.has("lse") else trace.full(only)[1])[0, qhead]
    lse = lse[rows.start : rows.stop].float()
    down, across = (math.ceil(len(window) / side) for window in (rows, positions))
    pos = torch.arange(positions.start, positions.stop)
    cells, columns = [], math.ceil(len(positions) / across)
    step = max(down, _BLOCK // down * down)
    for first in range(0, len(rows), step):
        block = slice(rows.start + first, min(rows.start + first + step, rows.stop))
        q = trace.read("q", only, block)[0, qhead].float() * formula.scale
        row = torch.arange(block.start, block.stop)
        # no later position is seen; whole cells, so that they are pooled alike
        seen = min(len(pos), across * max(1, math.ceil((block.stop - positions.start) / across)))
        z = formula.capped(q @ keys[:seen].mT).sub_(lse[first : first + len(q), None])
        weights = z.exp_().masked_fill_(~sees(row, pos[:seen], formula), 0.0)
        pooled = _pool(weights, down, across)
        cells.append(torch.nn.functional.pad(pooled, (0, columns - pooled.shape[1])))
    return Tile(torch.cat(cells).numpy(), _edges(rows, down), _edges(positions, across))


#: States of an entry in a tile of retention; the order of the codes.
STATES = ("not yet there", "kept", "evicted", "in a region of which nothing is left")
_FUTURE, _RETAINED, _EVICTED, _WIPED = range(4)
# Which code stands for several, ascending: an entry that stays must not vanish among evicted ones.
_STRENGTH = np.array([_FUTURE, _WIPED, _EVICTED, _RETAINED], dtype=np.uint8)


def retention_tile(
    record: Record, layer: int, head: int, region: int = 32, side: int = SIDE
) -> Tile:
    """Return the state of every position in a head after each event; uint8 codes of `STATES`.

    layer, head: on the record's axes. region: positions of a region, counted as in the metric
    `wipeout`. side: cells to a side, at most; of events that share a row of cells, the last is
    shown. `rows` of the tile are events, the rows after which something leaves the layer, without
    an end.
    """
    gone = record.gone_after[layer]
    events = event_rows(gone)
    down, across = (max(1, math.ceil(n / side)) for n in (len(events), record.n_pos))
    shown = events[::-1][::down][::-1]
    codes = np.full((len(shown), record.n_pos), _FUTURE, dtype=np.uint8)
    first = -(-SINK // region) * region
    for place, row in enumerate(shown):
        kept = gone[head] > row
        codes[place, : row + 1] = np.where(kept[: row + 1], _RETAINED, _EVICTED)
        stop = max(first, (row + 1 - RECENT) // region * region)
        empty = ~kept[first:stop].reshape(-1, region).any(1)
        codes[place, first:stop][np.repeat(empty, region)] = _WIPED
    ranked = torch.from_numpy(np.argsort(_STRENGTH).astype(np.uint8)[codes])
    pooled = _STRENGTH[_pool(ranked, 1, across).numpy()] if len(shown) else codes[:, ::across]
    return Tile(pooled, shown, _edges(range(record.n_pos), across))


#: States of an entry in a tile of reads; the order of the codes. The strongest stands for several.
READ_STATES = ("not yet there", "evicted", "held, not read", "read")


def reading_tile(record: Record, layer: int, head: int, side: int = SIDE) -> Tile:
    """Return the state of every position in a head at each row after the prompt; `READ_STATES`.

    layer, head: on the record's axes. side: cells to a side, at most. An entry counts as read if
    some query head of the head reads it.
    """
    rows = range(record.prompt_len, record.n_pos)
    down, across = (max(1, math.ceil(n / side)) for n in (len(rows), record.n_pos))
    cells, step = [], max(down, _BLOCK // down * down)
    for first in range(rows.start, rows.stop, step):
        block = slice(first, min(first + step, rows.stop))
        codes = np.zeros((block.stop - first, record.n_pos), dtype=np.uint8)
        past = np.arange(block.stop) <= np.arange(first, block.stop)[:, None]
        held, read = (x(record, layer, block)[head] for x in (held_entries, read_entries))
        codes[:, : block.stop] = past + held.astype(np.uint8) + read
        cells.append(_pool(torch.from_numpy(codes), down, across))
    shape = (0, math.ceil(record.n_pos / across))
    values = torch.cat(cells).numpy() if cells else np.empty(shape, np.uint8)
    return Tile(values, _edges(rows, down), _edges(range(record.n_pos), across))


def _pool(values: torch.Tensor, down: int, across: int) -> torch.Tensor:
    """Return the maximum of blocks of `down` rows and `across` columns of values of at least 0."""
    if (down, across) == (1, 1):
        return values
    rows, columns = values.shape
    pad = (0, -columns % across, 0, -rows % down)
    whole = torch.nn.functional.pad(values, pad)
    most: torch.Tensor = whole.unflatten(0, (-1, down)).unflatten(2, (-1, across)).amax((1, 3))
    return most


def _edges(window: range, by: int) -> Ints:
    return np.append(np.arange(window.start, window.stop, by), window.stop)
