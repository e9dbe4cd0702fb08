"""Names of the last release, which work for one more with a DeprecationWarning.

`kvsim.analysis` finds them here. This file is removed in the release after this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

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

    def parts() -> Iterator[dict[str, Any]]:
        for one in found:
            values = {"spearman": one.spearman, "log_pearson": one.log_pearson}
            values |= {name: one.recall(share) for name, share in recalls.items()}
            yield _places(one, one.spearman.shape, "step", STEPS) | values

    return wide(parts(), _columns("step", STEPS, "spearman", "log_pearson", *recalls))


def loss_table(found: Sequence[Expectation], removed: Sequence[float] = REMOVED) -> pl.DataFrame:
    """Return attention lost, one row per trace, order, query head and share of keys removed."""

    def parts() -> Iterator[dict[str, Any]]:
        for one in found:
            loss = one.loss(removed)
            shares = np.broadcast_to(np.asarray(removed), loss.shape)
            yield _places(one, loss.shape, "order", ORDERS) | {"loss": loss, "removed": shares}

    return wide(parts(), _columns("order", ORDERS, "removed", "loss"))


_OF_TRACE = ("trace", "task", "cut", "rows", "keys")


def _columns(first: str, names: Sequence[str], *values: str) -> dict[str, Any]:
    columns: dict[str, Any] = dict.fromkeys(_OF_TRACE[:2], pl.String)
    columns |= dict.fromkeys((*_OF_TRACE[2:], "layer", "head", "qhead"), pl.Int64)
    columns |= {first: pl.Enum(names)} | dict.fromkeys(values, pl.Float64)
    return columns | {"fidelity": pl.Enum(FIDELITY)}


def _places(
    one: Expectation, shape: tuple[int, ...], first: str, names: Sequence[str]
) -> dict[str, Any]:
    at = np.indices(shape)  # [name, layer, qhead, ...]
    places = {first: np.asarray(names)[at[0]], "layer": at[1], "qhead": at[2]}
    of_trace = {name: getattr(one, name) for name in _OF_TRACE}
    return of_trace | places | {"head": at[2] // one.group, "fidelity": "exact"}
