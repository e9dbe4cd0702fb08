"""Policies times budgets times traces."""

from kvsim.analysis.overview import SUMMARY, summarise
from kvsim.core.arguments import resolve_budget
from kvsim.sweeps.driver import replay_all
from kvsim.sweeps.outcome import Failure, Run
from kvsim.sweeps.output import check_output
from kvsim.sweeps.terms import shared_prefill

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
