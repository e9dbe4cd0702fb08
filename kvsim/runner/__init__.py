"""A model's computation under a policy.

decoder  single decoder layers, on rows at any positions
prefill  a prefill that drops rows, recomputed after its first selection
masked   the logits of a model whose rows see only the entries that a Record retains
"""

from kvsim.runner.masked import masked_logits
from kvsim.runner.prefill import Recomputed, recompute

__all__ = ["Recomputed", "masked_logits", "recompute"]
