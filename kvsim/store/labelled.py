"""Traces as xarray Datasets; arrays of stored traces are lazy: decoded when they are accessed."""

from __future__ import annotations

from typing import Any

import numpy as np
from xarray import Dataset, Variable
from xarray.backends import BackendArray
from xarray.core.indexing import (
    ExplicitIndexer,
    IndexingSupport,
    LazilyIndexedArray,
    explicit_indexing_adapter,
)

from kvsim.core.left_out import held_parts
from kvsim.core.trace import Trace
from kvsim.schema import AXES, OF_ROWS, axes_of
from kvsim.store.group import reading
from kvsim.store.metadata import attributes_of
from kvsim.store.opening import TraceLike, as_trace
from kvsim.store.reader import StoredTrace, as_numbers


def to_xarray(trace: TraceLike) -> Dataset:
    """Return the arrays of a trace with named dimensions; lazy for a stored trace.

    Importing this module raises ImportError without xarray (`pip install kvsim[xarray]`).
    """
    trace = as_trace(trace)
    data: dict[str, Any] = {}
    source = trace.source
    coords: dict[str, Any] = {"layer": list(trace.layer_ids)}
    rows = trace.left_out is not None
    if trace.left_out is not None:
        start, stop = trace.left_out
        coords["row"] = [*range(start), *range(stop, trace.n_pos)]
    if isinstance(source, StoredTrace):
        for name in source.shapes:
            dtype = trace.header.source_dtypes.get(name)
            attributes = {} if dtype is None else {"source_dtype": dtype}
            lazy = LazilyIndexedArray(_LazyArray(source, name))
            data[name] = Variable(axes_of(name, rows=rows), lazy, attributes)
    else:
        data = {name: (axes_of(name, rows=rows), _whole(trace, name)) for name in source.shapes}
    if trace.token_text is not None:
        data["token_text"] = (AXES["tokens"], np.array(trace.token_text))
    return Dataset(data, coords=coords, attrs=attributes_of(trace.header))


def _whole(trace: Trace, name: str) -> np.ndarray[Any, Any]:
    """All that a trace in memory has of an array."""
    if name not in OF_ROWS:
        return trace.read(name).numpy()
    parts = held_parts(name, range(trace.n_pos), trace.left_out)
    return np.concatenate([trace.read(name, pos=part).numpy() for part in parts], 2)


class _LazyArray(BackendArray):
    """One array of a stored trace, as xarray's indexing accesses it."""

    def __init__(self, stored: StoredTrace, name: str) -> None:
        self.array, self.number, self.where = *stored.array(name), stored.where
        self.shape = self.array.shape
        self.dtype = np.dtype(np.float32 if self.number == "bfloat16" else self.number)

    def __getitem__(self, key: ExplicitIndexer) -> Any:
        return explicit_indexing_adapter(key, self.shape, IndexingSupport.BASIC, self._part)

    def _part(self, key: tuple[int | slice, ...]) -> Any:
        """Read the part at integers and slices; only the chunks that it touches are decoded."""
        with reading(self.where):
            values = as_numbers(self.array[key], self.number)
        return (values.float() if self.number == "bfloat16" else values).numpy()
