"""As what resident entries are stored: a codec, and when an entry leaves the exact window.

An entry is exact when it arrives. After some row it is rounded once, and stays as it is then; rows
behind that one see the rounded key or value. Keys and values have a clock each. Channels of keys
that a codec prunes are 0 from then on.

Shape letters: L layers, H KV heads, T tokens, d head dimension, g entries of a group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from kvsim.core.checks import compute_dtype
from kvsim.core.lazy import Tensor, torch
from kvsim.core.pieces import Piece
from kvsim.errors import PolicyError
from kvsim.schema import NEVER

if TYPE_CHECKING:
    from kvsim.core.trace import Trace


class Clock(NamedTuple):
    """The `step` oldest exact entries of a head leave its window once at least `exact` stay.

    once: only after the first row that any may leave, so that later entries stay exact. group:
    entries that are rounded together, a divisor of step.
    """

    exact: int = 0
    step: int = 1
    once: bool = False
    group: int = 1


def behind_window(codec: Any) -> tuple[Clock, Clock]:
    """`clocks` of a codec with a parameter `window`, behind which entries leave one by one."""
    return (Clock(codec.window),) * 2


class Codec(Piece, ABC):
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
        """When keys leave the exact window, and when values do."""
        return Clock(), Clock()

    def channels(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The channels of a layer's keys that are stored, bool [H, d], where `reads.last` is not 0.

        queries [H, G, w, d] of so many rows before rounding begins, after RoPE; keys [H, n, d], 0
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


def check_channels(label: str, dim: int, unit: int) -> None:
    """Raise PolicyError where the channels of a head are no whole units."""
    if dim % unit:
        raise PolicyError(f"{label}: a head has {dim} channels; expected a multiple of {unit}")


def stored_after(evicted_at: Tensor, clock: Clock, first: int) -> Tensor:
    """The row after which each entry is rounded, int32 [L, H, T]; NEVER if it leaves before.

    evicted_at: int32 [L, H, T]. first: the row after which the first entries are rounded.
    """
    out = torch.full_like(evicted_at, NEVER)
    n_pos = evicted_at.shape[-1]
    events = [e for e in evicted_at.unique().tolist() if first < e < n_pos]
    for start, stop in pairwise([first, *([first + 1] if clock.once else [*events, n_pos])]):
        advance(out, evicted_at, clock, start, stop)
    return out


def advance(out: Tensor, evicted_at: Tensor, clock: Clock, start: int, stop: int) -> Tensor:
    """Round what is due after rows start..stop-1, before which nothing leaves after `start`.

    out: `stored_after` of earlier rows [L, H, T], overwritten. Returns which entries are rounded
    now, bool as out.
    """
    exact = (out[..., :stop] == NEVER) & (evicted_at[..., :stop] > start)
    rank = exact.cumsum(-1) - 1
    # after the row of the entry that completes its batch
    due = rank - rank % clock.step + clock.step - 1 + clock.exact
    pos = torch.arange(stop, device=out.device).expand_as(rank)
    arrival = rank.new_full((*rank.shape[:-1], stop + clock.step + clock.exact), NEVER)
    arrival.scatter_(-1, rank.where(exact, arrival.shape[-1] - 1), pos)
    arrival[..., -1] = NEVER  # where entries that are not exact went
    row = arrival.gather(-1, due.clamp(min=0)).clamp_(min=start)
    now = exact & (row < stop)
    part = out[..., :stop]
    part.copy_(row.to(out.dtype).where(now, part))
    new = torch.zeros_like(out, dtype=torch.bool)
    new[..., :stop] = now
    return new


def round_marked(
    codec: Codec, which: int, stored: Tensor, marked: Tensor, channels: Tensor | None = None
) -> None:
    """Overwrite keys (0) or values (1) [..., T, d] where marked, in groups of neighbours.

    channels: of keys that are stored, bool [..., d], the others become 0; None for all of them.
    """
    entries = stored[marked]
    if len(entries):
        groups = entries.to(compute_dtype(entries.dtype)).unflatten(
            0, (-1, codec.clocks[which].group)
        )
        stored[marked] = (codec.keys, codec.values)[which](groups).flatten(0, 1).to(stored.dtype)
    if channels is not None and which == 0:
        stored.masked_fill_(marked.unsqueeze(-1) & ~channels.unsqueeze(-2), 0.0)


@dataclass(frozen=True)
class Stored:
    """Keys or values of a layer: exact and rounded [H, T, d], and the row after which [H, T].

    Where nothing is rounded, rounded is exact.
    """

    exact: Tensor
    rounded: Tensor
    after: Tensor

    @classmethod
    def as_recorded(cls, exact: Tensor) -> Stored:
        """Keys or values that nothing rounds."""
        return cls(exact, exact, exact.new_full(exact.shape[:2], NEVER, dtype=torch.int32))

    def at(self, head: int, entries: Tensor, rows: slice) -> Tensor:
        """Return entries [m] of a head as the first of the rows sees them, [m, d]."""
        late = (self.after[head, entries] >= rows.start).unsqueeze(-1)
        exact, rounded = self.exact[head, entries], self.rounded[head, entries]
        out: Tensor = torch.where(late, exact, rounded)
        return out

    def changing(self, head: int, entries: Tensor, rows: slice) -> Tensor:
        """Return the places of the entries [m] that are rounded while the rows run."""
        after = self.after[head, entries]
        places: Tensor = ((after >= rows.start) & (after < rows.stop - 1)).nonzero()[:, 0]
        return places


def rounded(
    codec: Codec, trace: Trace, layer: int, gone: Tensor, last: int, exact: Sequence[Tensor]
) -> list[Stored]:
    """Keys and values of a layer, each of which is rounded after its row.

    layer: its index in the trace; gone: after which row each entry has left, int [H, T]; last: the
    row after which the first entries are rounded; exact: keys and values [H, T, d].
    """
    out, channels = [], None
    if codec.reads.last:
        channels = kept_channels(codec, trace, layer, gone, last)
    for which, (clock, numbers) in enumerate(zip(codec.clocks, exact, strict=True)):
        after, new = stored_after(gone, clock, last), numbers.clone()
        round_marked(codec, which, new, after != NEVER, channels)
        out.append(Stored(numbers, new, after))
    return out


def shortened(
    storage: object, gone: Tensor, last: int, dims: tuple[int, int]
) -> list[tuple[Tensor, float]]:
    """After which row keys and values are rounded, and to how many bits; empty without a codec.

    dims: of a key and of a value; other terms as in `rounded`.
    """
    if not isinstance(storage, Codec):
        return []
    bits = storage.bits(dims[0])[0], storage.bits(dims[1])[1]
    pairs = zip(storage.clocks, bits, strict=True)
    return [(stored_after(gone, clock, last), of_entry) for clock, of_entry in pairs]


def kept_channels(codec: Codec, trace: Trace, layer: int, gone: Tensor, last: int) -> Tensor:
    """The channels of a layer's keys that are stored, bool [H, d]; terms as in `rounded`."""
    owner, pos = trace.owners[layer], torch.arange(last + 1, device=gone.device)
    computed = (gone[:, : last + 1] >= pos).any(0).nonzero()[-codec.reads.last :, 0].cpu()  # rows
    rows = slice(int(computed[0]), last + 1)
    every = [trace.read("q", slice(i, i + 1), rows)[0] for i in trace.header.readers(owner)]
    queries = [q.unflatten(0, (len(gone), -1))[:, :, computed - computed[0]] for q in every]
    keys = trace.read("k", slice(owner, owner + 1), slice(0, last + 1))[0].to(gone.device)
    held = (gone[:, : last + 1] > last).unsqueeze(-1)
    return codec.channels(torch.cat(queries, dim=1).to(gone.device), keys.where(held, 0.0))


class Spec(NamedTuple):
    """A codec, or a reader, as a stored record names it (`kvsim.policies.naming` builds it)."""

    name: str
    params: Mapping[str, Any]

    @classmethod
    def of(cls, piece: Piece | Spec) -> Spec:
        """The name and the parameters of a codec or a reader."""
        if isinstance(piece, Spec):
            return piece
        return cls(piece.label, {each.name: getattr(piece, each.name) for each in fields(piece)})  # type: ignore[arg-type]
