"""The form of a trace's arrays as zarr arrays: dtypes, chunks and shards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsim.core.left_out import LeftOut, stored_shape
from kvsim.schema import AXES, BLOCKED, CHUNK, SUMS

#: The dtype of bfloat16 as it is stored, for which zarr has no name: its bits.
BITS = "uint16"

#: An array of a trace that may have more chunks than this in all has one file per layer.
MOST_FILES = 1000

# Bits that a number takes on the disk, by its dtype in the model: its sign and fraction hardly
# compress. Means of values vary less. Measured on tiny and SmolLM2.
_USUAL = {"float32": 29.0, "float64": 58.0, "bfloat16": 13.0, "float16": 15.0}
_LESS = {"v": 1.0, "attn_out": 4.0}


@dataclass(frozen=True)
class StoredArray:
    """One array of a trace as it is stored.

    number: the dtype of its numbers. source_dtype: in the model. sharded: whether the chunks of a
    layer are in one file.
    """

    name: str
    shape: tuple[int, ...]
    number: str
    source_dtype: str
    sharded: bool = False

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype in files."""
        return np.dtype(BITS if self.number == "bfloat16" else self.number)

    @property
    def chunks(self) -> tuple[int, ...]:
        """A layer, all heads, 256 positions or probe rows; all, of an array without layers."""
        axes = AXES[self.name]
        size = {"layer": 1, **dict.fromkeys(BLOCKED, CHUNK)} if len(axes) > 1 else {}
        return tuple(size.get(axis, max(1, n)) for axis, n in zip(axes, self.shape, strict=True))

    @property
    def nchunks(self) -> int:
        """Number of chunks."""
        return math.prod(-(-n // size) for n, size in zip(self.shape, self.chunks, strict=True))

    @property
    def nfiles(self) -> int:
        """Number of files with chunks."""
        return self.shape[0] if self.sharded else self.nchunks

    @property
    def usual_bytes(self) -> float:
        """Bytes that the values usually take on the disk."""
        size = 8 * self.dtype.itemsize
        bits = min(_USUAL.get(self.source_dtype, size), size - 1) - _LESS.get(self.name, 0)
        return math.prod(self.shape) * bits / 8


def stored_arrays(
    shapes: Mapping[str, tuple[int, ...]],
    source_dtypes: Mapping[str, str],
    store_dtype: str | None = None,
    left_out: LeftOut = None,
    *,
    shards: bool = True,
) -> list[StoredArray]:
    """Return the arrays of a trace as they are stored.

    shapes: with the rows that are left out. store_dtype: ``float16`` to store all but lse and
    sums in half precision. shards: whether arrays with many chunks are sharded.
    """
    chunks = sum(StoredArray(name, x, "", "").nchunks for name, x in shapes.items())
    arrays = []
    for name, shape in shapes.items():
        source = source_dtypes[name]
        narrow = None if name in ("lse", *SUMS, "residual_norm") else store_dtype
        part = stored_shape(name, shape, left_out)
        blocks = "layer" in AXES[name] and any(axis in AXES[name] for axis in BLOCKED)
        sharded = shards and blocks and chunks > MOST_FILES
        arrays.append(StoredArray(name, part, narrow or source, source, sharded))
    return arrays


def pos_axis(name: str) -> int:
    """Return the axis of positions in one layer of an array."""
    return AXES[name].index("pos") - 1


def cut_shape(
    name: str, shape: tuple[int, ...], n_pos: int, left_out: LeftOut = None
) -> tuple[int, ...]:
    """Return the shape for `n_pos` positions."""
    pairs = zip(AXES[name], shape, strict=True)
    whole = tuple(n_pos if axis == "pos" else length for axis, length in pairs)
    return stored_shape(name, whole, left_out)
