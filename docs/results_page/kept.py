"""What a kept set says: regions wiped out, gaps, places, likeness, punctuation."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from kvsim import Record, Trace
from kvsim.metrics import retained_iou, retention_lift, wipeout
from kvsim.metrics.catalogue import mean_known
from kvsim.metrics.values import value_norm_overlaps
from results_page.policies import LARGEST

LENGTHS, THRESHOLDS = (8, 16, 32, 64), (0.0, 0.1)


def of_record(trace: Trace, one: Record) -> Iterator[tuple[str, float]]:
    """What a kept set says, after the last event that evicted."""
    layers = list(one.gone_after)
    for length in LENGTHS:
        for threshold in THRESHOLDS:
            rates = [wipeout(x, length, threshold).cumulative[:, -1:] for x in layers]
            mean = float(mean_known(np.concatenate([rate.ravel() for rate in rates])))
            yield f"wipeout {length} {threshold:g}", mean if one.events else 0.0
    for layer, evicted_at in enumerate(layers):
        iou = retained_iou(evicted_at).iou
        yield f"retained_iou {layer}", float(iou.mean()) if iou.size else np.nan
    last = one.events[-1] if one.events else one.n_pos - 1
    held = one.retained(last)[..., : last + 1]  # [L, H, N]
    n = last + 1
    pos = np.arange(n)
    middle = (pos + 0.5 >= n / 3) & (pos + 0.5 < 2 * n / 3)
    yield "middle coverage", float(held[..., middle].mean())
    before = np.maximum.accumulate(np.where(held, pos, -1), axis=-1)
    yield "longest run", float((pos - before).max(-1).mean())
    x = np.sort(np.nonzero(held)[2] / (n - 1))
    yield "mean place", float(x.mean())
    rank = np.arange(len(x) + 1) / len(x)
    yield "distance from uniform", float(np.maximum(rank[1:] - x, x - rank[:-1]).max())
    old = n - one.budget // 2  # what is not among H2O's recent entries
    heavy = np.nonzero(held[..., :old])[2]
    yield "mean place of older", float(heavy.mean() / (old - 1)) if len(heavy) else np.nan
    yield "similarity", _similarity(trace, held)
    yield "punctuation", _punctuation(trace, one, last)
    yield "norm overlap", _norm_overlap(trace, one)


def _similarity(trace: Trace, held: NDArray[np.bool_]) -> float:
    """Mean cosine between two kept keys of a head."""
    if held.shape[1] != trace.n_heads:
        return np.nan
    keys = torch.nn.functional.normalize(trace.k[:, :, : held.shape[-1]], dim=-1).double().numpy()
    total = (held[..., None, :] @ keys)[..., 0, :]
    count = held.sum(-1)
    return float((((total**2).sum(-1) - count) / (count * (count - 1)).clip(1)).mean())


def _punctuation(trace: Trace, one: Record, row: int) -> float:
    """Share of punctuation kept in the last layer over the share of everything, less 1."""
    if trace.token_text is None:
        return np.nan
    # windows are kept whatever is in them
    found = retention_lift(trace, one, one.layers[-1], row, recent=LARGEST["window"])
    heads = one.evicted_at.shape[1]
    marks = found.filter(pl.col("token").is_in([".", ",", ";", ":"]))
    if not marks["count"].sum() or not found["retained"].sum():
        return np.nan
    rates = [x["retained"].sum() / (x["count"].sum() * heads) for x in (marks, found)]
    return float(rates[0] / rates[1] - 1)


def _norm_overlap(trace: Trace, one: Record) -> float:
    """Share of the kept entries behind the sinks that the norm of the value alone would keep."""
    (found,) = value_norm_overlaps(trace, [one])
    return float(np.mean([of_layer.overlap for of_layer in found]))
