"""Stored arrays as lazy arrays of xarray: decoded when, and as far as, they are asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
from xarray import Variable
from xarray.backends import BackendArray
from xarray.core.indexing import (
    ExplicitIndexer,
    IndexingSupport,
    LazilyIndexedArray,
    explicit_indexing_adapter,
)

from kvsim.schema import AXES
from kvsim.store.reader import StoredTrace

_ALL = slice(None)


class _Lazy(BackendArray):
    """One array of a stored trace as xarray's indexing sees it."""

    def __init__(self, stored: StoredTrace, name: str) -> None:
        self.stored, self.name = stored, name
        self.shape = stored.shapes[name]
        self.dtype = stored.arrays[name].dtype

    def __getitem__(self, key: ExplicitIndexer) -> Any:
        return explicit_indexing_adapter(key, self.shape, IndexingSupport.BASIC, self._part)

    def _part(self, key: tuple[int | slice, ...]) -> np.ndarray[Any, Any]:
        """The part at numbers and slices, of which layers and positions save reading."""
        axes = AXES[self.name]
        blocked = "row" if "row" in axes else "pos"
        saved = {"layer": _ALL, blocked: _ALL}
        rest: list[int | slice] = []
        for axis, n, one in zip(axes, self.shape, key, strict=True):
            if axis not in saved:
                rest.append(one)
                continue
            places = range(n)[one] if isinstance(one, slice) else range(one, one + 1)
            low = min(places, default=0)
            saved[axis] = slice(low, max(places, default=-1) + 1)
            if isinstance(one, slice):
                stop = places.stop - low
                rest.append(slice(places.start - low, None if stop < 0 else stop, places.step))
            else:
                rest.append(0)
        values = self.stored.read(self.name, saved["layer"], saved[blocked]).numpy()
        return values[tuple(rest)]


def variables(stored: StoredTrace) -> dict[str, Variable]:
    """The arrays of a stored trace by name, with their dimensions, in their stored dtype."""
    return {
        name: Variable(
            AXES[name],
            LazilyIndexedArray(_Lazy(stored, name)),
            {"source_dtype": source} if (source := stored.arrays[name].source_dtype) else {},
        )
        for name in stored.shapes
    }
