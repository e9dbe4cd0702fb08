"""KVQuant (Hooper et al. 2024, arXiv 2401.18079), in part: stores outliers exactly."""

from __future__ import annotations

from typing import Annotated

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import AtLeast, AtMost
from kvsim.core.storing import Clock, SplitQuantizer
from kvsim.policies.kivi import between_limits


class KVQuant(SplitQuantizer):
    """Rounds keys by channel and values by token, except for a few outliers of each.

    A vector is a channel of `group` keys (after RoPE) or a token's value. The share `outliers` of
    its numbers, the farthest from its median, is stored separately in 16 bits, with 16 bits for
    their place (per-vector dense-and-sparse quantization, section 3.4). The lower of two medians
    counts; of equally far numbers, the earlier. The others are rounded to the nearest of 2^bits
    levels between their smallest and largest. `group` exact keys are collected before they are
    rounded together; values are rounded one by one.

    Deviations: the paper rounds keys before RoPE, to levels that k-means finds on calibration texts
    with the sensitivity of the loss, with limits of keys from the same texts, and stores the first
    token exactly. Here every text has its own limits and evenly spaced levels; limits have the
    precision of the trace. The paper's vectors of values span all heads, here one, so that few
    channels round `outliers` to a whole number.
    """

    bits_per_number: Annotated[int, AtLeast(1)] = 3
    outliers: Annotated[float, AtLeast(0), AtMost(0.5)] = 0.01
    group: Annotated[int, AtLeast(1)] = 128

    @property
    def clocks(self) -> tuple[Clock, Clock]:
        """Keys leave in groups, values one by one."""
        return Clock(step=self.group, group=self.group), Clock()

    def round_keys(self, groups: Tensor, bits: int) -> Tensor:
        """Keys [N, g, d]: each channel by itself."""
        return self.round_values(groups.mT, bits).mT.contiguous()

    def round_values(self, groups: Tensor, bits: int) -> Tensor:
        """Values [N, 1, d]: each token by itself."""
        x, median = groups, groups.median(-1, keepdim=True).values
        order = (x - median).abs().argsort(dim=-1, descending=True, stable=True)
        apart = torch.zeros_like(x, dtype=torch.bool)
        apart.scatter_(-1, order[..., : self._count(x.shape[-1])], True)  # noqa: FBT003 - a value
        out: Tensor = between_limits(median.where(apart, x), -1, bits)
        return x.where(apart, out)

    def _count(self, numbers: int) -> int:
        return round(self.outliers * numbers)

    def size(self, dim: int, bits: int) -> tuple[float, float]:
        """Bits of the numbers, 32 for the limits of each vector, and 32 for each outlier."""
        of_key = dim * (bits + 32 * (1 + self._count(self.group)) / self.group)
        return of_key, dim * bits + 32.0 * (1 + self._count(dim))
