"""Hooks of notebooks; `kvsim.notebook`, a room above, renders the objects."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any


class Displayed:
    """An object that a notebook shows as more than its text."""

    def _repr_html_(self) -> str:
        """The object as HTML."""
        return str(import_module("kvsim.notebook").html(self))


def notebook_shell() -> Any:
    """Return the shell of the notebook that this process runs; None elsewhere."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell if hasattr(shell, "kernel") else None
