"""What notebooks ask objects for; `kvsim.notebook`, a room above, says how they look."""

from __future__ import annotations

from importlib import import_module


class Displayed:
    """An object that a notebook shows as more than its text."""

    def _repr_html_(self) -> str:
        """The object as HTML."""
        return str(import_module("kvsim.notebook").html(self))
