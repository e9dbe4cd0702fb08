"""Values and keys of kept entries: norms of values, similarity of keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from kvsim.analysis.arrays import Bools, EvictedAt, Floats, share
from kvsim.analysis.kept.retention import SINK, last_event
from kvsim.analysis.subject import by_layer
from kvsim.core.lazy import torch
from kvsim.core.record import Record
from kvsim.core.trace import Trace

#: Values of one layer after its last event, [H], and those of random sets of the same size.
WithChance = tuple[Floats, Floats]


def value_norm_overlap(evicted_at: EvictedAt, norms: Floats, sink: int = SINK) -> WithChance:
    """Share of the kept entries after the sinks that are among the largest values.

    With c entries kept at positions from `sink` on, after the last event at which the layer
    evicted: the kept ones among the c largest norms of the value (the lower position first among
    equals), over c. The first `sink` positions are left out because most policies protect them, and
    their values are small. The norm of the value is a factor of the score of Expected Attention
    (arXiv 2510.00636).

    evicted_at [H, T]; norms [H, T] of the values of each head. NaN where a head has lost nothing
    after the sinks, or keeps nothing there.
    """
    last = last_event(evicted_at)
    kept = evicted_at[:, sink : last + 1] > last
    count, n = kept.sum(-1), kept.shape[-1]
    order = np.argsort(-norms[:, sink : last + 1], axis=-1, kind="stable")
    largest = np.arange(n) < count[:, None]
    both = (np.take_along_axis(kept, order, -1) & largest).sum(-1)
    chosen = (count > 0) & (count < n)
    chance = np.where(chosen, count / max(1, n), np.nan)
    return share(both, np.where(chosen, count, 0)), chance


def value_norm_overlaps(
    trace: Trace, records: Sequence[Record], device: str = "cpu"
) -> list[list[WithChance]]:
    """For each record the overlap of each of its layers."""

    def norms(layer: int) -> Floats:
        values = trace.read("v", slice(layer, layer + 1))[0].to(device)
        lengths: Floats = values.norm(dim=-1).cpu().numpy()
        return lengths

    def overlap(record: Record, index: int, lengths: Floats) -> WithChance:
        gone = record.gone_after[index]
        return value_norm_overlap(gone, lengths.repeat(len(gone) // len(lengths), axis=0))

    return by_layer(records, norms, overlap)


def key_similarity(keys: Floats) -> Callable[[EvictedAt], WithChance]:
    """Mean cosine of two different keys that a head holds after the layer's last event.

    G-KV (arXiv 2512.00504, section 4.2) measures redundancy by the cosine of keys after RoPE.
    Chance is the mean over all pairs of the positions there at the event: in a random set every
    pair is equally likely. A key of length 0 has cosine 0 with any other.

    keys [H, T, d] and evicted_at [H, T], in which heads that share a key head are neighbours. NaN
    where nothing has been evicted and for less than two keys.
    """
    length = np.linalg.norm(keys, axis=-1, keepdims=True)
    unit = keys / np.where(length > 0, length, 1.0)
    squares = (unit**2).sum(-1)

    def mean_cosine(chosen: Bools) -> Floats:
        """Mean over the pairs of the chosen entries [H, n]; [H]."""
        # the square of their sum has every pair twice, and each vector with itself
        n, weight = chosen.shape[1], chosen.astype(np.float64)
        total = (weight[:, None] @ unit[:, :n])[:, 0]
        count = chosen.sum(-1)
        pairs = (total**2).sum(-1) - (weight * squares[:, :n]).sum(-1)
        return share(pairs, count * (count - 1))

    @cache
    def chance(last: int) -> Floats:
        return mean_cosine(np.ones((len(unit), last + 1), bool))

    def similarity(evicted_at: EvictedAt) -> WithChance:
        last = last_event(evicted_at)
        kept = evicted_at[:, : last + 1] > last
        each = len(kept) // len(unit)
        heads = [mean_cosine(kept[head::each]) for head in range(each)]
        return np.stack(heads, axis=1).ravel(), chance(last).repeat(each)

    return similarity


def key_similarities(
    trace: Trace, records: Sequence[Record], device: str = "cpu"
) -> list[list[WithChance]]:
    """For each record the similarity in each of its layers."""

    def of_layer(layer: int) -> Callable[[EvictedAt], WithChance]:
        read = trace.read("k", slice(layer, layer + 1))[0]
        return key_similarity(read.to(device, torch.float64).cpu().numpy())

    return by_layer(records, of_layer, lambda record, at, of: of(record.gone_after[at]))
