"""A cache in blocks, as serving engines lay it out: a pool, block tables, reference counts.

The layout of PagedAttention (Kwon et al., SOSP 2023, arXiv 2309.06180). Entry t of a sequence is in
slot `table[t // size] * size + t % size`. A block that several sequences hold is counted, and is
copied before one of them writes to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvsim.core.attention import Formula, with_sinks

#: Slots of a tile: blocks whose entries `paged_attention` reads at once.
_TILE = 512


class Pool:
    """Blocks of `size` slots for keys and values of `heads` heads: [block, size, heads, dim].

    It grows as needed. counts: how many sequences hold each block. held, peak: blocks in use, now
    and at most; freed, shared, copied: how often blocks were.
    """

    def __init__(self, size: int, heads: int, like: Tensor, dim: int) -> None:
        self.size, self.heads = size, heads
        self.keys, self.values = (like.new_zeros(0, size, heads, dim) for _ in range(2))
        self.counts: list[int] = []
        self.held = self.peak = self.freed = self.shared = self.copied = 0
        self._free: list[int] = []

    def allocate(self, n: int) -> list[int]:
        """Return n free blocks, each counted once."""
        if n > len(self._free):
            more = max(n - len(self._free), len(self.counts) // 4, 16)
            self._free += range(len(self.counts) + more - 1, len(self.counts) - 1, -1)
            self.counts += [0] * more
            self.keys, self.values = (
                torch.cat([x, x.new_zeros(more, *x.shape[1:])]) for x in (self.keys, self.values)
            )
        blocks = [self._free.pop() for _ in range(n)]
        for block in blocks:
            self.counts[block] = 1
        self.held += n
        self.peak = max(self.peak, self.held)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Count blocks, which are in use, once more."""
        for block in blocks:
            self.counts[block] += 1
        self.shared += len(blocks)

    def free(self, blocks: Sequence[int]) -> None:
        """Count blocks, which are in use, once less; those at 0 can be allocated again."""
        for block in blocks:
            self.counts[block] -= 1
            if not self.counts[block]:
                self._free.append(block)
                self.held -= 1
                self.freed += 1

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of keys and values."""
        return 2 * self.size * self.heads * self.keys.shape[-1] * self.keys.itemsize


class Sequences:
    """Sequences of entries in a pool, each with a block table and a length."""

    def __init__(self, pool: Pool, n: int) -> None:
        self.pool = pool
        self.tables: list[list[int]] = [[] for _ in range(n)]
        self.lengths = [0] * n

    def slots(self, at: int) -> Tensor:
        """The slot of each entry of a sequence, int [n]."""
        size, device = self.pool.size, self.pool.keys.device
        first = torch.tensor(self.tables[at], device=device, dtype=torch.long) * size
        return (first[:, None] + torch.arange(size, device=device)).flatten()[: self.lengths[at]]

    def append(self, at: int, keys: Tensor, values: Tensor) -> None:
        """Add entries [n, heads, dim] to a sequence; a shared last block is copied first."""
        start, n, table = self.lengths[at], len(keys), self.tables[at]
        if start % self.pool.size:
            self._unshare(at, len(table) - 1)
        table += self.pool.allocate(-(-(start + n) // self.pool.size) - len(table))
        self.lengths[at] = start + n
        self._write(self.slots(at)[start:], keys, values)

    def _unshare(self, at: int, index: int) -> None:
        pool, block = self.pool, self.tables[at][index]
        if pool.counts[block] > 1:
            (new,) = pool.allocate(1)
            pool.keys[new], pool.values[new] = pool.keys[block], pool.values[block]
            pool.free([block])
            self.tables[at][index] = new
            pool.copied += 1

    def _write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        self.pool.keys.flatten(0, 1)[slots] = keys
        self.pool.values.flatten(0, 1)[slots] = values

    def read(self, at: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a sequence, [n, heads, dim]."""
        slots = self.slots(at)
        return self.pool.keys.flatten(0, 1)[slots], self.pool.values.flatten(0, 1)[slots]

    def replace(self, at: int, keys: Tensor) -> None:
        """Put other keys [n, heads, dim] in the place of all."""
        for index in range(len(self.tables[at])):
            self._unshare(at, index)
        self.pool.keys.flatten(0, 1)[self.slots(at)] = keys

    def compact(self, at: int, index: Tensor) -> None:
        """Keep entries of a sequence, for each head those at index [heads, n], ascending.

        -1 stands for a pad, which becomes 0. Heads may keep different entries: their rows of a
        block move by themselves. Leading blocks of which nothing leaves stay where they are, and
        shared; the others are copied into new blocks and freed.
        """
        pool, n, table = self.pool, index.shape[1], self.tables[at]
        size = pool.size
        moved = (index != torch.arange(n, device=index.device)).any(0)
        first = int(moved.byte().argmax()) if bool(moved.any()) else n
        whole = n == self.lengths[at] and first == n
        same = len(table) if whole else first // size
        source = self.slots(at)
        rows = index[:, same * size :].clamp(min=0).T  # [n', heads]
        head = torch.arange(pool.heads, device=index.device)
        keys, values = (x.flatten(0, 1)[source[rows], head] for x in (pool.keys, pool.values))
        pads = (index[:, same * size :] < 0).T.unsqueeze(-1)
        new = pool.allocate(max(0, -(-n // size) - same))
        old, self.tables[at], self.lengths[at] = table[same:], table[:same] + new, n
        self._write(
            self.slots(at)[same * size :], keys.masked_fill(pads, 0), values.masked_fill(pads, 0)
        )
        pool.free(old)

    def share(self, at: int, other: Sequences, which: int) -> None:
        """Begin an empty sequence with all entries of another one; no entry is copied."""
        self.pool.share(other.tables[which])
        self.tables[at], self.lengths[at] = list(other.tables[which]), other.lengths[which]

    def release(self) -> None:
        """Free all blocks."""
        for table in self.tables:
            self.pool.free(table)
        self.tables, self.lengths = [[] for _ in self.tables], [0] * len(self.tables)


def paged_attention(
    q: Tensor,
    pool: Pool,
    table: Sequence[int],
    length: int,
    formula: Formula,
    pads: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of the last w of `length` entries, q [heads, G, w, d]; [heads, G, w, d].

    Reads keys and values through the block table, a tile of blocks at a time; parts are merged by
    their log-sum-exp. formula: scale and softcap; a sliding window is not applied. pads: how many
    leading slots of each head are padding, int [heads]. sinks: the logits of these heads' sinks,
    [heads, G] (`Formula.sink`).
    """
    heads, _, w, _ = q.shape
    size, device = pool.size, q.device
    blocks = torch.tensor(table, device=device, dtype=torch.long)
    last = torch.arange(length - w, length, device=device)
    out = torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32))
    total = out.new_full(out.shape[:-1], -torch.inf)
    per = max(1, _TILE // size)
    for start in range(0, len(blocks), per):
        tile = blocks[start : start + per]
        n = min(len(tile) * size, length - start * size)
        k, v = (x[tile].flatten(0, 1)[:n].to(out.dtype) for x in (pool.keys, pool.values))
        z = formula.capped(torch.einsum("hgwd,nhd->hgwn", q.to(out.dtype), k) * formula.scale)
        at = torch.arange(start * size, start * size + n, device=device)
        hidden = (at > last[:, None]).expand(heads, 1, w, n)
        if pads is not None:
            hidden = hidden | (at < pads.view(heads, 1, 1, 1))
        z = z.masked_fill(hidden, -torch.inf)
        lse = z.logsumexp(-1)
        new = total.logaddexp(lse)
        shift = new.masked_fill(new == -torch.inf, 0.0).unsqueeze(-1)
        weights = (z - shift).exp()
        out = out * (total.unsqueeze(-1) - shift).exp() + torch.einsum("hgwn,nhd->hgwd", weights, v)
        total = new
    if sinks is not None:
        out, _ = with_sinks(out, total, sinks.to(out.dtype))
    return out.to(q.dtype)
