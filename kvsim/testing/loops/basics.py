"""Types, softmax, logits and rotation, which the replay and the metrics share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]


def softmax(z: Floats) -> Floats:
    """Weights of logits [n] that sum to 1; an empty array of an empty one."""
    if not len(z):
        return z
    weight = np.exp(z - z.max())
    return np.asarray(weight / weight.sum(), dtype=np.float64)


def logits_of(q: Floats, k: Floats, scale: float) -> Floats:
    """[qhead, row, pos] of one layer: scale times the product of every query with every key."""
    group = len(q) // len(k)
    return np.stack([scale * (q[i] @ k[i // group].T) for i in range(len(q))])


def rotate(x: Floats, by: Any, inv_freq: Sequence[float] | Floats) -> Floats:
    """x [..., dim] rotated forward by `by` [...] positions, each pair at its own frequency.

    Dimension i is paired with i + half, half the number of frequencies; dimensions from 2 half on
    are not rotated.
    """
    half = len(inv_freq)
    angle = np.multiply.outer(by, np.asarray(inv_freq, dtype=np.float64))
    a, b = x[..., :half], x[..., half : 2 * half]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], axis=-1)
