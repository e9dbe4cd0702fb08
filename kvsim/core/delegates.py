"""Functions of rooms above that methods of the core call; `kvsim/__init__.py` puts them here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: `save_trace` of a trace.
delegates: dict[str, Callable[..., Any]] = {}
