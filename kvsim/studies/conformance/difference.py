"""A set that an implementation and a definition do not share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: Kinds of differing sets: tied at the cut; another choice; everything kept at an event that
#: should evict; entries evicted where the definition has no event; evicted entries that return;
#: entries stored in other numbers of bits.
DifferenceKind = Literal["tie", "choice", "no eviction", "no event", "return", "bits"]


@dataclass(frozen=True)
class Difference:
    """A set that differs from the definition's, of one layer and head after the event after a row.

    extra: positions that stay and by definition leave; missing: that leave and by definition stay;
    returned: that had left before. gap: the highest score of what is missing less the lowest of
    what is extra, as a share of the largest score of the layer; None where one of them is empty or
    protected. highest: the extra entries are the highest positions of an exact tie. of: sets of
    entries that stay, of pages that a row reads, or of keys or values that are rounded. cut: both
    scores of the gap. bits: of a number, by the implementation and by definition.
    """

    row: int
    layer: int
    head: int
    kind: DifferenceKind
    extra: tuple[int, ...]
    missing: tuple[int, ...]
    returned: tuple[int, ...] = ()
    gap: float | None = None
    highest: bool = False
    of: str = "entries"
    cut: tuple[float, float] | None = None
    bits: tuple[float, float] | None = None
