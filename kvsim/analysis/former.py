"""Names of the last release, which work for one more with a DeprecationWarning.

`kvsim.analysis` finds them here. This file is removed in the release after this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from kvsim.analysis.arrays import Floats
from kvsim.analysis.attention.expectation import ORDERS, REMOVED, STEPS, TOP, Expectation
from kvsim.analysis.definition import Metric
from kvsim.analysis.registry import METRICS
from kvsim.analysis.subject import SHARES, Analysis
from kvsim.analysis.table import Progress, measure
from kvsim.analysis.wide import wide
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


def expectation_table(found: Sequence[Expectation]) -> pl.DataFrame:
    """Return agreement with observed attention, one row per trace, step and query head."""
    recalls = {f"recall_{100 * share:.0f}": share for share in TOP}
    values = [
        {"spearman": x.spearman, "log_pearson": x.log_pearson}
        | {name: x.recall(share) for name, share in recalls.items()}
        for x in found
    ]
    return _table(found, values, "step", STEPS, ("spearman", "log_pearson", *recalls))


def loss_table(found: Sequence[Expectation], removed: Sequence[float] = REMOVED) -> pl.DataFrame:
    """Return attention lost, one row per trace, order, query head and share of keys removed."""
    losses = [x.loss(removed) for x in found]
    values = [{"removed": np.broadcast_to(removed, loss.shape), "loss": loss} for loss in losses]
    return _table(found, values, "order", ORDERS, ("removed", "loss"))


def _table(
    found: Sequence[Expectation],
    values: Sequence[Mapping[str, Floats]],
    first: str,
    names: Sequence[str],
    numbers: Sequence[str],
) -> pl.DataFrame:
    """Return the values, arrays [name, layer, qhead, ...] of each expectation, in columns."""
    of_trace = ("trace", "task", "cut", "rows", "keys")
    columns: dict[str, Any] = dict.fromkeys(of_trace[:2], pl.String)
    columns |= dict.fromkeys((*of_trace[2:], "layer", "head", "qhead"), pl.Int64)
    columns |= {first: pl.Enum(names)} | dict.fromkeys(numbers, pl.Float64)
    parts: list[dict[str, Any]] = []
    for x, arrays in zip(found, values, strict=True):
        name, layer, qhead, *_ = np.indices(arrays[numbers[-1]].shape)
        places = {first: np.asarray(names)[name], "layer": layer, "qhead": qhead}
        part = {column: getattr(x, column) for column in of_trace} | places | {**arrays}
        parts.append(part | {"head": qhead // x.group, "fidelity": "exact"})
    return wide(parts, columns | {"fidelity": pl.Enum(FIDELITY)})
