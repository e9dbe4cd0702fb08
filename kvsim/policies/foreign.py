"""A policy of the user's own: `package.module:NAME`, or of a plan: `duo:FILE`."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from kvsim.core.parameters import Parameter, parameters
from kvsim.core.policy import Allocator, Policy, Schedule, Scorer, Wrapper
from kvsim.core.reading import Reader
from kvsim.core.storing import Codec
from kvsim.errors import KvsimError, PolicyError, error_line, suggest
from kvsim.policies.catalogue import CATALOGUE
from kvsim.policies.duo import Duo, HeadPlan
from kvsim.policies.entry import Entry
from kvsim.policies.headkv import HeadKV
from kvsim.policies.lukv import LUKV, PARAMS, SCORER, SINK
from kvsim.policies.snapkv import SnapKV
from kvsim.policies.tova import TOVA
from kvsim.schema import NEVER

# Policies of a plan of heads: allocator, scorer, its parameters there, and the schedule. The scorer
# is None where the plan names it.
_PLANNED: Mapping[str, tuple[Any, Any, Mapping[str, Any], Schedule]] = {
    "duo": (Duo, TOVA, {"heads": "group"}, Schedule(interval=1)),
    "headkv": (HeadKV, SnapKV, {}, Schedule(interval=None)),
    "lukv": (LUKV, None, {}, Schedule(interval=None)),
}


def entry_of(name: str) -> Entry | None:
    """The entry of a class of the user's own that needs a scorer inside, or stands behind one.

    None for any other policy.
    """
    target = None if name.partition(":")[0] in _PLANNED else _target(name)
    if isinstance(target, type) and issubclass(target, Allocator | Wrapper | Reader | Codec):
        return Entry("of your own", target, None)
    return None


def named(name: str) -> Mapping[str, Any]:
    """The parameters that its class or function names. Raises PolicyError where there is none."""
    kind, _, file = name.partition(":")
    if kind in _PLANNED:
        return _of_plan(_pieces(kind, file))
    target = _target(name)
    if isinstance(target, type) and (fields := parameters(target)):
        return fields
    try:
        return inspect.signature(target).parameters if callable(target) else {}
    except (TypeError, ValueError):  # of a callable without a signature
        return {}


def build(name: str, params: Mapping[str, Any]) -> Policy:
    """Build a policy of the user's own. Raises PolicyError where that fails."""
    module_name, _, attribute = name.partition(":")
    if module_name in _PLANNED:
        return _planned(module_name, attribute, params)
    target = built = _target(name)
    if callable(target):
        with _explained(f"{name!r} cannot be built from {params}"):
            built = target(**params)
    if isinstance(built, Scorer):
        built = replace(Policy.of(built), name=attribute)
    if not isinstance(built, Policy) or (params and not callable(target)):
        raise PolicyError(
            f"{name!r} is a {type(built).__name__}; expected a kvsim.Policy, a Scorer, or a "
            "function that takes the parameters and returns one of them"
        )
    return built


def _pieces(kind: str, file: str) -> tuple[Any, Any, Mapping[str, Any], Schedule]:
    """Allocator, scorer, its parameters and the schedule of the policy of a plan."""
    allocator, scorer, there, schedule = _PLANNED[kind]
    if scorer is None:
        training = HeadPlan.open(Path(file), kind, allocator.axes).training
        defaults = {"scorer": SCORER, "params": PARAMS, "sink": SINK}
        name, params, sink = ({**defaults, **training}[key] for key in defaults)
        scorer = plain_scorer(f"{kind}: {file}", name)
        if not isinstance(params, dict) or not params.keys() <= parameters(scorer).keys():
            raise PolicyError(f"{kind}: {file}: its scorer {name} has no parameters {params!r}")
        if type(sink) is not int or not 0 <= sink < NEVER:
            raise PolicyError(f"{kind}: {file}: its sink is {sink!r}; expected a number of entries")
        there = {"sink": sink, **params}
    return allocator, scorer, there, schedule


def plain_scorer(where: str, name: Any) -> Any:
    """The class of a scorer that evicts equally in all heads. Raises PolicyError for others."""
    entry = CATALOGUE.get(name) if isinstance(name, str) else None
    if entry is None or entry.kind != "scorer" or entry.layer_budgets or entry.policy:
        raise PolicyError(f"{where}: its scorer is {name!r}; expected one such as snapkv")
    return entry.piece


def _of_plan(of: tuple[Any, Any, Mapping[str, Any], Schedule]) -> dict[str, Parameter]:
    """The parameters of a policy of a plan: those of its allocator and of its scorer."""
    return {**parameters(of[0]), **parameters(of[1])}


def _planned(kind: str, file: str, params: Mapping[str, Any]) -> Policy:
    """The policy of a plan of heads."""
    of = _pieces(kind, file)
    (*pieces, there, schedule), accepted = of, _of_plan(of)
    values = {"file": file, **there, **params}
    for key in params.keys() - accepted.keys():
        raise PolicyError(
            f"{kind}:{file} has no parameter {key!r}{suggest(key, accepted)}; "
            f"parameters: {', '.join(accepted)}"
        )
    allocator, scorer = (
        piece(**{key: values[key] for key in parameters(piece) if key in values})
        for piece in pieces
    )
    return Policy(f"{kind}:{file}", scorer, allocator, schedule=schedule)


def _target(name: str) -> Any:
    """Return the object that `package.module:NAME` names."""
    module_name, _, attribute = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # the last place to look for the user's file
    with _explained(f"cannot import {attribute!r} of {module_name!r} for policy {name!r}"):
        return getattr(importlib.import_module(module_name), attribute)


@contextmanager
def _explained(failed: str) -> Iterator[None]:
    """Raise a PolicyError of one line for whatever a user's code raises, its exit included."""
    try:
        yield
    except KvsimError:
        raise
    except (Exception, SystemExit) as error:  # a user's file is anybody's code
        raise PolicyError(f"{failed}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """Say what a user's code raised, and in which line of its file, if that is known."""
    frames = ((x.filename, x.lineno) for x in traceback.extract_tb(error.__traceback__))
    user = (x for x in frames if x[0] not in (__file__, importlib.__file__) and x[0][0] != "<")
    where = "".join(f" ({file}, line {line})" for file, line in islice(user, 1))
    return f"{type(error).__name__}: {error_line(error)}{where}"
