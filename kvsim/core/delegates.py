"""Functions of rooms above that methods of the core call; `kvsim/__init__.py` puts them here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: `html` of an object for notebooks; `save_trace`, `to_xarray` and `compacted` of a trace.
delegates: dict[str, Callable[..., Any]] = {}


class Displayed:
    """An object that a notebook shows as more than its text."""

    def _repr_html_(self) -> str:
        """The object as HTML."""
        return str(delegates["html"](self))
