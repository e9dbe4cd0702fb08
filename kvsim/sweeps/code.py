"""Digests of the code that computes cells, which identify results together with parameters."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache, partial
from modulefinder import ModuleFinder
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

#: Modules without user code.
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
    """Return the SHA-256 of users' code in pieces of policies and functions of metrics.

    Of the loaded bytecode, and of the files of their modules with all imports from the same package
    or folder; empty without users' code.
    """
    kinds = list(_kinds(roots))
    files = {path for name in {kind.__module__ for kind in kinds} for path in _files(name)}
    lines = {f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files}
    lines |= {line for kind in kinds for line in _codes(kind)}
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest() if lines else ""


def _kinds(roots: Iterable[object]) -> Iterator[Any]:
    """Yield users' functions, and classes of pieces at any depth."""
    for root in roots:
        kind: Any = root if inspect.isfunction(root) else type(root)
        if kind.__module__.partition(".")[0] not in _LIBRARIES:
            yield kind
        inner = [root.func, *root.args] if isinstance(root, partial) else []
        inner += root if isinstance(root, list | tuple) else ()
        inner += [getattr(root, x.name) for x in fields(root)] if is_dataclass(root) else ()
        yield from _kinds(inner)


def _files(name: str) -> set[Path]:
    """Return the file of a module, and those of its imports from the same package or folder."""
    file = Path(getattr(sys.modules.get(name), "__file__", None) or "")
    if not file.is_file():  # of a notebook
        return set()
    root = file.absolute().parents[name.count(".") + (file.stem == "__init__")]
    if root.name.endswith("-packages"):  # of an installed package all files, and only these
        return {file, *(root / name.partition(".")[0]).rglob("*.py")}
    finder = ModuleFinder([str(root)], excludes=[*_LIBRARIES])
    with suppress(Exception):  # not Python, or missing
        finder.run_script(str(file)) if name == "__main__" else finder.import_hook(name)
    found = (vars(each)["__file__"] for each in finder.modules.values())
    return {file, *(Path(each) for each in found if each)}


def _codes(thing: Any) -> Iterator[str]:
    members = vars(thing).values() if inspect.isclass(thing) else [thing]
    for member in members:
        function = inspect.unwrap(
            getattr(member, "fget", None) or getattr(member, "__func__", member)
        )
        if isinstance(function, FunctionType):
            yield f"{function.__qualname__}: {_text(function.__code__)}"


def _text(code: CodeType) -> str:
    """Return the bytecode, names and constants of a function, without addresses."""
    constants = [_text(x) if isinstance(x, CodeType) else x for x in code.co_consts]
    ordered = [sorted(map(repr, x)) if isinstance(x, frozenset) else x for x in constants]
    return repr((code.co_code, code.co_names, code.co_varnames, ordered))
