"""Formats of serving engines: integers with a scale for each token, and short floats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import AtLeast, AtMost
from kvsim.core.storing import SplitQuantizer

#: Names of dtypes in torch, and their bits.
_FORMATS = {
    "e4m3": ("float8_e4m3fn", 8),
    "e5m2": ("float8_e5m2", 8),
    "fp16": ("float16", 16),
    "bf16": ("bfloat16", 16),
}
#: Channels of a block of NVFP4.
_BLOCK = 16


class Integers(SplitQuantizer):
    """Symmetric integers, with one scale for the key and one for the value of each head and token.

    scale = max |x| / (2^(bits - 1) - 1) over the channels, in 16 bits; x / scale is rounded to the
    nearest integer. No paper: the per-token format of engines for int8 and int4 caches.

    `window`: most recent entries that stay exact. A row's own entry is exact for this row.

    Deviation: scales have the precision of the trace, not fp16.
    """

    label: ClassVar[str] = "int8"
    choices = range(2, 16)

    bits_per_number: Annotated[int, AtLeast(2), AtMost(16)] = 8
    window: Annotated[int, AtLeast(0)] = 0

    def round_keys(self, groups: Tensor, bits: int) -> Tensor:
        """Numbers [N, 1, d], each token by itself."""
        largest = groups.abs().amax(-1, keepdim=True)
        scale = largest / (2 ** (bits - 1) - 1)
        out: Tensor = (groups / scale).round_().nan_to_num_(0.0).mul_(scale)
        return out

    def size(self, dim: int, bits: int) -> tuple[float, float]:
        """Bits of the numbers, and 16 for the scale."""
        both = float(dim * bits + 16)
        return both, both


class ShortFloats(SplitQuantizer):
    """Short floating-point numbers: round to nearest, clip to the largest.

    Without a scale, as vLLM stores an fp8 cache by default. The largest number is 448 for e4m3,
    which has no infinity, and 57,344 for e5m2 (arXiv 2209.05433, table 1).

    `window`: as of int8.
    """

    label: ClassVar[str] = "fp8"

    format: Literal["e4m3", "e5m2", "fp16", "bf16"] = "e4m3"
    window: Annotated[int, AtLeast(0)] = 0

    @property
    def choices(self) -> Sequence[int]:
        """Bits of the format."""
        return (_FORMATS[self.format][1],)

    def round_keys(self, groups: Tensor, bits: int) -> Tensor:
        """Numbers [N, 1, d]."""
        form = getattr(torch, _FORMATS[self.format][0])
        largest = torch.finfo(form).max
        out: Tensor = groups.clamp(-largest, largest).to(form).to(groups.dtype)
        return out

    def size(self, dim: int, bits: int) -> tuple[float, float]:
        """Bits of the numbers."""
        both = float(dim * bits)
        return both, both


class BlockFloats(SplitQuantizer):
    """NVFP4: 4-bit floating-point numbers, with a scale for each block of 16 channels.

    A number rounds to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with a sign (E2M1), ties to
    even. scale = max |x| / 6 over the block, rounded to an 8-bit float (E4M3). No paper: the format
    of NVIDIA's Blackwell, in TensorRT-LLM and vLLM (nvfp4).

    `window`: as of int8.

    Deviation: engines multiply all scales of a tensor by one more calibrated 32-bit number; here it
    is 1, as in an fp8 cache without calibration.
    """

    label: ClassVar[str] = "nvfp4"
    choices = (4,)
    block = _BLOCK

    window: Annotated[int, AtLeast(0)] = 0

    def round_keys(self, groups: Tensor, bits: int) -> Tensor:
        """Numbers [N, 1, d], each block by itself."""
        blocks = groups.unflatten(-1, (-1, min(_BLOCK, groups.shape[-1])))
        largest = blocks.abs().amax(-1, keepdim=True)
        scale = (largest / 6).clamp(max=448.0).to(torch.float8_e4m3fn).to(groups.dtype)
        x = blocks / scale.where(scale > 0, torch.inf)  # too small for a scale: all 0
        size = x.abs()
        step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0)).to(x)
        number = (x / step).round_().mul_(step).clamp_(-6.0, 6.0)
        out: Tensor = number.mul_(scale).flatten(-2)
        return out

    def size(self, dim: int, bits: int) -> tuple[float, float]:
        """Four bits a number, and eight for each block."""
        both = float(bits * dim) + 8 * dim / min(_BLOCK, dim)
        return both, both
