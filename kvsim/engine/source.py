"""A trace as what a View reads from: one block of layers, loaded when first asked for."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from kvsim.errors import PolicyError
from kvsim.schema import CHUNK
from kvsim.trace import Trace


class TraceSource:
    """Keys, values and queries of some layers of a trace on one device.

    Raises PolicyError for a layer whose sliding window hides something: nobody who reads from here
    knows of windows.
    """

    def __init__(self, trace: Trace, layers: slice, device: torch.device) -> None:
        for layer in range(*layers.indices(trace.n_layers)):
            check_unwindowed(trace, layer)
        self._trace, self._layers, self._device = trace, layers, device
        self.rope, self.formula = trace.ropes[layers][0], trace.formulas[layers][0]
        self.positions = trace.positions.to(device)
        self._window, self._window_start = torch.empty(0, 0, 0, 0), 0

    @cached_property
    def keys(self) -> Tensor:
        """[L, H, T, d]."""
        return self._trace.read("k", self._layers).to(self._device)

    @cached_property
    def values(self) -> Tensor:
        """[L, H, T, d]."""
        return self._trace.read("v", self._layers).to(self._device)

    def queries(self, start: int, stop: int) -> Tensor:
        """[L, H, G, stop - start, d]."""
        first, held = self._window_start, self._window.shape[2]
        if start < first or stop > first + held:
            # whole chunks, because neighbouring rows are asked for next
            first = start // CHUNK * CHUNK
            last = min(-(-stop // CHUNK) * CHUNK, self._trace.n_pos)
            q = self._trace.read("q", self._layers, slice(first, last))
            self._window, self._window_start = q.to(self._device), first
        q = self._window[:, :, start - first : stop - first]
        out: Tensor = q.unflatten(1, (self._trace.n_heads, -1))
        return out

    @property
    def n_rows(self) -> int:
        """Rows of the trace."""
        return self._trace.n_pos

    @cached_property
    def o_proj(self) -> Tensor:
        """Output projection of each query head, [L, H, G, d, D]."""
        stored = self._trace.read("o_proj", self._layers).to(self._device)
        out: Tensor = stored.unflatten(1, (self._trace.n_heads, -1))
        return out

    def full(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Attention output [L, H, G, stop - start, d] of the full cache, and its log-sum-exp."""
        output, lse = self._full
        return output[..., start:stop, :], lse[..., start:stop]

    @cached_property
    def _full(self) -> tuple[Tensor, Tensor]:
        group = (self._trace.n_heads, -1)
        output, lse = (x.to(self._device) for x in self._trace.full(self._layers))
        return output.unflatten(1, group), lse.unflatten(1, group)

    def poison(self, gone: Tensor) -> None:
        """Overwrite keys and values where gone [L, H, T] with NaN (a test hook)."""
        self.keys = self.keys.masked_fill(gone.unsqueeze(-1), torch.nan)
        self.values = self.values.masked_fill(gone.unsqueeze(-1), torch.nan)


def check_unwindowed(trace: Trace, layer: int) -> None:
    """Raise PolicyError for a layer whose sliding window hides something from some row."""
    if layer in trace.windowed:
        raise PolicyError(
            f"layer {layer} of {trace.name} has a sliding window of "
            f"{trace.formulas[layer].window} positions, which bounds its cache by itself; expected "
            "layers that see the whole text"
        )
