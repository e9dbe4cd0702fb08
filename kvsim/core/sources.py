"""Sources of a trace's arrays; `kvsim.store` has those of stored traces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvsim.core.lazy import Tensor, torch
from kvsim.errors import NeedsError
from kvsim.schema import AXES, OF_VALUES

_ALL = slice(None)

#: Query heads, KV heads, dimensions of keys and of values of a layer.
Size = tuple[int, int, int, int]


class ArraySource(Protocol):
    """The arrays of a trace, read in parts."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each array."""

    @property
    def positions(self) -> Tensor:
        """Position of each row in the sequence, int64 [pos]."""

    def read(self, name: str, layers: slice, pos: slice) -> Tensor:
        """Read part of an array; arrays without such an axis ignore `layers` or `pos`."""


class InMemory:
    """Arrays in memory; `read` returns views."""

    def __init__(self, arrays: Mapping[str, Tensor]) -> None:
        self.arrays = dict(arrays)
        self.shapes = {name: tuple(array.shape) for name, array in arrays.items()}
        self.positions = torch.arange(self.shapes["q"][2])

    def read(self, name: str, layers: slice, pos: slice) -> Tensor:
        """Return a view of part of an array."""
        return _part(name, self.arrays[name], layers, pos)


class Loaded:
    """Another source with some layers read once and held in memory; `read` returns views.

    Args:
        base: the other source.
        layers: held layers, each array from its first reading on; others are read anew.
        dtype: of the held arrays.
        held: returns the source's runs of positions of an array (`Header.held`).
    """

    def __init__(
        self,
        base: ArraySource,
        layers: slice,
        dtype: torch.dtype,
        held: Callable[[str, range], Sequence[slice]],
    ) -> None:
        self.base, self.shapes, self.positions = base, base.shapes, base.positions
        self._layers, self._held = range(*layers.indices(base.shapes["q"][0])), held
        self._dtype = dtype
        self._arrays: dict[str, list[tuple[slice, Tensor]]] = {}

    def read(self, name: str, layers: slice, pos: slice) -> Tensor:
        """Part of an array."""
        wanted = range(*layers.indices(self.shapes["q"][0]))
        cached = self._layers
        inside = wanted and cached and cached[0] <= wanted[0] and wanted[-1] <= cached[-1]
        if AXES[name][0] != "layer" or not inside:
            return self.base.read(name, layers, pos)
        layers_at = slice(wanted[0] - cached[0], wanted[-1] + 1 - cached[0])
        start, stop, _ = pos.indices(len(self.positions))
        for run, array in self._runs(name):
            if run.start <= start and stop <= run.stop:
                return _part(name, array, layers_at, slice(start - run.start, stop - run.start))
        return self.base.read(name, layers, pos)  # its error names the missing rows

    def _runs(self, name: str) -> list[tuple[slice, Tensor]]:
        if name not in self._arrays:
            layers = slice(self._layers.start, self._layers.stop)
            self._arrays[name] = [
                (run, self.base.read(name, layers, run).to(self._dtype))
                for run in self._held(name, range(len(self.positions)))
            ]
        return self._arrays[name]


def _part(name: str, array: Tensor, layers: slice, pos: slice) -> Tensor:
    if AXES[name][0] != "layer":
        return array[pos]
    if "pos" not in AXES[name]:
        return array[layers]
    axis = AXES[name].index("pos")
    return array[(layers, *[_ALL] * (axis - 1), pos)]


class PerQueryHead:
    """Another source with the keys and values of each KV head repeated `group` times."""

    def __init__(self, base: ArraySource, group: int) -> None:
        self.base, self.group = base, group
        self.positions = base.positions
        self.shapes = dict(base.shapes)
        for name in filter(of_kv_heads, base.shapes):
            layers, heads, *rest = base.shapes[name]
            self.shapes[name] = (layers, heads * group, *rest)

    def read(self, name: str, layers: slice, pos: slice) -> Tensor:
        """Part of an array, keys and values with a head for each query head."""
        part = self.base.read(name, layers, pos)
        return part.repeat_interleave(self.group, dim=1) if of_kv_heads(name) else part


def of_kv_heads(name: str) -> bool:
    """Whether an array has an axis of KV heads."""
    return AXES[name][1:2] == ("head",)


def is_sized(name: str) -> bool:
    """Whether an array has an axis of heads or of head dimensions."""
    return not {"qhead", "head", "dim"}.isdisjoint(AXES[name])


def sized(name: str, shape: Sequence[int], size: Size) -> tuple[int, ...]:
    """Return the shape of an array of layers of this size."""
    qheads, heads, dim, value_dim = size
    lengths = {"qhead": qheads, "head": heads, "dim": value_dim if name in OF_VALUES else dim}
    return tuple(lengths.get(axis, n) for axis, n in zip(AXES[name], shape, strict=True))


def narrowed(name: str, array: Tensor, size: Size) -> Tensor:
    """Remove the padding of an array for layers of this size."""
    shape = sized(name, array.shape, size)
    return array if shape == array.shape else array[tuple(map(slice, shape))].contiguous()


def padded(name: str, array: Tensor, size: Size) -> Tensor:
    """Pad layers of an array with zeros to a size."""
    out = array.new_zeros(sized(name, array.shape, size))
    out[tuple(map(slice, array.shape))] = array
    return out


class OneSize:
    """Layers of one size of another source; NeedsError for the others."""

    def __init__(self, base: ArraySource, sizes: Sequence[Size], size: Size) -> None:
        self.base, self.positions, self._sizes, self._size = base, base.positions, sizes, size
        self.shapes = {name: sized(name, shape, size) for name, shape in base.shapes.items()}

    def read(self, name: str, layers: slice, pos: slice) -> Tensor:
        """Part of an array."""
        part = self.base.read(name, layers, pos)
        if not is_sized(name):
            return part
        for place in range(*layers.indices(len(self._sizes))):
            if self._sizes[place] != self._size:
                raise NeedsError(
                    f"layer {place} has (query heads, KV heads, dimensions, of values) "
                    f"{self._sizes[place]}, expected {self._size}, as the others that are read"
                )
        return narrowed(name, part, self._size)


def dtype_of(source: ArraySource) -> torch.dtype:
    """Return the dtype of queries, keys and values in the innermost source."""
    while isinstance(source, Loaded | OneSize):
        source = source.base
    return source.read("q", slice(0, 1), slice(0, 0)).dtype


class SharedEntries:
    """One layer of another source, with the query heads of all layers that share its entries.

    layers: the places of these layers, the owner first.
    """

    def __init__(self, base: ArraySource, layers: Sequence[int]) -> None:
        self.base, self.layers, self.positions = base, layers, base.positions
        self.shapes = {
            name: (1, shape[1] * (len(layers) if AXES[name][1] == "qhead" else 1), *shape[2:])
            for name, shape in base.shapes.items()
            if len(shape) > 2
        }

    def read(self, name: str, layers: slice, pos: slice) -> Tensor:
        """Read part of an array, query heads grouped by KV head."""
        if AXES[name][1] != "qhead":
            return self.base.read(name, slice(self.layers[0], self.layers[0] + 1), pos)[layers]
        parts = [self.base.read(name, slice(layer, layer + 1), pos) for layer in self.layers]
        heads = self.shapes["k"][1]
        return torch.cat([part.unflatten(1, (heads, -1)) for part in parts], 2).flatten(1, 2)


class SelectedRows:
    """Some rows of another source, for a model that runs only on these rows.

    Leaves out arrays that depend on all rows, such as attention.

    Args:
        base: the other source.
        rows: their places in it, int64 [n], ascending.
    """

    _KEPT = ("q", "k", "v", "gate", "o_proj")

    def __init__(self, base: ArraySource, rows: Tensor) -> None:
        self.base, self.rows = base, rows
        self.positions = base.positions[rows]
        self.shapes = {name: base.shapes[name] for name in self._KEPT if name in base.shapes}
        for name in self.shapes.keys() - {"o_proj"}:
            layers, heads, _, dim = self.shapes[name]
            self.shapes[name] = (layers, heads, len(rows), dim)

    def read(self, name: str, layers: slice, pos: slice) -> Tensor:
        """Part of an array; `pos` counts the selected rows."""
        rows = self.rows[pos]
        if name == "o_proj" or not len(rows):
            return self.base.read(name, layers, pos)
        first, stop = int(rows[0]), int(rows[-1]) + 1
        part = self.base.read(name, layers, slice(first, stop))
        return part if stop - first == len(rows) else part.index_select(2, rows - first)
