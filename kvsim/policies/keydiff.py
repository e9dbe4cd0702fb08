"""KeyDiff: keeps the keys that point away from the others.

Park et al., "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
Resource-Constrained Environments", arXiv 2504.15364. The anchor is the mean of the normalised keys
in the cache. A key scores higher the less similar it is to the anchor: s_j = -cos(k_j, anchor).
Keys are taken as they are cached, after the rotary embedding.

Deviations. The paper prefills in blocks and evicts after each of them; here an event sees the whole
cache. `keydiff@vllm` has the schedule of vLLM's pull request 56673 (commit c49733a), mode
"full_replacement", which keeps int(tokens so far * (1 - ratio)) entries: a budget such as
`30%so-far`. Its mode "filtering" is left out: there each new entry is accepted or refused once, and
older ones stay for good. The rank that a new one must reach is round(tokens so far * (1 - ratio)).
It would need an allocator that evicts only the newest entry, and a budget with another rounding.
"""

from __future__ import annotations

from kvsim.core.lazy import Tensor, torch
from kvsim.core.pieces import Scorer
from kvsim.core.view import View


class KeyDiff(Scorer):
    """Distance in angle from the mean direction of the keys."""

    scale = "signed"

    def score(self, view: View) -> Tensor:
        """s_j = -cos(k_j, a) with a = mean over live entries of k_i / ||k_i||; [L, H, n]."""
        keys = view.keys  # 0 on pads, which add nothing to the sum
        total = torch.nn.functional.normalize(keys, dim=-1, eps=1e-12).sum(2)
        anchor = total / view.count.unsqueeze(-1).clamp(min=1)  # [L, H, d]
        return -torch.nn.functional.cosine_similarity(keys, anchor.unsqueeze(2), dim=-1, eps=1e-8)
