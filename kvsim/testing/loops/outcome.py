"""What the naive replay evicts, and how close each of its decisions was."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvsim.schema import NEVER
from kvsim.testing.loops.basics import Ints
from kvsim.testing.loops.rule import Propagated


@dataclass(frozen=True)
class Cut:
    """One decision of one head, between the last entry kept and the first one dropped.

    margin: their score difference relative to the larger of the two, or to the size of the terms
    that they are made of; 0 for an exact tie, infinite where scores decided nothing (all or none of
    the unprotected entries stay). size: the larger of the two scores.

    A decision on the way to the scores (a threshold, a rank) is a cut too, and where heads or
    layers share a budget, a decision of one counts for all of them.
    """

    layer: int
    head: int
    row: int
    margin: float
    size: float


@dataclass(frozen=True)
class Outcome:
    """What the naive replay evicted: `evicted_at` int32 [layer, head, pos], and each cut.

    selection: which rows each layer worked on, where the rule propagates. That choice is a cut
    after row -1 in every layer that depends on it.
    """

    evicted_at: Ints
    cuts: tuple[Cut, ...]
    selection: Propagated | None = None

    def sure_until(self, tolerance: float, *, ties: bool = True, faint: float = 0.0) -> Ints:
        """int32 [layer, head]: the row of the first cut that rounding could reverse, else NEVER.

        A cut is unsure where its margin is below `tolerance` or both scores are below `faint`.
        With `ties` an exact tie is sure: the tie rule (lower position) decides it.
        """
        sure = np.full(self.evicted_at.shape[:2], NEVER, dtype=np.int32)
        for cut in self.cuts:
            exact = ties and cut.margin == 0.0
            if cut.size < faint or (cut.margin < tolerance and not exact):
                sure[cut.layer, cut.head] = min(sure[cut.layer, cut.head], cut.row)
        return sure

    def agrees(
        self, evicted_at: npt.ArrayLike, tolerance: float, *, ties: bool = True, faint: float = 0.0
    ) -> bool:
        """Whether another replay evicted the same entries, up to each head's first unsure cut."""
        limit = self.sure_until(tolerance, ties=ties, faint=faint)[:, :, None]
        other = np.asarray(evicted_at)
        return other.shape == self.evicted_at.shape and bool(
            (np.minimum(other, limit) == np.minimum(self.evicted_at, limit)).all()
        )
