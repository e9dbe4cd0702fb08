"""The cache of a running model from which a policy evicts: entries gathered, memory freed.

The layers of a block share one table of keys and one of values, left-padded where heads hold
different numbers of entries. Each of them is a layer of a transformers `Cache`, and all together
are the source that the block's View reads from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvsim.core.checks import compute_dtype
from kvsim.core.trace import Trace
from kvsim.core.view import Entries

#: Rows that a table grows by where no event is near.
_GROWTH = 64


class Table:
    """Rows of layers, [L, H, n, d], that grow at the end.

    Memory is made for `room` rows more than there are, at once for all layers.
    """

    def __init__(self, example: Tensor) -> None:
        self._array = example
        self._held = [example.shape[2]] * example.shape[0]

    def append(self, layer: int, rows: Tensor, room: int) -> Tensor:
        """Add rows [H, w, d] to a layer, and return all that it has, [H, n, d]."""
        start = self._held[layer]
        stop = self._held[layer] = start + rows.shape[1]
        if stop > self._array.shape[2]:
            more = self._array.new_zeros(*self._array.shape[:2], stop + room, rows.shape[2])
            more[:, :, :start] = self._array[:, :, :start]
            self._array = more
        self._array[layer, :, start:stop] = rows
        return self._array[layer, :, :stop]

    def held(self, layer: int) -> int:
        """How many rows a layer has."""
        return self._held[layer]

    @property
    def rows(self) -> Tensor:
        """All rows, [L, H, n, d], where all layers have as many."""
        return self._array[:, :, : self._held[0]]

    @property
    def nbytes(self) -> int:
        """Bytes in memory, those for rows to come included."""
        return self._array.nbytes

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return self._array.itemsize

    def gather(self, slots: Tensor, live: Tensor) -> None:
        """Keep the rows in slots [L, H, n], zero where not live; the memory of others is freed."""
        index = slots.unsqueeze(-1).expand(*slots.shape, self._array.shape[-1])
        self._array = self._array.gather(2, index).masked_fill_(~live.unsqueeze(-1), 0.0)
        self._held = [slots.shape[-1]] * len(self._held)


class LiveSource:
    """What a block of layers of a running model holds, as the source of its View.

    sketch: the sequence to be run (`RunningModel.sketch`); layers: of it. Keys and values are in the
    slots of the block's entries; queries of all rows are held. room: rows before the next event.
    """

    def __init__(self, sketch: Trace, layers: Sequence[int], like: Tensor) -> None:
        self.n_rows = sketch.n_pos
        self.rope, self.formula = sketch.ropes[layers[0]], sketch.formulas[layers[0]]
        self.positions = torch.arange(self.n_rows, device=like.device)
        self.room = 0
        self.entries: Entries | None = None  # of the block that reads from here
        self.layers, self._sketch = tuple(layers), sketch
        self._heads, self._group, self._dim = sketch.n_heads, sketch.group, sketch.dim
        self._padded, self._live = False, 0
        self._keys, self._values, self._queries = (
            Table(like.new_zeros(len(layers), heads, 0, self._dim))
            for heads in (self._heads, self._heads, sketch.n_qheads)
        )

    @property
    def keys(self) -> Tensor:
        """[L, H, n, d], after RoPE."""
        return _computable(self._keys.rows)

    @property
    def values(self) -> Tensor:
        """[L, H, n, d]."""
        return _computable(self._values.rows)

    @property
    def o_proj(self) -> Tensor:
        """Output projection of each query head, [L, H, G, d, D]."""
        parts = [self._sketch.read("o_proj", slice(layer, layer + 1)) for layer in self.layers]
        out: Tensor = torch.cat(parts).to(self.positions.device)
        return out.unflatten(1, (-1, self._group))

    def queries(self, start: int, stop: int) -> Tensor:
        """[L, H, G, stop - start, d], after RoPE."""
        q = self._queries.rows[:, :, start:stop].unflatten(1, (-1, self._group))
        return _computable(q)

    def full(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Only clairvoyant scorers read it, and they are refused before a model runs."""
        raise NotImplementedError(f"attention of rows {start}..{stop - 1} over the full cache")

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add the entries [H, w, d] of new rows to a layer; returns all of its entries."""
        room = self.room or _GROWTH
        return self._keys.append(layer, keys, room), self._values.append(layer, values, room)

    def note_queries(self, layer: int, queries: Tensor) -> None:
        """Add the queries of new rows, [qhead, w, d]."""
        self._queries.append(layer, queries, self.room or _GROWTH)

    def compact(self, slots: Tensor) -> None:
        """Keep the entries in slots [L, H, n] alone, in that order; pads are zero."""
        for table in (self._keys, self._values):
            table.gather(slots, self.entries.live)

    def settle(self) -> None:
        """Count the entries after an event."""
        self._padded = not bool(self.entries.live.all())
        self._live = int(self.entries.live.sum())

    def mask(self, layer: int, query: Tensor, *, added: bool) -> Tensor | None:
        """What the new rows, those of query [1, qhead, w, d], see: [1, qhead or 1, w, n].

        True where a row sees an entry; with `added` 0 there and the least number elsewhere, to be
        added to logits. None where a single row sees everything.
        """
        rows, held = query.shape[2], self.entries.live.shape[-1]
        if rows == 1 and not self._padded:
            return None
        n = self.held(layer)
        new = torch.ones(rows, n - held, dtype=torch.bool, device=query.device)
        new = new.tril(n - held - rows).expand(1, 1, rows, -1)
        heads = 1
        if self._padded:
            heads = query.shape[1]
            old = self.entries.live[layer].repeat_interleave(self._group, dim=0)
        else:
            old = new.new_ones(1, held)
        visible = torch.cat(
            [old[None, :, None].expand(1, heads, rows, held), new.expand(1, heads, -1, -1)], dim=-1
        )
        if not added:
            return visible
        least = torch.finfo(query.dtype).min
        return torch.zeros_like(visible, dtype=query.dtype).masked_fill_(~visible, least)

    def held(self, layer: int) -> int:
        """Slots of a layer, pads included."""
        return self._keys.held(layer)

    def seen(self, layer: int) -> int:
        """Rows that went through a layer."""
        return self._queries.held(layer)

    @property
    def live_bytes(self) -> int:
        """Bytes of the keys and values of live entries, without pads."""
        new = self._keys.held(0) - self.entries.live.shape[-1]
        entries = self._live + new * len(self.layers) * self._heads
        return entries * 2 * self._dim * self._keys.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values in memory: with pads, and with room for rows to come."""
        return self._keys.nbytes + self._values.nbytes


def _computable(x: Tensor) -> Tensor:
    """A tensor of the model in the dtype that policies compute in."""
    return x.to(compute_dtype(x.dtype))


class LiveLayer(CacheLayerMixin):
    """A layer of transformers' cache, of which a block of layers holds the entries."""

    is_sliding = False

    def __init__(self, source: LiveSource, index: int) -> None:
        super().__init__()
        self.source, self.index = source, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the block has made the tables."""

    def update(
        self, key_states: Tensor, value_states: Tensor, cache_kwargs: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Add entries [1, H, w, d] of new rows; returns all entries, with pads, [1, H, n, d]."""
        keys, values = self.source.extend(self.index, key_states[0], value_states[0])
        return keys[None], values[None]

    def get_seq_length(self) -> int:
        """Rows that went through the layer, evicted entries included: positions count on."""
        return self.source.seen(self.index)

    def get_mask_sizes(self, cache_position: Tensor) -> tuple[int, int]:
        """Return the length of a mask over all rows, and its offset."""
        return self.get_seq_length() + len(cache_position), 0

    def get_max_cache_shape(self) -> int:
        """No limit."""
        return -1
