"""LaCache: layers keep different tokens in a ladder pattern, and fewer of the old ones.

Shi et al., "LaCache: Ladder-Shaped KV Caching for Efficient Long-Context Modeling of Large Language
Models", ICML 2025, arXiv 2507.14204. Only positions decide, so no attention is needed. After the
first `sink` entries, chunks of B neighbours are compacted, the oldest first: layer l keeps A of the
B, at an offset that grows with depth. Together the layers thus hold every token of the chunk, each
in about `span` neighbouring layers, of which `overlap` also hold its successor:

    B = 1 + ceil((L - span) / (span - overlap)),  A = min(B, ceil(span / (span - overlap)))
    layer l keeps entries o(l) to o(l) + A - 1 of a chunk,  o(l) = min(B - A, l // (span - overlap))

When no chunk is left before the most recent L entries (L layers), compaction starts over with the
oldest entries, so that older text becomes sparser. By default the span is half of the layers.

Deviations. The sizes B and A, the sinks and the recent entries are those of the released code
(GATECH-EIC/LaCache). The budget is exact: the last chunk may lose fewer than B - A entries, and no
chunk is compacted early. Where no chunk fits, or B = A, the oldest entries are evicted. Keys keep
their order and RoPE positions; the release rotates by slot.

`@release` differs twice. Its offset is l mod (B - A + 1), which puts a token into distant layers.
And if a long prompt makes it start over m times at once, it compacts once (`passes="merged"`): in
chunks of m (B - 1) + 1 it keeps every m-th entry, A in all, from an offset of at most their size
less A. Entries of the last chunk that still fit the budget leave next. The release lets the cache
exceed its size by (B - A) // 2, and with A > 1 may keep entries twice, which a smaller offset
avoids here; with the default span neither happens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import AtLeast
from kvsim.core.pieces import Scorer, Scores
from kvsim.core.view import View


class LaCache(Scorer):
    """The order in which entries leave.

    `behind` is 1 for entries compacted in this pass, and 2 for those that it would drop.
    """

    span: Annotated[int, AtLeast(1)] | None = None
    overlap: Annotated[int, AtLeast(0)] = 0
    sink: Annotated[int, AtLeast(0)] = 4
    offset: Literal["ladder", "modulo"] = "ladder"
    passes: Literal["each", "merged"] = "each"

    columns: ClassVar[Mapping[str, float]] = {"behind": 0.0}
    per_row: ClassVar[bool] = True

    def ladder(self, n_layers: int) -> tuple[int, int, int]:
        """B, A and the layers from one step to the next."""
        span = max(1, n_layers // 2) if self.span is None else self.span
        step = span - min(self.overlap, span - 1)
        group = 1 + max(0, -(-(n_layers - span) // step))
        return group, min(group, -(-span // step)), step

    def score(self, view: View) -> Scores:
        """The rank of each entry in the order of eviction; float64 [L, H, n]."""
        n = view.pos.shape[-1]
        cursor = view.pos.where(view["behind"] > 0, -1).amax(-1, keepdim=True)
        excess = (view.count - view.budget).clamp(min=0).unsqueeze(-1)  # entries that leave now
        turns = torch.full(view.pos.shape, torch.nan, dtype=torch.float64, device=view.pos.device)
        compact = self._merged if self.passes == "merged" else self._each
        cursor, turn = compact(view, cursor, excess, turns)
        behind = (view.pos <= cursor).double()
        if self.passes == "merged":
            behind = behind.masked_fill(~turns.isnan(), 2.0)
        turns = turns.where(~turns.isnan(), view.slot + float(turn)).where(view.live, -torch.inf)
        places = turns.argsort(dim=-1, stable=True).argsort(dim=-1) - (n - view.count.unsqueeze(-1))
        return Scores(places.clamp(min=0).double(), {"behind": behind})

    def _offsets(self, view: View, most: Tensor | int, times: Tensor | int = 1) -> Tensor:
        """Offsets of layers in chunks that lose `most`; int, up to [L, H, 1]."""
        group, kept, step = self.ladder(view.setting.n_layers)
        layers = view.layers.view(-1, 1, 1)
        offset = layers % (most + 1) if self.offset == "modulo" else layers // step * times
        return offset.minimum(torch.as_tensor(times * (group - kept)))

    def _merged(
        self, view: View, cursor: Tensor, excess: Tensor, turns: Tensor
    ) -> tuple[Tensor, int]:
        """As `_each`, with all passes merged into one of larger chunks."""
        n_layers = view.setting.n_layers
        group, kept, _ = self.ladder(n_layers)
        drops, n = group - kept, view.pos.shape[-1]
        due = view.live & (view["behind"] == 2)
        turns.copy_((view.slot - float(n)).where(due, torch.nan))
        excess = (excess - due.sum(-1, keepdim=True)).clamp(min=0)
        if not drops:
            return cursor, 0
        rest = view.live & (view.pos >= self.sink) & ~due
        ahead = rest & (view.pos > cursor)
        # after this event, past the cursor and past the sinks
        after = ahead.sum(-1, keepdim=True) - n_layers - excess
        most = rest.sum(-1, keepdim=True) - n_layers - excess
        chunks = after.clamp(min=0) // kept
        over = excess > chunks * drops
        chunks = chunks.where(over, -(-excess // drops))
        offset = self._offsets(view, drops)
        done, leaves, place = _compacted(ahead, chunks, group, offset, kept)
        turns.copy_(torch.where(leaves, place.double(), turns))
        cursor = torch.maximum(cursor, view.pos.where(done, -1).amax(-1, keepdim=True))
        excess = excess - leaves.sum(-1, keepdim=True)
        room = most.clamp(min=0) // kept * drops  # entries that one more pass drops
        again = over & (room > 0)
        times = (-(-excess // room.clamp(min=1))).clamp(min=1)
        size = times * (group - 1) + 1
        rest &= ~leaves
        chunks = torch.where(again, -(-excess // (size - kept)), 0)
        offset = self._offsets(view, size - kept, times)
        done, leaves, place = _compacted(rest, chunks, size, offset, kept, times)
        turns.copy_(torch.where(leaves, place + float(n), turns))
        return view.pos.where(done, -1).amax(-1, keepdim=True).where(again, cursor), 2 * n

    def _each(
        self, view: View, cursor: Tensor, excess: Tensor, turns: Tensor
    ) -> tuple[Tensor, int]:
        """Fill in the turns of evicted entries, pass by pass; returns the cursor, and a turn.

        cursor, excess int [L, H, 1]: the last compacted position, and the number of entries to
        evict. turns [L, H, n]. The returned turn is later than all of them.
        """
        group, kept, _ = self.ladder(view.setting.n_layers)
        drops, n, turn = group - kept, view.pos.shape[-1], 0
        offset = self._offsets(view, drops)
        older = view.slot < view.count.unsqueeze(-1) - view.setting.n_layers
        rest = view.live & older & (view.pos >= self.sink)
        ahead = rest & (view.pos > cursor)
        while drops and bool((rest.sum(-1) >= group).logical_and(excess[..., 0] > 0).any()):
            # whole chunks, until the rest fits
            chunks = (ahead.sum(-1, keepdim=True) // group).minimum(-(-excess // drops))
            done, leaves, place = _compacted(ahead, chunks, group, offset, kept)
            turns.copy_(torch.where(leaves, place + float(turn), turns))
            last = view.pos.where(done, -1).amax(-1, keepdim=True)
            cursor = torch.where(last >= 0, last, cursor)
            excess = (excess - leaves.sum(-1, keepdim=True)).clamp(min=0)
            rest = ahead = rest & ~leaves  # the next pass starts over
            turn += n
        return cursor, turn


def _compacted(
    entries: Tensor,
    chunks: Tensor,
    size: Tensor | int,
    offset: Tensor,
    kept: int,
    times: Tensor | int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mark the first chunks, and the entries to evict, bool [L, H, n]; with places of entries.

    Each chunk keeps every `times`-th entry from the offset on, `kept` in all.
    """
    place = entries.cumsum(-1) - 1
    done, inside = entries & (place < chunks * size), place % size - offset
    stays = (inside >= 0) & (inside % times == 0) & (inside < times * kept)
    return done, done & ~stays, place
