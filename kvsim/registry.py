"""Policies, metrics, figures and commands by name: the core's, then those of entry points.

A study of kvsim and a package of a user declare their objects in the same way::

    [project.entry-points."kvsim.metrics"]
    share_kept = "my_package:SHARE_KEPT"

or name a mapping that has the object by that name. An object is imported when it is first read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache, cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from kvsim.errors import PackageError, error_line

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """Objects by name: `own` in their order, then those of studies and of packages, by name.

    Args:
        kind: the kind of object, in a word, such as "metric".
        group: the group of entry points.
        types: allowed types of an object.
        own: the objects of the core.
        reserved: names that no package may have.

    Raises PackageError on access to a declared object that cannot be loaded, is of another type, or
    has the name of another one.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        types: tuple[type[Any], ...],
        own: Mapping[str, T],
        reserved: Collection[str] = (),
    ) -> None:
        self.kind, self.group = kind, group
        self._types, self._own, self._reserved = types, own, reserved
        self._loaded: dict[str, T] = {}

    @cached_property
    def _points(self) -> dict[str, list[EntryPoint]]:
        points: dict[str, list[EntryPoint]] = {}
        for point in sorted(_installed().select(group=self.group), key=_order):
            points.setdefault(point.name, []).append(point)
        return points

    def __getitem__(self, name: str) -> T:
        points = self._points.get(name, [])
        ours = name in self._own or name in self._reserved
        if len(points) + ours > 1:
            owners = " and by ".join([*["kvsim"] * ours, *map(_owner, points)])
            raise PackageError(
                f"the {self.kind} {name!r} is declared by {owners}; a name is declared once: "
                f"rename it in the package's pyproject.toml, or uninstall {_project(points[-1])}"
            )
        if not points:
            return self._own[name]
        if name not in self._loaded:
            self._loaded[name] = self._load(points[0])
        return self._loaded[name]

    def _read(self, point: EntryPoint) -> Any:
        return point.load()

    def _load(self, point: EntryPoint) -> T:
        loaded, cause = None, None
        try:
            loaded = self._read(point)
            if isinstance(loaded, Mapping):
                loaded = loaded[point.name]
            expected = " or ".join(f"{each.__module__}.{each.__name__}" for each in self._types)
            reason = f"it is of type {type(loaded).__name__}; expected {expected}"
        except (Exception, SystemExit) as error:  # a package is user code
            if _project(point) == "kvsim":
                raise
            cause, reason = error, f"{type(error).__name__}: {error_line(error)}"
        if cause or not isinstance(loaded, self._types):
            raise PackageError(
                f"the {self.kind} {point.name!r} of {_owner(point)} cannot be loaded from "
                f"{point.value!r}: {reason}; mend the package, or uninstall {_project(point)}"
            ) from cause
        kept: T = loaded
        return kept

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self._points

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._own, *self._points]))

    def __len__(self) -> int:
        return len(self._own.keys() | self._points.keys())


_installed = cache(entry_points)  # a scan of all installed packages


class Ordered(Registry[T]):
    """A registry in which an object whose field `after` is not empty follows that of this name."""

    @cached_property
    def _order(self) -> list[str]:
        order = list(self._own)
        waiting = {
            name: str(getattr(self[name], "after", ""))
            for name in super().__iter__()
            if name not in self._own
        }
        while waiting:
            ready = [name for name, after in waiting.items() if after in order] or [*waiting]
            for name in ready:
                after = waiting.pop(name)
                order.insert(order.index(after) + 1 if after in order else len(order), name)
        return order

    def __iter__(self) -> Iterator[str]:
        return iter(self._order)


def _project(point: EntryPoint) -> str:
    return point.dist.name if point.dist else ""


def _owner(point: EntryPoint) -> str:
    version = f" {point.dist.version}" if point.dist and _project(point) != "kvsim" else ""
    return f"{_project(point)}{version}"


def _order(point: EntryPoint) -> tuple[bool, str, str]:
    """Return a sort key: kvsim's own before those of packages, then by name."""
    return _project(point) != "kvsim", point.name, _project(point)
