"""Traces as files, in the format of docs/trace-format.md, and records.

What needs zarr is loaded by its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsim.store.index import check_target
    from kvsim.store.reader import open_trace
    from kvsim.store.verification import Verification, describe, verify
    from kvsim.store.writer import TraceWriter, save_trace

__all__ = [
    "TraceWriter",
    "Verification",
    "check_target",
    "describe",
    "open_trace",
    "save_trace",
    "verify",
]

_ROOMS = {
    "index": ["check_target"],
    "reader": ["open_trace"],
    "verification": ["Verification", "describe", "verify"],
    "writer": ["TraceWriter", "save_trace"],
}


def __getattr__(name: str) -> Any:
    for room, names in _ROOMS.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{room}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
