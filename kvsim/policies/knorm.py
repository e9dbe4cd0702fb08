"""Knorm: keeps the keys with the smallest norms.

Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression", EMNLP 2024,
arXiv 2406.11430. Keys of small norm tend to receive much attention: s_j = -||k_j||.

Deviations. None. All layers are treated alike.
"""

from __future__ import annotations

from kvsim.core.lazy import Tensor, torch
from kvsim.core.pieces import Scorer
from kvsim.core.view import View


class Knorm(Scorer):
    """The norm of a key, the smaller the better."""

    scale = "signed"  # a norm counts against its entry

    def score(self, view: View) -> Tensor:
        """s_j = -||k_j||; [L, H, n]."""
        length: Tensor = torch.linalg.vector_norm(view.keys, dim=-1)
        return -length
