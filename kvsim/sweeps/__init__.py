"""Policies times budgets times traces."""

from kvsim.sweeps.outcome import Failure, Run
from kvsim.sweeps.parts import check_output
from kvsim.sweeps.run import SUMMARY, resolve_budget, shared_prefill, summarise, sweep

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
