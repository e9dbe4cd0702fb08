"""How alike the keys are that a policy keeps: what G-KV's redundancy term is to lower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvsim.analysis.kept.retention import event_rows
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
    out = np.full(len(unit), np.nan)
    np.divide((total**2).sum(-1) - itself, count * (count - 1), out=out, where=count > 1)
    return out


def key_similarities(
    trace: Trace, records: Sequence[Record], device: str = "cpu"
) -> list[list[KeySimilarity]]:
    """For each record and each of its layers; the keys of a layer are read once."""
    found: list[dict[int, KeySimilarity]] = [{} for _ in records]
    for layer in sorted({layer for record in records for layer in record.layers}):
        keys = trace.read("k", slice(layer, layer + 1))[0].to(device, torch.float64).cpu().numpy()
        for record, of_layers in zip(records, found, strict=True):
            if layer in record.layers:
                gone = record.gone_after[record.layers.index(layer)]
                by_head = keys.repeat(len(gone) // len(keys), axis=0)
                of_layers[layer] = key_similarity(gone, by_head)
    each = zip(records, found, strict=True)
    return [[one[layer] for layer in record.layers] for record, one in each]
