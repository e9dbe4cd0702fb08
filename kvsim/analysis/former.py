"""Names of the last release, which work for one more with a DeprecationWarning.

`kvsim.analysis` finds them here. This file is removed in the release after this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from kvsim.analysis.attention.expectation import ORDERS, REMOVED, STEPS, TOP, Expectation
from kvsim.analysis.definition import Metric
from kvsim.analysis.registry import METRICS
from kvsim.analysis.subject import SHARES, Analysis
from kvsim.analysis.table import Progress, measure
from kvsim.analysis.wide import places, wide
from kvsim.core.trace import Trace
from kvsim.policies.asl import ASL, Selecting
from kvsim.schema import FIDELITY

#: What to use instead.
INSTEAD = {
    "FINDINGS": "METRICS, entries of kind 'trace'",
    "Finding": "Metric",
    "findings": "measure(trace), or measure(Analysis(trace, ks=...), metrics=[...])",
    "expectation_table": "measure(trace, metrics=['expectation_steps', 'expectation_logs', "
    "'expectation_recall'])",
    "loss_table": "measure(trace, metrics=['attention_loss'])",
}

Finding = Metric

_NAMES = (
    *("expectation", "expectation_steps", "projection_gap", "normal_distance"),
    *("rank_variance", "rank_relative", "rank_union", "layer_entropy", "selection_layer"),
    "score_decline",
)
FINDINGS: Mapping[str, Metric] = {name: METRICS[name] for name in _NAMES}


def findings(
    trace: Trace,
    names: Sequence[str] | None = None,
    *,
    ks: Sequence[int | str] = SHARES,
    rule: Selecting | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> pl.DataFrame:
    """Return a Table of some metrics of a trace alone."""
    analysis = Analysis(trace, ks, ASL() if rule is None else rule, device)
    return measure(analysis, metrics=_NAMES if names is None else names, progress=progress)


_COLUMNS: dict[str, Any] = {
    **dict.fromkeys(("trace", "task"), pl.String),
    **dict.fromkeys(("cut", "rows", "keys", "layer", "head", "qhead"), pl.Int64),
}
_FIDELITY = {"fidelity": pl.Enum(FIDELITY)}


def expectation_table(measured: Sequence[Expectation]) -> pl.DataFrame:
    """Return agreement with observed attention, one row per trace, step and query head."""
    recalls = {f"recall_{100 * share:.0f}": share for share in TOP}
    parts = (
        _shared(x, (*x.observed.shape[:2], 1))
        | {"step": step, "spearman": x.spearman[at], "log_pearson": x.log_pearson[at]}
        | {name: x.recall(share)[at] for name, share in recalls.items()}
        for x in measured
        for at, step in enumerate(STEPS)
    )
    numbers = dict.fromkeys(("spearman", "log_pearson", *recalls), pl.Float64)
    return wide(parts, _COLUMNS | {"step": pl.Enum(STEPS)} | numbers | _FIDELITY)


def loss_table(measured: Sequence[Expectation], removed: Sequence[float] = REMOVED) -> pl.DataFrame:
    """Return attention lost, one row per trace, order, query head and share of keys removed."""
    parts = (
        _shared(x, loss.shape)
        | {"order": order, "removed": np.broadcast_to(removed, loss.shape), "loss": loss}
        for x in measured
        for order, loss in zip(ORDERS, x.loss(removed), strict=True)
    )
    numbers = dict.fromkeys(("removed", "loss"), pl.Float64)
    return wide(parts, _COLUMNS | {"order": pl.Enum(ORDERS)} | numbers | _FIDELITY)


def _shared(x: Expectation, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the columns of rows [layer, qhead, n] that both tables have."""
    return {**vars(x), **places(shape, x.group, "place"), "keys": x.keys}
