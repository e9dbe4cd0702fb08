"""Threads of torch by the size of the work: on small work a second one only waits, and spins."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from kvsim.core.lazy import torch
from kvsim.core.trace import Trace

#: Tokens of a trace, and parameters of a model, below which a second thread makes nothing faster.
SHORT, SMALL = 4096, 200_000_000


@contextlib.contextmanager
def threads_for(work: Iterable[Trace] | torch.nn.Module) -> Iterator[None]:
    """Use one thread meanwhile if all traces are short, or the model is small."""
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
