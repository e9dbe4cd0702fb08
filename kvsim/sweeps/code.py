"""The code that computes cells, as it was loaded: it names results, as parameters do."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from types import CodeType
from typing import Any

#: Modules that are of no user.
_LIBRARIES = {"builtins", "kvsim", "numpy", "torch", "transformers", *sys.stdlib_module_names}
#: Of each module the spec with which it was loaded, its source then, and whether it was loaded.
_READ: dict[str, tuple[object, bytes, bool]] = {}


@cache
def of_kvsim() -> str:
    """Return the SHA-256 of kvsim's own modules that compute values, read once a process."""
    root, sha = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        if path.relative_to(root).parts[0] not in ("cli", "plots", "report"):
            sha.update(path.read_bytes())
    return sha.hexdigest()


def code_of(roots: Iterable[object]) -> dict[str, str]:
    """Return the code of users behind pieces of policies and functions of metrics.

    For each of their modules, and all that these import from their top-level package or folder,
    the SHA-256 of its source, as kvsim first saw it loaded; and one of the functions and constants
    that were loaded, which are older than a source that was edited without a reload.
    """
    kinds = list(_kinds(roots))
    left = [kind.__module__ for kind in kinds]
    tops = {name.partition(".")[0] for name in left} - {"__main__"}
    folders = {path.parent for name in left if (path := _path(name))}
    folders = {folder for folder in folders if not folder.name.endswith("-packages")}
    sources, loaded = dict[str, str](), {*left}
    while left:
        name = left.pop()
        path = None if name in sources else _path(name)
        if path and (name.partition(".")[0] in tops or not folders.isdisjoint(path.parents)):
            source, was_loaded = _source(name, path)
            loaded |= {name} if was_loaded else set()
            sources[name] = hashlib.sha256(source).hexdigest()
            left += _imports(name, source, package=path.stem == "__init__")
    runs = "\n".join(sorted(_running(loaded, kinds)))
    return sources | ({"": hashlib.sha256(runs.encode()).hexdigest()} if kinds else {})


def _kinds(roots: Iterable[object]) -> Iterator[Any]:
    """Yield functions, and classes of pieces at any depth, that are of users."""
    for root in roots:
        kind: Any = root if inspect.isfunction(root) else type(root)
        if kind.__module__.partition(".")[0] not in _LIBRARIES - {"__main__"}:
            yield kind
        inner = [root.func, *root.args] if isinstance(root, partial) else []
        inner += root if isinstance(root, list | tuple) else ()
        inner += [getattr(root, x.name) for x in fields(root)] if is_dataclass(root) else ()
        yield from _kinds(inner)


def _path(name: str) -> Path | None:
    """Return the file of a module; None where it has none."""
    module, spec = sys.modules.get(name), None
    if module is None:
        with suppress(Exception):  # no module, or in a package that cannot be imported
            spec = importlib.util.find_spec(name)
    place = getattr(module, "__file__", None) or getattr(spec, "origin", None)
    return path if place and (path := Path(place).absolute()).is_file() else None


def _source(name: str, path: Path) -> tuple[bytes, bool]:
    """Return the source of a module, read when it is loaded, and whether it was loaded before."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    before = _READ.get(name)
    if before is None or (before[0] is not spec and before[0] is not None):  # or loaded again
        before = spec, path.read_bytes(), name in sys.modules
    _READ[name] = spec, *before[1:]
    return before[1:]


def _imports(name: str, source: bytes, *, package: bool) -> Iterator[str]:
    """Yield the modules that a module imports anywhere, among other names."""
    within = name if package else name.rpartition(".")[0]
    with suppress(SyntaxError, ValueError):  # no Python
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                for parts in (alias.name.split(".") for alias in node.names):
                    yield from (".".join(parts[:n]) for n in range(1, len(parts) + 1))
            elif isinstance(node, ast.ImportFrom):
                with suppress(ImportError):
                    relative = "." * node.level + (node.module or "")
                    whole = importlib.util.resolve_name(relative, within)
                    yield from (whole, *(f"{whole}.{alias.name}" for alias in node.names))


def _running(modules: Iterable[str], kinds: Iterable[Any]) -> set[str]:
    """Return the functions that were loaded of modules, and the constants that they name.

    kinds: classes and functions that run, even if others of their names were loaded later.
    """
    spaces = {name: vars(sys.modules[name]) for name in modules if name in sys.modules}
    things = [*kinds, *(x for space in spaces.values() for x in space.values())]
    own = [x for x in things if getattr(x, "__module__", None) in {*modules}]
    own += [y for x in own if inspect.isclass(x) for y in vars(x).values()]
    codes: list[CodeType] = []
    for thing in own:  # of methods and properties, or behind decorators
        inner = next(
            (y for x in ("__func__", "fget", "func") if (y := getattr(thing, x, None))), thing
        )
        code = getattr(inspect.unwrap(inner), "__code__", None)
        codes += [code] if isinstance(code, CodeType) else []
    texts, names = set[str](), set[str]()
    for code in codes:
        codes += (x for x in code.co_consts if isinstance(x, CodeType))
        constants = [_constant(x) for x in code.co_consts if not isinstance(x, CodeType)]
        texts.add(
            repr((code.co_qualname, code.co_code, code.co_names, code.co_varnames, constants))
        )
        names.update(code.co_names)
    of_modules = ((x, space[x]) for space in spaces.values() for x in names & space.keys())
    return texts | {f"{name}={text}" for name, x in of_modules if (text := _constant(x))}


def _constant(x: object) -> str:
    """Return the text of a constant; empty for what can change."""
    if isinstance(x, tuple | frozenset):
        texts = [*map(_constant, x)]
        return str(sorted(texts) if isinstance(x, frozenset) else texts) if all(texts) else ""
    return repr(x) if x is None or isinstance(x, int | float | complex | str | bytes) else ""
