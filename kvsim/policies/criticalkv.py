"""CriticalKV: keeps a scorer's best entries, then those with the largest effect on the output.

Feng et al., "Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective",
arXiv 2502.03805. The first stage gives a share of the budget (`first_stage`, by default half) to
the best entries of the scorer. The rest goes to the entries with the largest products of score and
projected value, (s_j + epsilon) ||W_o v_j||_1, averaged over the query heads of the group, with W_o
the output projection; where the model multiplies the output by a gate first, its mean over the
prompt is part of W_o.

Deviations. Entries that the scorer protects come first and count in the first stage. Where they
fill it, or its share is below one entry, the second stage chooses all others. Scores that can be
negative enter as s - min s. Under an allocator the first stage is a share of the head's uniform
budget. With a scorer that already multiplies by the norm of the value, such as expected_attention,
prefer `value_norm="none"`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from typing import Annotated, ClassVar

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import AtLeast, Between, Finite
from kvsim.core.pieces import Inputs, Scores, Wrapper, protected_by
from kvsim.core.select import select
from kvsim.core.view import LOGIT_BYTES, View
from kvsim.policies.gkv import check_sign


class CriticalKV(Wrapper):
    """The best `first_stage` of the budget by the scorer; the rest by score times value."""

    epsilon: Annotated[float, AtLeast(0), Finite()] = 1e-4
    first_stage: Annotated[float, Between(0, 1)] = 0.5

    @property
    def reads(self) -> Inputs:
        """The needs of the scorer, and the output projection."""
        reads: Inputs = self.scorer.reads
        return reads | Inputs(arrays=frozenset({"o_proj"}))

    #: the projected size of the stored value
    adds: ClassVar[Mapping[str, float]] = {"projected": nan}

    def score(self, view: View) -> Scores:
        """1 to 2 for the first stage, by the scorer; 0 to 1/2 for the rest; float64 [L, H, n]."""
        inner = self.inner(view)
        live, kept = view.live, protected_by(self.scorer.protection, view)
        scores = inner.values.double()
        check_sign("criticalkv", self.scorer, scores, live & ~kept)
        if self.scorer.scale == "signed":  # protected entries may have no score
            least = scores.masked_fill(~live | kept, torch.inf).amin(-1, keepdim=True)
            scores = (scores - least).clamp(min=0.0)
        scores = scores.where(live, 0.0)
        share = (view.budget.double() * self.first_stage).long().expand_as(view.count)  # [L, H]
        first = select(scores, share, kept, live)
        size = _projected(view)
        sized = (scores + self.epsilon) * size
        values = (1 + _of_largest(scores)).where(first, _of_largest(sized) / 2)
        return Scores(values, {**inner.columns, "projected": size})


def _projected(view: View) -> Tensor:
    """`projected_size` of new entries, or of all where values may have been rounded since."""
    norms = view["projected"]
    new = int((norms.isnan() & view.live).sum(-1).max())  # the last ones of each head
    old = 0 if view.rounded else norms.shape[-1] - new
    return torch.cat(
        [norms[..., :old], projected_size(view.values[:, :, old:], view.array("o_proj"))], -1
    )


def projected_size(values: Tensor, o_proj: Tensor) -> Tensor:
    """Mean over the group of ||W_o v||_1: values [L, H, n, d], o_proj [L, H, G, d, D]; [L, H, n].

    A block of entries at a time.
    """
    layers, heads, groups, _, hidden = o_proj.shape
    step = max(1, LOGIT_BYTES // (layers * heads * groups * hidden * values.element_size()))
    wide = o_proj.transpose(2, 3).flatten(3)  # [L, H, d, G * D]
    parts = [(part @ wide).abs_().sum(-1) for part in values.split(step, dim=2)]
    return torch.cat(parts, dim=-1) / groups


def _of_largest(x: Tensor) -> Tensor:
    """x [L, H, n] >= 0 relative to the layer's largest, which keeps the order across heads."""
    largest = x.amax((1, 2), keepdim=True)
    return x / largest.masked_fill(largest == 0, 1.0)
