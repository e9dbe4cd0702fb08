"""torch, loaded when something of it is used first: reading tables takes none of it."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["Tensor", "torch"]

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:

    class _Torch(ModuleType):
        def __getattr__(self, name: str) -> Any:
            module = import_module("torch")
            self.__dict__.update(vars(module))  # from here on as fast as the module itself
            return getattr(module, name)

    class _OfTorch(type):
        def __instancecheck__(cls, value: object) -> bool:
            loaded = sys.modules.get("torch")  # without it there is no tensor
            return loaded is not None and isinstance(value, loaded.Tensor)

    class Tensor(metaclass=_OfTorch):
        """Stands for `torch.Tensor` in annotations and `isinstance`."""

    torch = _Torch("torch")
