"""The cache of a running model from which a policy evicts: entries gathered, memory freed.

The layers of a block share one table of keys and one of values, left-padded where heads hold
different numbers of entries. Each of them is a layer of a transformers `Cache`, and all together
are the source that the block's View reads from.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from kvsim.core.setting import Source
from kvsim.core.trace import Trace
from kvsim.errors import CaptureError, PolicyError
from kvsim.recorder.hooks import kernel_mask
from kvsim.runner.model import computable
from kvsim.runner.reading import LiveReads
from kvsim.schema import AXES

T = TypeVar("T")

#: Rows by which a table grows at least, if no event comes first.
_GROWTH = 64


class Table:
    """Rows of layers, [L, H, n, d], that grow at the end; in memory there is room for more.

    example: an empty table [L, H, 0, d] of the dtype and on the device of the rows.
    """

    def __init__(self, example: Tensor) -> None:
        self._array = example
        self._lengths = [0] * len(example)

    def append(self, layer: int, rows: Tensor, room: int) -> Tensor:
        """Add rows [H, w, d] to a layer, and return all of its rows, [H, n, d].

        room: rows that are added before the next event, these included.
        """
        start = self._lengths[layer]
        stop = self._lengths[layer] = start + rows.shape[1]
        if stop > self._array.shape[2]:
            # few copies of many rows, and little room that stays empty
            size = max(stop, start + min(room, _GROWTH + start // 4))
            grown = self._array.new_zeros(*self._array.shape[:2], size, rows.shape[2])
            grown[:, :, :start] = self._array[:, :, :start]
            self._array = grown
        self._array[layer, :, start:stop] = rows
        return self.of_layer(layer)

    def length(self, layer: int) -> int:
        """Return the number of rows of a layer."""
        return self._lengths[layer]

    def of_layer(self, layer: int) -> Tensor:
        """All rows of a layer, [H, n, d]."""
        return self._array[layer, :, : self._lengths[layer]]

    @property
    def rows(self) -> Tensor:
        """All rows, [L, H, n, d]; between two forwards, when all layers have as many."""
        return self._array[:, :, : self._lengths[0]]

    def gather(self, slots: Tensor, live: Tensor) -> None:
        """Keep the rows in slots [L, H, n], 0 where not live; the memory of the others is freed."""
        layers, heads, total, dim = self._array.shape
        # one flat index: an order of magnitude faster than gather with an expanded one
        base = torch.arange(layers * heads, device=slots.device).mul_(total).view(layers, heads, 1)
        picked = self._array.view(-1, dim).index_select(0, (slots + base).flatten())
        self._array = picked.view(*slots.shape, dim)
        if not bool(live.all()):
            self._array.masked_fill_(~live.unsqueeze(-1), 0.0)
        self._lengths = [slots.shape[-1]] * layers

    def drop(self, n: int) -> None:
        """Free the memory of the first n rows."""
        self._array = self.rows[:, :, n:].clone()
        self._lengths = [self._array.shape[2]] * len(self._lengths)


class LiveSource(Source):
    """Cache of a block of layers of a running model, as the source of its View.

    Keys and values are in the slots of the block's entries. Queries are kept as long as an event
    can read them.

    Args:
        sketch: the sequence to be run (`RunningModel.sketch`), without rows that are dropped before
            these layers.
        layers: those of the block; one alone where others read its entries.
        like: an empty tensor of the model's dtype, on its device.
        rotated: keys are rotated to their slots, and cannot be read.
        dropped: how many rows are dropped.
        exact: keep a copy of the keys beside those that are rounded.

    Attributes:
        readers: the layers that attend to the entries: those of the block, or all that read the
            one of it. Methods that concern one of them take its place here (`index`).
        room: rows before the next event.
        padded: heads hold different numbers of entries.
        run: rows that went through each of the readers.
    """

    compacted = True

    def __init__(
        self,
        sketch: Trace,
        layers: Sequence[int],
        like: Tensor,
        *,
        rotated: bool = False,
        dropped: int = 0,
        exact: bool = False,
    ) -> None:
        self.n_rows = sketch.n_pos
        self.rope, self.formula = sketch.ropes[layers[0]], sketch.formulas[layers[0]]
        self.positions = sketch.positions.to(like.device)
        self._memo: dict[Hashable, Any] = {}
        self.room = 0
        self.reads_queries = True  # an event follows
        self.dropped = dropped
        self.rotated = rotated
        self.layers, self._sketch = tuple(layers), sketch
        self.readers = sketch.header.readers(layers[0]) if len(layers) == 1 else self.layers
        self._heads, self._group = sketch.n_heads, sketch.group
        self._entry_bytes = sketch.entry_size * like.itemsize
        of_keys = like.new_zeros(len(layers), self._heads, 0, sketch.dim)
        of_values = like.new_zeros(len(layers), self._heads, 0, sketch.value_dim)
        of_queries = like.new_zeros(len(self.readers), sketch.n_qheads, 0, sketch.dim)
        #: of latent attention, which ends a key; keys and values are then one table
        self._latent = sketch.header.latent
        if self._latent is not None:
            of_queries = computable(of_queries)  # as the absorbed form has them
        self._keys, self._queries = Table(of_keys), Table(of_queries)
        self._values = self._keys if self._latent is not None else Table(of_values)
        self._exact = Table(of_keys) if exact else None
        self.run = [0] * len(self.readers)
        self._first_row = 0  # rows before those of the table of queries
        self._first_queries = self._queries.rows  # of the first rows of the text
        # after the last event that acted
        self._live = torch.ones(len(layers), self._heads, 0, dtype=torch.bool, device=like.device)
        self.padded, self._count = False, 0

    @property
    def keys(self) -> Tensor:
        """[L, H, n, d], after RoPE."""
        rows = self._rows(0)
        if self.rotated and rows.numel():
            raise PolicyError(
                "a scorer reads keys, which are rotated to their slots; expected one that chooses "
                "by position only, as streaming_llm@original does, or positions='absolute'"
            )
        return computable(rows)

    @property
    def values(self) -> Tensor:
        """[L, H, n, d]."""
        rows = computable(self._rows(1))
        return rows if self._latent is None else rows[..., -self._latent :]

    def _rows(self, which: int) -> Tensor:
        """The keys (0) or values (1) as they are held, [L, H, n, d]; latents are in both."""
        return (self._keys, self._values)[which].rows

    @property
    def exact_keys(self) -> Tensor:
        """Keys before they are rounded, [L, H, n, d]."""
        return computable((self._exact or self._keys).rows)

    def array(self, name: str) -> Tensor:
        """Return the projections, or an array of rows that repeat the context once they ran."""
        return self.memo(("array", name), self._projections)

    def _projections(self) -> Tensor:
        parts = [self._sketch.read("o_proj", slice(layer, layer + 1)) for layer in self.readers]
        return self._grouped(torch.cat(parts).to(self.positions.device))

    def _grouped(self, x: Tensor) -> Tensor:
        """x [reader, qhead, ...] with the query heads of each KV head, [L, H, G, ...]."""
        out: Tensor = x.unflatten(1, (self._heads, self._group))
        if len(self.layers) < len(self.readers):  # all of them read the entries of one layer
            out = out.transpose(0, 1).flatten(1, 2)[None]
        return out

    def note_arrays(self, arrays: Mapping[str, Tensor]) -> None:
        """Keep what `repeat_context` returns, of the block's layers."""
        for name, array in arrays.items():
            of_block = array
            if name in AXES:  # else of no layer
                queries = "qhead" in AXES[name]
                of_block = computable(array[[*(self.readers if queries else self.layers)]])
                of_block = self._grouped(of_block) if queries else of_block
            self._memo["array", name] = of_block

    def queries(self, start: int, stop: int) -> Tensor:
        """[L, H, G, stop - start, d], after RoPE; PolicyError for rows that are not kept."""
        if stop <= self._first_queries.shape[2]:
            rows = self._first_queries[:, :, start:stop]
        elif start >= self._first_row:
            rows = self._queries.rows[:, :, start - self._first_row : stop - self._first_row]
        else:
            raise PolicyError(
                f"a scorer reads the queries of rows {start}..{stop - 1}, and those before "
                f"{self._first_row} are gone; expected a scorer that declares them (reads), "
                "so that a live run keeps them"
            )
        return computable(self._grouped(rows))

    def extend(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add the entries [H, w, d] of new rows to a layer of the block; returns all it has."""
        room = self.room
        if self._latent is not None:  # the model gives the latent and the rotated part
            if len(keys) != self._heads or keys.shape[-1] != self._latent:
                raise CaptureError(
                    f"the model caches keys of {len(keys)} heads, expected the latents of its "
                    "entries; run it with a newer transformers"
                )
            entries = self._keys.append(index, torch.cat([values, keys], dim=-1), room)
            return entries[..., -self._latent :], entries[..., : -self._latent]
        if self._exact is not None:
            self._exact.append(index, keys, room)
        return self._keys.append(index, keys, room), self._values.append(index, values, room)

    def note_queries(self, index: int, queries: Tensor) -> None:
        """Count new rows of a reader, and keep their queries [qhead, w, d]."""
        self.run[index] += queries.shape[1]
        if self.reads_queries:
            self._queries.append(index, queries, self.room)

    def expect(self, room: int, *, reads_queries: bool) -> None:
        """Make room for rows before the next event; without one that reads queries, free them."""
        self.room, self.reads_queries = room, reads_queries
        if not reads_queries:
            self.drop_queries(max(self.run), 0)

    def drop_queries(self, before: int, first: int) -> None:
        """Free the queries of rows before `before`, but those of the first rows of the text."""
        n = before - self._first_row
        if n > 0:
            if not self._first_row:
                self._first_queries = self._queries.rows[:, :, :first].clone()
            self._queries.drop(n)
            self._first_row = before

    def writable(self, which: int) -> Tensor:
        """The keys (0) or values (1) in the cache itself, [L, H, n, d]."""
        return self._rows(which)

    def evict(self, slots: Tensor, live: Tensor, evicted_at: Tensor) -> None:
        """Free the memory of all entries but those in slots [L, H, n]."""
        self._compact(slots, live)
        self._live, self._count = live, int(live.sum())
        self.padded = self._count < live.numel()

    def _compact(self, slots: Tensor, live: Tensor) -> None:
        """Keep the entries in slots [L, H, n], in that order; pads, where not live, become 0."""
        for table in {x for x in (self._keys, self._values, self._exact) if x is not None}:
            table.gather(slots, live)
        if self.rotated:
            self._keys.rows.copy_(self._to_slots(self._keys.rows, slots))

    def _to_slots(self, keys: Tensor, slots: Tensor) -> Tensor:
        """Return keys that stood in slots [L, H, n], rotated to their new ones."""
        to = torch.arange(slots.shape[-1], device=slots.device)
        return self.rope.rotate(self.rope.unrotate(computable(keys), slots), to)

    def mask(
        self,
        index: int,
        query: Tensor,
        given: Tensor | None,
        *,
        added: bool,
        reads: LiveReads | None = None,
    ) -> Tensor | None:
        """Return the entries that new rows see, of query [1, qhead, w, d]: [1, qhead or 1, w, n].

        True where a row sees an entry; with `added` 0 there and the least number elsewhere, to be
        added to logits. None where a single row sees everything. given: the model's own mask, which
        holds as long as no entry has left. reads: chooses what rows read of the entries.
        """
        start, layer, run = self.run[index] + self.dropped, self.readers[index], self.run[index]
        index = min(index, len(self.layers) - 1)
        rows, n = query.shape[2], self._keys.length(index)
        chooses = reads is not None and reads.chooses(layer, start + rows)
        if not self.padded and not chooses:
            if n == run + rows and not self.dropped:
                return given
            if rows == 1:
                return None
        visible = torch.ones(1, 1, rows, n, dtype=torch.bool, device=query.device).tril(n - rows)
        (keys, values, live), weights = self.entries(index), None
        if self.padded:
            visible = visible & live.repeat_interleave(self._group, dim=0).unsqueeze(1)
        if reads is not None and chooses:
            keys = keys if self._exact is None else self._exact.of_layer(index)
            values = values[..., -(self._latent or values.shape[-1]) :]
            q, keys, values = (computable(x) for x in (query[0], keys, values))
            read, weights = reads.entries(layer, start, q, keys, values, live)
            visible = visible & read
        return kernel_mask(visible, query, added=added, weights=weights)

    def entries(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [H, n, d] of a layer of the block, and which are no pads, [H, n]."""
        keys, live = self._keys.of_layer(index), self._live[index]
        live = torch.nn.functional.pad(live, (0, keys.shape[1] - live.shape[1]), value=True)
        return keys, self._values.of_layer(index), live

    @property
    def n_slots(self) -> int:
        """Slots of each head, pads included."""
        return self._keys.length(0)

    @property
    def live_bytes(self) -> int:
        """Bytes of the keys and values of live entries, without pads."""
        new = self.n_slots - self._live.shape[-1]
        return (self._count + new * len(self.layers) * self._heads) * self._entry_bytes


class LiveLayer(DynamicLayer):
    """A layer of transformers' cache, of which a block of layers holds the entries."""

    is_croppable = False

    def __init__(self, source: LiveSource, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.source, self.index = source, index

    @classmethod
    def of(cls, part: Any, source: LiveSource, index: int) -> LiveLayer:
        """Return a layer in the place of `part` of a cache, with its states if it has any."""
        layer = cls(source, index)
        if not hasattr(part, "conv_states"):
            return layer
        both: LiveLayer = object.__new__(type(cls.__name__, (cls, type(part)), {}))
        vars(both).update(vars(part) | vars(layer))
        return both

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Add entries [1, H, w, d] of new rows; returns all entries, with pads, [1, H, n, d]."""
        if self.source.room < 1:
            raise CaptureError(
                "rows are added to a cache that a policy evicts from outside of its Decoding or "
                "press, which counts and masks them; go on in its `with` block"
            )
        keys, values = self.source.extend(self.index, key_states[0], value_states[0])
        return keys[None], values[None]

    def get_seq_length(self) -> int:
        """Rows that went through the layer, evicted entries included: positions count on."""
        return self.source.run[self.index]
