"""q8_0 and q4_0: llama.cpp's formats of blocks of 32 channels for the cache (-ctk, -ctv)."""

from __future__ import annotations

from typing import ClassVar, Literal

from kvsim.core.lazy import Tensor, torch
from kvsim.core.storing import SplitQuantizer
from kvsim.policies.turboquant import orthogonal, product

#: Channels of a block, and of the smallest matrix; the largest number of float16.
_BLOCK, _ROTATED, _LARGEST = 32, 64, 65504.0


class Blocks(SplitQuantizer):
    """Blocks of 32 channels: integers times a scale d in 16 bits (ggml, MIT licence).

    q8_0: d = max |x| / 127; codes are x * (1 / d), halves away from 0. q4_0: d is the number of
    largest magnitude, the first of equals, over -8; codes are min(trunc(x * (1 / d) + 8.5), 15) -
    8. Then d is rounded to 16 bits. This is the reference of ggml-quants.c and `gguf.quants`. `-ctk
    q8_0 -ctv q4_0` is `q8_0` with `v_bits` 4.

    `rotated`: llama.cpp's default since April 2026 (pull request 21038). A head of a multiple of 64
    channels is multiplied by a normalized Hadamard matrix before rounding, and back after it: keys
    in the largest parts that are a power of two, values in parts of 64. llama.cpp does so only if
    all layers of a cache have heads of one size.

    Deviations: the AVX kernel of q8_0 takes 127 / max |x| and rounds halves to even (of 181,248
    keys one code differs). On a CPU queries are rounded to q8_0, too; here they stay exact. A scale
    beyond float16 becomes 65,504, not infinity. llama.cpp refuses heads of under 32 channels.
    """

    label: ClassVar[str] = "q8_0"
    choices = (4, 8)
    block = _BLOCK

    bits_per_number: Literal[8, 4] = 8
    rotated: bool = False

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
            return _blocks(x, bits).to(groups.dtype)
        matrix = torch.from_numpy(orthogonal(part, "hadamard", 0)).to(x)
        x = product(x.unflatten(-1, (-1, part)), matrix)
        return product(_blocks(x, bits), matrix).flatten(-2).to(groups.dtype)

    def size(self, dim: int, bits: int) -> tuple[float, float]:
        """Bits of the numbers, and 16 for each block."""
        both = float(bits * dim) + 16 * dim / min(_BLOCK, dim)
        return both, both


def _blocks(x: Tensor, bits: int) -> Tensor:
    """float32 numbers [..., d] after the round trip."""
    x = x.unflatten(-1, (-1, min(_BLOCK, x.shape[-1])))
    size = x.abs()
    if bits == 8:
        d = size.amax(-1, keepdim=True) / 127
        x = x * d.reciprocal().where(d > 0, 0.0)
        size, whole = x.abs(), x.abs().floor()
        code = (whole + (2 * (size - whole)).floor()) * x.sign()
    else:
        d = x.gather(-1, size.argmax(-1, keepdim=True)) / -8
        code = (x * d.reciprocal().where(d != 0, 0.0) + 8.5).trunc().clamp(0, 15) - 8
    d = d.clamp(-_LARGEST, _LARGEST).half().float()
    out: Tensor = ((code + 0.0).nan_to_num_(0.0, 0.0, 0.0) * d).flatten(-2)  # 1 / d overflows
    return out
