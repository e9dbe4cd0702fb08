"""Where blocks of a capture go: arrays in memory, and the shapes of those of a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvsim.core.checks import DTYPES
from kvsim.core.header import Header
from kvsim.core.left_out import LeftOut
from kvsim.core.probe import ARRAYS as PROBE
from kvsim.core.probe import Probe
from kvsim.core.sources import Size
from kvsim.core.trace import Trace
from kvsim.recorder.hooks import KernelCall
from kvsim.schema import AXES, SUMS, axes_of
from kvsim.store.layout import pos_axis


class MemorySink:
    """Blocks in memory, with the methods of a TraceWriter that a capture calls."""

    def __init__(self) -> None:
        self.blocks: dict[str, dict[int, list[Tensor]]] = {}
        self._dropped: set[str] = set()

    def write_layer(self, name: str, layer: int, values: Tensor) -> None:
        """Keep a copy of one layer of an array."""
        self.append(name, layer, values)

    def append(self, name: str, layer: int, block: Tensor) -> None:
        """Keep a copy of the block."""
        if name in self._dropped:
            return
        layers = self.blocks.setdefault(name, {})
        layers.setdefault(layer, []).append(block.to("cpu", copy=True))

    def drop(self, name: str) -> None:
        """Forget an array; later blocks of it are ignored."""
        self.blocks.pop(name, None)
        self._dropped.add(name)

    def set_length(self, n_pos: int) -> None:
        """Do nothing: blocks in memory need no length."""

    def write_projections(
        self, shape: Sequence[int], read: Callable[[int], Tensor], source_dtype: str
    ) -> None:
        """Keep output projections with the other arrays."""
        for layer in range(shape[0]):
            self.append("o_proj", layer, read(layer))

    def publish(self, header: Header, **more: Any) -> Trace:
        """Return the trace; more: its tokens and their text."""
        facts = {**vars(header), "rope": header.ropes}
        del facts["ropes"], facts["source_dtypes"]  # as the arrays are
        arrays: dict[str, Any] = {name: self._array(name) for name in self.blocks}
        return Trace.from_arrays(**arrays, **facts, **more)

    def _array(self, name: str) -> Tensor:
        """Return the whole array, its layers stacked."""
        layers, axis = self.blocks[name], pos_axis(name) if "pos" in AXES[name] else 0
        return torch.stack([torch.cat(layers[layer], dim=axis) for layer in sorted(layers)])


def arrays_of(
    call: KernelCall,
    size: Size,
    n_layers: int,
    n_pos: int,
    *,
    probe: Probe | None,
    left_out: LeftOut,
) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Return shapes, with all rows, and dtypes of the arrays of a capture by its first call.

    size: the largest of the layers.
    """
    source, of_entries = DTYPES[call.q.dtype], DTYPES[call.k.dtype]
    sizes = {"layer": n_layers, "pos": n_pos}
    sizes |= zip(("qhead", "head", "dim", "value_dim"), size, strict=True)
    dtypes = dict.fromkeys(("k", "v"), of_entries)
    dtypes |= {"q": source, "attn_out": DTYPES[call.out.dtype]}
    dtypes["lse"] = "float64" if source == "float64" else "float32"
    if left_out is not None:
        sizes |= {"before": left_out[1], "moment": 1 + sizes["dim"]}
        dtypes |= dict.fromkeys(SUMS, dtypes["lse"])
    if probe is not None:
        sizes["probe"] = len(probe.tokens)
        dtypes |= dict.fromkeys(PROBE, source)
    dtypes |= {} if call.gate is None else {"gate": DTYPES[call.gate.dtype]}
    if call.residual is not None:
        sizes["hidden"], dtypes["residual"] = len(call.residual[0]), DTYPES[call.residual.dtype]
    if call.residual_norm is not None:
        dtypes["residual_norm"] = "float32"
    axes = {name: axes_of(name) for name in dtypes}
    return {name: tuple(sizes[axis] for axis in axes[name]) for name in dtypes}, dtypes
