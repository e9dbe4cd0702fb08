"""ThinK (Xu et al., ICLR 2025, arXiv 2407.21018): prunes the least important channels of keys."""

from __future__ import annotations

from typing import Annotated

from kvsim.core.lazy import Tensor
from kvsim.core.parameters import AtLeast, Below
from kvsim.core.pieces import Inputs
from kvsim.core.reading import highest
from kvsim.core.storing import Clock, Quantizer


class ThinK(Quantizer):
    """After the prompt, each head prunes the channels that matter least to its last queries.

    A channel i scores ||q_i k_i^T||_F = ||q_i|| ||k_i||, with q_i its numbers in the last `window`
    queries (after RoPE), and k_i in all resident keys. The floor(`pruned` d) channels with the
    lowest scores are not stored; of equal ones the first stay. The `recent` last keys, keys of the
    response, and values keep all channels. `pruned` is the paper's lambda; defaults are those of
    the authors' code (SalesforceAIResearch/ThinK).

    Deviations. Query heads of a KV head share its channels, by the norm over all of them, as in
    kvpress; the authors' code repeats keys for each query head, and prunes each copy by itself.
    `@kvpress` prunes the recent keys, too. The mask, d bits for a head, does not count as bytes.
    Left out: pruned values, and pruned keys that are also rounded, both tried in the paper.
    """

    pruned: Annotated[float, AtLeast(0), Below(1)] = 0.4
    window: Annotated[int, AtLeast(1)] = 32
    recent: Annotated[int, AtLeast(0)] = 32

    @property
    def clocks(self) -> tuple[Clock, Clock]:
        """All keys of the prompt but the recent ones leave at once; values stay exact."""
        return (Clock(self.recent, once=True),) * 2

    @property
    def reads(self) -> Inputs:
        """The last queries of the prompt."""
        return Inputs(last=self.window)

    def channels(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Channels with the largest products of both norms, bool [H, d]."""
        score = queries.double().square().sum((1, 2)) * keys.double().square().sum(1)
        return highest(score, self._kept(score.shape[-1]))

    def _kept(self, dim: int) -> int:
        return dim - int(dim * self.pruned)

    def keys(self, groups: Tensor) -> Tensor:
        """Keys [N, 1, d] as they are; `channels` prunes them."""
        return groups

    def bits(self, dim: int) -> tuple[float, float]:
        """16 bits for each number of a stored channel."""
        return 16.0 * self._kept(dim), 16.0 * dim
