"""Large arrays as pictures of bounded size: retention after each event, reads.

A tile has at most `SIDE` cells to a side, so the data sent to a browser does not grow with the
trace. A cell that covers several rows or positions shows their maximum, so that a single retained
entry stays visible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvsim.analysis.arrays import Ints, event_rows
from kvsim.analysis.kept.retention import RECENT, SINK
from kvsim.analysis.kept.states import held_entries, read_entries
from kvsim.core.record import Record

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

    values: NDArray[np.uint8]
    rows: Ints
    positions: Ints


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
