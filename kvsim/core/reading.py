"""Sparse attention: the pages of resident entries that a row reads, and accounts of them.

A page is a run of consecutive resident entries of a head, in position order: entries `page * i` to
`page * (i + 1) - 1`. Only read entries enter a row's attention.

Shape letters: L layers, H KV heads, G query heads of a group, w rows, P pages, s entries of a page,
d head dimension, n entries, T tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from kvsim.core.attention import Formula
from kvsim.core.lazy import Tensor, torch
from kvsim.core.pieces import Piece
from kvsim.core.storing import Spec

if TYPE_CHECKING:
    from kvsim.core.trace import Trace

T = TypeVar("T")

#: Query heads that read the same pages: each its own, those of a KV head, or all of a layer.
Heads = Literal["query", "kv", "layer"]


@dataclass
class Pages:
    """The resident entries of a layer by page; the last pages of a head may not be full.

    keys, values [H, P, s, d], 0 on pads; live [H, P, s]; layer: its index in the trace. pos [H, P,
    s]: positions in the text, 0 on pads. trace: for calibration; a row must not depend on later
    ones. budget: of the policy. of_layer: cached results for all pages of the layer.
    """

    keys: Tensor
    values: Tensor
    live: Tensor
    formula: Formula
    layer: int
    pos: Tensor
    trace: Trace
    budget: int
    of_layer: dict[Hashable, Any]
    _memo: dict[Hashable, Any] = field(default_factory=dict)

    def once(self, key: Hashable, compute: Callable[[], T], *, of_layer: bool = False) -> T:
        """Return `compute()`, cached for these pages or for all of the layer."""
        memo = self.of_layer if of_layer else self._memo
        if key not in memo:
            memo[key] = compute()
        return cast("T", memo[key])


class SparseAttention(Piece, ABC):
    """Selects the pages that each row after the prompt reads; rows of the prompt read everything.

    If the context is compressed before the question, rows of the question count as rows after the
    prompt, and `trace.prompt_len` is the end of the context.

    Subclasses are frozen dataclasses; a field `heads` replaces the default. Query heads that read
    the same pages use their mean score.
    """

    #: entries of a page
    page: int = 1
    #: query heads that read the same pages
    heads: Heads = "query"
    #: the first layers, in which every row reads everything
    dense_layers: int = 0

    @property
    def effect(self) -> Literal["exact", "none"]:
        """Effect of the budget on reads."""
        return "exact"

    @property
    def weights(self) -> Any:
        """Weights of entries (pages of one) in a row's attention; None for 1.

        An object with `learned` and `log_weights` (`kvsim.policies.magicpig.MagicPIG`).
        """
        return None

    def at(self, trace: Trace, budget: int) -> SparseAttention:
        """Return the piece with parameters for this trace and budget."""
        return self

    @abstractmethod
    def score(self, queries: Tensor, pages: Pages, visible: Tensor) -> Tensor:
        """Score pages [H, G, w, P] for queries [H, G, w, d] after RoPE; the highest are read.

        visible [H, 1, w, P]: existing pages at each row; scores of others have no effect.
        """

    def chosen(self, scores: Tensor, entries: Tensor, budget: int) -> Tensor:
        """Mark the pages that rows read, bool [H, G, w, P], by scores [H, G, w, P].

        By default the `best` that fit the budget, or the parameter `share` of it.

        The result has G = 1 if the heads of a group read the same pages, and also H = 1 if all
        heads do. entries [H, 1, w, P]: number in a page at each row, 0 before it exists.
        """
        budget = int(getattr(self, "share", 1.0) * budget)
        return best(self.heads, scores, entries, budget // self.page)

    def summary_bits(self, dim: int) -> tuple[float, float]:
        """Bits of a page's summary in memory, and bits of it that a row's choice reads."""
        return 0.0, 0.0


def shared(heads: Heads, scores: Tensor, entries: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of query heads that read the same pages, and which pages exist, bool like scores.

    Shapes as in `SparseAttention.chosen`.
    """
    visible = entries > 0
    if heads == "kv":
        scores = scores.mean(1, keepdim=True)
    elif heads == "layer":
        scores, visible = scores.mean((0, 1), keepdim=True), visible[:1]
    return scores, visible.expand_as(scores)


def best(heads: Heads, scores: Tensor, entries: Tensor, count: int) -> Tensor:
    """Mark the `count` pages with the highest scores, at least one; ties to the earlier page.

    Shapes as in `SparseAttention.chosen`.
    """
    scores, visible = shared(heads, scores, entries)
    return highest(scores.masked_fill(~visible, -torch.inf), max(1, count)) & visible


def highest(scores: Tensor, count: int) -> Tensor:
    """Mark the `count` highest scores along the last dimension; ties to the first."""
    if count >= scores.shape[-1]:
        return torch.ones_like(scores, dtype=torch.bool)
    if scores.device.type == "cpu":  # several times faster than torch's topk
        parted = np.partition(scores.numpy(), -count, axis=-1)
        least = torch.from_numpy(parted[..., -count, None])
    else:
        least = scores.topk(count, dim=-1).values[..., -1:]
    above = scores > least
    equal = scores == least
    room = count - above.sum(-1, keepdim=True)
    if bool((equal.sum(-1, keepdim=True) > room).any()):
        equal &= equal.cumsum(-1) <= room
    return above | equal


@dataclass(frozen=True, eq=False)
class Reads:
    """The account of sparse attention: the pages that each row read.

    bits: uint8 [layer, head, row, byte], row 0 the first after the prompt; page i of a row is a bit
    of byte i // 8, from the highest on; a large account is a file, mapped into memory. Dense layers
    have all bits set. The head axis counts query heads, KV heads or 1, as `heads` says. page:
    entries of a page. first: the row of bits[:, :, 0]. sparse: chose them, at this budget. summary:
    bits of a page's summary, stored and read by a row. keys: whether rows read every key to choose.
    weighted: whether read entries have weights.
    """

    bits: NDArray[np.uint8]
    page: int
    heads: Heads
    first: int
    sparse: SparseAttention | Spec
    summary: tuple[float, float] = (0.0, 0.0)
    keys: bool = False
    weighted: bool = False

    @classmethod
    def of(cls, sparse: SparseAttention, bits: NDArray[np.uint8], first: int, dim: int) -> Reads:
        """The account of a piece; dim: channels of a key."""
        terms = sparse.summary_bits(dim), sparse.reads.every_key, sparse.weights is not None
        return cls(bits, sparse.page, sparse.heads, first, sparse, *terms)

    def check(self, evicted_at: NDArray[np.int32]) -> None:
        """Raise ValueError for rows, heads or pages unlike those of a record's `evicted_at`."""
        layers, heads, n_pos = evicted_at.shape
        of_layers, of_heads, rows, size = self.bits.shape
        fewer, more = sorted((heads, of_heads))
        fits = self.bits.dtype == np.uint8 and fewer > 0 and more % fewer == 0
        fits &= all(type(x) is int and x > 0 for x in (self.page, self.first))
        needed = -(-n_pos // self.page) // 8 + 1 if fits else 0
        if not fits or (of_layers, rows, size) != (layers, max(0, n_pos - self.first), needed):
            raise ValueError(
                f"an account of reads has the shape {self.bits.shape} next to evicted_at "
                f"{evicted_at.shape}, pages of {self.page} and {self.first} rows before it"
            )

    def dense(self, at: int) -> bool:
        """Whether everything was read in a layer, by its place in the record."""
        return bool(self.bits[at].min(initial=255) == 255)

    def pages(self, at: int, rows: slice, count: int) -> Tensor:
        """Read pages in a layer, among the first `count`; bool [head, row, page]."""
        packed = self.bits[at, :, rows.start - self.first : rows.stop - self.first]
        return torch.from_numpy(np.unpackbits(packed, axis=-1, count=count)).bool()

    def entries(self, at: int, rows: slice, gone: Tensor) -> Tensor:
        """Read entries in a layer; bool [head, row, rows.stop].

        at: the layer's place in the record. gone: the row after which each entry left, int [H, T].
        The head axis is the longer of the account's and gone's.
        """
        pages = self.pages(at, rows, -(-rows.stop // self.page)).to(gone.device)
        heads = max(len(pages), len(gone))
        seen = visible(gone, rows)
        last = seen[:, -1]
        if bool((gone[:, : rows.stop][~last] >= rows.start).any()):  # slots change in between
            page = (seen.cumsum(-1) - 1).clamp_(min=0) // self.page
            pages, page, seen = (
                x.repeat_interleave(heads // len(x), 0) for x in (pages, page, seen)
            )
            return seen & pages.gather(-1, page)
        page = (last.cumsum(-1) - 1).clamp_(min=0) // self.page
        of_gone, of_pages = heads // len(gone), heads // len(pages)
        out = pages.new_empty(heads, *seen.shape[1:])
        for head in range(heads):
            torch.index_select(pages[head // of_pages], 1, page[head // of_gone], out=out[head])
            out[head] &= seen[head // of_gone]
        return out


def visible(gone: Tensor, rows: slice) -> Tensor:
    """Entries resident when rows attend; bool [H, row, rows.stop] from gone [H, T]."""
    row = torch.arange(rows.start, rows.stop, device=gone.device).unsqueeze(-1)
    gone = gone[:, None, : rows.stop]
    return (torch.arange(rows.stop, device=gone.device) <= row) & (gone >= row)
