"""Full attention of a trace: recorded, or computed from its queries, keys and values."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from contextlib import nullcontext

from kvsim.core.attention import Formula, attention_weights, causal_attention
from kvsim.core.checks import DTYPES
from kvsim.core.lazy import Tensor, torch
from kvsim.core.sources import ArraySource
from kvsim.errors import TraceError

# One thread computes; other threads that share the trace take its result.
_COMPUTING = threading.Lock()


class FullAttention:
    """Attention output, log-sum-exp and attention weights of a trace.

    Args:
        source: the arrays.
        formulas: the attention formula of each layer.
        dtype: the compute dtype.
        cache: keep results in memory, layer by layer.
        base: full attention of the same queries, with the same output and log-sum-exp.
    """

    def __init__(
        self,
        source: ArraySource,
        formulas: Sequence[Formula],
        dtype: torch.dtype,
        *,
        cache: bool,
        base: FullAttention | None = None,
    ) -> None:
        self._source, self._formulas, self._dtype, self._cache = source, formulas, dtype, cache
        self._base = base
        self._computed: dict[int, tuple[Tensor, Tensor]] = {}
        self._last: tuple[int, Tensor] | None = None

    def layers(self, layers: slice, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Return attn_out [layer, qhead, pos, dim] and lse [layer, qhead, pos] of rows."""
        if self._base is not None:
            return self._base.layers(layers, rows)
        recorded = {
            name: self._read(name, layers, rows)
            for name in ("attn_out", "lse")
            if name in self._source.shapes
        }
        if len(recorded) == 2:
            return recorded["attn_out"], recorded["lse"]
        with _COMPUTING if self._cache else nullcontext():
            computed = [self._compute(i) for i in range(*layers.indices(len(self._formulas)))]
        out, lse = (
            torch.stack(each) if len(each) > 1 else each[0][None]
            for each in zip(*computed, strict=True)
        )
        return recorded.get("attn_out", out[:, :, rows]), recorded.get("lse", lse[:, :, rows])

    def _compute(self, layer: int) -> tuple[Tensor, Tensor]:
        if layer in self._computed:
            return self._computed[layer]
        q, k, v = (self._read(name, _only(layer), slice(None))[0] for name in "qkv")
        out, lse = causal_attention(q, k, v, self._formulas[layer])
        if not math.isfinite(float(lse.sum())):
            raise TraceError(
                f"the logits of layer {layer} overflow {DTYPES[self._dtype]}, expected finite "
                "ones; check q, k and scale, or give float64"
            )
        if self._cache:
            self._computed[layer] = out, lse
        return out, lse

    def weights(self, layer: int, rows: Tensor, pos: Tensor) -> Tensor:
        """Exact attention [qhead, row, pos] of a layer's rows and positions, 0 where masked."""
        q, k = self._pick("q", layer, rows), self._pick("k", layer, pos)
        if "lse" in self._source.shapes:
            lse = self._pick("lse", layer, rows)
        else:
            lse = self._lse(layer).index_select(1, rows)
        return attention_weights(q, k, lse, self._formulas[layer], rows, pos)

    def _lse(self, layer: int) -> Tensor:
        if self._cache or self._base is not None:
            return self.layers(_only(layer))[1][0]
        last = self._last  # threads share a trace: return the compared object
        if last is None or last[0] != layer:
            last = self._last = layer, self.layers(_only(layer))[1][0]
        return last[1]

    def _pick(self, name: str, layer: int, at: Tensor) -> Tensor:
        """Read positions `at` of one layer, within one range from the first to the last."""
        low, high = int(at.min()), int(at.max())
        return self._read(name, _only(layer), slice(low, high + 1))[0].index_select(1, at - low)

    def _read(self, name: str, layers: slice, pos: slice) -> Tensor:
        return self._source.read(name, layers, pos).to(self._dtype)


def _only(layer: int) -> slice:
    return slice(layer, layer + 1)
