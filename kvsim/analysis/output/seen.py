"""Outputs of rows under several Records of one layer, from the weights of full attention.

A row's weights over visible entries are full attention's, divided by their sum, the mass. So the
weights of a block of rows are computed once over the entries that any record keeps, and a record
costs the product of the weights of its own entries with their values. Where keys are rotated to
their slots in the cache, rows attend one by one (`by_slot`).

Shape letters: H KV heads, G query heads of a group, w rows of a block, n entries, T tokens, d
dimension of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from kvsim.analysis.output.layer import FAINT, LOWEST, Layer, Rows, length, marked, take
from kvsim.core.lazy import Tensor, torch
from kvsim.schema import NEVER

#: Rows of a block.
ROWS = 128

# Limit of the weights of the rows of a group in a block: long texts have smaller blocks.
_MOST_WEIGHTS = 1 << 24

# Above this share of kept entries, the weights of all entries are computed.
_MOST_LEFT = 0.7


def seen(layer: Layer, gone: Sequence[Tensor], events: Sequence[int]) -> Iterator[tuple[int, Rows]]:
    """Blocks of the rows after the first event of each record, with the record's index in `gone`.

    gone: of each record, the row after which each entry leaves, int [H, T]. events: rows after
    which entries leave, where blocks should begin.
    """
    firsts = [int(record.min()) for record in gone]
    scratch = _Scratch(layer.q), _Scratch(layer.q)
    for start, stop in _blocks(layer, [min([*firsts, *events[:1]]), *events]):
        active = [index for index, first in enumerate(firsts) if first < stop - 1]
        if not active:
            continue
        rows = slice(start, stop)
        views = [_Seen(layer, rows, gone[index]) for index in active]
        for head in range(len(layer.k)):
            # head by head, so that weights are still in the processor's cache when they are used
            weights = _Weights(layer, rows, head, views, scratch[0])
            for view in views:
                view.add(weights, scratch[1])
        full = layer.at(layer.out, rows).permute(0, 3, 1, 2).contiguous()  # [H, d, G, w]
        size = length(full, 1)
        for index, view in zip(active, views, strict=True):
            out, mass = view.outcome()
            begin = max(start, firsts[index] + 1)
            parts = out, mass, full.permute(0, 2, 3, 1), size
            yield index, Rows(slice(begin, stop), *(x[:, :, begin - start :] for x in parts))


def _blocks(layer: Layer, events: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Blocks of rows that begin after events, or after some of them where these are dense."""
    group, total = layer.q.shape[1], layer.k.shape[1]
    most = max(1, min(ROWS, _MOST_WEIGHTS // (group * total)))
    begins = [events[0] + 1]
    for event in events[1:]:
        if event + 1 - begins[-1] >= most // 2:
            begins.append(event + 1)
    for begin, end in pairwise([*begins, total]):
        for start in range(begin, end, most):
            yield start, min(start + most, end)


class _Scratch:
    """Reused memory: the first use of new pages costs as much as a product."""

    def __init__(self, like: Tensor) -> None:
        self._memory = like.new_empty(0)

    def __call__(self, *shape: int) -> Tensor:
        size = math.prod(shape)
        if self._memory.numel() < size:
            self._memory = self._memory.new_empty(size)
        return self._memory[:size].view(shape)


class _Weights:
    """Weights [n, G * w] of a head's group over entries of any record, then the rows' own."""

    def __init__(
        self, layer: Layer, rows: slice, head: int, views: Sequence[_Seen], scratch: _Scratch
    ) -> None:
        self.head, keys, q = head, layer.keys[head], layer.queries(rows, head)
        retained = views[0].visible[head, : rows.start]
        for view in views[1:]:
            retained = retained | view.visible[head, : rows.start]
        count = rows.stop - rows.start
        before = int(retained.sum())
        row = torch.arange(count, device=retained.device)
        if before > _MOST_LEFT * rows.start:
            before = rows.start
            place, k = torch.arange(before, device=retained.device), keys[:before]
        else:
            place, k = retained.cumsum(0) - 1, keys.index_select(0, retained.nonzero()[:, 0])
        self._place = torch.cat([place, row + before])
        self._matrix = scratch(before + count, q.shape[1])
        torch.mm(k, q, out=self._matrix[:before])
        torch.mm(keys[rows], q, out=self._matrix[before:])
        layer.shifted(self._matrix, rows, head).clamp_(min=LOWEST).exp_()
        triangle = self._matrix[before:]
        later = (row.unsqueeze(-1) > row).unsqueeze(1)
        triangle.unflatten(-1, (-1, count)).masked_fill_(later, 0.0)
        self.triangle = layer.values[head, rows].mT @ triangle
        self.before = self._matrix[:before]

    def of(self, entries: Tensor, chosen: _Scratch) -> Tensor:
        """Weights of the entries at positions at [m], ascending; [m, G * w]."""
        out = chosen(entries.shape[0], self._matrix.shape[1])
        return torch.index_select(self._matrix, 0, self._place.index_select(0, entries), out=out)


class _Seen:
    """Visible entries of a block of rows under one record, and the output over them.

    gone: int [H, T]. visible: entries that some of the rows see, bool [H, m], by position.
    """

    def __init__(self, layer: Layer, rows: slice, gone: Tensor) -> None:
        self._layer, self._rows, self._gone = layer, rows, gone[:, : rows.stop]
        inside = (self._gone >= rows.start) & (self._gone < rows.stop - 1)
        self._changing = bool(inside.any())
        # where nothing leaves inside the block, its rows see each other as without eviction
        self.visible = gone[:, : rows.stop if self._changing else rows.start] >= rows.start
        heads, group, dim = *layer.q.shape[:2], layer.v.shape[2]
        self._product = gone.new_empty(
            (heads, dim + 1, group * (rows.stop - rows.start)), dtype=layer.q.dtype
        )

    def add(self, weights: _Weights, chosen: _Scratch) -> None:
        """Multiply the weights of a head with the values of its entries, and with 1."""
        head, rows, out = weights.head, self._rows, self._product[weights.head]
        entries = self.visible[head].nonzero()[:, 0]
        # not `len`, which takes longer of a tensor
        whole = entries.shape[0] == weights.before.shape[0] and not self._changing
        weight = weights.before if whole else weights.of(entries, chosen)
        if self._changing:
            row = torch.arange(rows.start, rows.stop, device=entries.device)
            gone = self._gone[head].index_select(0, entries)
            leaving = (gone < rows.stop - 1).nonzero()[:, 0]
            weight_of = weight.index_select(0, leaving)
            evicted = gone.index_select(0, leaving).view(-1, 1, 1) < row
            weight_of.unflatten(-1, (-1, len(row))).masked_fill_(evicted, 0.0)
            weight.index_copy_(0, leaving, weight_of)
        torch.mm(self._layer.values[head].index_select(0, entries).mT, weight, out=out)
        if not self._changing:
            out += weights.triangle

    def outcome(self) -> tuple[Tensor, Tensor]:
        """Output [H, G, w, d] and mass [H, G, w]."""
        layer, lse = self._layer, self._layer.at(self._layer.lse, self._rows)
        product = self._product.unflatten(-1, lse.shape[1:])
        mass = product[:, -1]
        if layer.formula.sinks:
            sinks = layer.formula.sink(mass, len(mass))
            mass = mass + (sinks.unsqueeze(-1) - lse).exp()
        out = (product[:, :-1] / mass.unsqueeze(1)).permute(0, 2, 3, 1)
        return self._exact(out, mass) if bool((mass < FAINT).any()) else (out, mass)

    def _exact(self, out: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
        """Output and mass from the logits of visible entries, where the mass is small."""
        rows, layer = self._rows, self._layer
        visible = self._gone >= rows.start
        entries = marked(visible)
        k, v = take([layer.k, layer.v], entries)
        row = torch.arange(rows.start, rows.stop, device=entries.device).unsqueeze(-1)
        sees = (entries.unsqueeze(1) <= row) & (self._gone.gather(1, entries).unsqueeze(1) >= row)
        mask = sees & visible.gather(1, entries).unsqueeze(1)
        exact, lse = layer.whole(
            *layer.attend(layer.at(layer.q, rows), k[:, None], v[:, None], mask=mask.unsqueeze(1))
        )
        faint = mass < FAINT
        share = (lse - layer.at(layer.lse, rows)).exp()
        return exact.where(faint.unsqueeze(-1), out), share.where(faint, mass)


def by_slot(layer: Layer, last: Tensor) -> Iterator[Rows]:
    """Rows after the first event, with keys and queries rotated to their slots in the cache.

    The log-sum-exp, and so the mass, is that of the model's own positions: full attention on
    visible entries. Slots change only at events. For presets that re-rotate, so rows attend one by
    one.
    """
    queries, keys = layer.unrotated
    events = {int(e) for e in last.unique() if e != NEVER}
    for event, stop in pairwise(sorted({*events, last.shape[-1] - 1})):
        retained = last[:, : event + 1] > event
        old = marked(retained)
        new = torch.arange(event + 1, stop + 1, device=old.device).expand(len(old), -1)
        shown = torch.cat([retained.gather(1, old), new > event], dim=-1)
        k, v, moved = take((layer.k, layer.v, keys), torch.cat([old, new], dim=-1))
        rows = slice(event + 1, stop + 1)
        _, lse = _row_by_row(layer, layer.at(layer.q, rows), k, v, shown)
        slot = (shown.cumsum(-1) - 1).clamp_(min=0)
        k = layer.rope.rotate(moved, slot)
        q = layer.rope.rotate(layer.at(queries, rows), slot[:, None, old.shape[-1] :])
        out, _ = _row_by_row(layer, q, k, v, shown)
        yield Rows.of(layer, rows, out, (lse - layer.at(layer.lse, rows)).exp_())


def _row_by_row(
    layer: Layer, q: Tensor, k: Tensor, v: Tensor, shown: Tensor
) -> tuple[Tensor, Tensor]:
    """Causal attention of q [H, G, w, d] to k, v [H, n, d] where `shown` [H, n]; own rows last."""
    before = k.shape[1] - q.shape[2]
    mask = None if bool(shown.all()) else shown[:, None, None]
    parts = []
    for row in range(q.shape[2]):
        entries = slice(before + row + 1)
        seen = None if mask is None else mask[..., entries]
        query = q[:, :, row : row + 1]
        parts.append(layer.attend(query, k[:, None, entries], v[:, None, entries], mask=seen))
    out, lse = (torch.cat(each, dim=2) for each in zip(*parts, strict=True))
    return layer.whole(out, lse)
