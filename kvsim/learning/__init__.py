"""Scorers that are learned from traces: `kvsim learn`.

`lessons` has what the optimum teaches of each entry, `training` fits a network to it, `learn` does
both on some prompts and compares the outcome with other policies on the rest.
"""

from kvsim.learning.learn import Learning, learn

__all__ = ["Learning", "learn"]
