"""LaCache: layers keep different tokens, in the shape of a ladder, and fewer of the old ones.

Shi et al., "LaCache: Ladder-Shaped KV Caching for Efficient Long-Context Modeling of Large Language
Models", ICML 2025, arXiv 2507.14204. Positions alone decide, so that no attention is needed. After
the first `sink` entries, chunks of B neighbours are compacted, the oldest first: layer l keeps A
of the B, at an offset that grows with depth. Together the layers thus hold every token of the
chunk, each in about `span` neighbouring layers, of which `overlap` also hold its successor:

    B = 1 + ceil((L - span) / (span - overlap)),  A = min(B, ceil(span / (span - overlap)))
    layer l keeps entries o(l) to o(l) + A - 1 of a chunk,  o(l) = min(B - A, l // (span - overlap))

When no chunk is left before the most recent L entries (L layers), compaction starts over with the
oldest entries, so that older text is thinner. By default the span is half of the layers.

Deviations. The sizes B and A, the sinks and the recent entries are those of the released code
(GATECH-EIC/LaCache); its offset is l mod (B - A + 1), which `lacache@release` uses and which puts a
token into layers that are not neighbours. The budget is exact: the last chunk may lose fewer than
B - A entries, and no chunk is compacted ahead. The release lets the cache exceed its size by
(B - A) // 2. Where that is 0, as with the default span, `lacache@release` keeps what the release
keeps if the prompt is at most 1.8 budgets long, and in decoding then. A longer prompt is compacted
again and again here until it fits, and in larger chunks there: at prompt 1,000 and budget 250 in 28
layers the sets have an IoU of 0.44. Where no chunk fits, or B = A, the oldest entries are evicted.
Keys keep their order and RoPE positions; the release rotates by slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from kvsim.core.lazy import torch
from kvsim.core.parameters import AtLeast
from kvsim.core.policy import Protection, Scorer, Scores
from kvsim.core.view import View
from kvsim.errors import PolicyError


@dataclass(frozen=True)
class LaCache(Scorer):
    """The turn in which entries leave; `behind` marks those that this pass has compacted."""

    span: Annotated[int, AtLeast(1)] | None = None
    overlap: Annotated[int, AtLeast(0)] = 0
    sink: Annotated[int, AtLeast(0)] = 4
    offset: Literal["ladder", "modulo"] = "ladder"

    columns: ClassVar[Mapping[str, float]] = {"behind": 0.0}
    per_row: ClassVar[bool] = True
    flops = Scorer.no_flops

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.span is not None and self.overlap >= self.span:
            raise PolicyError(
                f"lacache: overlap is {self.overlap}, span is {self.span}; expected a smaller "
                "overlap, because neighbouring steps of a ladder differ"
            )

    def ladder(self, n_layers: int) -> tuple[int, int, int]:
        """B, A and the layers from one step to the next."""
        span = max(1, n_layers // 2) if self.span is None else self.span
        step = span - min(self.overlap, span - 1)
        group = 1 + max(0, -(-(n_layers - span) // step))
        return group, min(group, -(-span // step)), step

    def score(self, view: View) -> Scores:
        """The place of each entry in the order in which they leave; float64 [L, H, n]."""
        group, kept, step = self.ladder(view.n_layers)
        drops = group - kept
        offset = view.layers % (drops + 1) if self.offset == "modulo" else view.layers // step
        offset = offset.clamp(max=drops).view(-1, 1, 1)
        n = view.pos.shape[-1]
        older = view.slot < view.count.unsqueeze(-1) - view.n_layers
        rest = view.live & older & (view.pos >= self.sink)
        cursor = view.pos.where(view["behind"] > 0, -1).amax(-1, keepdim=True)
        ahead = rest & (view.pos > cursor)
        excess = (view.count - view.budget).clamp(min=0).unsqueeze(-1)  # entries that leave now
        turns = torch.full(view.pos.shape, torch.nan, dtype=torch.float64, device=view.pos.device)
        turn = 0
        while drops and bool((rest.sum(-1) >= group).logical_and(excess[..., 0] > 0).any()):
            place = ahead.cumsum(-1) - 1
            whole = ahead & (place // group < ahead.sum(-1, keepdim=True) // group)
            inside = place % group - offset
            done = whole & (place // group < -(-excess // drops))  # until the rest fits
            leaves = done & ((inside < 0) | (inside >= kept))
            turns = torch.where(leaves, place + float(turn), turns)
            last = view.pos.where(done, -1).amax(-1, keepdim=True)
            cursor = torch.where(last >= 0, last, cursor)
            excess = (excess - leaves.sum(-1, keepdim=True)).clamp(min=0)
            rest = ahead = rest & ~leaves  # the next pass starts over
            turn += n
        turns = torch.where(turns.isnan(), view.slot + float(turn), turns).where(view.live, -1.0)
        places = turns.argsort(dim=-1, stable=True).argsort(dim=-1) - (n - view.count.unsqueeze(-1))
        return Scores(places.clamp(min=0).double(), {"behind": (view.pos <= cursor).double()})

    def protection(self, budget: int) -> Protection:
        """Protect the sinks."""
        return Protection(sink=self.sink)
