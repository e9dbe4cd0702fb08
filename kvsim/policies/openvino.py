"""OpenVINO GenAI: evicts whole blocks by attention that each step adds, max-pooled.

The cache eviction of OpenVINO GenAI (openvinotoolkit/openvino.genai@da1db86, `cache_eviction.cpp`
and `kvcrush.cpp`, Apache-2.0), an engine with paged attention; no paper defines it. One set of
blocks of `page` entries serves all heads of a layer. A step is a forward: the first one is the
prompt, of which the last `window` rows count (0: all of them); each row of the response is one.
With the attention a_r(i) from row r, summed over all query heads,

    s_j = sum over steps of max_(j <= i < j + pool_kernel) sum_(r in the step) a_r(i)

`norm_sum`, the engine's default, divides s_j by the number of counted rows that saw entry j, and
`sum` does not. A block scores the sum over its entries. The first `sink` entries stay (`start_size`
of the engine), and the last `recent` ones (`recent_size`) with the block that is not full. Of the
blocks between them the lowest leave as soon as a whole block exceeds the budget
(`max_cache_size`); of equal ones the older. The first event follows the first row of the response.

KVCrush (`crush` blocks) lets some blocks that would leave stay, beyond the budget. Each entry
between the two ends has a bit, which is set for the half of them with the largest s_j. An anchor
has one bit for each place in a block: the majority over these blocks (`mean`), or `zeros`, `ones`,
`alternating`. Blocks that leave are sorted by their Hamming distance to the anchor, and of those in
places 0, n // crush, 2 (n // crush) and so on `crush` stay.

So a head holds up to page - 1 entries and `crush` blocks more than the budget. Deviations: the
engine refuses sizes that are not whole blocks, which here are rounded up (`sink`, `recent`) or down
(the budget). Of entries with equal s_j the older one gets the bit, and of blocks at equal distance
the older one is first; the engine leaves this to the C++ library, for blocks if more than 16 leave.
Its default anchor, a random one, is left out, and so are Adaptive R-KV and `apply_rotation`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import AtLeast
from kvsim.core.pieces import Allocator, Plan, Protection, Scorer, Scores
from kvsim.core.view import View
from kvsim.core.weights import row_grid
from kvsim.policies.chunkkv import sums
from kvsim.policies.union import check_alike

Aggregation = Literal["norm_sum", "sum"]


class OpenVINO(Scorer):
    """Attention received, max-pooled over following entries in each step."""

    window: Annotated[int, AtLeast(0)] = 8
    pool_kernel: Annotated[int, AtLeast(1)] = 7
    aggregation: Aggregation = "norm_sum"

    columns: ClassVar[Mapping[str, float]] = {"sums": 0.0}

    def score(self, view: View) -> Scores:
        """s_j, over the number of rows that saw entry j; float64 [L, H, n]."""
        total, last = view["sums"], int(view.since.min())
        first, end = _first_counted(view, self.window), view.setting.prompt_len
        prompt = total.new_zeros(len(total), total.shape[-1])
        size = view.queries(1).shape[1:3].numel() * len(total) * total.element_size()
        for start, stop in row_grid(max(first, last + 1), end, size):
            prompt += self._received(view, range(start, stop)).sum(1)
        total = total + self._pooled(prompt).unsqueeze(1)
        for start, stop in row_grid(max(end, last + 1), view.row + 1, size):
            # one by one: neighbours of equal attention have equal sums
            for step in self._pooled(self._received(view, range(start, stop))).unbind(1):
                total = total + step.unsqueeze(1)
        score = total.double()
        if self.aggregation == "norm_sum":
            score = score / _counted(view, self.window)
        return Scores(score, {"sums": total})

    def _received(self, view: View, rows: range) -> Tensor:
        """Attention from rows since the last event, summed over all query heads; [L, w, n]."""
        row = torch.arange(rows.start, rows.stop, device=view.pos.device)
        weights = view.attn(rows, group="sum").sum(1)
        return weights.masked_fill_((row <= view.since.unsqueeze(-1)).unsqueeze(-1), 0.0)

    def _pooled(self, x: Tensor) -> Tensor:
        """The largest of x [..., n] at each entry and the pool_kernel - 1 after it."""
        padded = torch.nn.functional.pad(x.flatten(0, -2), (0, self.pool_kernel - 1))
        pooled: Tensor = torch.nn.functional.max_pool1d(padded, self.pool_kernel, stride=1)
        return pooled.view(x.shape)


class Blocks(Allocator):
    """Whole blocks, of which those at both ends stay."""

    sink: Annotated[int, AtLeast(1)] = 32
    recent: Annotated[int, AtLeast(1)] = 128
    page: Annotated[int, AtLeast(1)] = 32
    crush: Annotated[int, AtLeast(0)] = 0
    anchor: Literal["mean", "zeros", "ones", "alternating"] = "mean"
    window: Annotated[int, AtLeast(0)] = 8
    aggregation: Aggregation = "norm_sum"

    effect = "near"

    def protection(self, budget: int) -> Protection:
        """Whole blocks at both ends."""
        return Protection(self._whole(self.sink) * self.page, self._whole(self.recent) * self.page)

    def _whole(self, entries: int) -> int:
        """The blocks that hold so many entries."""
        return -(-entries // self.page)

    def plan(self, view: View, scores: Tensor, protected: Tensor) -> Plan:
        """All entries but those of the blocks that leave, [L, H, n], and their number, [L, H]."""
        check_alike("openvino: heads", view.pos, view.pos[:, :1], "no allocator in front")
        live, always = view.live[:, 0], protected[:, 0]  # [L, n]
        block = (view.slot[:, 0] // self.page).clamp(min=0)
        number = int(block.max()) + 1
        index = torch.arange(number, device=block.device)
        start, end = self._whole(self.sink), view.count[:, :1] // self.page
        end = end - self._whole(self.recent)
        between = (index >= start) & (index < end)  # [L, blocks]
        room = view.budget // self.page - start - self._whole(self.recent)
        free = between & (sums(always & live, block, number) == 0)
        value = sums(scores[:, 0].double().masked_fill(~live, 0.0), block, number)
        order = value.masked_fill(~free, torch.inf).argsort(dim=-1, stable=True)
        most = (between.sum(-1, keepdim=True) - room).clamp(min=0)
        leaves = free & (order.argsort(-1) < most)
        if self.crush:
            value = scores[:, 0].double()
            if self.aggregation == "norm_sum":
                value = (value * _counted(view, self.window)[:, 0]).float()
            inside = live & between.gather(-1, block)
            place = view.slot[:, 0].clamp(min=0) % self.page
            leaves &= ~self._crushed(value, inside, block, place, leaves)
        stays = (live & ~leaves.gather(-1, block)).unsqueeze(1).expand_as(view.live)
        return Plan(stays.sum(-1), eligible=stays)

    def _crushed(
        self, value: Tensor, inside: Tensor, block: Tensor, place: Tensor, leaves: Tensor
    ) -> Tensor:
        """The blocks that stay although they are among the lowest, bool [L, blocks].

        value, inside, block, place [L, n]: s_j, whether the entry is between the ends, its block
        and its place there. leaves [L, blocks]: the lowest blocks.
        """
        order = value.masked_fill(~inside, -torch.inf).argsort(dim=-1, descending=True, stable=True)
        number = inside.sum(-1, keepdim=True)
        bits = inside & (order.argsort(-1) < number // 2)
        majority = 2 * sums(bits, place, self.page) > number // self.page
        anchor = {
            "mean": majority.gather(-1, place),
            "zeros": torch.zeros_like(bits),
            "ones": torch.ones_like(bits),
            "alternating": place % 2 == 1,
        }[self.anchor]
        distance = sums(inside & (bits != anchor), block, leaves.shape[-1])
        distance = distance.masked_fill(~leaves, self.page + 1)
        rank = distance.argsort(dim=-1, stable=True).argsort(-1)  # those that leave first
        step = leaves.sum(-1, keepdim=True) // self.crush
        return (rank < step * self.crush) & (rank % step.clamp(min=1) == 0)


def _first_counted(view: View, window: int) -> int:
    """The first row of the prompt that counts."""
    return max(0, view.setting.prompt_len - window) if window else 0


def _counted(view: View, window: int) -> Tensor:
    """Rows so far that counted and saw each entry, at least 1; int [L, H, n]."""
    return view.row + 1 - view.pos.clamp(min=_first_counted(view, window))
