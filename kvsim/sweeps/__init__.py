"""Policies times budgets times traces."""

from kvsim.core.arguments import resolve_budget
from kvsim.sweeps.driver import replay_all
from kvsim.sweeps.outcome import Failure, Run
from kvsim.sweeps.parts import check_output
from kvsim.sweeps.run import SUMMARY, shared_prefill, summarise

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
