"""Arrays in memory as the source of a trace, and how users' arrays become tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kvsim.errors import TraceError
from kvsim.schema import AXES
from kvsim.store.checks import DTYPES

ArrayLike = Tensor | np.ndarray[Any, Any]

_ALL = slice(None)


class Source(Protocol):
    """Where the arrays of a trace are."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each array that there is."""

    def read(self, name: str, layers: slice, pos: slice) -> Tensor:
        """Part of an array; `layers` or `pos` mean nothing for arrays without such an axis."""


class Memory:
    """Arrays in memory; `read` gives views."""

    def __init__(self, arrays: Mapping[str, Tensor]) -> None:
        self.arrays = dict(arrays)

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each array."""
        return {name: tuple(array.shape) for name, array in self.arrays.items()}

    def read(self, name: str, layers: slice, pos: slice) -> Tensor:
        """A view of part of an array."""
        array = self.arrays[name]
        if AXES[name][0] != "layer":
            return array[pos]
        if "pos" not in AXES[name]:
            return array[layers]
        axis = AXES[name].index("pos")
        return array[(layers, *[_ALL] * (axis - 1), pos)]


def as_tensor(name: str, array: ArrayLike) -> Tensor:
    """The array as a tensor of a floating dtype, without a copy."""
    tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array.detach()
    if tensor.dtype not in DTYPES:
        raise TraceError(
            f"{name} has dtype {str(tensor.dtype).removeprefix('torch.')}, expected one of "
            f"{', '.join(DTYPES.values())}"
        )
    return tensor


def as_tokens(tokens: ArrayLike | Sequence[int], n_pos: int, where: str) -> Tensor:
    """Token ids [pos] as int64."""
    ids = torch.as_tensor(tokens)
    if tuple(ids.shape) != (n_pos,) or ids.dtype.is_floating_point or ids.dtype == torch.bool:
        raise TraceError(
            f"{where}: tokens has shape {tuple(ids.shape)} and dtype "
            f"{str(ids.dtype).removeprefix('torch.')}, expected {n_pos} integers"
        )
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < 1 << 31:
        raise TraceError(
            f"{where}: tokens are {int(ids.min())} to {int(ids.max())}, expected numbers of a "
            "vocabulary, from 0 on"
        )
    return ids.to(torch.int64)
