"""Random eviction: a random set of entries, drawn anew at every event; the baseline.

`random@prompt` draws only from the response: the prompt and the last `recent` entries stay, and a
uniformly random set of the rest, independently for each layer and head.

This follows the Random Attention (arXiv 2609.03430) of randkv 0.1.0 (PyPI). Deviations. The paper
and its authors' code could not be read. randkv draws from another generator, so that sets agree in
distribution. Its K entries do not count the recent ones: give a budget of K + recent. Its first
event is at the row that exceeds the budget, and events come before a row attends; here events come
after each row, from the end of the prompt on.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import AtLeast
from kvsim.core.pieces import Scorer
from kvsim.core.view import View


class Random(Scorer):
    """A uniformly random set, drawn anew at every event, independently for each head.

    The score of an entry is a hash of (seed, layer, row, head, position): SplitMix64 (Steele, Lea
    and Flood 2014, doi 10.1145/2660193.2660195) folded over the five numbers. So a draw depends
    only on these, not on block size, order of layers, budget or process.
    """

    seed: int = 0

    label: ClassVar[str] = "random"
    per_row: ClassVar[bool] = True

    def score(self, view: View) -> Tensor:
        """Uniform in [0, 1), 53 bits, float64; [L, H, n]."""
        heads = torch.arange(view.pos.shape[1], device=view.pos.device)
        state = torch.full_like(view.layers, _signed(self.seed)).view(-1, 1, 1)
        for part in (view.layers.view(-1, 1, 1), view.row, heads.view(1, -1, 1), view.pos):
            state = _splitmix(state) ^ part
        return _shift(_splitmix(state), 11).double() / 2.0**53


class RandomResponse(Random):
    """Random draws from the response; the prompt and the last entries stay."""

    recent: Annotated[int, AtLeast(0)] = 64
    protect_prompt: bool = True


def _splitmix(z: Tensor) -> Tensor:
    """One SplitMix64 step on int64, whose products wrap as unsigned ones do."""
    z = z + _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's is arithmetic."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """The int64 with the bits of value mod 2**64."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
