"""torch, loaded on first use, so that reading tables does not import it."""

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
            self.__dict__.update(vars(module))  # later uses are as fast as the module
            return getattr(module, name)

    class _OfTorch(type):
        def __instancecheck__(cls, value: object) -> bool:
            loaded = sys.modules.get("torch")  # no torch, no tensor
            return loaded is not None and isinstance(value, loaded.Tensor)

    class Tensor(metaclass=_OfTorch):
        """`torch.Tensor` in annotations and `isinstance`."""

    torch = _Torch("torch")


#: Tokens of a trace, and parameters of a model, below which a second thread does not help.
SHORT, SMALL = 4096, 200_000_000


@contextmanager
def threads_for(work: Iterable[Any] | torch.nn.Module) -> Iterator[None]:
    """Limit torch to one thread in the block if all traces are short, or the model is small."""
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
