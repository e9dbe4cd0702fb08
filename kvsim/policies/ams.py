"""AMS: cuts the cache into segments of equal attention mass, each of which keeps a share.

"Adaptive Mass-Segmented KV Compression for Long-Form Reasoning", arXiv 2605.23200. At an event:

1. The *usage* u of an entry is its mean attention from the `window` most recent rows (at most as
   many rows as the budget), average-pooled over `pool_kernel` neighbours. For the window's own
   entries, `suffix_fill` gives the usage; by default it is the largest usage of the head.
2. The *mass* of an entry is m = u / sum u. The *credit* c remembers the mass of earlier events:
   c becomes credit_decay c + (1 - credit_decay) m. From here on the mass is
   credit_mix m + (1 - credit_mix) c / sum c. `credit=False` leaves the credit out.
3. The cache is cut where the cumulative mass crosses multiples of `segment_mass`
   (`segmentation="fixed"`: after every `segment_length` entries).
4. Segments are merged and split until they have `min_segment` to `max_segment` entries.
5. Each segment gets a *quota*, a part of the budget in proportion to its mass (`weights="length"`:
   to its length; "equal": the same for all), at least `min_quota` entries.
6. A scorer chooses the best entries of each segment, as many as its quota.

So every segment keeps an entry as long as the budget has one for each.

Two modes. `mode="strict"` (default) keeps the paper's promises: segments have min_segment to
max_segment entries (if max_segment >= 2 min_segment - 1), every segment keeps at least min_quota
entries as long as the budget suffices, and the number of kept entries is exactly the budget.
`mode="reference"` follows the release:

* It splits segments before it merges them, so a merged segment can exceed max_segment.
* It rounds quotas and corrects their sum in passes from the left.
* If the budget is below sink + recent, it protects recent entries first; strict mode protects the
  sinks first.
* Entries that the scorer itself protects (its window, its sinks) rank first in their segment and
  use up its quota.
* A final cut by score over the whole head can erase whole segments.

Deviations. The window holds the last rows of the trace up to the event, with each query rotated to
its own position; the release rotates all of them to the current position. Mass is computed per head
and sequence, in float64. If there are more segments than entries in the budget, the release's quota
passes never end; there the reference mode takes the rule of the strict mode. The release gives
entries that a scorer protects the largest score of the layer, so they tie with the best entry; here
they come first. The TOVA of the release, and of `ams@release`, protects the last token in this way.
The release has no event at the end of the prefill; here such an event has a full window.
`weights="length"` is the paper's ablation without mass weights. For this ablation the release runs
`reference_no_mass`, which still weighs by mass; its credit remembers the usage instead of the mass
(`credit_of="usage"`). The defaults come from the paper's Table 15. It has no `recent` and
`pool_kernel`; here they are 32 and 5, as in the release. `ams@release` has the mode "reference" and
the hyper-parameters of the release.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, NamedTuple

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import AtLeast, Between, Odd
from kvsim.core.pieces import Allocator, Plan, Protection, protected_by
from kvsim.core.select import apportion, in_rounds, select
from kvsim.core.view import View
from kvsim.errors import PolicyError
from kvsim.policies.window import Windowed, smooth

# Added to every mass before it is normalised (the release's value; the paper gives none).
_EPSILON = 1e-12
# A finer one cuts nothing more: a segment has at least one entry.
_LEAST_SHARE = 1e-5
# The release keeps this many queries between two events.
_BUFFER = 257


class AMS(Allocator):
    """Allocator that gives each segment of the cache a quota.

    In the paper's letters: segment_mass Delta, min_segment L_min, max_segment L_max, min_quota
    q_min, credit_decay lambda, credit_mix beta. credit_of: whether the credit remembers the mass or
    the usage. Ablations: weights "length" or "equal", credit False, segmentation "fixed",
    segment_mass >= 1 with a large max_segment for a single segment.
    """

    segment_mass: Annotated[float, AtLeast(_LEAST_SHARE)] = 0.1
    min_segment: Annotated[int, AtLeast(1)] = 16
    max_segment: Annotated[int, AtLeast(1)] = 256
    min_quota: Annotated[int, AtLeast(0)] = 1
    credit: bool = True
    credit_decay: Annotated[float, Between(0, 1)] = 0.9
    credit_mix: Annotated[float, Between(0, 1)] = 0.9
    credit_of: Literal["mass", "usage"] = "mass"
    window: Annotated[int, AtLeast(1)] = 128
    pool_kernel: Annotated[int, AtLeast(1), Odd()] = 5
    suffix_fill: Literal["head_max", "global_max", "head_mean", "observed", "zero"] = "head_max"
    mode: Literal["strict", "reference"] = "strict"
    weights: Literal["mass", "length", "equal"] = "mass"
    segmentation: Literal["mass", "fixed"] = "mass"
    segment_length: Annotated[int, AtLeast(1)] = 128
    sink: Annotated[int, AtLeast(0)] = 4
    recent: Annotated[int, AtLeast(0)] = 32

    columns: ClassVar[Mapping[str, float]] = {"credit": 0.0}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_segment < self.min_segment:
            raise PolicyError(
                f"ams: max_segment is {self.max_segment}; expected at least min_segment, "
                f"{self.min_segment}"
            )

    reads = Windowed.reads

    def protection(self, budget: int) -> Protection:
        """Sinks and recent entries; under a tight budget strict mode protects fewer recent ones."""
        if self.mode == "strict":
            sink = min(self.sink, budget)
            return Protection(sink, min(self.recent, budget - sink))
        recent = min(self.recent, budget)
        return Protection(min(self.sink, budget - recent), recent)

    def plan(self, view: View, scores: Tensor, protected: Tensor) -> Plan:
        """Usage, mass and credit, segments, quotas (sections 3.2 to 3.5 of the paper)."""
        usage, suffix = self._usage(view)
        observed = normalise(usage.clamp(min=0.0), view.live)
        mass, credit = observed, view["credit"].double()
        if self.credit:
            raw = self.credit_of == "usage"
            now = usage if raw else observed
            credit = self.credit_decay * credit + (1 - self.credit_decay) * now
            remembered = credit if raw else normalise(credit.clamp(min=0.0), view.live)
            mixed = self.credit_mix * now + (1 - self.credit_mix) * remembered
            mass = normalise(mixed.clamp(min=0.0), view.live)
        starts = self.segment(mass, view.live)
        parts = SegmentSums.of(starts, mass, protected, view.live)
        budget = view.budget.expand_as(view.count).minimum(view.count)
        quotas = self.share(parts, budget)
        notes = {
            "observed": observed,
            "credit": credit,
            "mass": mass,
            "protected": protected & view.live,
            "segment_mass": parts.mass,
            "segment_length": parts.length,
            "suffix_mass": (mass * suffix).sum(-1),
            "infeasible": quotas.infeasible,
            "quota_minimum": quotas.minimum,
            "quota_by_mass": quotas.by_mass,
        }
        columns = {"credit": credit}
        if self.mode == "strict":
            return Plan(quotas.units, parts.group, columns=columns, notes=notes)
        # entries that the scorer protects rank first in their segment and use up its quota
        first = protected_by(view.setting.scorer_protection, view)
        candidates = select(scores, quotas.units, first, view.live, parts.group)
        notes["quota"] = quotas.units
        notes["segment"] = parts.group
        return Plan(budget, eligible=candidates, columns=columns, notes=notes)

    def _usage(self, view: View) -> tuple[Tensor, Tensor]:
        """Usage u (float64) and the suffix without usage from the window, both [L, H, n]."""
        count = view.count
        rows = min(self.window, view.row + 1)
        if self.mode == "reference" and not view.is_prompt:
            buffered = min(view.setting.interval or _BUFFER, _BUFFER)
            rows = min(rows, buffered - 1)
        width = view.budget.minimum(count - 1).clamp(min=1, max=max(1, rows))  # W_e, [L, H]
        if int(count.min()) <= view.row:
            return self._usage_over(view, width)
        # nothing was evicted: replays share it
        terms = view.row, view.setting.prompt_len, view.setting.interval, *width.flatten().tolist()
        key = "usage", self, *terms
        return view.memo(key, lambda: self._usage_over(view, width), shared=True)

    def _usage_over(self, view: View, width: Tensor) -> tuple[Tensor, Tensor]:
        """The same from the last `width` rows, int [L, H]."""
        attention = view.attn(int(width.max()))  # [L, H, G, w, n]
        group, held_rows = attention.shape[2:4]
        row = torch.arange(view.row + 1 - held_rows, view.row + 1, device=width.device)
        counted = row > view.row - width.unsqueeze(-1)  # [L, H, w]
        weight = counted.to(attention.dtype).repeat(1, 1, group).unsqueeze(2)  # [L, H, 1, G * w]
        received = (weight @ attention.flatten(2, 3))[:, :, 0].double() / group  # [L, H, n]
        suffix = view.live & (view.pos > view.row - width.unsqueeze(-1))
        judged = view.live & ~suffix
        vote = (received / width.unsqueeze(-1)).masked_fill(~judged, 0.0)
        usage = smooth(vote, "avg", self.pool_kernel).masked_fill(~judged, 0.0)
        if self.suffix_fill == "observed":
            seen = (view.row + 1 - view.pos).minimum(width.unsqueeze(-1)).clamp(min=1)
            return torch.where(suffix, received / seen, usage), suffix
        return torch.where(suffix, self._fill(usage, judged), usage), suffix

    def _fill(self, usage: Tensor, judged: Tensor) -> Tensor:
        """Usage of suffix entries, [L, H, 1]; 1 where the window has no usage at all."""
        if self.suffix_fill == "zero":
            return usage.new_zeros(*usage.shape[:2], 1)
        number = judged.sum(-1, keepdim=True)
        if self.suffix_fill == "head_mean":
            fill = usage.sum(-1, keepdim=True) / number.clamp(min=1)
        else:
            fill = usage.amax(-1, keepdim=True)
        if self.suffix_fill == "global_max":
            fill = fill.amax(1, keepdim=True).expand_as(number)
            number = number.sum(1, keepdim=True).expand_as(number)
        return fill.masked_fill(number == 0, 1.0)

    def segment(self, mass: Tensor, live: Tensor) -> Tensor:
        """First slots of segments, int [L, H, S], for mass [L, H, n]; n: none."""
        n = mass.shape[-1]
        if self.segmentation == "fixed":
            first = (n - live.sum(-1)).unsqueeze(-1)
            return (first + torch.arange(0, n, self.segment_length, device=first.device)).clamp(
                max=n
            )
        strict = self.mode == "strict"
        starts = cuts(mass, live, self.segment_mass, keep_unreached=not strict)
        if strict:
            starts = merge(starts, n, self.min_segment, short_tail=False)
            return split(starts, n, self.max_segment, equal=True)
        starts = split(starts, n, self.max_segment, equal=False)
        return merge(starts, n, self.min_segment, short_tail=True)

    def share(self, parts: SegmentSums, budget: Tensor) -> Quotas:
        """Allocate the budget [L, H] to the segments."""
        weight = {
            "mass": parts.mass,
            "length": parts.length.double(),
            "equal": (parts.length > 0).double(),
        }[self.weights]
        least = parts.length.clamp(max=self.min_quota)
        if self.mode == "strict":
            return strict_quotas(parts, weight, least.maximum(parts.kept), budget)
        return reference_quotas(parts, weight, least, budget)


def normalise(values: Tensor, live: Tensor) -> Tensor:
    """(values + epsilon) / their sum over the live entries of each head; 0 on pads."""
    raised = (values + _EPSILON).masked_fill(~live, 0.0)
    return raised / raised.sum(-1, keepdim=True).clamp(min=_EPSILON)


def cuts(mass: Tensor, live: Tensor, share: float, *, keep_unreached: bool) -> Tensor:
    """A segment starts at the first entry whose cumulative mass reaches a multiple of `share`.

    A crossing at the first entry moves to the second. keep_unreached: as in the release, multiples
    below 1 that rounding leaves unreached start a segment at the last entry. Returns slots, int [L,
    H, S], ascending, perhaps repeated; n marks no segment.
    """
    n = mass.shape[-1]
    first = (n - live.sum(-1)).unsqueeze(-1)
    number = max(0, math.ceil(1 / share - 1e-9) - 1)  # multiples below 1
    levels = torch.arange(1, number + 1, device=mass.device, dtype=mass.dtype) * share
    levels = levels.expand(*mass.shape[:-1], number).contiguous()
    reached = torch.searchsorted(mass.cumsum(-1), levels)
    if keep_unreached:
        reached = reached.clamp(max=n - 1)
    return torch.cat([first, reached.maximum(first + 1)], dim=-1)


def merge(starts: Tensor, n: int, least: int, *, short_tail: bool) -> Tensor:
    """Segments of fewer than `least` entries absorb those after them.

    The result is the orbit of the first start under s -> first start at s + least or later, found
    by doubling the jumps. A short last segment joins the one before unless short_tail.
    """
    number = starts.shape[-1]
    none = starts.new_full((*starts.shape[:-1], 1), number)
    jump = torch.cat([torch.searchsorted(starts, starts + least), none], dim=-1)
    reached = torch.zeros_like(jump, dtype=torch.bool)
    reached[..., 0] = True
    for _ in range(number.bit_length()):
        landed = jump.masked_fill(~reached, number)
        reached = reached.scatter(-1, landed, value=True)
        jump = jump.gather(-1, jump)
    kept = starts.masked_fill(~reached[..., :number], n)
    if not short_tail:
        last = kept.masked_fill(kept == n, -1).amax(-1, keepdim=True)
        tail = (n - last < least) & (last > starts[..., :1])
        kept = kept.masked_fill(tail & (kept == last), n)
    return _packed(kept, n)


def split(starts: Tensor, n: int, most: int, *, equal: bool) -> Tensor:
    """Cut segments of more than `most` entries into equal pieces, or after every `most` entries."""
    length = _lengths(starts, n).unsqueeze(-1)  # [L, H, S, 1]
    pieces = -(-length // most)
    piece = torch.arange(max(1, int(pieces.max())), device=starts.device)
    # piece(o) = floor(o pieces / length) changes at o = ceil(piece length / pieces)
    offset = -(-piece * length // pieces.clamp(min=1)) if equal else piece * most
    cut = (starts.unsqueeze(-1) + offset).masked_fill(piece >= pieces, n)
    return _packed(cut.flatten(2), n)


def _packed(starts: Tensor, n: int) -> Tensor:
    starts = starts.sort(dim=-1).values
    return starts[..., : int((starts < n).sum(-1).max())].contiguous()


def _lengths(starts: Tensor, n: int) -> Tensor:
    """Entries from each start to the next; 0 without one, and for all but the last of equals."""
    following = torch.cat([starts[..., 1:], starts.new_full((*starts.shape[:-1], 1), n)], dim=-1)
    return following - starts


class SegmentSums(NamedTuple):
    """Sums over the entries of each segment; S is the most segments of any head."""

    group: Tensor  #: segment of each entry, int [L, H, n]; 0 on pads
    length: Tensor  #: entries, int [L, H, S]; 0 for segments that a head does not have
    kept: Tensor  #: protected entries, int [L, H, S]
    mass: Tensor  #: [L, H, S]

    @staticmethod
    def of(starts: Tensor, mass: Tensor, protected: Tensor, live: Tensor) -> SegmentSums:
        """Segments that begin at the slots `starts` [L, H, S], n for none."""
        n = mass.shape[-1]
        begins = starts.new_zeros(*mass.shape[:-1], n + 1).scatter_(-1, starts, 1)
        group = (begins[..., :n].cumsum(-1) - 1).clamp_(min=0)
        kept = torch.zeros_like(starts).scatter_add_(-1, group, (protected & live).long())
        total = mass.new_zeros(starts.shape).scatter_add_(-1, group, mass.masked_fill(~live, 0.0))
        return SegmentSums(group, _lengths(starts, n), kept, total)


class Quotas(NamedTuple):
    """Quotas of the segments, and the shares of the budget that they consist of."""

    units: Tensor  #: int [L, H, S]
    minimum: Tensor  #: share of the budget allocated regardless of weights, [L, H]
    by_mass: Tensor  #: share allocated by weight, [L, H]; the rest is rounding
    infeasible: Tensor  #: bool [L, H], whether the minima exceed the budget


def strict_quotas(parts: SegmentSums, weight: Tensor, least: Tensor, budget: Tensor) -> Quotas:
    """`least` plus a share of the rest by weight, at most the segment's length; largest remainders.

    Where the minima exceed the budget, protected entries come first, then one entry per segment and
    round, the heaviest first, so that as many segments as possible keep an entry.
    """
    infeasible = least.sum(-1) > budget
    floor = torch.where(infeasible.unsqueeze(-1), 0, least)
    units = apportion(budget, weight, floor, parts.length)
    spare = (budget - parts.kept.sum(-1)).clamp(min=0)
    tight = parts.kept + in_rounds(spare, (least - parts.kept).clamp(min=0), parts.mass)
    units = torch.where(infeasible.unsqueeze(-1), tight, units)
    minimum = least.sum(-1).minimum(budget) / budget
    return Quotas(units, minimum, 1 - minimum, infeasible)


def reference_quotas(parts: SegmentSums, weight: Tensor, least: Tensor, budget: Tensor) -> Quotas:
    """The release: rounded shares, settled by passes of one unit from the left.

    Protected entries do not count. Where the minima reach the budget, passes take from segments of
    more than one; where there are more segments than entries to give, the strict rule decides.
    """
    length = parts.length
    index = -torch.arange(length.shape[-1], device=length.device, dtype=torch.double)
    order = index.expand_as(length)  # priority: the lower index first
    base = least.sum(-1)
    rest = (budget - base).clamp(min=0)
    total = weight.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.double).tiny)
    added = (rest.unsqueeze(-1) * weight / total).round().long()  # halves to even
    units = length.minimum(least + added)
    given = (units - least).sum(-1)
    over = (units.sum(-1) - budget).clamp(min=0)
    units = units - in_rounds(over, units - least, order)
    under = (budget - units.sum(-1)).clamp(min=0)
    units = units + in_rounds(under, length - units, order)
    fewer = least - in_rounds((base - budget).clamp(min=0), (least - 1).clamp(min=0), order)
    units = torch.where((base >= budget).unsqueeze(-1), fewer, units)
    endless = (base >= budget) & ((least > 0).sum(-1) > budget)
    always = parts.kept.sum(-1)
    room = least.maximum(parts.kept) - parts.kept
    tight = parts.kept + in_rounds((budget - always).clamp(min=0), room, parts.mass)
    units = torch.where(endless.unsqueeze(-1), tight, units)
    return Quotas(units, base.minimum(budget) / budget, given.minimum(rest) / budget, endless)
