"""Policies times budgets times traces."""

import warnings

from kvsim.core.arguments import resolve_budget
from kvsim.sweeps.outcome import Failure, Run
from kvsim.sweeps.parts import check_output
from kvsim.sweeps.run import SUMMARY, replay_all, shared_prefill, summarise

__all__ = [
    "SUMMARY",
    "Failure",
    "Run",
    "check_output",
    "replay_all",
    "resolve_budget",
    "shared_prefill",
    "summarise",
]


def __getattr__(name: str) -> object:
    """Return `replay_all` by its former name, `sweep`, for one release."""
    if name != "sweep":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        "kvsim.sweeps.sweep is kvsim.sweeps.replay_all now; for grids there is kvsim.sweep",
        DeprecationWarning,
        stacklevel=2,
    )
    return replay_all
