"""What the naive replay and the naive metrics both need: types, softmax, logits, rotation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]

#: `evicted_at` of an entry that never leaves.
NEVER = 2**31 - 1


def softmax(z: Floats) -> Floats:
    """Weights that add up to 1, of logits [n]; none of none."""
    if not len(z):
        return z
    weight = np.exp(z - z.max())
    return np.asarray(weight / weight.sum(), dtype=np.float64)


def logits_of(q: Floats, k: Floats, scale: float) -> Floats:
    """[qhead, row, pos] of one layer: scale times the product of every query with every key."""
    group = len(q) // len(k)
    return np.stack([scale * (q[i] @ k[i // group].T) for i in range(len(q))])


def turn(x: Floats, by: Any, inv_freq: Sequence[float] | Floats) -> Floats:
    """x [..., dim] turned forward by `by` [...] positions, each pair at its own frequency.

    Dimension i goes with i + half, half the number of frequencies; dimensions past 2 half stay.
    """
    half = len(inv_freq)
    angle = np.multiply.outer(by, np.asarray(inv_freq, dtype=np.float64))
    a, b = x[..., :half], x[..., half : 2 * half]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], axis=-1)


def pool(values: Sequence[float], kind: str | None, kernel: int) -> list[float]:
    """Stride 1, same length: "max" pads with -inf, "avg" pads with 0 and divides by the kernel."""
    if kind is None:
        return list(values)
    pooled = []
    for slot in range(len(values)):
        near = values[max(0, slot - kernel // 2) : slot + kernel // 2 + 1]
        pooled.append(max(near) if kind == "max" else sum(near) / kernel)
    return pooled
