"""Outputs of rows that read only some of the held entries, or quantized ones.

A row's output is the softmax over the entries that it reads, with keys and values as stored when
the row attends, and the weights of sparse attention if any. Its mass is the share of full attention
on these entries.

Shape letters: H KV heads, G query heads of a group, w rows of a block, m entries, P pages, s
entries of a page, T tokens, d dimension of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from kvsim.analysis.output.changed import (
    Stored,
    events,
    first_moved,
    first_row,
    folds,
    log_weights,
    rounded,
)
from kvsim.analysis.output.layer import FAINT, LOWEST, Layer, Rows
from kvsim.core.lazy import Tensor, torch
from kvsim.core.merging import Merger
from kvsim.core.reading import Reads, visible
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.engine.reading import Period, periods
from kvsim.policies.naming import stored_piece

#: Rows of a block.
ROWS = 64
#: Rows of a block times query heads of a group: fewer rows share more of their pages.
_TOGETHER = 256
#: Fewest rows of a block.
_LEAST_ROWS = 8


def partial(
    layer: Layer, record: Record, index: int, trace: Trace, gone: Tensor, end: int
) -> Iterator[Rows]:
    """Blocks of the rows before `end` that eviction, sparse attention or quantization changes.

    at: the layer's index in the record; gone: the row after which each entry leaves, int [H, T].
    """
    exact, changes = (layer.k, layer.v), set[int]()
    stored = [Stored.as_recorded(x) for x in exact]
    storage, last = stored_piece(record.storage), first_row(record, trace) - 1
    if isinstance(storage, Merger):
        always = torch.full_like(gone, -1)
        stored = [Stored(x, x.clone(), always) for x in exact]
        folding = folds(storage, stored[0].rounded, stored[1].rounded, gone)
        changes = {row + 1 for row in events(gone) if row + 1 < end}
    elif storage is not None:
        stored = rounded(storage, trace, record.layers[index], gone, last, exact)
    begin, prompt = first_moved(record, trace, gone), min(trace.prompt_len, end)
    cuts = {*range(begin, prompt, ROWS), *range(max(begin, prompt), end, ROWS), end}
    for start, stop in pairwise(sorted(cuts | changes)):
        rows = slice(start, stop)
        if start in changes:
            next(folding)
        if record.reads is None or start < record.reads.first:
            read = visible(gone, rows)
        else:
            read = record.reads.entries(index, rows, gone)
        weights = log_weights(record.reads, index, rows, gone, layer.at(layer.q, rows), layer.k)
        yield _of_rows(layer, rows, read, stored, weights)


def _of_rows(
    layer: Layer, rows: slice, read: Tensor, stored: Sequence[Stored], weights: Tensor | None = None
) -> Rows:
    """Rows that read entries [H or H * G, w, n], with logarithms of weights [H * G, w, n]."""
    read, given = read.unflatten(0, (len(layer.k), -1)), [None] * len(layer.k)
    of_heads = given if weights is None else weights.unflatten(0, (len(layer.k), -1))
    heads = enumerate(zip(read, of_heads, strict=True))
    parts = [_of_head(layer, h, rows, part, stored, logs) for h, (part, logs) in heads]
    out, mass = (torch.stack(x) for x in zip(*parts, strict=True))
    return Rows.of(layer, rows, out, mass)


def _of_head(
    layer: Layer,
    head: int,
    rows: slice,
    read: Tensor,
    stored: Sequence[Stored],
    weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Output [G, w, d] and mass [G, w] of rows of a head's group; read [1 or G, w, n]."""
    keys, values = stored
    group, count = layer.q.shape[1], rows.stop - rows.start
    entries = read.flatten(0, 1).any(0).nonzero()[:, 0]
    mask = read[..., entries].permute(2, 0, 1).expand(-1, group, -1).flatten(1)  # [m, G * w]
    row = torch.arange(rows.start, rows.stop, device=entries.device).repeat(group)
    queries = layer.queries(rows, head)

    def logits(k: Tensor) -> Tensor:
        """Logits minus the log-sum-exp of full attention; [m, G * w]."""
        extended = torch.cat([k, k.new_ones(len(k), 1)], -1)
        return layer.shifted(extended @ queries, rows, head)

    seen = logits(keys.exact[head, entries]).masked_fill_(~mask, -torch.inf)
    mass = seen.exp().sum(0)
    if keys.rounded is not keys.exact:
        seen = logits(keys.at(head, entries, rows))
        changing = keys.changing(head, entries, rows)
        later = row > keys.after[head, entries[changing]].unsqueeze(-1)
        rounded = logits(keys.rounded[head, entries[changing]])
        seen[changing] = rounded.where(later, seen[changing])
        seen.masked_fill_(~mask, -torch.inf)
    if weights is not None:
        seen += weights[..., entries].permute(2, 0, 1).flatten(1)
    sink = None
    highest = seen.amax(0)
    if layer.formula.sinks:
        lse = layer.at(layer.lse, rows)[head]
        of_group = layer.formula.sink(seen, len(layer.k))[head]
        sink = (of_group.unsqueeze(-1) - lse).flatten()
        highest, mass = torch.maximum(highest, sink), mass + sink.exp()
    weight = (seen - highest).exp_()
    total = weight.sum(0) if sink is None else weight.sum(0) + (sink - highest).exp()
    out = weight.mT @ values.at(head, entries, rows)
    if values.rounded is not values.exact:
        changing = values.changing(head, entries, rows)
        late = entries[changing]
        later = row > values.after[head, late].unsqueeze(-1)
        change = values.rounded[head, late] - values.exact[head, late]
        out += (weight[changing] * later).mT @ change
    out /= total.unsqueeze(-1)
    return out.view(group, count, -1), mass.view(group, count)


def paged(layer: Layer, reads: Reads, index: int, gone: Tensor) -> Iterator[Rows]:
    """Blocks of the rows of an account over the entries that they read.

    The pages that any row of a block reads are multiplied with its queries together, with weight 0
    for rows that do not read a page. A row's weights are full attention's, divided by their sum,
    the mass.

    at: the layer's index in the account; gone: the row after which each entry leaves, int [H, T].
    """
    group, n_pos = layer.q.shape[1], layer.k.shape[1]
    size = max(_LEAST_ROWS, _TOGETHER // group)
    for start, stop in periods(gone, reads.first, n_pos):
        period = Period(layer.keys, layer.values, gone[:, :stop] >= start, reads.page)
        for begin in range(start, stop, size):
            rows = slice(begin, min(begin + size, stop))
            pages = reads.pages(index, rows, period.live.shape[1]).to(gone.device)
            pages = pages.repeat_interleave(layer.q.shape[0] * group // len(pages), 0)
            pages = pages.unflatten(0, (-1, group))  # [H, G, w, P]
            out, mass = _attend(layer, period, rows, pages)
            if bool((mass < FAINT).any()):
                read = reads.entries(index, rows, gone)
                stored = [Stored.as_recorded(x) for x in (layer.k, layer.v)]
                yield _of_rows(layer, rows, read, stored)
            else:
                yield Rows.of(layer, rows, out, mass)


def _attend(layer: Layer, period: Period, rows: slice, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Output [H, G, w, d] and mass [H, G, w] of rows over pages [H, G, w, P]."""
    heads, group, count = pages.shape[:3]
    page = period.live.shape[2]
    products = []
    for head in range(heads):
        read = pages[head].flatten(0, 1)  # [G * w, P]
        union = read.any(0).nonzero()[:, 0]
        keys, values = (x[head, union].flatten(0, 1) for x in (period.keys, period.values))
        weight = keys @ layer.queries(rows, head)  # [P * s, G * w]
        layer.shifted(weight, rows, head).clamp_(min=LOWEST).exp_()
        by_page = weight.unflatten(0, (-1, page))
        by_page *= read[:, union].mT.unsqueeze(1)
        _hide_later(by_page, union, period.slots[head, rows], group)
        products.append(values.mT @ weight)
    product = torch.stack(products)  # [H, d + 1, G * w]
    mass = product[:, -1].unflatten(-1, (group, count))
    if layer.formula.sinks:
        sinks = layer.formula.sink(mass, heads)
        mass = mass + (sinks.unsqueeze(-1) - layer.at(layer.lse, rows)).exp()
    out = product[:, :-1].unflatten(-1, (group, count)).permute(0, 2, 3, 1)
    return out / mass.unsqueeze(-1), mass


def _hide_later(weight: Tensor, union: Tensor, slots: Tensor, group: int) -> None:
    """Set weights [P, s, G * w] of entries after their row to 0; union: pages [P], slots: [w]."""
    page = weight.shape[1]
    later = (union >= int(slots[0]) // page).nonzero()[:, 0]  # no row is before the first
    if len(later):
        slot = union[later].unsqueeze(-1) * page + torch.arange(page, device=union.device)
        hidden = (slot.unsqueeze(-1) > slots).repeat(1, 1, group)
        weight[later] = weight[later].masked_fill(hidden, 0.0)
