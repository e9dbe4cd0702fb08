"""The cache of a running model in blocks: what a policy keeps is compacted, the rest freed.

A block table serves all heads of a layer, or each head has its own. In the first, as in engines,
heads that hold fewer entries are padded; in the second nothing is, however ragged the heads are.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from kvsim.core.trace import Trace
from kvsim.errors import PolicyError
from kvsim.runner.blocks import Pool, Sequences, paged_attention
from kvsim.runner.cache import LiveSource


@dataclass
class Paging:
    """How a running model's cache is laid out in blocks, and the pool that its sequences share.

    size: entries of a block. tables: one block table for all heads of a layer, or for each head.
    Prefixes of sequences that begin alike are stored once (`Decoding.begin`). padded_bytes: slots
    without an entry, the most of the layers of one sequence that evict together.
    """

    size: int = 16
    tables: Literal["layer", "head"] = "layer"
    pool: Pool | None = None
    prefixes: dict[tuple[tuple[int, ...], int], Sequences] = field(default_factory=dict)
    padded_bytes: int = 0

    def sequences(self, layers: int, heads: int, dim: int, like: Tensor) -> Sequences:
        """Return empty sequences of layers, in a pool of this layout."""
        together = heads if self.tables == "layer" else 1
        if self.pool is None:
            self.pool = Pool(self.size, together, like, dim)
        return Sequences(self.pool, layers * heads // together)

    @property
    def notes(self) -> list[str]:
        """Counts of blocks as a sentence."""
        if self.pool is None:
            return []
        use, mib = self.pool.use, 2**20
        text = (
            f"cache in blocks of {self.size} entries, a table per {self.tables}: at most "
            f"{use.peak_blocks:,} blocks ({use.peak_blocks * self.pool.block_bytes / mib:.1f} MiB) "
            f"at once, {use.freed_blocks:,} freed, {use.shared_blocks:,} shared, "
            f"{use.copies_on_write:,} copied on write; at most {self.padded_bytes / mib:.2f} MiB "
            "of a sequence without an entry after an event"
        )
        return [text]

    def release(self) -> None:
        """Free the blocks of prefixes."""
        for sequences in self.prefixes.values():
            sequences.release()
        self.prefixes.clear()


class PagedSource(LiveSource):
    """The entries of a block of layers in the blocks of a pool, and the source of its View.

    Between events, attention reads them through the block tables; only a View gathers them.
    """

    def __init__(
        self, sketch: Trace, layers: Sequence[int], like: Tensor, paging: Paging, **more: Any
    ) -> None:
        super().__init__(sketch, layers, like, **more)
        self._dim, problem = sketch.dim, ""
        if sketch.value_dim != sketch.dim:
            problem = f"keys of {sketch.dim} and values of {sketch.value_dim} dimensions"
        if len(self.readers) > len(layers):
            problem = f"entries that layers {list(self.readers[1:])} read of layer {layers[0]}"
        if problem:
            raise PolicyError(f"a cache in blocks has no place for {problem}; leave the paging out")
        self.paging = paging
        heads = self._heads
        self._tables = heads if paging.tables == "head" else 1  # of a layer
        self._sequences = paging.sequences(len(layers), heads, self._dim, like)
        self._slots = [0] * len(layers)  # of a layer, as the View counts them
        self._pads = torch.zeros(len(layers), heads, dtype=torch.long, device=like.device)
        weakref.finalize(self, self._sequences.release)

    def _of(self, index: int) -> list[tuple[int, slice]]:
        """The sequences of a layer of the block, and their heads."""
        per = self._heads // self._tables
        first = index * self._tables
        return [(first + i, slice(i * per, i * per + per)) for i in range(self._tables)]

    def _rows(self, which: int) -> Tensor:
        """The keys (0) or values (1) in the slots of the View, [L, H, n, d]: pads on the left."""
        like, n = self._sequences.pool.keys, self.n_slots
        dense = like.new_zeros(len(self.layers), self._heads, n, self._dim)
        for index in range(len(self.layers)):
            for at, heads in self._of(index):
                rows = self._sequences.read(at)[which]
                dense[index, heads, n - len(rows) :] = rows.transpose(0, 1)
        return dense

    def extend(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add the entries [H, w, d] of new rows to a layer of the block; returns these alone."""
        for at, heads in self._of(index):
            new = (x[heads].transpose(0, 1) for x in (keys, values))
            self._sequences.append(at, *new)
        self._slots[index] += keys.shape[1]
        return keys, values

    def begin(self, index: int, tokens: tuple[int, ...], keys: Tensor, values: Tensor) -> None:
        """Begin a layer with the entries of a prefix, whose blocks other sequences hold too."""
        stored = self.paging.prefixes.get((tokens, self.layers[index]))
        here = [at for at, _ in self._of(index)]
        if stored is None:
            self.extend(index, keys, values)
            stored = Sequences(self._sequences.pool, self._tables)
            for i, at in enumerate(here):
                stored.share(i, self._sequences, at)
            self.paging.prefixes[tokens, self.layers[index]] = stored
            return
        for i, at in enumerate(here):
            self._sequences.share(at, stored, i)
        self._slots[index] = len(tokens)

    def attend(self, index: int, query: Tensor) -> Tensor:
        """Attention of new rows [1, qhead, w, d] over the blocks of a layer; [1, w, qhead, d]."""
        q = query[0].unflatten(0, (self._heads, self._group))
        sinks = self.formula.sink(query, self._heads) if self.formula.sinks else None
        parts = [
            paged_attention(
                q[heads],
                self._sequences.pool,
                self._sequences.tables[at],
                self._sequences.lengths[at],
                self.formula,
                self._pads[index, heads] if self._padded else None,
                None if sinks is None else sinks[heads],
            )
            for at, heads in self._of(index)
        ]
        return torch.cat(parts).flatten(0, 1).transpose(0, 1)[None]

    def _compact(self, slots: Tensor, live: Tensor) -> None:
        """Keep the entries in slots [L, H, n], in that order; free the blocks of the others."""
        counts, before = live.sum(-1), self.n_slots
        empty = 0
        for index in range(len(self.layers)):
            for at, heads in self._of(index):
                n = int(counts[index, heads].max())
                first = before - self._sequences.lengths[at]
                kept = (slots[index, heads] - first).masked_fill(~live[index, heads], -1)
                self._sequences.compact(at, kept[:, kept.shape[-1] - n :])
                self._pads[index, heads] = n - counts[index, heads]
                blocks = len(self._sequences.tables[at]) * self.paging.size
                empty += blocks * (heads.stop - heads.start) - int(counts[index, heads].sum())
        self.paging.padded_bytes = max(self.paging.padded_bytes, empty * self._entry_bytes)
        self._slots = [slots.shape[-1]] * len(self.layers)
        if self.rotated:
            ragged = bool(self._pads.any()) or len({*self._sequences.lengths}) > 1
            keys = self._to_slots(self._rows(0), slots, ragged=ragged)
            for index in range(len(self.layers)):
                for at, heads in self._of(index):
                    self._sequences.replace(at, keys[index, heads].transpose(0, 1))

    @property
    def n_slots(self) -> int:
        """Slots of each head as the View counts them, pads included."""
        return self._slots[0]
