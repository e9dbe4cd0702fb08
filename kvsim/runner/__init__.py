"""Running a model's layers under a policy.

`decoder` computes single decoder layers on rows at any positions, `prefill` what a prefill that
drops rows computes behind its first selection, `masked` the logits of a model whose rows see what
Records left them.
"""

from kvsim.runner.masked import masked_logits
from kvsim.runner.prefill import Recomputed, recompute

__all__ = ["Recomputed", "masked_logits", "recompute"]
