"""torch, loaded when something of it is used first: reading tables takes none of it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["Tensor", "threads_for", "torch"]

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


#: Tokens of a trace, and parameters of a model, below which a second thread makes nothing faster.
SHORT, SMALL = 4096, 200_000_000


@contextmanager
def threads_for(work: Iterable[Any] | torch.nn.Module) -> Iterator[None]:
    """Let torch use one thread meanwhile if all traces are short, or the model is small."""
    if isinstance(work, torch.nn.Module):
        small = sum(parameter.numel() for parameter in work.parameters()) < SMALL
    else:
        small = all(trace.n_pos < SHORT for trace in work)
    before = torch.get_num_threads()
    if small:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
