# ruff: noqa: F403 - type checkers read the figures from their modules
"""Figures. The only room that imports matplotlib, besides studies with figures of their own.

Every figure is a function that returns a matplotlib Figure and touches no global state; `save`
writes it. The functions are imported on first use: `kvsim plot --help` does not load matplotlib.

Everywhere `layer`, `layers` and `head` are indices in the trace, of KV heads, and records are of
the traces given with them. -1 is the last layer or head of a trace; a Table is searched for its own
numbers. A record of another trace is a TraceError; a layer or head that is not there or was not
replayed, or nothing to draw, is a PolicyError.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvsim.plots.registry import FIGURES

if TYPE_CHECKING:
    from kvsim.plots.attention import *
    from kvsim.plots.events import *
    from kvsim.plots.haystack import *
    from kvsim.plots.records import *
    from kvsim.plots.style import save as save
    from kvsim.plots.summary import *
    from kvsim.plots.text import *

_HOME = {"NEEDED": "records", "save": "style"}


def __getattr__(name: str) -> Any:
    """Import a figure on first use."""
    if name == "__all__":
        return [*FIGURES, *_HOME]
    if name not in FIGURES and name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module(f"{__name__}.style").draw_in_notebooks()
    home = f"{__name__}.{_HOME[name]}" if name in _HOME else FIGURES[name].module
    globals()[name] = getattr(import_module(home), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *FIGURES, *_HOME})
