"""The arithmetic of attention: rotary embedding, partial attention, and the exact merge of parts.

Shape letters: L layers, H KV heads, G query heads of a group, w rows (queries), n entries (keys),
d head dimension. Query head `i` belongs to KV head `i // G`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Layout = Literal["half", "interleaved"]

# torch's fused CPU kernel returns the log-sum-exp beside the output, so that parts merge exactly.
# It is a private operator: where it is missing, and on other devices, `_attend_blocks` answers.
_FUSED = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)

# Logits that the unfused path holds at once.
_BLOCK_LOGITS = 1 << 24


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of a model, as its kernel saw it (RoFormer, arXiv 2104.09864).

    inv_freq: one frequency per rotated pair, radians per position, after any scaling rule
    (llama3, yarn, linear). attention_scaling multiplies cos and sin (yarn). rotary_dim: how many
    leading dimensions rotate, all of them by default. layout: "half" pairs dimension i with
    i + rotary_dim/2 (Llama), "interleaved" pairs 2i with 2i + 1.
    """

    inv_freq: Sequence[float] | Tensor
    attention_scaling: float = 1.0
    rotary_dim: int | None = None
    layout: Layout = "half"

    def __post_init__(self) -> None:
        object.__setattr__(self, "inv_freq", tuple(float(f) for f in self.inv_freq))
        if self.rotary_dim is None:
            object.__setattr__(self, "rotary_dim", 2 * len(self.inv_freq))
        if self.rotary_dim != 2 * len(self.inv_freq):
            raise ValueError(
                f"rotary_dim is {self.rotary_dim}, but {len(self.inv_freq)} frequencies rotate "
                f"{2 * len(self.inv_freq)} dimensions; give one frequency per rotated pair"
            )
        if self.layout not in ("half", "interleaved"):
            raise ValueError(f"layout is {self.layout!r}; expected 'half' or 'interleaved'")

    @classmethod
    def default(cls, dim: int, theta: float = 10_000.0) -> Rope:
        """The unscaled rotation of a head of `dim` dimensions with base `theta`."""
        return cls(tuple(theta ** (-2.0 * i / dim) for i in range(dim // 2)))

    def rotate(self, x: Tensor, pos: Tensor) -> Tensor:
        """x [..., n, d] turned forward by its positions pos [n] or [..., n]; angles in float64."""
        return self._turn(x, pos, 1.0)

    def unrotate(self, x: Tensor, pos: Tensor) -> Tensor:
        """The inverse of `rotate`: x as it was before the rotary embedding."""
        return self._turn(x, pos, -1.0)

    def rotate_mean(self, x: Tensor, start: int, count: int) -> Tensor:
        """The mean of x [..., d] turned by each of the positions start..start+count-1.

        In closed form: the pair of frequency f turns to the middle position and shrinks by the
        Dirichlet factor sin(count f/2) / (count sin(f/2)). Turning by -p is the transpose of
        turning by p, so the positions 1-start-count..-start give the transpose of this mean.
        """
        frequency = self._frequencies(x)
        # whole turns per position change nothing, and without them sin(f/2) is 0 for f = 0 alone
        frequency = frequency - 2 * math.pi * (frequency / (2 * math.pi)).round()
        shrink = torch.sinc(frequency * count / (2 * math.pi))
        shrink /= torch.sinc(frequency / (2 * math.pi))
        angle = frequency * (start + (count - 1) / 2)
        size = shrink * self.attention_scaling
        return self._apply(x, (angle.cos() * size).to(x.dtype), (angle.sin() * size).to(x.dtype))

    def pairs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The two components of each rotated pair of x [..., d], [..., pairs] each."""
        turned = x[..., : 2 * len(self.inv_freq)]
        if self.layout == "half":
            a, b = turned.chunk(2, dim=-1)
            return a, b
        return turned[..., 0::2], turned[..., 1::2]

    def _turn(self, x: Tensor, pos: Tensor, sign: float) -> Tensor:
        angle = pos.to(torch.float64).unsqueeze(-1) * self._frequencies(x)  # [..., n, pairs]
        # rotate multiplies by the attention scaling, unrotate divides it out again
        size = self.attention_scaling**sign
        cos = (angle.cos() * size).to(x.dtype)
        sin = (angle.sin() * (sign * size)).to(x.dtype)
        return self._apply(x, cos, sin)

    def _frequencies(self, x: Tensor) -> Tensor:
        return torch.tensor(self.inv_freq, dtype=torch.float64, device=x.device)

    def _apply(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Each pair of x as a complex number, times cos + i sin; the other dimensions stay."""
        a, b = self.pairs(x)
        rest = x[..., 2 * len(self.inv_freq) :]
        if self.layout == "half":
            out = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        else:
            out = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        if not rest.shape[-1]:
            return out
        return torch.cat([out, rest.expand(*out.shape[:-1], -1)], dim=-1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of q [B, G, w, d] over k, v [B, 1 or G, n, d] -> (out [B, G, w, d], lse [B, G, w]).

    causal: row i sees entries 0..i (needs w == n). mask: bool [B, 1 or G, w, n], True where a row
    sees an entry. A row that sees nothing has output 0 and log-sum-exp -inf.
    """
    if causal and q.shape[-2] != k.shape[-2]:
        raise ValueError(
            f"causal attention needs as many rows as entries, got {q.shape[-2]} and {k.shape[-2]}"
        )
    if k.shape[-2] == 0:
        return torch.zeros_like(q), q.new_full(q.shape[:-1], -math.inf)
    if _FUSED is None or q.device.type != "cpu":
        return _attend_blocks(q, k, v, scale, causal, mask)
    groups = q.shape[1]
    k, v = k.expand(-1, groups, -1, -1), v.expand(-1, groups, -1, -1)
    bias = None if mask is None else _bias(mask, q)
    out, lse = _FUSED(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    if mask is not None:  # the kernel gives 0 where nothing is seen
        lse = lse.masked_fill(~mask.any(-1), -math.inf)
    return out, lse


def _bias(mask: Tensor, q: Tensor) -> Tensor:
    bias = torch.zeros((), dtype=q.dtype, device=q.device)
    return torch.where(mask, bias, -math.inf).to(q.dtype)


def _attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same in plain operations, a block of rows at a time."""
    n = k.shape[-2]
    step = max(1, _BLOCK_LOGITS // max(1, q.shape[0] * q.shape[1] * n))
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])
    at = torch.arange(n, device=q.device)
    for a in range(0, q.shape[-2], step):
        rows = slice(a, min(a + step, q.shape[-2]))
        z = (q[..., rows, :] * scale) @ k.transpose(-1, -2)
        if causal:
            z = z.masked_fill(at > at[rows].unsqueeze(-1), -math.inf)
        if mask is not None:
            z = z.masked_fill(~mask[..., rows, :], -math.inf)
        total = z.logsumexp(-1)
        # exp(-inf - -inf) would be NaN for a row that sees nothing
        weight = (z - total.masked_fill(total.isneginf(), 0.0).unsqueeze(-1)).exp()
        out[..., rows, :] = weight @ v
        lse[..., rows] = total
    return out, lse


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of entries, from the attention over each.

    out [..., w, d], lse [..., w]; exact: the weights of the parts are exp(lse_part - lse_union).
    Writes into out_a.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    weight = (lse_b - lse).exp_()
    return out_a.lerp_(out_b, weight.unsqueeze(-1)), lse


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Full attention of a layer: q [qhead, n, d], k, v [head, n, d] -> (out, lse [qhead, n])."""
    heads = k.shape[0]
    out, lse = attend(
        q.unflatten(0, (heads, -1)), k.unsqueeze(1), v.unsqueeze(1), scale, causal=True
    )
    return out.flatten(0, 1), lse.flatten(0, 1)
