"""The cache of a running model in blocks: kept entries are compacted, other blocks freed.

A block table serves all heads of a layer, as in engines; heads that hold fewer entries are padded.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvsim.core.trace import Trace
from kvsim.errors import PolicyError
from kvsim.runner.blocks import Pool, Sequences, paged_attention
from kvsim.runner.cache import LiveSource


@dataclass
class Paging:
    """Blocks of `size` entries, and the pool of them that sequences of a running model share.

    Prefixes of sequences that begin alike are stored once (`Decoding.begin`). padded_bytes: slots
    without an entry, the most of the layers of one sequence that evict together.
    """

    size: int = 16
    pool: Pool | None = None
    prefixes: dict[tuple[tuple[int, ...], int], Sequences] = field(default_factory=dict)
    padded_bytes: int = 0

    @property
    def notes(self) -> list[str]:
        """Counts of blocks as a sentence."""
        if self.pool is None:
            return []
        pool, mib = self.pool, 2**20
        text = (
            f"cache in blocks of {self.size} entries: at most {pool.peak:,} blocks "
            f"({pool.peak * pool.block_bytes / mib:.1f} MiB) at once, {pool.freed:,} freed, "
            f"{pool.shared:,} shared, {pool.copied:,} copied on write; at most "
            f"{self.padded_bytes / mib:.2f} MiB of empty slots in a sequence after an event"
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
        problem = ""
        if sketch.value_dim != sketch.dim:
            problem = f"keys of {sketch.dim} and values of {sketch.value_dim} dimensions"
        if len(self.readers) > len(layers):
            problem = f"entries that layers {list(self.readers[1:])} read of layer {layers[0]}"
        if problem:
            raise PolicyError(f"a cache in blocks has no place for {problem}; leave the paging out")
        self.paging = paging
        paging.pool = paging.pool or Pool(paging.size, self._heads, like, sketch.dim)
        self._sequences = Sequences(paging.pool, len(layers))  # one of each layer
        self._pads = torch.zeros(len(layers), self._heads, dtype=torch.long, device=like.device)
        weakref.finalize(self, self._sequences.release)

    def _rows(self, which: int) -> Tensor:
        """The keys (0) or values (1) in the slots of the View, [L, H, n, d]: pads on the left."""
        each = [self._sequences.read(index)[which] for index in range(len(self.layers))]
        pads = ((0, 0, 0, 0, self.n_slots - len(rows), 0) for rows in each)
        dense = map(torch.nn.functional.pad, each, pads)
        return torch.stack([*dense]).transpose(1, 2)

    def extend(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add the entries [H, w, d] of new rows to a layer of the block; returns these alone."""
        self._sequences.append(index, keys.transpose(0, 1), values.transpose(0, 1))
        return keys, values

    def begin(self, index: int, tokens: tuple[int, ...], keys: Tensor, values: Tensor) -> None:
        """Begin a layer with the entries of a prefix, whose blocks other sequences hold too."""
        stored = self.paging.prefixes.get((tokens, self.layers[index]))
        if stored is None:
            self.extend(index, keys, values)
            stored = self.paging.prefixes[tokens, self.layers[index]] = Sequences(
                self._sequences.pool, 1
            )
            stored.share(0, self._sequences, index)
        else:
            self._sequences.share(index, stored, 0)

    def attend(self, index: int, query: Tensor) -> Tensor:
        """Attention of new rows [1, qhead, w, d] over the blocks of a layer; [1, w, qhead, d]."""
        out = paged_attention(
            query[0].unflatten(0, (self._heads, self._group)),
            self._sequences.pool,
            self._sequences.tables[index],
            self._sequences.lengths[index],
            self.formula,
            self._pads[index] if self.padded else None,
            self.formula.sink(query, self._heads) if self.formula.sinks else None,
        )
        return out.flatten(0, 1).transpose(0, 1)[None]

    def _compact(self, slots: Tensor, live: Tensor) -> None:
        counts, before, empty = live.sum(-1), self.n_slots, 0
        for index, of_heads in enumerate(counts):
            n = int(of_heads.max())
            kept = slots[index] - (before - self._sequences.lengths[index])
            kept = kept.masked_fill(~live[index], -1)
            self._sequences.compact(index, kept[:, kept.shape[-1] - n :])
            self._pads[index] = n - of_heads
            blocks = len(self._sequences.tables[index]) * self.paging.size
            empty += blocks * self._heads - int(of_heads.sum())
        self.paging.padded_bytes = max(self.paging.padded_bytes, empty * self._entry_bytes)
        if self.rotated and bool(live.all()):
            for index, of_layer in enumerate(self._to_slots(self._rows(0), slots)):
                self._sequences.replace(index, of_layer.transpose(0, 1))

    @property
    def n_slots(self) -> int:
        """Slots of each head as the View counts them, pads included."""
        return max(self._sequences.lengths)
