"""The policies by name, one file per paper.

A new policy is one file here and one line in `CATALOGUE`. `policy` builds one from its name.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvsim.composition import Everything, Policy, Schedule, Scorer
from kvsim.errors import PolicyError, suggest
from kvsim.policies.full import Full
from kvsim.policies.h2o import H2O, ObservedAttention
from kvsim.policies.random import Random
from kvsim.policies.snapkv import SnapKV
from kvsim.policies.streaming_llm import StreamingLLM
from kvsim.policies.tova import TOVA

__all__ = ["CATALOGUE", "Entry", "Preset", "policy"]

_NEVER = Schedule(interval=None, prefill=False)
_PROMPT = Schedule(interval=None)
_EVERY_ROW = Schedule(interval=1)


@dataclass(frozen=True)
class Preset:
    """What an implementation does differently: another scorer, parameters or schedule."""

    summary: str
    scorer: type[Any] | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """A policy of the catalogue: what it keeps, from which paper, its scorer and presets."""

    summary: str
    paper: str
    scorer: type[Any]
    schedule: Schedule
    presets: Mapping[str, Preset] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)


CATALOGUE: Mapping[str, Entry] = {
    "full": Entry(
        "everything: the reference", "", Full, _NEVER, policy={"allocator": Everything()}
    ),
    "random": Entry("a random set: the null", "", Random, _EVERY_ROW),
    "streaming_llm": Entry(
        "the first and the most recent entries",
        "arXiv 2309.17453",
        StreamingLLM,
        _EVERY_ROW,
        {
            "original": Preset(
                "keys rotated to their slot in the cache", policy={"positions": "slot"}
            )
        },
    ),
    "h2o": Entry(
        "recent entries and those that received most attention so far",
        "arXiv 2306.14048",
        H2O,
        _EVERY_ROW,
        {
            "kvpress": Preset(
                "ObservedAttention: average attention received, after the prompt only",
                scorer=ObservedAttention,
                policy={"schedule": _PROMPT},
            )
        },
    ),
    "tova": Entry(
        "what the last row attends to, one ranking for all heads",
        "arXiv 2401.06104",
        TOVA,
        _EVERY_ROW,
        {
            "kvpress": Preset(
                "the last token is kept; after the prompt only",
                params={"protect_last": True},
                policy={"schedule": _PROMPT},
            )
        },
    ),
    "snapkv": Entry(
        "what a window of rows attends to, pooled over neighbours",
        "arXiv 2404.14469",
        SnapKV,
        _PROMPT,
        {
            "kvpress": Preset(
                "window 64, average-pool of 5",
                params={"window": 64, "pool": "avg", "pool_kernel": 5},
            ),
            "original": Preset(
                "one set per query head, which a grouped cache cannot store",
                policy={"per_query_head": True},
            ),
        },
    ),
}


def policy(name: str, **params: Any) -> Policy:
    """The policy called `name`, `NAME[@PRESET]`, with parameters replaced by `params`.

    `package.module:NAME` is a policy of the user's own: a Policy, or something that returns one
    when called with `params`. Raises PolicyError for an unknown name, preset or parameter.
    """
    if ":" in name:
        return _own(name, params)
    base, _, preset_name = name.partition("@")
    if base not in CATALOGUE:
        raise PolicyError(
            f"unknown policy {base!r}{suggest(base, CATALOGUE)}; known: {', '.join(CATALOGUE)}"
        )
    entry = CATALOGUE[base]
    if preset_name and preset_name not in entry.presets:
        known = ", ".join(f"{base}@{p}" for p in entry.presets) or "none"
        raise PolicyError(
            f"{base} has no preset {preset_name!r}{suggest(preset_name, entry.presets)}; "
            f"presets of {base}: {known}"
        )
    preset = entry.presets[preset_name] if preset_name else Preset("")
    scorer = _scorer(name, preset.scorer or entry.scorer, {**preset.params, **params})
    return Policy(name, scorer, **{"schedule": entry.schedule, **entry.policy, **preset.policy})


def _scorer(name: str, kind: type[Any], params: Mapping[str, Any]) -> Scorer:
    known = {f.name: f for f in fields(kind)}
    for key, value in params.items():
        if key not in known:
            has = ", ".join(known) or "none"
            raise PolicyError(
                f"{name} has no parameter {key!r}{suggest(key, known)}; parameters: {has}"
            )
        if not _fits(value, known[key].type):
            raise PolicyError(f"{name}: {key} is {value!r}; expected {known[key].type}")
    scorer: Scorer = kind(**params)
    return scorer


def _fits(value: object, annotation: object) -> bool:
    """Whether a parameter has the type its field names; ranges are the scorer's own business."""
    allowed = {p.strip() for p in str(annotation).replace("Literal", "").split("|")}
    if value is None:
        return "None" in allowed
    if isinstance(value, bool):
        return "bool" in allowed
    if isinstance(value, int):
        return bool({"int", "float"} & allowed)
    if isinstance(value, float):
        return "float" in allowed
    return not allowed <= {"int", "float", "bool", "None"}


def _own(name: str, params: Mapping[str, Any]) -> Policy:
    module_name, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        raise PolicyError(
            f"cannot import {module_name!r} for policy {name!r}: {error}; "
            "is it installed, or on PYTHONPATH?"
        ) from error
    except AttributeError as error:
        raise PolicyError(f"{module_name!r} has no {attribute!r}; looked for a policy") from error
    made = found(**params) if callable(found) and not isinstance(found, Policy) else found
    if not isinstance(made, Policy):
        raise PolicyError(f"{name!r} is a {type(made).__name__}; expected a kvsim.Policy")
    if params and made is found:
        raise PolicyError(f"{name!r} is a ready Policy and takes no parameters")
    return made
