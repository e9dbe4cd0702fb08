"""The nearest place on a line whose value is above a bound, for many places at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def tops(line: Ints) -> list[Ints]:
    """The largest of each 1, 2, 4, ... consecutive values of a line [n]: [k][i] of 2**k from i."""
    out = [line]
    while len(out[-1]) > 1 << (len(out) - 1):
        half = 1 << (len(out) - 1)
        out.append(np.maximum(out[-1][:-half], out[-1][half:]))
    return out


def above(highest: Sequence[Ints], at: Ints, bound: Ints, step: int) -> Ints:
    """From each place `at` [m] the nearest one behind (step 1) or before it (-1) above `bound` [m].

    highest: the `tops` of the line. Where there is none, the place after or before the line. Time
    m log(n).
    """
    here = at  # nothing from `at` up to and with `here` is above the bound, `at` itself left aside
    for level, top in reversed(list(enumerate(highest))):
        first = here + 1 if step > 0 else here - (1 << level)
        inside = (first >= 0) & (first < len(top))
        low = inside & (top[np.clip(first, 0, len(top) - 1)] <= bound)
        here = np.where(low, here + (step << level), here)
    return here + step
