"""Where blocks of a capture in memory go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvsim.core.header import Header
from kvsim.core.trace import Trace
from kvsim.schema import AXES
from kvsim.store.layout import pos_axis


class MemorySink:
    """Blocks in memory, with the methods of a TraceWriter that a capture calls."""

    def __init__(self) -> None:
        self.blocks: dict[str, dict[int, list[Tensor]]] = {}
        self._dropped: set[str] = set()

    def append(self, name: str, layer: int, block: Tensor) -> None:
        """Keep a copy of the block."""
        if name in self._dropped:
            return
        layers = self.blocks.setdefault(name, {})
        layers.setdefault(layer, []).append(block.to("cpu", copy=True))

    write_layer = append

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
