"""Arguments of users as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvsim.core.checks import DTYPES
from kvsim.errors import TraceError

ArrayLike = Tensor | np.ndarray[Any, Any]

Positions = Sequence[int] | slice | Tensor


def as_tensor(name: str, array: ArrayLike) -> Tensor:
    """Return the array as a tensor of a floating dtype, without a copy."""
    tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array.detach()
    if tensor.dtype not in DTYPES:
        raise TraceError(
            f"{name} has dtype {str(tensor.dtype).removeprefix('torch.')}, expected one of "
            f"{', '.join(DTYPES.values())}"
        )
    return tensor


def as_tokens(tokens: ArrayLike | Sequence[int], n_pos: int, where: str) -> Tensor:
    """Return token ids [pos] as int64."""
    ids = torch.as_tensor(tokens)
    if tuple(ids.shape) != (n_pos,) or ids.dtype.is_floating_point or ids.dtype == torch.bool:
        raise TraceError(
            f"{where}: tokens has shape {tuple(ids.shape)} and dtype "
            f"{str(ids.dtype).removeprefix('torch.')}, expected {n_pos} integers"
        )
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < 1 << 31:
        raise TraceError(
            f"{where}: tokens are {int(ids.min())} to {int(ids.max())}, expected token ids, "
            "0 or more"
        )
    return ids.to(torch.int64)


def as_positions(at: Positions, n_pos: int) -> Tensor:
    """Return positions as int64; negative ones count from the end."""
    if isinstance(at, slice):
        return torch.arange(n_pos)[at]
    index = torch.as_tensor(at, dtype=torch.int64)
    index = torch.where(index < 0, index + n_pos, index)
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < n_pos:
        raise IndexError(f"position out of range, expected 0 to {n_pos - 1}")
    return index
