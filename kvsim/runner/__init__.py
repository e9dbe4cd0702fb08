"""Running a model's layers under a policy.

`decoder` computes single decoder layers on rows at any positions, `prefill` what a prefill that
drops rows computes behind its first selection.
"""

from kvsim.runner.prefill import Recomputed, recompute

__all__ = ["Recomputed", "recompute"]
