"""Old module names, which work for one release with a DeprecationWarning.

CHANGELOG.md lists them. They and this file are removed in the release after this one.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

#: The modules that hold what an old module held, the first that has a name is asked for it.
MODULES: Mapping[str, tuple[str, ...]] = {
    "kvsim.attention": ("kvsim.core.attention",),
    "kvsim.composition": ("kvsim.core.policy", "kvsim.core.pieces"),
    "kvsim.diagnostics": ("kvsim.analysis",),
    "kvsim.metrics": ("kvsim.analysis",),
    "kvsim.propagation": ("kvsim.core.propagation",),
    "kvsim.record": ("kvsim.core.record",),
    "kvsim.results": ("kvsim.analysis.results",),
    "kvsim.samples": ("kvsim.tiny.sample",),
    "kvsim.select": ("kvsim.core.select",),
    "kvsim.statistics": ("kvsim.analysis.summaries",),
    "kvsim.testing.reference": ("kvsim.testing.loops",),
    "kvsim.trace": ("kvsim.core.trace", "kvsim.store"),
    "kvsim.view": ("kvsim.core.view",),
}


class _Forwarding(ModuleType):
    """A module that takes each name from the modules that hold it now."""

    def __getattr__(self, name: str) -> object:
        homes = MODULES[self.__name__]
        if not name.startswith("__"):
            for home in map(import_module, homes):
                if hasattr(home, name):
                    return getattr(home, name)
        raise AttributeError(f"{self.__name__} is {' and '.join(homes)} now, without {name!r}")


class _Renamed(MetaPathFinder, Loader):
    """Finds the old modules by name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MODULES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        warnings.warn(
            f"{spec.name} is {' and '.join(MODULES[spec.name])} now; the old name goes with the "
            "next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return _Forwarding(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is run: names are looked up when they are asked for."""


def install() -> None:
    """Let old module names be imported."""
    if not any(isinstance(finder, _Renamed) for finder in sys.meta_path):
        sys.meta_path.append(_Renamed())
