"""The code that computes cells: it names results, as parameters do."""

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
from types import CodeType, FunctionType
from typing import Any

#: Modules that are of no user.
_LIBRARIES = {"builtins", "kvsim", "numpy", "torch", "transformers", *sys.stdlib_module_names}


@cache
def of_kvsim() -> str:
    """Return the SHA-256 of kvsim's own modules that compute values, read once a process."""
    root, sha = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        if path.relative_to(root).parts[0] not in ("cli", "plots", "report"):
            sha.update(path.read_bytes())
    return sha.hexdigest()


def code_of(roots: Iterable[object]) -> str:
    """Return the SHA-256 of the code of users behind pieces of policies and functions of metrics.

    It is of their bytecode as it was loaded, and of the files of their modules and of all that
    these import from the same package or folder; empty without code of users.
    """
    kinds = list(_kinds(roots))
    left = [kind.__module__ for kind in kinds]
    tops = {name.partition(".")[0] for name in left}
    folders = {path.parent for name in left if (path := _path(name))}
    folders = {folder for folder in folders if not folder.name.endswith("-packages")}
    sources = dict[str, bytes]()
    while left:
        name = left.pop()
        path = None if name in sources else _path(name)
        if path and (name.partition(".")[0] in tops or not folders.isdisjoint(path.parents)):
            sources[name] = path.read_bytes()
            left += _imports(name, sources[name], package=path.stem == "__init__")
    lines = {f"{name} {hashlib.sha256(source).hexdigest()}" for name, source in sources.items()}
    lines |= {line for kind in kinds for line in _codes(kind)}
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest() if lines else ""


def _kinds(roots: Iterable[object]) -> Iterator[Any]:
    """Yield functions, and classes of pieces at any depth, that are of users."""
    for root in roots:
        kind: Any = root if inspect.isfunction(root) else type(root)
        if kind.__module__.partition(".")[0] not in _LIBRARIES:
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


def _codes(thing: Any) -> Iterator[str]:
    """Yield the bytecode of a function, or of the methods of a class, as text."""
    members = vars(thing).values() if inspect.isclass(thing) else [thing]
    for member in members:
        function = inspect.unwrap(
            getattr(member, "fget", None) or getattr(member, "__func__", member)
        )
        if isinstance(function, FunctionType):
            yield f"{function.__qualname__}: {_text(function.__code__)}"


def _text(code: CodeType) -> str:
    """Return the bytecode, names and constants of a function, which has no addresses in it."""
    constants = [_text(x) if isinstance(x, CodeType) else x for x in code.co_consts]
    ordered = [sorted(map(repr, x)) if isinstance(x, frozenset) else x for x in constants]
    return repr((code.co_code, code.co_names, code.co_varnames, ordered))
