"""TurboQuant (Zandieh et al. 2025, arXiv 2504.19874): a rotation, then one common codebook."""

from __future__ import annotations

from functools import lru_cache
from math import pi, sqrt
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import AtLeast, AtMost
from kvsim.core.pieces import Run
from kvsim.core.storing import SplitQuantizer, check_channels
from kvsim.policies.kivi import between_limits


class TurboQuant(SplitQuantizer):
    """Stores a vector's norm, and each number of the rotated unit vector in a few bits.

    A coordinate of a random unit vector has the density (1 - x^2)^((d - 3) / 2) on [-1, 1], up to a
    factor. All vectors share the 2^bits levels with the smallest mean squared error under it
    (Lloyd-Max); they are rotated by a random orthogonal matrix before rounding, and back after it
    (Algorithm 1). `objective` "prod" is Algorithm 2, for keys: one bit less, plus the norm of the
    residual and the signs of its d products with Gaussian vectors (QJL), so that products with
    queries are unbiased. Values have no products with queries and use Algorithm 1.

    `rotation`: a random orthogonal matrix (of a Gaussian one) or the Hadamard matrix. `unit`:
    levels of a vector are scaled to the norm 1 before they are rotated back. `uniform_values`:
    values are not rotated; 2^bits levels lie between a token's smallest and largest number.
    `window`: as of int8. `seed`: of the matrices.

    `@vllm` is vLLM's turboquant_4bit_nc: Hadamard matrix, unit levels, uniform values. Deviations:
    vLLM stores the first and last two layers exactly, and takes levels of the normal distribution,
    the limit for large d. Norms have the precision of the trace, not fp16. The paper's experiments
    give more bits to channels with outliers, without saying how these are chosen; left out.
    """

    choices = range(1, 9)

    bits_per_number: Annotated[int, AtLeast(1), AtMost(8)] = 4
    objective: Literal["mse", "prod"] = "mse"
    rotation: Literal["random", "hadamard"] = "random"
    unit: bool = False
    uniform_values: bool = False
    window: Annotated[int, AtLeast(0)] = 0
    seed: Annotated[int, AtLeast(0)] = 0

    def check(self, run: Run) -> None:
        """Raise PolicyError for a Hadamard matrix whose size is no power of two."""
        super().check(run)
        for dim in run.dims if self.rotation == "hadamard" else ():
            check_channels(self.label, dim, 1 << (dim - 1).bit_length())

    def round_keys(self, groups: Tensor, bits: int) -> Tensor:
        """Keys [N, 1, d], each token by itself."""
        return self._rounded(groups, bits, residual=self.objective == "prod")

    def round_values(self, groups: Tensor, bits: int) -> Tensor:
        """Values [N, 1, d], each token by itself."""
        if self.uniform_values:
            return between_limits(groups, -1, bits)
        return self._rounded(groups, bits, residual=False)

    def _rounded(self, x: Tensor, bits: int, *, residual: bool) -> Tensor:
        dim = x.shape[-1]
        largest = x.abs().amax(-1, keepdim=True)
        part = x / largest.where(largest > 0, 1.0)  # squares neither underflow nor overflow
        length = _norm(part)
        part = part / length.where(length > 0, 1.0)
        matrix = torch.from_numpy(orthogonal(dim, self.rotation, self.seed)).to(x)
        levels = torch.from_numpy(codebook(dim, bits - residual)).to(x)
        middles = (levels[1:] + levels[:-1]) / 2
        coded = levels[torch.bucketize(product(part, matrix.mT), middles)]
        if self.unit:
            size = _norm(coded)
            coded = coded / size.where(size > 0, 1.0)  # 0 where the one level is
        out = product(coded, matrix)
        if residual:
            gaussian = torch.from_numpy(_gaussian(dim, self.seed, 1)).to(x)
            rest = part - out
            signs = torch.where(product(rest, gaussian.mT) < 0, -1.0, 1.0).to(x)
            out = out + product(signs, gaussian) * (_norm(rest) * (sqrt(pi / 2) / dim))
        return out * length * largest

    def size(self, dim: int, bits: int) -> tuple[float, float]:
        """Bits of the numbers, and 16 for each norm, smallest number and step."""
        numbers = float(dim * bits)
        of_key = 32 if self.objective == "prod" else 16
        return numbers + of_key, numbers + (32 if self.uniform_values else 16)


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """x @ matrix, summed in the same order for any number of vectors."""
    out = x.new_zeros(*x.shape[:-1], matrix.shape[1])
    for column, row in zip(x.unbind(-1), matrix, strict=True):
        out += column.unsqueeze(-1) * row
    return out


def _norm(x: Tensor) -> Tensor:
    return product(x * x, x.new_ones(x.shape[-1], 1)).sqrt_()


@lru_cache
def codebook(dim: int, bits: int) -> NDArray[np.float64]:
    """The 2^bits levels of a coordinate of a random unit vector, ascending.

    The angle of x = cos(angle) has the density sin^(d - 2), and the integral of x times that is
    sin^(d - 1) / (d - 1); levels are means between the middles of their neighbours.
    """
    angle, step = np.linspace(pi, 0, 1 << 16, retstep=True)
    density = np.sin(angle) ** max(dim - 2, 0)
    below = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])]) * (-step / 2)
    mean = -(np.sin(angle) ** max(dim - 1, 1)) / max(dim - 1, 1)
    x, below, mean = np.cos(angle), below / below[-1], mean / below[-1]
    levels = np.interp((np.arange(2**bits) + 0.5) / 2**bits, below, x)
    for _ in range(20_000):
        edges = np.concatenate([[-1.0], (levels[1:] + levels[:-1]) / 2, [1.0]])
        share, total = (np.diff(np.interp(edges, x, y)) for y in (below, mean))
        moved, levels = levels, total / share
        if abs(levels - moved).max() < 1e-12:
            break
    return np.asarray(levels)


@lru_cache
def orthogonal(dim: int, kind: str, seed: int) -> NDArray[np.float64]:
    """An orthogonal matrix [d, d]."""
    if kind == "hadamard":
        out = np.ones((1, 1))
        while len(out) < dim:
            out = np.block([[out, out], [out, -out]])
        return out / sqrt(dim)
    q, r = np.linalg.qr(_gaussian(dim, seed, 0))
    return np.asarray(q * np.sign(np.diag(r)))  # uniform over all rotations


def _gaussian(dim: int, seed: int, which: int) -> NDArray[np.float64]:
    return np.random.default_rng([seed, dim, which]).standard_normal((dim, dim))
