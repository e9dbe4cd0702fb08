"""Policies times budgets times traces."""

from kvsim.sweeps.run import (
    SUMMARY,
    Failure,
    Run,
    check_output,
    resolve_budget,
    shared_prefill,
    summarise,
    sweep,
)

__all__ = [
    "SUMMARY",
    "Failure",
    "Run",
    "check_output",
    "resolve_budget",
    "shared_prefill",
    "summarise",
    "sweep",
]
