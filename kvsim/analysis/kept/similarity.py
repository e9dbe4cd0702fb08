"""How alike the keys are that a policy keeps: what G-KV's redundancy term is to lower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvsim.analysis.kept.retention import event_rows, share
from kvsim.analysis.walk import by_layer
from kvsim.core.record import Record
from kvsim.core.trace import Trace

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class KeySimilarity:
    """Of one layer after its last event, [H]; `chance` is what random sets have on average."""

    mean: Floats
    chance: Floats


def key_similarity(evicted_at: NDArray[np.int32], keys: Floats) -> KeySimilarity:
    """Mean cosine of two different keys that a head holds after the layer's last event.

    G-KV (arXiv 2512.00504, section 4.2) takes the cosine of keys after RoPE for redundancy. Chance
    is the mean over all pairs of the positions there at the event: in a random set every pair is as
    likely. A key of length 0 is like no other.

    evicted_at [H, T]; keys [H, T, d]. NaN where nothing has been evicted and for less than two
    keys.
    """
    rows = event_rows(evicted_at)
    if not len(rows):
        none = np.full(len(evicted_at), np.nan)
        return KeySimilarity(none, none)
    last = int(rows[-1])
    held = evicted_at[:, : last + 1] > last
    length = np.linalg.norm(keys[:, : last + 1], axis=-1, keepdims=True)
    unit = keys[:, : last + 1] / np.where(length > 0, length, 1.0)
    return KeySimilarity(_mean_cosine(unit, held), _mean_cosine(unit, np.ones_like(held)))


def _mean_cosine(unit: Floats, chosen: NDArray[np.bool_]) -> Floats:
    """Mean over the pairs of the chosen [H, n] of unit vectors [H, n, d]; [H]."""
    # the square of their sum has every pair twice, and each vector with itself
    weight = chosen.astype(np.float64)
    total = (weight[:, None] @ unit)[:, 0]
    itself = (weight * (unit**2).sum(-1)).sum(-1)
    count = chosen.sum(-1)
    return share((total**2).sum(-1) - itself, count * (count - 1))


def key_similarities(
    trace: Trace, records: Sequence[Record], device: str = "cpu"
) -> list[list[KeySimilarity]]:
    """For each record the similarity in each of its layers."""

    def keys(layer: int) -> Floats:
        read = trace.read("k", slice(layer, layer + 1))[0]
        return read.to(device, torch.float64).cpu().numpy()

    def similarity(record: Record, at: int, keys: Floats) -> KeySimilarity:
        gone = record.gone_after[at]
        return key_similarity(gone, keys.repeat(len(gone) // len(keys), axis=0))

    return by_layer(records, keys, similarity)
