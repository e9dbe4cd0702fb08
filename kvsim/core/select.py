"""Selection of entries, and allocation of whole numbers of them.

All policies rank and round here. Everything is exact and ends for every input.
"""

from __future__ import annotations

import numpy as np

from kvsim.core.lazy import Tensor, torch

# Fractions that differ by less tie, up to rounding.
_FRACTION = 2.0**-32


def select(
    values: Tensor,
    quotas: Tensor,
    protected: Tensor,
    live: Tensor,
    groups: Tensor | None = None,
    eligible: Tensor | None = None,
) -> Tensor:
    """The kept set of every head: protected first, then score descending, then the lower position.

    values [L, H, n] scores, higher = keep; quotas [L, H] entries to keep, at least the protected
    ones; protected, live bool [L, H, n]; entries are in position order. Returns bool [L, H, n]. A
    head with fewer live entries than its quota keeps all. With groups int [L, H, n], quotas are [L,
    H, S], one selection per group. Entries that are not eligible, bool [L, H, n], stay only if
    protected. Linear in n apart from one sort, without groups.
    """
    if eligible is not None:
        live = live & (eligible | protected)
    if groups is not None:
        return _select_in_groups(values, quotas, protected, live, groups)
    safe = protected & live
    candidate = live ^ safe
    need = quotas - safe.sum(-1)  # [L, H]
    score = values.where(candidate, -torch.inf)
    cut = _at_cut(score, need)
    above = score > cut  # no entry but a candidate is above -inf
    tied = candidate & (score == cut)
    room = (need - above.sum(-1)).unsqueeze(-1)
    return safe | above | (tied & (tied.cumsum(-1) <= room))


def _sorted(numbers: Tensor) -> Tensor:
    if numbers.device.type != "cpu":
        return numbers.sort(dim=-1).values
    # vectorised, and several times as fast as torch's, which also sorts indices
    return torch.from_numpy(np.sort(numbers.numpy(), axis=-1))


def _at_cut(score: Tensor, need: Tensor) -> Tensor:
    """The need-th largest score of each row [..., 1]; above all scores if need is 0."""
    n = score.shape[-1]
    cut = _sorted(score).gather(-1, (n - need).clamp(min=0, max=n - 1).unsqueeze(-1))
    return cut.masked_fill((need <= 0).unsqueeze(-1), torch.inf)


def _select_in_groups(
    values: Tensor, quotas: Tensor, protected: Tensor, live: Tensor, groups: Tensor
) -> Tensor:
    last = quotas.shape[-1]
    groups = groups.where(live, last)
    order = _group_order(values, protected, groups, last)
    ranked = groups.gather(-1, order)  # group by group, best first
    size = quotas.new_zeros(*quotas.shape[:-1], last + 1)
    size.scatter_add_(-1, groups, torch.ones_like(groups))
    first = size.cumsum(-1) - size
    place = torch.arange(order.shape[-1], device=order.device) - first.gather(-1, ranked)
    room = torch.cat([quotas, quotas.new_zeros(*quotas.shape[:-1], 1)], dim=-1)
    keep = place < room.gather(-1, ranked)
    return torch.empty_like(live).scatter_(-1, order, keep)


def _group_order(values: Tensor, protected: Tensor, groups: Tensor, last: int) -> Tensor:
    """Slots group by group; in a group protected first, then score descending, then the slot."""
    slot_bits = max(1, (values.shape[-1] - 1).bit_length())
    if values.dtype == torch.float32 and last.bit_length() + 32 + slot_bits < 64:
        # one number holds all three: a float's bits sort like the float once negative ones are
        # inverted
        bits = (values + 0.0).view(torch.int32).long()  # -0.0 is 0.0
        worse = 0x7FFFFFFF - (bits ^ ((bits >> 31) & 0x7FFFFFFF))
        worse = worse.masked_fill_(protected, 0)
        slot = torch.arange(values.shape[-1], device=values.device)
        packed = (((groups << 32) | worse) << slot_bits) | slot
        return _sorted(packed) & ((1 << slot_bits) - 1)
    order = values.masked_fill(protected, torch.inf).argsort(dim=-1, descending=True, stable=True)
    return order.gather(-1, groups.gather(-1, order).argsort(dim=-1, stable=True))


def compete(
    values: Tensor, floor: Tensor, total: Tensor, protected: Tensor, live: Tensor, pos: Tensor
) -> Tensor:
    """Return how many of `total` places each head of a layer gets in one competition, [L, H].

    values [L, H, n]; floor [L, H]: guaranteed places, protected entries included and first; total
    [L], at least the sum of floor. Ties go to the lower position pos [L, H, n], then to the lower
    head.
    """
    safe = select(values, floor, protected, live)
    rest = (live & ~safe).flatten(1)
    need = total - safe.sum((1, 2))  # [L]
    score = values.flatten(1).masked_fill(~rest, -torch.inf)
    cut = _at_cut(score, need)
    above, tied = rest & (score > cut), rest & (score == cut)
    room = need - above.sum(-1)
    if bool((tied.sum(-1) > room).any()):
        heads = values.shape[1]
        head = torch.arange(heads, device=pos.device).unsqueeze(-1)
        turn = (pos * heads + head).flatten(1).masked_fill(~tied, torch.iinfo(pos.dtype).max)
        before = turn.argsort(dim=-1).argsort(dim=-1)  # tied entries have different turns
        tied = tied & (before < room.unsqueeze(-1))
    return (safe | (above | tied).view_as(safe)).sum(-1)


def apportion(total: Tensor, weight: Tensor, floor: Tensor, cap: Tensor) -> Tensor:
    """Whole shares of `total`: floor + min(cap - floor, mu * weight), where mu uses all of it.

    total int [...]; weight >= 0, floor and cap int [..., S]. Returns int [..., S], whose sum is
    exactly total where sum(floor) <= total <= sum(cap). Units left by rounding down go to the
    largest fractional parts, ties to the lower index. If every weighted share is at its cap, or no
    weight is positive, the shares without weight divide the rest equally.
    """
    room = (cap - floor).double()
    rest = (total - floor.sum(-1)).double().unsqueeze(-1)
    weighted = weight.double().clamp(min=0)
    share = _fill(rest, weighted, room)
    rest = rest - share.sum(-1, keepdim=True)
    share = share + _fill(rest, (weighted == 0).double(), room)
    # a share within rounding of an integer is that integer
    share = torch.where((share - share.round()).abs() < _FRACTION, share.round(), share)
    whole = share.floor()
    over = (total - floor.sum(-1)).unsqueeze(-1) - whole.long().sum(-1, keepdim=True)
    fraction = ((share - whole) / _FRACTION).round().masked_fill(whole >= room, -1.0)
    turn = fraction.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return floor + whole.long() + ((turn < over) & (whole < room)).long()


def _fill(total: Tensor, weight: Tensor, room: Tensor) -> Tensor:
    """min(room, mu * weight) with the sum `total` [..., 1], or all the room.

    mu is computed at breakpoints: shares reach their cap in the order of room / weight.
    """
    open_ = (weight > 0) & (room > 0)
    weight = weight.where(open_, 0.0)
    ratio = torch.where(open_, room / weight, torch.inf)
    ratio, order = ratio.sort(dim=-1, stable=True)
    capped = room.where(open_, 0.0).gather(-1, order)
    capped = capped.cumsum(-1) - capped  # sum of earlier shares
    heavier = weight.gather(-1, order).flip(-1).cumsum(-1).flip(-1)  # weight from here on
    mu = (total - capped) / heavier.clamp(min=torch.finfo(torch.double).tiny)
    holds = (mu <= ratio) & (heavier > 0)
    first = holds.to(torch.uint8).argmax(-1, keepdim=True)
    level = torch.where(holds.any(-1, keepdim=True), mu.gather(-1, first), torch.inf)
    level = level.clamp(min=0.0)
    return torch.minimum(room, level * weight).where(open_, 0.0)


def in_rounds(total: Tensor, cap: Tensor, priority: Tensor) -> Tensor:
    """Allocate one unit per round to each share below its cap, until all is used or all are full.

    total int [...]; cap int [..., S], most units of each share; priority [..., S], the order within
    a round, the highest first, ties by lower index. Returns int [..., S]. Whole rounds are found by
    bisection.
    """
    low = torch.zeros_like(total)
    high = cap.amax(-1).expand_as(total).clone()
    for _ in range(max(1, int(cap.max())).bit_length()):
        middle = (low + high + 1) // 2
        fits = torch.minimum(cap, middle.unsqueeze(-1)).sum(-1) <= total
        low, high = torch.where(fits, middle, low), torch.where(fits, high, middle - 1)
    allocated = torch.minimum(cap, low.unsqueeze(-1))
    rest = (total - allocated.sum(-1)).unsqueeze(-1)
    more = cap > low.unsqueeze(-1)
    order = priority.masked_fill(~more, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    turn = order.argsort(dim=-1)
    return allocated + (more & (turn < rest)).long()
