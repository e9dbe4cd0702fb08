"""Policies times budgets times traces."""

from kvsim.sweeps.driver import replay_all
from kvsim.sweeps.folder import Run

__all__ = ["Run", "replay_all"]
