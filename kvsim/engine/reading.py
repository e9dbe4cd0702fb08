"""The reads of sparse attention, row by row, among resident entries.

Shape letters: H KV heads, G query heads of a group, w rows of a block, P pages, s entries of a
page, n entries, T tokens, d head dimension.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.core.lazy import Tensor, torch
from kvsim.core.reading import Pages, Reads, SparseAttention
from kvsim.core.trace import Trace
from kvsim.errors import PolicyError
from kvsim.schema import GUIDE

#: Rows of a block.
ROWS = 64
#: Most scores of pages in a block.
_MOST_SCORES = 1 << 24


def read(
    trace: Trace,
    sparse: SparseAttention,
    evicted_at: NDArray[np.int32],
    budget: int,
    layers: Sequence[int],
    device: str,
    *,
    copied: bool = False,
) -> Reads:
    """Return the pages that rows after the prompt read.

    evicted_at [layer, H, T]. copied: score copies of the queries, which a piece may write to.
    """
    sparse, first = sparse.at(trace, budget), trace.prompt_len
    bits = account(trace, sparse, layers)
    for at, layer in enumerate(layers):
        if not reads_all(trace, sparse, layer):
            only, gone = slice(layer, layer + 1), torch.from_numpy(evicted_at[at]).to(device)
            q = trace.read("q", only, slice(first, None))
            k, v = trace.read("k", only)[0].to(device), trace.read("v", only)[0].to(device)
            qkv = q[0].to(device, copy=copied), k, v
            for start, chosen in chosen_pages(trace, layer, sparse, gone, budget, qkv):
                note(bits[at], chosen, start - first)
    return Reads.of(sparse, bits, first, trace.dim)


def account(trace: Trace, sparse: SparseAttention, layers: Sequence[int]) -> NDArray[np.uint8]:
    """The bits of a new account: set only in dense layers."""
    heads = {"query": trace.n_qheads, "kv": trace.n_heads, "layer": 1}[sparse.heads]
    size = ceil(trace.n_pos / sparse.page) // 8 + 1  # sparse layers leave one bit unset
    shape = len(layers), heads, trace.n_pos - trace.prompt_len, size
    bits = np.zeros(shape, np.uint8)
    bits[[at for at, layer in enumerate(layers) if reads_all(trace, sparse, layer)]] = 255
    return bits


def reads_all(trace: Trace, sparse: SparseAttention, layer: int) -> bool:
    """Whether every row reads everything in a layer of the trace."""
    return trace.layer_ids[layer] < sparse.dense_layers


def note(bits: NDArray[np.uint8], chosen: Tensor, start: int) -> None:
    """Write the pages that rows read, bool [head, w, P], to the account of a layer."""
    packed = np.packbits(chosen.cpu().numpy(), axis=-1)
    bits[:, start : start + packed.shape[1], : packed.shape[-1]] = packed


def chosen_pages(
    trace: Trace,
    layer: int,
    sparse: SparseAttention,
    gone: Tensor,
    budget: int,
    qkv: Iterable[Tensor],
) -> Iterator[tuple[int, Tensor]]:
    """Yield blocks of rows after the prompt: first row, and the pages read, bool [head, w, P].

    gone: the row after which each entry left, int [H, T]; qkv: queries [H * G, w, d] of these rows,
    keys and values [H, T, d], recorded or of a pass. sparse: as `at` returns it.
    """
    first, n_pos, of_layer = trace.prompt_len, trace.n_pos, dict[Hashable, Any]()
    q, k, v = qkv
    q = q.unflatten(0, (len(k), -1))
    for start, stop in periods(gone, first, n_pos):
        period = Period(k, v, gone[:, :stop] >= start, sparse.page)
        pages = period.pages(trace, layer, sparse, budget, of_layer)
        most = max(1, _MOST_SCORES // (q.shape[0] * q.shape[1] * pages.live.shape[1]))
        for begin in range(start, stop, min(ROWS, most)):
            rows = slice(begin, min(begin + min(ROWS, most), stop))
            queries = q[:, :, rows.start - first : rows.stop - first]
            yield begin, choose(sparse, queries, pages, period.slots[:, rows], budget)


def periods(gone: Tensor, first: int, n_pos: int) -> Iterator[tuple[int, int]]:
    """Yield rows start..stop-1 between events, from row `first` on; gone [H, T] as `evicted_at`."""
    events = gone.unique().tolist()
    yield from pairwise([first, *(e + 1 for e in events if first <= e < n_pos - 1), n_pos])


class Period:
    """Rows without evictions in between, so that entries keep their slots.

    k, v [H, T, d]; resident [H, n]: among the first n entries, at the last row. keys, values [H, P,
    s, d] by page, 0 on pads; live and pos [H, P, s], an entry's place in k. slots [H, n]: the index
    of each entry among the resident ones of its head.
    """

    def __init__(self, k: Tensor, v: Tensor, resident: Tensor, page: int) -> None:
        self.slots = resident.cumsum(-1) - 1
        size = -(-(int(self.slots[:, -1].max()) + 1) // page) * page
        live = torch.arange(size, device=k.device) <= self.slots[:, -1:]
        # resident entries first, in order; pads read position 0 and are overwritten
        order = resident.byte().argsort(dim=-1, descending=True, stable=True)
        order = torch.nn.functional.pad(order, (0, max(0, size - order.shape[-1])))[:, :size]
        at = order.masked_fill(~live, 0)
        self.live, self.pos = (x.unflatten(-1, (-1, page)) for x in (live, at))
        whole = bool(live.all())
        parts = []
        for x in (k, v):
            part = torch.stack([of_head[index] for of_head, index in zip(x, at, strict=True)])
            parts.append(part if whole else part.masked_fill_(~live.unsqueeze(-1), 0.0))
        self.keys, self.values = (part.unflatten(1, (-1, page)) for part in parts)

    def pages(
        self,
        trace: Trace,
        layer: int,
        sparse: SparseAttention,
        budget: int,
        of_layer: dict[Hashable, Any],
    ) -> Pages:
        """Return the pages of a layer; of_layer: as in `Pages`."""
        if sparse.heads == "layer" and (self.slots[:, -1] != self.slots[0, -1]).any():
            raise PolicyError(
                f"{sparse.label}: heads is 'layer', and the heads of layer {layer} hold different "
                "numbers of entries; expected 'kv' or 'query', or an eviction that leaves each "
                "head as many"
            )
        formula, held = trace.formulas[layer], (self.keys, self.values, self.live)
        return Pages(*held, formula, layer, self.pos, trace, budget, of_layer)


def choose(sparse: SparseAttention, q: Tensor, pages: Pages, slots: Tensor, budget: int) -> Tensor:
    """Choose the pages to read, bool [head, w, P]; q [H, G, w, d], slots [H, w] of the rows."""
    here = slots // sparse.page  # the page of each row itself
    begin = torch.arange(pages.live.shape[1], device=q.device) * sparse.page
    entries = (slots.unsqueeze(-1) + 1 - begin).clamp_(0, sparse.page).unsqueeze(1)
    visible = entries > 0  # [H, 1, w, P]
    scores, shape = sparse.score(q, pages, visible), [*q.shape[:3], visible.shape[-1]]
    if [*getattr(scores, "shape", ())] != shape:
        raise PolicyError(
            f"{sparse.label}: scores of pages are {[*getattr(scores, 'shape', ())]}; expected "
            f"{shape} [KV head, query head of its group, row, page], see {GUIDE}"
        )
    if sparse.page > 1:  # it holds entries of later rows, hidden from scores
        part = _partial(pages, here, slots % sparse.page)
        of_own = sparse.score(
            q, part, torch.ones_like(visible[..., :1]).expand(-1, -1, -1, len(here[0]))
        )
        place = here[:, None, :, None].expand(*scores.shape[:3], 1)
        scores = scores.scatter(-1, place, of_own.diagonal(dim1=-2, dim2=-1).unsqueeze(-1))
    chosen = sparse.chosen(scores, entries, budget).flatten(0, 1)
    if not bool(chosen.any(-1).all()):
        raise PolicyError(
            f"{sparse.label}: a row reads no page; expected scores that are numbers, and at least "
            f"one page for each row, see {GUIDE}"
        )
    return chosen


def _partial(pages: Pages, page: Tensor, last: Tensor) -> Pages:
    """A page for each row [H, w]: its own, up to its own entry."""
    head = torch.arange(len(page), device=page.device).unsqueeze(-1)
    at = torch.arange(pages.live.shape[-1], device=page.device)
    live = pages.live[head, page] & (at <= last.unsqueeze(-1))
    keys, values = (
        x[head, page].masked_fill(~live.unsqueeze(-1), 0.0) for x in (pages.keys, pages.values)
    )
    pos = pages.pos[head, page].masked_fill(~live, 0)
    return replace(pages, keys=keys, values=values, live=live, pos=pos, _memo={})
