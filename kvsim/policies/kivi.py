"""KIVI (Liu et al. 2024, arXiv 2402.02750): keys in few bits per channel, values per token."""

from __future__ import annotations

from typing import Annotated

from kvsim.core.lazy import Tensor
from kvsim.core.parameters import AtLeast
from kvsim.core.storing import Clock, SplitQuantizer


class Kivi(SplitQuantizer):
    """Rounds keys in groups of tokens by channel, and values by token.

    Numbers are rounded to the nearest of 2^bits levels between the smallest and the largest value
    of a group (section 3.1). A group of keys (after RoPE) is one channel of `group` tokens; exact
    keys are collected until there are `window` of them, which are then rounded together. A group of
    values is `group` channels of one token; the `window` most recent values stay exact (section
    3.3, Algorithm 1). Rounding happens after the row at which it is due, so this row still sees
    exact numbers. Smallest value and step are stored in 16 bits. In the paper's experiments `group`
    is 32 and `window` 128.

    Deviations: limits have the precision of the trace, not fp16. After an eviction, a group of keys
    has the `group` oldest exact resident entries, even with evicted ones between them; the paper
    evicts nothing.
    """

    bits_per_number: Annotated[int, AtLeast(1)] = 2
    group: Annotated[int, AtLeast(1)] = 32
    window: Annotated[int, AtLeast(1)] = 128

    @property
    def clocks(self) -> tuple[Clock, Clock]:
        """Keys leave in windows, values one by one."""
        return Clock(step=self.window, group=self.group), Clock(exact=self.window)

    @property
    def block(self) -> int:
        """Channels of a value that are rounded together."""
        return self.group

    def round_keys(self, groups: Tensor, bits: int) -> Tensor:
        """Keys [N, g, d]: each channel of a group by itself."""
        return between_limits(groups, 1, bits)

    def round_values(self, groups: Tensor, bits: int) -> Tensor:
        """Values [N, 1, d]: `group` channels of a token by themselves."""
        parts = groups.unflatten(-1, (-1, min(self.group, groups.shape[-1])))
        out: Tensor = between_limits(parts, -1, bits).flatten(-2)
        return out

    def size(self, dim: int, bits: int) -> tuple[float, float]:
        """Bits of the numbers, and 32 for each group of them."""
        return dim * (bits + 32 / self.group), dim * (bits + 32 / min(self.group, dim))


def between_limits(x: Tensor, dim: int, bits: int) -> Tensor:
    """Round x to 2^bits levels between its smallest and its largest value along a dimension."""
    low, high = x.aminmax(dim=dim, keepdim=True)
    step = (high - low) / (2**bits - 1)
    level = ((x - low) / step).round_().nan_to_num_(0.0)  # equal numbers have no step
    out: Tensor = level.mul_(step).add_(low)
    return out
