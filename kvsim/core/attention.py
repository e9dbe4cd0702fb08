"""Attention: rotary embedding, partial attention, and the exact merge of parts.

Shape letters: L layers, H KV heads, G query heads of a group, w rows (queries), n entries (keys),
d head dimension. Query head `i` belongs to KV head `i // G`.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import Above, AtLeast, Finite, check_fields
from kvsim.errors import NeedsError, TraceError
from kvsim.schema import NEVER

Layout = Literal["half", "interleaved", "unknown"]
Reduction = Literal["mean", "max", "sum"]

# torch's fused CPU kernel returns the log-sum-exp with the output, so that parts merge exactly. It
# is a private operator: without it, and on other devices, `_attend_blocks` runs. It ignores the
# stride of the last axis: see `_dense_rows`.
_FUSED: str | None = "_scaled_dot_product_flash_attention_for_cpu"

# Logits held at once by the unfused path.
_BLOCK_LOGITS = 1 << 24

# Rows of a block where a sliding window or chunks mask out distant entries.
_WINDOW_ROWS = 256


_Positive = Annotated[float, Finite(), Above(0)]


@dataclass(frozen=True)
class Formula:
    """Attention of a layer: softmax(softcap(scale q.k)) v over the entries visible to a row.

    scale: factor of q . k. softcap: a logit z becomes softcap tanh(z / softcap) (Gemma 2, arXiv
    2408.00118, section 2); None leaves it. window: a row sees itself and window - 1 positions
    before it (Mistral 7B, arXiv 2310.06825, section 2); None, all of them. chunk: a row sees the
    positions up to itself of its own chunk of so many, counted from position 0 (Llama 4); None, all
    of them. sinks: for each query head a logit in the softmax without a value (gpt-oss, arXiv
    2508.10925, section 2.2); none by default.
    """

    scale: _Positive
    softcap: _Positive | None = None
    window: Annotated[int, AtLeast(1)] | None = None
    sinks: tuple[float, ...] = ()
    chunk: Annotated[int, AtLeast(1)] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sinks", _numbers("attention: sinks", self.sinks))
        check_fields(self, "attention", TraceError)

    @property
    def plain(self) -> bool:
        """Whether rows see everything before them, and logits are just scale q . k."""
        return self.softcap is None and self.reach is None and not self.sinks

    @property
    def reach(self) -> int | None:
        """The longest text without masking by window or chunk; None without them."""
        return min(filter(None, (self.window, self.chunk)), default=None)

    @property
    def local(self) -> str:
        """The name of the mask of distant entries."""
        return "a sliding window" if self.chunk is None else "chunks"

    def last_rows(self, pos: Tensor) -> Tensor:
        """Return the last row that sees each of the positions int64 [n]; NEVER without bound."""
        last = torch.full_like(pos, NEVER)
        if self.window is not None:
            last = torch.minimum(last, pos + min(self.window, NEVER) - 1)
        if self.chunk is not None:
            chunk = min(self.chunk, NEVER)
            last = torch.minimum(last, pos - pos % chunk + chunk - 1)
        return last

    def within(self, n_pos: int) -> Formula:
        """Return the formula for `n_pos` positions, without a window or chunks of no effect."""
        if self.reach is None or (self.window or 0) < n_pos > (self.chunk or 0):
            return self
        window, chunk = (x if x and x < n_pos else None for x in (self.window, self.chunk))
        return replace(self, window=window, chunk=chunk)

    def capped(self, z: Tensor) -> Tensor:
        """Logits z = scale q . k after the softcap; z is overwritten."""
        return z if self.softcap is None else z.div_(self.softcap).tanh_().mul_(self.softcap)

    def sink(self, like: Tensor, heads: int) -> Tensor:
        """The sinks' logits [head, group], in the dtype and on the device of `like`."""
        sinks = torch.tensor(self.sinks, dtype=like.dtype, device=like.device)
        out: Tensor = sinks.unflatten(0, (heads, -1))
        return out


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of a model, as applied by its kernel (RoFormer, arXiv 2104.09864).

    inv_freq: one frequency per rotated pair, radians per position, after any scaling rule (llama3,
    yarn, linear). attention_scaling multiplies cos and sin (yarn). rotary_dim: how many leading
    dimensions rotate, two for each frequency by default. layout: "half" pairs dimension i with i +
    rotary_dim/2 (Llama), "interleaved" pairs 2i with 2i + 1. Without frequencies nothing is
    rotated, as in layers without RoPE. "unknown": another rotation, or different ones of queries
    and keys; methods raise NeedsError.
    """

    inv_freq: Sequence[float] | Tensor
    attention_scaling: _Positive = 1.0
    rotary_dim: int | None = None
    layout: Layout = "half"

    def __post_init__(self) -> None:
        check_fields(self, "rope", TraceError)
        object.__setattr__(self, "inv_freq", _numbers("rope: inv_freq", self.inv_freq))
        if self.rotary_dim is None:
            object.__setattr__(self, "rotary_dim", 2 * len(self.inv_freq))
        if self.rotary_dim != 2 * len(self.inv_freq):
            raise TraceError(
                f"rope: rotary_dim is {self.rotary_dim}, but {len(self.inv_freq)} frequencies "
                f"rotate {2 * len(self.inv_freq)} dimensions; give one frequency per rotated pair"
            )

    @classmethod
    def default(cls, dim: int, theta: float = 10_000.0) -> Rope:
        """The unscaled rotation of a head of `dim` dimensions with base `theta`."""
        return cls(tuple(theta ** (-2.0 * i / dim) for i in range(dim // 2)))

    def rotate(self, x: Tensor, pos: Tensor) -> Tensor:
        """Rotate x [..., n, d] by its positions pos [n] or [..., n]; angles in float64."""
        return self._turn(x, pos, 1.0)

    def unrotate(self, x: Tensor, pos: Tensor) -> Tensor:
        """Invert `rotate`: x before the rotary embedding."""
        return self._turn(x, pos, -1.0)

    def rotate_mean(self, x: Tensor, start: int, count: int) -> Tensor:
        """The mean of x [..., d] rotated by each of the positions start..start+count-1.

        In closed form: the pair of frequency f rotates to the middle position and shrinks by the
        Dirichlet factor sin(count f/2) / (count sin(f/2)). The positions 1-start-count..-start give
        the transpose of this mean.
        """
        frequency = self._frequencies(x)
        # full rotations have no effect; without them sin(f/2) is 0 only for f = 0
        frequency = frequency - 2 * math.pi * (frequency / (2 * math.pi)).round()
        shrink = torch.sinc(frequency * count / (2 * math.pi))
        shrink /= torch.sinc(frequency / (2 * math.pi))
        angle = frequency * (start + (count - 1) / 2)
        size = shrink * self.attention_scaling
        return self._apply(x, (angle.cos() * size).to(x.dtype), (angle.sin() * size).to(x.dtype))

    def pairs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The two components of each rotated pair of x [..., d], [..., pairs] each."""
        if self.layout == "unknown":
            raise NeedsError(
                "needs queries and keys before RoPE, which this model rotates in an unknown way; "
                "choose another policy"
            )
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
        """Multiply each pair of x, as a complex number, by cos + i sin; other dimensions stay."""
        a, b = self.pairs(x)
        rest = x[..., 2 * len(self.inv_freq) :]
        if self.layout == "half":
            out = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        else:
            out = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        if not rest.shape[-1]:
            return out
        return torch.cat([out, rest.expand(*out.shape[:-1], -1)], dim=-1)


def _numbers(name: str, values: Any) -> tuple[float, ...]:
    try:
        array = np.asarray(values.cpu() if isinstance(values, Tensor) else values)
    except (TypeError, ValueError, RuntimeError):  # lists of different lengths, sparse tensors
        array = np.empty((), object)
    if array.ndim != 1 or array.dtype.kind not in "iuf" or not np.isfinite(array).all():
        raise TraceError(f"{name} is {reprlib.repr(values)}; expected a list of finite numbers")
    return tuple(array.astype(np.float64).tolist())


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    formula: Formula,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of q [B, G, w, d] over k, v [B, 1 or G, n, d] -> (out [B, G, w, d], lse [B, G, w]).

    Values, and with them the output, may have another size than keys.

    causal: row i sees entries 0..i (needs w == n). mask: bool [B, 1 or G, w, n], True where a row
    sees an entry. A row that sees nothing has output 0 and log-sum-exp -inf. The formula's window
    and chunk must be in the mask; its sinks count once per row, not in each part (`with_sinks`).
    """
    if k.shape[-2] == 0:
        return q.new_zeros(*q.shape[:-1], v.shape[-1]), q.new_full(q.shape[:-1], -math.inf)
    fused = getattr(torch.ops.aten, _FUSED, None) if _FUSED else None
    if fused is None or q.device.type != "cpu" or formula.softcap is not None:
        return _attend_blocks(q, k, v, formula, causal, mask)
    groups, of_value, size = q.shape[1], v.shape[-1], max(q.shape[-1], v.shape[-1])
    q, k, v = (_dense_rows(x, size) for x in (q, k, v))
    k, v = k.expand(-1, groups, -1, -1), v.expand(-1, groups, -1, -1)
    # torch.where keeps the layout of the mask
    bias = None if mask is None else torch.where(mask, 0.0, -math.inf).to(q.dtype).contiguous()
    out, lse = fused(q, k, v, 0.0, causal, attn_mask=bias, scale=formula.scale)
    if mask is not None:  # the kernel returns 0 where nothing is visible
        lse = lse.masked_fill(~mask.any(-1), -math.inf)
    return out[..., :of_value], lse


def _dense_rows(x: Tensor, size: int) -> Tensor:
    """Return x [..., n, size] with a padded last axis; copied if rows are shared or not dense."""
    if x.shape[-1] < size:
        return torch.nn.functional.pad(x, (0, size - x.shape[-1]))
    if x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1]:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, formula: Formula, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    n = k.shape[-2]
    step = max(1, _BLOCK_LOGITS // max(1, q.shape[0] * q.shape[1] * n))
    out, lse = q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1])
    at = torch.arange(n, device=q.device)
    for a in range(0, q.shape[-2], step):
        rows = slice(a, min(a + step, q.shape[-2]))
        z = formula.capped((q[..., rows, :] * formula.scale) @ k.transpose(-1, -2))
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
    """Merge attention over two disjoint sets of entries into that over their union.

    out [..., w, d], lse [..., w]; exact: the weights of the parts are exp(lse_part - lse_union).
    Writes into out_a.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    weight = (lse_b - lse).exp_()
    return out_a.lerp_(out_b, weight.unsqueeze(-1)), lse


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add sinks [...] to the softmax of whole rows out [..., w, d], lse [..., w].

    A sink is an entry visible to every row, with value 0. Writes into out.
    """
    total = torch.logaddexp(lse, sinks.unsqueeze(-1))
    return out.mul_((lse - total).exp_().unsqueeze(-1)), total


def softmax(z: Tensor, sinks: Tensor) -> Tensor:
    """Softmax of logits z [..., n] and sinks [...], without the sinks' share."""
    return torch.cat([z, sinks.unsqueeze(-1)], dim=-1).softmax(-1)[..., :-1]


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, formula: Formula, start: int = 0
) -> tuple[Tensor, Tensor]:
    """Full attention of w rows of a layer, from row `start` on.

    q [qhead, w, d], k, v [head, start + w, d] -> (out [qhead, w, d], lse [qhead, w]).
    """
    q, k, v = q.unflatten(0, (len(k), -1)), k.unsqueeze(1), v.unsqueeze(1)
    if formula.reach is not None and start + q.shape[2] > formula.reach:
        out, lse = _local(q, k, v, formula, start)
    else:
        out, lse = attend(q, k[:, :, start:], v[:, :, start:], formula, causal=True)
        if start:
            old = attend(q, k[:, :, :start], v[:, :, :start], formula)
            out, lse = merge(out, lse, *old)
    if formula.sinks:
        out, lse = with_sinks(out, lse, formula.sink(q, len(k)))
    return out.flatten(0, 1), lse.flatten(0, 1)


def _local(q: Tensor, k: Tensor, v: Tensor, formula: Formula, start: int) -> tuple[Tensor, Tensor]:
    out, lse = q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1])
    for a in range(0, q.shape[2], _WINDOW_ROWS):
        b = min(a + _WINDOW_ROWS, q.shape[2])
        at = torch.arange(start + a, start + b, device=q.device)
        to = torch.arange(start + b, device=q.device)
        to = to[formula.last_rows(to) >= start + a]  # the last ones
        first = start + b - len(to)
        out[:, :, a:b], lse[:, :, a:b] = attend(
            q[:, :, a:b],
            k[:, :, first : start + b],
            v[:, :, first : start + b],
            formula,
            mask=sees(at, to, formula)[None, None],
        )
    return out, lse


def sees(rows: Tensor, pos: Tensor, formula: Formula) -> Tensor:
    """Positions pos [n] visible to rows [w] in full attention, bool [w, n]."""
    rows = rows.unsqueeze(-1)
    seen = pos <= rows
    return seen if formula.reach is None else seen & (rows <= formula.last_rows(pos))


def attention_weights(
    q: Tensor, k: Tensor, lse: Tensor, formula: Formula, rows: Tensor, pos: Tensor
) -> Tensor:
    """Exact rows of full attention [qhead, w, n], from their log-sum-exp.

    q [qhead, w, d] and lse [qhead, w] of rows [w], k [head, n, d] of positions pos [n].
    """
    z = (q * formula.scale).unflatten(0, (k.shape[0], -1)) @ k.unsqueeze(1).mT
    weights: Tensor = formula.capped(z).flatten(0, 1).sub_(lse.unsqueeze(-1)).exp_()
    return weights.masked_fill_(~sees(rows, pos, formula), 0.0)


def reduce_group(attention: Tensor, group: Reduction | None) -> Tensor:
    """Attention [L, H, G, w, n] with its query heads reduced to [L, H, w, n], or as it is."""
    if group is None:
        return attention
    if group == "max":
        return attention.amax(2)
    return attention.mean(2) if group == "mean" else attention.sum(2)
