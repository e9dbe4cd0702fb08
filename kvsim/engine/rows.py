"""An interval of 1 in blocks of rows: equal to `Block.event` after every row, much faster.

After the first event that acts, each row appends one entry per head and evicts one. One matrix
product computes the logits of a block of rows against all entries that can be live in it. Evicted
entries remain as holes until the block ends, so keys are gathered once per block. Layers with sinks
use `Block.event`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from kvsim.core.attention import Reduction, reduce_group
from kvsim.core.entries import gather
from kvsim.core.lazy import Tensor, torch
from kvsim.core.policy import Even, Scores, Uniform
from kvsim.core.view import View
from kvsim.engine.block import Block, check

#: Rows of a block. More means fewer gathers, and more holes to compute over.
ROWS = 32

# Below this, the sum of exp(logit - maximum of the block) over the live entries loses precision,
# because the maximum belongs to an evicted entry; the row then uses its own maximum.
_FAINT = 1e-6


def goes_by_rows(block: Block) -> bool:
    """Whether its policy evicts one entry per head after each row, by only the last row."""
    policy = block.policy
    return (
        policy.scorer.per_row
        and isinstance(policy.allocator, Uniform)
        and isinstance(policy.layer_budgets, Even)
        and policy.storage is None
        and policy.so_far is None
        and not block.source.formula.sinks
    )


def replay_rows(block: Block, events: Sequence[int]) -> None:
    """Fire `events` on the block: consecutive rows from the last of the prompt on."""
    rest = list(events)
    while rest:
        row = rest.pop(0)
        # until the first event that acts, every row is full attention
        steady = rest[:1] == [row + 1] and row >= block.setting.prompt_len - 1
        if block.event(row) and steady:
            break
    while rest:
        rows, rest = rest[:ROWS], rest[ROWS:]
        _run(block, rows[0], rows[-1] + 1)


def _run(block: Block, start: int, stop: int) -> None:
    """Run rows start..stop-1, each of which appends and evicts one entry per head."""
    entries, policy = block.entries, block.policy
    count = entries.pos.shape[-1]
    entries.append(start, stop)
    view = RowView(block, start, stop)
    protection, last = policy.protection(view.setting.budget), entries.pos.shape[-1] - 1
    pos, recent = entries.pos, protection.recent
    stays = pos < protection.first(view.setting.prompt_len)  # and pads
    slots = []
    for row in range(start, stop):
        view.open(row, count + row - start)
        scores = Scores.of(policy.scorer.score(view))
        check(policy, view, scores)
        entries.columns.update(scores.columns)
        fixed = ~view.live | stays
        if recent:
            fixed |= pos > row - recent
        # `select` for one entry: the lowest score, ties to the highest position
        rank = scores.values.masked_fill(fixed, torch.inf)
        slot = rank.flip(-1).argmin(-1, keepdim=True).neg_().add_(last)
        view.close(slot)
        slots.append(slot)
    rows = torch.arange(start, stop, dtype=torch.int32, device=pos.device)
    gone = pos.gather(-1, torch.cat(slots, -1))  # [L, H, w]
    block.evicted_at.scatter_(-1, gone, rows.expand_as(gone))
    entries.compress(view.live)
    block.advance(stop)


class RowView(View):
    """The View of one row within a block of rows: every slot of the block, the live ones marked.

    Slots are in position order. Slots of later rows and evicted entries are not live; unlike pads
    they have a position, and occur anywhere.
    """

    def __init__(self, block: Block, start: int, stop: int) -> None:
        how: Any = {"row": start, "since": block.since.clone(), "layers": block.layers}
        super().__init__(block.source, block.entries, block.setting, **how)
        self._block, self._start, self._stop, self._padded = block, start, stop, True
        # exp(logit - maximum) of every row of the block, [L, H, w, G, n], over all slots
        self._weights: Tensor | None = None
        self._row_weights = torch.empty(0)
        self._attention: Tensor | None = None
        self.live = block.entries.pos < start
        # the same as numbers: bool times float takes a slow path
        self._open = self.live.to(block.source.keys.dtype)

    @property
    def count(self) -> Tensor:
        """Live entries of each head; int [L, H]."""
        return self.live.sum(-1)

    @property
    def slot(self) -> Tensor:
        """Index of each entry among the live ones of its head, negative for others; [L, H, n]."""
        return (self.live.cumsum(-1) - 1).masked_fill_(~self.live, -1)

    def open(self, row: int, slot: int) -> None:
        """Go to `row`, whose own entry is at `slot`."""
        self.row, self._attention = row, None
        self.since.fill_(row - 1)  # every layer acted after the previous row
        self._windows.clear()
        self._gathered.clear()
        self.live.select(-1, slot).fill_(value=True)
        self._open.select(-1, slot).fill_(1.0)

    def close(self, slot: Tensor) -> None:
        """Mark the entries at slot [L, H, 1] as evicted."""
        self.live.scatter_(-1, slot, value=False)
        self._open.scatter_(-1, slot, 0.0)

    def _gather(self, name: str, stored: Tensor) -> Tensor:
        if name not in self._gathered:
            at = gather(stored, self._block.entries)
            self._gathered[name] = at.masked_fill(~self.live.unsqueeze(-1), 0.0)
        return self._gathered[name]

    def attn(
        self, rows: int | range, group: Reduction | None = None, *, log: bool = False
    ) -> Tensor:
        """`View.attn`; for only the current row, from the product of the whole block."""
        if rows != 1 or log:
            return super().attn(rows, group, log=log)
        if self._attention is None:
            self._attention = self._softmax()
        return reduce_group(self._attention.unsqueeze(3), group)

    def _softmax(self) -> Tensor:
        if self._weights is None:
            z = self._block_logits(self._start, self._stop)
            self._weights = z.sub_(z.amax(-1, keepdim=True)).exp_()
            self._row_weights = torch.empty_like(self._weights[:, :, 0])
        weight = self._weights[:, :, self.row - self._start]
        # one buffer for all rows: allocation would cost more than the product
        weight = torch.mul(weight, self._open.unsqueeze(2), out=self._row_weights)
        total = weight.sum(-1, keepdim=True)
        if float(total.min()) < _FAINT:
            z = self._block_logits(self.row, self.row + 1)[:, :, 0]
            return z.masked_fill_(~self.live.unsqueeze(2), -torch.inf).softmax(-1)
        return weight.mul_(total.reciprocal_())

    @cached_property
    def _slot_keys(self) -> Tensor:
        return gather(self._block.source.keys, self._block.entries)

    def _block_logits(self, start: int, stop: int) -> Tensor:
        """Logits of rows start..stop-1 against every slot; [L, H, w, G, n]."""
        source = self._block.source
        q = source.queries(start, stop).transpose(2, 3)  # [L, H, w, G, d]
        z = q.flatten(2, 3) @ self._slot_keys.transpose(-1, -2)
        z = source.formula.capped(z.mul_(source.formula.scale))
        out: Tensor = z.unflatten(2, q.shape[2:4])
        return out
