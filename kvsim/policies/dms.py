"""DMS: an entry leaves if its score is below a threshold when it has reached an age.

Łańcucki et al., "Inference-Time Hyper-Scaling with KV Cache Compression", NeurIPS 2025, arXiv
2506.05345. Every token is kept for `window` rows. When it leaves this window, its entry is evicted
for good if its score is below `threshold`, and otherwise stays for good. So each head's cache size
depends on the text, and `budget` is ignored. KVzap (arXiv 2601.07891) applies the same rule to a
score that approximates KVzip's. With `window=0`, an event admits or rejects all new entries. The
threshold is on the scale of the scorer, which may be negative.

Deviations. The papers train their scores. DMS trains a channel of the key, together with the model.
KVzap trains a small network on hidden states; its target is KVzip's score times ||W_o v||, divided
by the norm of the hidden state. Here any scorer takes its place, so results say nothing about the
trained ones. `dms+kvzip` has KVzap's target without these norms, which a trace does not hold for
rows that repeat the context; `dms+criticalkv+kvzip` has the first of them. DMS decides when the
token is new, and acts when it leaves the window. Here the score counts at the first event after the
entry left the window, as in DMSPress of kvpress around a score that does not change.

KVzap's trained map is not a scorer here, because a running model passes no residual stream to
scorers. A trace with `residual` (`kvsim capture --residual`) holds its input, up to the weights of
a norm. We learned such a linear map by ridge regression on 700 tokens of SmolLM2, with log scores
of `kvzip` as target. On another text its rank correlation with them was 0.60 in a head, and 0.58 of
the best quarter were the same entries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar

from kvsim.core.lazy import Tensor
from kvsim.core.parameters import AtLeast, Finite
from kvsim.core.pieces import Allocator, Plan
from kvsim.core.view import View
from kvsim.policies.window import Windowed


class DMS(Allocator):
    """Entries at or above the threshold, decided once; `admitted` is 1 for entries that stay."""

    threshold: Annotated[float, Finite()] = 0.01
    window: Annotated[int, AtLeast(0)] = 128

    columns: ClassVar[Mapping[str, float]] = {"admitted": math.nan}
    effect = "rule"

    def plan(self, view: View, scores: Tensor, protected: Tensor) -> Plan:
        """Mark entries that are protected, admitted, or at or above the threshold; [L, H, n]."""
        admitted = view["admitted"]
        new = view.live & ~protected & admitted.isnan() & (scores >= self.threshold)
        admitted = admitted.masked_fill(new, 1.0)
        stay = view.live & (protected | admitted.isfinite())
        return Plan(stay.sum(-1), eligible=stay, columns={"admitted": admitted})

    protection = Windowed.protection
