"""Quantizers of resident entries, and the clock by which entries leave the exact window.

An entry is exact when it arrives. After some row it is rounded once; later rows see the rounded key
or value. Keys and values have a clock each. Pruned channels of keys are 0 from then on.

Shape letters: L layers, H KV heads, T tokens, d head dimension, g entries of a group.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import field, fields, replace
from typing import Any, NamedTuple

from kvsim.core.checks import compute_dtype
from kvsim.core.lazy import Tensor, torch
from kvsim.core.pieces import Piece, Run
from kvsim.errors import PolicyError
from kvsim.schema import NEVER

#: Bits of an unrounded number.
EXACT = 16
_PLAN = re.compile(r"\d{1,2}(x[1-9]\d{0,3})?(/\d{1,2}(x[1-9]\d{0,3})?)*")


class Clock(NamedTuple):
    """When entries leave the exact window: the `step` oldest, once at least `exact` stay.

    once: only at the first row at which any may leave, so that later entries stay exact. group:
    entries rounded together, a divisor of step.
    """

    exact: int = 0
    step: int = 1
    once: bool = False
    group: int = 1


class Quantizer(Piece, ABC):
    """A deterministic round trip of entries that leave the exact window; a frozen dataclass."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for clock in self.clocks:
            if clock.step % clock.group:
                raise PolicyError(
                    f"{self.label}: entries leave the exact window {clock.step} at a time, in "
                    f"groups of {clock.group}; expected a multiple of the group"
                )

    @property
    def clocks(self) -> tuple[Clock, Clock]:
        """Clocks of keys and of values; by default entries leave one by one after `window`."""
        return (Clock(getattr(self, "window", 0)),) * 2

    def channels(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Stored channels of a layer's keys, bool [H, d]; called if `reads.last` is not 0.

        queries [H, G, w, d] after RoPE, of the last rows before rounding begins; keys [H, n, d], 0
        where nothing is held.
        """
        return torch.ones_like(keys[:, 0], dtype=torch.bool)

    @abstractmethod
    def keys(self, groups: Tensor) -> Tensor:
        """Keys [N, g, d] after the round trip, in the same dtype."""

    def values(self, groups: Tensor) -> Tensor:
        """Values [N, g, d] after the round trip, in the same dtype; by default as keys."""
        return self.keys(groups)

    @abstractmethod
    def bits(self, dim: int) -> tuple[float, float]:
        """Bits of a stored key and of a stored value, with their share of scales."""

    def of_layer(self, layer: int) -> Quantizer:
        """Return the quantizer of a layer, by its place: the same clocks, perhaps other bits.

        A layer that reads another's entries has the other's quantizer.
        """
        return self


class SplitQuantizer(Quantizer):
    """A quantizer that takes bits of keys and of values.

    `k_bits`, `v_bits`: of a number, by default `bits_per_number` or the only choice; 16: as
    recorded. A text is a plan by layer: `8x2/4x26/8x2` has 8 bits in the first two layers, 4 in the
    next 26, and 8 in the last two.
    """

    k_bits: int | str | None = field(default=None, kw_only=True)
    v_bits: int | str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        allowed = sorted({*self.choices, EXACT})
        for name, given in self._given.items():
            if not _PLAN.fullmatch(str(given)) or not {*_planned(given)} <= {*allowed}:
                raise PolicyError(
                    f"{self.label}: {name} is {given!r}; expected {', '.join(map(str, allowed))} "
                    f"for all layers, or a plan by layer such as 16x2/{allowed[0]}x28"
                )

    @property
    def choices(self) -> Sequence[int]:
        """Supported bits."""
        return range(1, EXACT)

    @property
    def block(self) -> int:
        """Channels rounded together; a smaller head is one block."""
        return 1

    @property
    def _given(self) -> dict[str, int | str]:
        both = {"k_bits": self.k_bits, "v_bits": self.v_bits}
        return {name: bits for name, bits in both.items() if bits is not None}

    @property
    def _bits(self) -> tuple[int, int]:
        own: Any = getattr(self, "bits_per_number", self.choices[0])
        return int(self.k_bits or own), int(self.v_bits or own)

    def check(self, run: Run) -> None:
        """Raise PolicyError for a plan of other layers, and for heads with partial blocks."""
        for name, plan in self._given.items():
            if isinstance(plan, str) and (n := len(_planned(plan))) != run.n_layers:
                raise PolicyError(
                    f"{self.label}: {name} is {plan!r}, a plan of {n} layers; expected a plan of "
                    f"{run.n_layers}"
                )
        for dim in run.dims:
            check_channels(self.label, dim, min(self.block, dim))

    def of_layer(self, layer: int) -> Quantizer:
        """Return the quantizer with a layer's bits."""
        plans = {name: plan for name, plan in self._given.items() if isinstance(plan, str)}
        bits: dict[str, Any] = {name: _planned(plan)[layer] for name, plan in plans.items()}
        return replace(self, **bits) if bits else self

    def keys(self, groups: Tensor) -> Tensor:
        """Keys [N, g, d] after the round trip."""
        return groups if self.k_bits == EXACT else self.round_keys(groups, self._bits[0])

    def values(self, groups: Tensor) -> Tensor:
        """Values [N, g, d] after the round trip."""
        return groups if self.v_bits == EXACT else self.round_values(groups, self._bits[1])

    def bits(self, dim: int) -> tuple[float, float]:
        """Bits of a stored key and of a stored value, with their share of scales."""
        (key, _), (_, value), whole = *(self.size(dim, x) for x in self._bits), float(EXACT * dim)
        return whole if self.k_bits == EXACT else key, whole if self.v_bits == EXACT else value

    @abstractmethod
    def round_keys(self, groups: Tensor, bits: int) -> Tensor:
        """Keys [N, g, d] after the round trip through `bits`, in the same dtype."""

    def round_values(self, groups: Tensor, bits: int) -> Tensor:
        """Values [N, g, d] after the round trip; by default as keys."""
        return self.round_keys(groups, bits)

    @abstractmethod
    def size(self, dim: int, bits: int) -> tuple[float, float]:
        """Return `bits` of this quantizer for these bits per number of keys and values."""


def _planned(given: int | str) -> list[int]:
    """Bits of each layer of a plan; a number is returned unchanged."""
    runs = (x.partition("x") for x in str(given).split("/"))
    return [int(bits) for bits, _, count in runs for _ in range(int(count or 1))]


def check_channels(label: str, dim: int, unit: int) -> None:
    """Raise PolicyError if a head's channels are not a multiple of the unit."""
    if dim % unit:
        raise PolicyError(f"{label}: a head has {dim} channels; expected a multiple of {unit}")


def advance(out: Tensor, evicted_at: Tensor, clock: Clock, start: int, stop: int) -> Tensor:
    """Mark entries due for rounding after rows start..stop-1, without evictions in between.

    out: `stored_after` of earlier rows [L, H, T], overwritten. Returns the entries to round now,
    bool like out.
    """
    exact = (out[..., :stop] == NEVER) & (evicted_at[..., :stop] > start)
    rank = exact.cumsum(-1) - 1
    # after the row of the entry that completes its batch
    due = rank - rank % clock.step + clock.step - 1 + clock.exact
    pos = torch.arange(stop, device=out.device).expand_as(rank)
    arrival = rank.new_full((*rank.shape[:-1], stop + clock.step + clock.exact), NEVER)
    arrival.scatter_(-1, rank.where(exact, arrival.shape[-1] - 1), pos)
    arrival[..., -1] = NEVER  # place for entries that are no longer exact
    row = arrival.gather(-1, due.clamp(min=0)).clamp_(min=start)
    now = exact & (row < stop)
    part = out[..., :stop]
    part.copy_(row.to(out.dtype).where(now, part))
    new = torch.zeros_like(out, dtype=torch.bool)
    new[..., :stop] = now
    return new


def round_marked(
    quantizer: Quantizer, which: int, stored: Tensor, marked: Tensor, channels: Tensor | None = None
) -> None:
    """Round marked keys (0) or values (1) [..., T, d] in place, in groups of neighbours.

    channels: stored ones of keys, bool [..., d], others become 0; None for all.
    """
    entries = stored[marked]
    if len(entries):
        groups = entries.to(compute_dtype(entries.dtype)).unflatten(
            0, (-1, quantizer.clocks[which].group)
        )
        stored[marked] = (
            (quantizer.keys, quantizer.values)[which](groups).flatten(0, 1).to(stored.dtype)
        )
    if channels is not None and which == 0:
        stored.masked_fill_(marked.unsqueeze(-1) & ~channels.unsqueeze(-2), 0.0)


class Spec(NamedTuple):
    """A piece by name in a stored record (`kvsim.policies.naming` builds it)."""

    name: str
    params: Mapping[str, Any]

    @classmethod
    def of(cls, piece: Piece | Spec) -> Spec:
        """The name and the parameters of a piece."""
        if isinstance(piece, Spec):
            return piece
        return cls(piece.label, {each.name: getattr(piece, each.name) for each in fields(piece)})
