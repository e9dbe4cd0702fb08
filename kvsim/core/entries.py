"""The cache of a block of layers as a table of entries.

Shape letters: L layers of the block, H KV heads, n entries (left-padded where heads hold different
numbers), d head dimension, T positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy

from kvsim.core.lazy import Tensor, torch


class Entries:
    """The cache as a table of entries in position order: `pos` and named columns.

    pos [L, H, n] absolute positions, -1 on pads. live [L, H, n] is False on pads, which are on the
    left; padded: whether there are any. count [L, H]: live entries of each head. stop: the position
    after the last one. Columns [L, H, n]: a policy's values for each entry. compacted: the source
    holds only the live entries, in the slots of this table.
    """

    def __init__(
        self,
        layers: int,
        heads: int,
        columns: Mapping[str, float],
        like: Tensor,
        *,
        compacted: bool = False,
    ) -> None:
        self._initial, self._compacted = dict(columns), compacted
        self.pos = torch.empty(layers, heads, 0, dtype=torch.long, device=like.device)
        self.live = self.pos >= 0
        self.count = self.pos.new_zeros(layers, heads)
        self.padded, self.stop = False, 0
        self.columns = {name: like.new_empty(layers, heads, 0) for name in columns}
        self.aligned = True  # slot i is row i of the source's arrays until the first eviction

    def append(self, start: int, stop: int) -> None:
        """Add the entries of positions start..stop-1 to every head."""
        shape = (*self.pos.shape[:2], stop - start)
        new = torch.arange(start, stop, device=self.pos.device).expand(shape)
        self.pos = torch.cat([self.pos, new], dim=-1)
        self.live = self.pos >= 0
        self.count = self.count + (stop - start)
        self.stop = stop
        for name, value in self._initial.items():
            column = self.columns[name]
            self.columns[name] = torch.cat([column, column.new_full(shape, value)], dim=-1)

    def of_layers(self, layers: slice) -> Entries:
        """The table of some layers, to read."""
        part = copy(self)
        part.pos, part.live, part.count = (x[layers] for x in (self.pos, self.live, self.count))
        part.columns = {name: column[layers] for name, column in self.columns.items()}
        return part

    def compress(self, keep: Tensor) -> Tensor:
        """Keep the entries marked in keep [L, H, n]; pads go to the left again.

        Returns the previous slot of each new slot, int [L, H, n']; undefined for pads.
        """
        self.count = keep.sum(-1)
        fewest, most = (int(count) for count in self.count.aminmax())
        self.padded = fewest < most
        if self.padded:  # a stable sort of the mask moves the kept entries to the right, in order
            slot = keep.byte().sort(dim=-1, stable=True).indices[..., keep.shape[-1] - most :]
            self.pos = self.pos.gather(-1, slot).masked_fill_(~keep.gather(-1, slot), -1)
        else:
            slot = keep.nonzero()[:, 2].view(*keep.shape[:2], most)
            self.pos = self.pos.gather(-1, slot)
        self.live = self.pos >= 0
        self.columns = {name: c.gather(-1, slot) for name, c in self.columns.items()}
        self.aligned = self._compacted
        return slot

    def places(self, total: int) -> Tensor:
        """Indices of entries in a flattened array [L, H, total], int [L, H, n].

        Pads point to the first position of the head.
        """
        pos = self.pos.clamp(min=0) if self.padded else self.pos
        layers, heads, _ = pos.shape
        head = torch.arange(layers * heads, device=pos.device).view(layers, heads, 1)
        return head * total + pos

    @property
    def complete(self) -> bool:
        """Whether nothing was evicted."""
        return self.aligned and not self._compacted


def gather(stored: Tensor, entries: Entries) -> Tensor:
    """Gather rows of stored [L, H, T, d] at the entries' positions, 0 on pads; [L, H, n, d]."""
    layers, heads, total, dim = stored.shape
    n = entries.pos.shape[-1]
    if entries.aligned:
        return stored[:, :, :n]
    # one flat index: an order of magnitude faster than gather with an expanded one
    index = entries.places(total).flatten()
    out = stored.reshape(-1, dim).index_select(0, index).view(layers, heads, n, dim)
    return out.masked_fill_(~entries.live.unsqueeze(-1), 0.0) if entries.padded else out
