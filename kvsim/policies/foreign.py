"""User-defined policies `package.module:NAME`, and policies of a plan `duo:FILE`."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvsim.core.parameters import parameters
from kvsim.core.policy import Even, Policy, Scorer, Uniform
from kvsim.errors import KvsimError, PolicyError, error_line
from kvsim.policies.catalogue import CATALOGUE, EVERY_128, EVERY_ROW, PROMPT
from kvsim.policies.entry import Entry

#: Policies of a plan of heads, named with its file; a plan of `lukv` names its scorer.
_PLANNED = {
    "duo": Entry("", "duo:Duo", EVERY_ROW, default="tova", inner={"tova": {"heads": "group"}}),
    "headkv": Entry("", "headkv:HeadKV", PROMPT, default="snapkv"),
    "lukv": Entry("", "lukv:LUKV", PROMPT),
}


def described(name: str) -> tuple[Entry, Mapping[str, Any], bool]:
    """Entry and parameters of a user-defined policy, and whether `build` builds it.

    False for a plan, and for the class of a piece that needs a scorer or follows one.
    """
    kind, _, file = name.partition(":")
    if kind in _PLANNED:
        entry = replace(_PLANNED[kind], params={"file": file})
        if not entry.default:
            entry = replace(entry, **_scoring(kind, file, entry))
        return entry, entry.parameters, False
    own, target = Entry("a policy of your own", Scorer), _target(name)
    if isinstance(target, type):
        entry = Entry("of your own", target)
        if entry.kind not in ("", "scorer", "propagation"):
            return entry, entry.parameters, False
        if fields := parameters(target):
            return own, fields, True
    try:
        return own, inspect.signature(target).parameters if callable(target) else {}, True
    except (TypeError, ValueError):  # of a callable without a signature
        return own, {}, True


def build(name: str, params: Mapping[str, Any]) -> Policy:
    """Build a user-defined policy. Raises PolicyError where that fails."""
    target = built = _target(name)
    if callable(target):
        with _explained(f"{name!r} cannot be built from {params}"):
            built = target(**params)
    if isinstance(built, Scorer):
        built = Policy(name.partition(":")[2], built, schedule=EVERY_128)
    if not isinstance(built, Policy) or (params and not callable(target)):
        raise PolicyError(
            f"{name!r} is a {type(built).__name__}; expected a kvsim.Policy, a Scorer, or a "
            "function that takes the parameters and returns one of them"
        )
    return built


def plain_scorer(where: str, name: Any) -> type[Any]:
    """Return the class of a scorer with the same quota in all heads; PolicyError for others."""
    entry = CATALOGUE.get(name) if isinstance(name, str) else None
    if (
        entry is None
        or entry.kind != "scorer"
        or entry.by_layer is not Even
        or entry.allocator is not Uniform
    ):
        raise PolicyError(f"{where}: its scorer is {name!r}; expected one such as snapkv")
    return entry.piece


def _scoring(kind: str, file: str, entry: Entry) -> dict[str, Any]:
    """The entry with the scorer of its plan as the default, and its parameters."""
    name, of_scorer, sink = entry.piece.scoring(file)
    scorer = plain_scorer(f"{kind}: {file}", name)
    with _explained(f"{kind}: {file}: its scorer {name} cannot be built from {of_scorer}"):
        scorer(**of_scorer)
    return {"default": name, "inner": {name: {"sink": sink, **of_scorer}}}


def _target(name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    if module_name.endswith(".py"):
        module = module_name.removesuffix(".py")
        raise PolicyError(f"{name!r} has a file; expected its module, {module}:{attribute}")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # the last place to search for the user's file
    with _explained(f"cannot import {attribute!r} of {module_name!r} for policy {name!r}"):
        return getattr(importlib.import_module(module_name), attribute)


@contextmanager
def _explained(failed: str) -> Iterator[None]:
    """Raise a PolicyError of one line for any error or exit in a user's code."""
    try:
        yield
    except KvsimError:
        raise
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        frames = ((x.filename, x.lineno) for x in traceback.extract_tb(error.__traceback__))
        user = (x for x in frames if x[0] not in (__file__, importlib.__file__) and x[0][0] != "<")
        where = next((f" ({file}, line {line})" for file, line in user), "")
        raise PolicyError(
            f"{failed}: {type(error).__name__}: {error_line(error)}{where}"
        ) from error
