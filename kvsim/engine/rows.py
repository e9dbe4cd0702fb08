"""An interval of 1 in blocks of rows: what `Block.event` does after every row, many times faster.

After the first event that acts, each row appends one entry per head and evicts one. The logits of a
block of rows against everything that can be live in it come from one matrix product; entries that
left remain as holes until the block ends, so keys are gathered once per block and never per row.
Layers with sinks go by `Block.event`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from kvsim.core.policy import Scores
from kvsim.core.view import Group, View, gather, reduce_group
from kvsim.engine.block import Block, check

#: Rows of a block. More means fewer gathers, and more holes to compute over.
ROWS = 32

# Below this, the sum of exp(logit - maximum of the block) over the live entries has lost precision,
# because the maximum belongs to an entry that is gone; the row then gets a maximum of its own.
_FAINT = 1e-6


def replay_rows(block: Block, events: Sequence[int]) -> None:
    """Fire `events`, which are consecutive rows, on the block."""
    left = list(events)
    while left and not block.event(left.pop(0)):
        pass  # until the first event that acts, every row is full attention
    while left:
        rows, left = left[:ROWS], left[ROWS:]
        _run(block, rows[0], rows[-1] + 1)


def _run(block: Block, start: int, stop: int) -> None:
    """Rows start..stop-1, each of which appends one entry and evicts one per head."""
    entries, policy = block.entries, block.policy
    held = entries.pos.shape[-1]
    entries.append(start, stop)
    view = RowView(block, start, stop)
    protection, prompt_len = policy.protection(view.setting.budget), view.setting.prompt_len
    last = entries.pos.shape[-1] - 1
    for row in range(start, stop):
        view.open(row, held + row - start)
        # the part of a View that per_row may use
        scores = Scores.of(policy.scorer.score(cast("View", view)))
        check(policy, scores.values, view.live, block.layers, row)
        entries.columns.update(scores.columns)
        free = view.live & ~protection.mask(entries.pos, row, prompt_len)
        # the lowest score leaves; of equal ones the highest position
        rank = scores.values.masked_fill(~free, torch.inf)
        slot = (last - rank.flip(-1).argmin(-1)).unsqueeze(-1)
        view.close(slot)
        block.evicted_at.scatter_(-1, entries.pos.gather(-1, slot), row)
    entries.compress(view.live)
    block.advance(stop)


class RowView:
    """The View of one row within a block of rows: every slot of the block, the live ones marked.

    Slots are in position order; those of later rows and of entries that left are not live. Offers
    what a scorer with `per_row` may ask for.
    """

    is_prompt = False

    def __init__(self, block: Block, start: int, stop: int) -> None:
        self._block, self._start, self._stop = block, start, stop
        # exp(logit - maximum) of every row of the block, [L, H, w, G, n], whatever is live
        self._weights: Tensor | None = None
        self._row_weights = torch.empty(0)
        self._attention: Tensor | None = None
        self.setting, self.layers, self.pos = block.setting, block.layers, block.entries.pos
        self.budget = torch.full_like(block.layers, block.setting.budget).unsqueeze(-1)
        self.live = self.pos < start
        # the same as numbers: bool times float takes a slow path
        self._open = self.live.to(block.source.keys.dtype)
        self.row = start

    def open(self, row: int, slot: int) -> None:
        """Go to `row`, whose own entry is at `slot`."""
        self.row, self._attention = row, None
        self.live[..., slot] = True
        self._open[..., slot] = 1.0

    def close(self, slot: Tensor) -> None:
        """The entries at slot [L, H, 1] are gone."""
        self.live.scatter_(-1, slot, value=False)
        self._open.scatter_(-1, slot, 0.0)
        if (
            self._block.poison is not None and self._weights is not None
        ):  # whoever still counts them will show
            later = self._weights[:, :, self.row + 1 - self._start :]
            later.scatter_(-1, slot[:, :, None, None].expand(*later.shape[:-1], 1), 1e30)

    def __getitem__(self, column: str) -> Tensor:
        return self._block.entries.columns[column]

    def attn(self, last: int, group: Group | None = None) -> Tensor:
        """Attention of the current row (`last` is 1); [L, H, G, 1, n], or [L, H, 1, n] by group."""
        if last != 1:
            raise ValueError(f"a scorer with per_row sees one row, this one asks for {last}")
        if self._attention is None:
            self._attention = self._softmax()
        return reduce_group(self._attention.unsqueeze(3), group)

    def received(self) -> Tensor:
        """Attention received from the current row, summed over the group; [L, H, n]."""
        return self.attn(1, group="sum")[..., 0, :]

    def _softmax(self) -> Tensor:
        """Softmax over the live entries, [L, H, G, n]."""
        if self._weights is None:
            z = self._logits(self._start, self._stop)
            self._weights = z.sub_(z.amax(-1, keepdim=True)).exp_()
            self._row_weights = torch.empty_like(self._weights[:, :, 0])
        weight = self._weights[:, :, self.row - self._start]
        # one buffer for all rows: fresh pages would cost more than the product
        weight = torch.mul(weight, self._open.unsqueeze(2), out=self._row_weights)
        total = weight.sum(-1, keepdim=True)
        if bool((total < _FAINT).any()):
            z = self._logits(self.row, self.row + 1)[:, :, 0]
            return z.masked_fill_(~self.live.unsqueeze(2), -torch.inf).softmax(-1)
        return weight.mul_(total.reciprocal_())

    def _logits(self, start: int, stop: int) -> Tensor:
        """Logits of rows start..stop-1 against every slot; [L, H, w, G, n]."""
        source = self._block.source
        q = source.queries(start, stop).transpose(2, 3)  # [L, H, w, G, d]
        z = q.flatten(2, 3) @ gather(source.keys, self._block.entries).transpose(-1, -2)
        z = source.formula.capped(z.mul_(source.formula.scale))
        out: Tensor = z.unflatten(2, q.shape[2:4])
        return out
