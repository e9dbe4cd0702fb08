"""Redundancy: similarity of an entry's key to the other keys of its head.

The term of R-KV (Cai et al., arXiv 2505.24133) that G-KV takes over. C holds the cosine
similarity of every two keys, 0 on the diagonal. In each row i the entry at the last slot j with
C_ij > threshold is set to 0, and

    c_j = mean_i C_ij

so that of keys that repeat each other, the last occurrence counts as less redundant.

Deviations. The papers set what lies *below* the threshold to 0 and sum over the rows; their code,
followed here, keeps it, zeroes one entry per row, and divides by the number of rows.

The sums need no matrix: they are k_j . sum_i k_i - |k_j|^2 for unit keys k. Only the search for the
last similar slot does. It goes backwards over growing blocks of columns, and ends for a row at its
first match: early if keys share a direction, in the worst case after one matrix product. Later
events compare only new entries and those whose match was evicted, because keys do not change
(`Searched`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvsim.core.lazy import Tensor, torch
from kvsim.core.view import View

# Similarities held at once; blocks that fit the processor's cache are faster.
_BLOCK_BYTES = 4 << 20
# Columns of the first block of the search, and of the largest.
_NARROW, _WIDE = 64, 512
# No last similar slot exists, or it was not searched.
_NONE, _UNKNOWN = -1, -2


@dataclass
class Searched:
    """The last similar entry of each entry at the previous event, by position.

    pos [h, m]: ascending. last [h, m]: the position of the last similar entry, -1 for none, -2 for
    an entry that was not compared.
    """

    pos: Tensor = field(default_factory=lambda: torch.empty(0, 0))
    last: Tensor = field(default_factory=lambda: torch.empty(0, 0))

    def slots(self, pos: Tensor, chosen: Tensor) -> tuple[Tensor, int]:
        """Return the last similar slots of entries at pos, and the first slot that may be new.

        pos, chosen and the result [h, n]. The result counts slots before the first new one.
        """
        if not self.pos.shape[-1]:
            return torch.full_like(pos, _UNKNOWN), 0
        at = torch.searchsorted(self.pos, pos).clamp_(max=self.pos.shape[1] - 1)
        last = self.last.gather(1, at).masked_fill_(self.pos.gather(1, at) != pos, _UNKNOWN)
        new = chosen & (last == _UNKNOWN)
        first = int(torch.where(new.any(-1), new.byte().argmax(-1), pos.shape[1]).min())
        slot = torch.searchsorted(pos, last).clamp_(max=pos.shape[1] - 1)
        there = (pos.gather(1, slot) == last) & chosen.gather(1, slot)
        # one whose match has left searches again
        return torch.where(there, slot, last.clamp(max=_NONE).where(last < 0, _UNKNOWN)), first

    def keep(self, pos: Tensor, chosen: Tensor, last: Tensor) -> None:
        """Keep the last similar slots [h, n] of the entries at pos that are chosen."""
        matches = pos.gather(1, last.clamp(min=0)).where(last >= 0, _NONE)
        self.pos, self.last = pos, matches.masked_fill_(~chosen, _UNKNOWN)


def mean_similarity(
    keys: Tensor,
    among: Tensor,
    *,
    threshold: float,
    epsilon: float,
    else_first: bool = False,
    view: View | None = None,
) -> Tensor:
    """c_j of the entries marked in `among` with each other, 0 elsewhere.

    keys [L, H, n, d]; among bool [L, H, n]; a key is k / (|k| + epsilon). else_first: in a row
    without a similar entry, set the first entry to 0. view: given if the keys are those of its
    entries in order, so that the search resumes from the previous event.
    """
    n, dim = keys.shape[-2:]
    keys, chosen = keys.reshape(-1, n, dim), among.reshape(-1, n)  # a row per head
    norm = keys.norm(dim=-1, keepdim=True)
    unit = keys / (norm + epsilon)
    if not bool(chosen.all()):
        unit = unit.masked_fill_(~chosen.unsqueeze(-1), 0.0)
    together = unit.sum(1).unsqueeze(-1)  # [L * H, d, 1]
    with_itself = (norm / (norm + epsilon)).square()
    total = (unit @ together - with_itself).squeeze(-1)
    searched, pos = Searched(), torch.arange(n, device=keys.device).expand(len(keys), n)
    if view is not None and not view.rounded:
        searched = view.memo(("similar", threshold, epsilon), Searched)
        pos = view.pos.reshape(-1, n)
    previous, first = searched.slots(pos, chosen)
    heads = max(1, _BLOCK_BYTES // (n * _NARROW * keys.element_size()))
    blocks = zip(*(x.split(heads) for x in (unit, chosen, previous)), strict=True)
    last = torch.cat([_last_similar(x, marks, at, first, threshold) for x, marks, at in blocks])
    searched.keep(pos, chosen, last)
    at = (
        last.clamp(min=0) + n * torch.arange(len(last), device=last.device).unsqueeze(-1)
    ).flatten()
    similarity = (unit.reshape(-1, dim).index_select(0, at).view_as(unit) * unit).sum(-1)
    total.scatter_add_(-1, last.clamp(min=0), -similarity.masked_fill_(last < 0, 0.0))
    if else_first:
        first_chosen = chosen.to(torch.uint8).argmax(-1, keepdim=True)
        direction = unit.gather(1, first_chosen.unsqueeze(-1).expand(-1, 1, dim))
        lost = (unit @ direction.transpose(1, 2)).squeeze(-1)
        lost = lost.masked_fill(last >= 0, 0.0).scatter(-1, first_chosen, 0.0)
        total.scatter_add_(-1, first_chosen, -lost.sum(-1, keepdim=True))
    count = chosen.sum(-1, keepdim=True).clamp(min=1)
    mean: Tensor = (total / count).masked_fill(~chosen, 0.0)
    return mean.view(among.shape)


def _last_similar(
    unit: Tensor, chosen: Tensor, previous: Tensor, first: int, threshold: float
) -> Tensor:
    """The last slot above the threshold in each row, -1 for none.

    unit [h, n, d] unit keys, 0 where not chosen; chosen, previous and the result [h, n]. previous:
    the last similar slot before the slot `first`, -1 for none, -2 for unknown.
    """
    heads, n, dim = unit.shape
    last = torch.full_like(previous, _NONE)
    # rows to search: their heads, slots and keys
    which = torch.arange(heads, device=unit.device)
    slot = torch.arange(n, device=unit.device).expand(heads, n)
    keys, rows, pending = unit, unit, chosen
    stop, width = n, _NARROW
    while True:
        if stop == first:
            last = torch.where(pending & (previous >= 0), previous, last)
            pending = pending & (previous == _UNKNOWN)
        most = int(pending.sum(-1).max())
        if stop == 0 or most == 0:
            return last
        if most < slot.shape[1]:  # heads with fewer rows are padded with finished rows
            which = pending.any(-1).nonzero().squeeze(-1)
            keys = unit if len(which) == heads else unit[which]
            slot = pending[which].byte().sort(dim=-1, stable=True).indices[:, n - most :]
            flat = slot + n * torch.arange(len(which), device=slot.device).unsqueeze(-1)
            rows = keys.reshape(-1, dim).index_select(0, flat.flatten()).unflatten(0, flat.shape)
        start = max(first if first < stop else 0, stop - width)
        columns = keys[:, start:stop].transpose(1, 2)
        step = max(1, _BLOCK_BYTES // (len(which) * (stop - start) * unit.element_size()))
        for part, at in zip(rows.split(step, 1), slot.split(step, 1), strict=True):
            cosine = part @ columns  # [h', r, stop - start]
            head, row = ((at >= start) & (at < stop)).nonzero(as_tuple=True)
            cosine[head, row, at[head, row] - start] = 0.0
            similar = cosine.amax(-1) > threshold
            head, row = (similar & pending[which].gather(1, at)).nonzero(as_tuple=True)
            match = cosine[head, row].flip(-1)
            back = (match > threshold).to(torch.uint8).argmax(-1)  # the first of them
            last[which[head], at[head, row]] = stop - 1 - back
        pending = pending & (last < 0)
        stop, width = start, min(2 * width, _WIDE)
