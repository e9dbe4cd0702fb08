"""q8_0 and q4_0: the blocks of 32 channels in which llama.cpp stores a cache (-ctk, -ctv)."""

from __future__ import annotations

from typing import ClassVar, Literal

from kvsim.core.lazy import Tensor, torch
from kvsim.core.pieces import Run
from kvsim.core.storing import SplitQuantizer, check_channels
from kvsim.policies.turboquant import orthogonal, product

#: Channels of a block, and of the smallest matrix that rotates a head.
_BLOCK, _ROTATED = 32, 64
_LARGEST = 65504.0  # of float16


class Blocks(SplitQuantizer):
    """Each 32 channels of a token are integers with a scale d in 16 bits (ggml, MIT licence).

    q8_0: d = max |x| / 127, codes are x * (1 / d), halves away from 0. q4_0: d is the number of
    largest magnitude, the first of equals, over -8; codes are x * (1 / d) + 8.5 without its
    fraction, at most 15, minus 8. A number is its code times d, d rounded to 16 bits only there.
    This is `quantize_row_q8_0_ref` and `quantize_row_q4_0_ref` of ggml-quants.c, and `gguf.quants`.
    `bits_per_number` 8 is q8_0, 4 is q4_0: `-ctk q8_0 -ctv q4_0` is `q8_0` with `v_bits` 4.

    `rotated` (`@rotated`): as llama.cpp does unless told not to (pull request 21038, April 2026;
    LLAMA_ATTN_ROT_DISABLE), a head of a multiple of 64 channels is multiplied by a normalized
    Hadamard matrix before, and back after: keys in the largest parts that are a power of two,
    values in parts of 64. Other heads are stored as they are.

    Deviations: the AVX kernel of q8_0 divides 127 by max |x| and rounds halves to even; of 181,248
    keys one code differs. Kernels on a CPU also round the query to q8_0 for its products with
    keys; here it stays exact. A scale beyond 65,504 is 65,504, not infinite. llama.cpp refuses
    heads that blocks do not divide; here a head below 32 channels is a block.
    """

    label: ClassVar[str] = "q8_0"
    choices = (4, 8)

    bits_per_number: Literal[8, 4] = 8
    rotated: bool = False

    def check(self, run: Run) -> None:
        """Raise PolicyError where a head has no whole blocks."""
        super().check(run)
        for dim in run.dims:
            check_channels(self.label, dim, min(_BLOCK, dim))

    def round_keys(self, groups: Tensor, bits: int) -> Tensor:
        """Keys [N, 1, d], each block by itself."""
        dim = groups.shape[-1]
        return self._rounded(groups, bits, dim & -dim)

    def round_values(self, groups: Tensor, bits: int) -> Tensor:
        """Values [N, 1, d], each block by itself."""
        return self._rounded(groups, bits, _ROTATED)

    def _rounded(self, groups: Tensor, bits: int, part: int) -> Tensor:
        x = groups.float()
        if not self.rotated or x.shape[-1] % _ROTATED:
            return blocks(x, bits).to(groups.dtype)
        matrix = torch.from_numpy(orthogonal(part, "hadamard", 0)).to(x)
        x = product(x.unflatten(-1, (-1, part)), matrix)
        out = product(blocks(x, bits), matrix)
        return out.flatten(-2).to(groups.dtype)

    def size(self, dim: int, bits: int) -> tuple[float, float]:
        """Bits of the numbers, and 16 for each block."""
        both = float(bits * dim) + 16 * dim / min(_BLOCK, dim)
        return both, both


def blocks(x: Tensor, bits: int) -> Tensor:
    """float32 numbers [..., d] after the round trip through q8_0 or q4_0."""
    x = x.unflatten(-1, (-1, min(_BLOCK, x.shape[-1])))
    size = x.abs()
    if bits == 8:
        d = size.amax(-1, keepdim=True) / 127
        scaled = x * d.reciprocal().where(d > 0, 0.0)
        whole = scaled.abs().floor()
        code = (whole + (2 * (scaled.abs() - whole)).floor()) * scaled.sign()
    else:
        d = x.gather(-1, size.argmax(-1, keepdim=True)) / -8
        code = (x * d.reciprocal().where(d != 0, 0.0) + 8.5).trunc().clamp(0, 15) - 8
    scale = d.clamp(-_LARGEST, _LARGEST).half().float()
    out: Tensor = ((code + 0.0).nan_to_num_(0.0, 0.0, 0.0) * scale).flatten(-2)  # 1 / d overflows
    return out
