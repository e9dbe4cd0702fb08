"""What resident entries become when others leave: a merger, which folds these into them.

It stands in the place of a codec, which stores entries in another form. Keys are after RoPE, as in
the cache. What is stored follows from keys, values and the kept sets alone, so that metrics and the
judge compute it again from a record.

Shape letters: L layers, H KV heads, T tokens or slots, d head dimension, m entries of a head that
stay, e that leave.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

from kvsim.core.checks import compute_dtype
from kvsim.core.lazy import Tensor, torch
from kvsim.core.storing import Clock, Codec
from kvsim.schema import NEVER

#: Cosines that differ by less are equal: the first entry is the nearest.
TIE = 1e-6

# Cosines that are computed together.
_MOST = 1 << 24


class Shares(NamedTuple):
    """Weights of merging entries, and of the nearest for each, in its new sum; and the divisor's.

    [H, e] each.
    """

    entry: Tensor
    nearest: Tensor
    divisor: Tensor


class Merger(Codec):
    """Folds each entry that leaves into the kept one of its head with the largest cosine of keys.

    What stays becomes (own * x + sum of `entry` * y + `nearest` * x) / (own + sum of `divisor`), of
    all entries y that merge into x; keys and values alike.
    """

    #: the weight of an entry in the sum that it becomes
    own: float = 1.0

    @property
    def clocks(self) -> tuple[Clock, ...]:  # type: ignore[override]  # none
        """Nothing leaves an exact window."""
        return ()

    def keys(self, groups: Tensor) -> Tensor:
        """Keys as they are until another entry leaves."""
        return groups

    def bits(self, dim: int) -> tuple[float, float]:
        """16 bits for each number: an entry stays an entry."""
        return 16.0 * dim, 16.0 * dim

    def merging(self, cosines: Tensor, leaves: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the entries that leave merge, bool [H, e], and the threshold [H] from now on.

        cosines, leaves [H, e]: pads do not leave. before: the last threshold, NaN before the first.
        """
        return leaves, before

    @abstractmethod
    def shares(self, cosines: Tensor) -> Shares:
        """Return the weights of entries that merge, by their cosine [H, e]."""

    def fold(
        self, keys: Tensor, values: Tensor, gone: Tensor, kept: Tensor, before: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Overwrite keys and values [H, T, d] of what is kept when others are gone, bool [H, T].

        before: the last threshold, [H]. Returns which entries change [H, T], and the new threshold.
        """
        changed = torch.zeros_like(kept)
        (of_gone, leaves), (of_kept, stays) = _places(gone), _places(kept)
        if not of_gone.shape[1] or not of_kept.shape[1]:
            return changed, before
        head = torch.arange(len(keys), device=keys.device).unsqueeze(-1)
        dtype = compute_dtype(keys.dtype)
        gone_units, units = (
            torch.nn.functional.normalize(keys[head, of].to(dtype), dim=-1, eps=1e-12)
            for of in (of_gone, of_kept)
        )
        matches = []
        for part in gone_units.split(max(1, _MOST // stays.numel()), dim=1):
            cosines = (part @ units.mT).masked_fill_(~stays.unsqueeze(1), -torch.inf)
            first = (cosines >= cosines.amax(-1, keepdim=True) - TIE).int().argmax(-1, keepdim=True)
            matches.append((first[..., 0], cosines.gather(-1, first)[..., 0]))
        nearest, cosine = (torch.cat(parts, dim=1) for parts in zip(*matches, strict=True))
        leaves = leaves & stays.any(-1, keepdim=True)
        merges, least = self.merging(cosine, leaves, before)
        shares = Shares(*(x.where(merges, 0.0) for x in self.shares(cosine)))
        nothing = cosine.new_zeros(of_kept.shape)
        own, divisor, merged = (
            nothing.scatter_add(-1, nearest, x) for x in (*shares[1:], merges.to(dtype))
        )
        for array in (keys, values):
            old, entries = array[head, of_kept], array[head, of_gone]
            folded = entries.to(dtype).where(merges.unsqueeze(-1), 0.0)
            folded *= shares.entry.unsqueeze(-1)
            new = (self.own + own).unsqueeze(-1) * old.to(dtype)
            new.scatter_add_(1, nearest.unsqueeze(-1).expand_as(folded), folded)
            new /= (self.own + divisor).unsqueeze(-1)
            array[head, of_kept] = new.to(array.dtype).where(merged.unsqueeze(-1) > 0, old)
        changed[head, of_kept] = merged > 0
        return changed, least

    def folds(
        self, keys: Tensor, values: Tensor, evicted_at: Tensor
    ) -> Iterator[tuple[int, Tensor]]:
        """Overwrite keys and values [H, T, d] event by event; yields its row and what changed.

        evicted_at: after which row each entry leaves, int [H, T].
        """
        threshold = unknown(keys)
        pos = torch.arange(keys.shape[1], device=keys.device)
        for row in events(evicted_at):
            kept = (evicted_at > row) & (pos <= row)
            changed, threshold = self.fold(keys, values, evicted_at == row, kept, threshold)
            yield row, changed


def unknown(keys: Tensor) -> Tensor:
    """The threshold before the first event, of keys [..., H, T, d]."""
    return keys.new_full(keys.shape[:-2], torch.nan, dtype=compute_dtype(keys.dtype))


def events(evicted_at: Tensor) -> list[int]:
    """The rows after which an entry leaves, ascending."""
    return [row for row in evicted_at.unique().tolist() if row != NEVER]


def _places(marked: Tensor) -> tuple[Tensor, Tensor]:
    """Where entries are marked, int [H, m], ascending; and which of these are no others."""
    size = int(marked.sum(-1).amax())
    places = (~marked).byte().argsort(dim=-1, stable=True)[:, :size]
    return places, marked.gather(-1, places)
