# ruff: noqa: INP001 - lies in docs/, which is no package
"""The page of policies: its tables, and for the site the docstrings of kvsim/policies."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

import kvsim
from kvsim.cli.listing import fires, needs, shown
from kvsim.core.attention import Rope
from kvsim.policies import ACCESS, CATALOGUE, describe, has_parameter, names
from kvsim.policies.naming import Part


def policies() -> str:
    """Return the table of policies."""
    lines = ["| policy | rule | evicts after | needs | paper |", "| --- " * 5 + "|"]
    for name, entry in CATALOGUE.items():
        each = describe(name)
        cells = (_source(each, CATALOGUE), entry.rule, fires(each), _needs(each))
        lines.append(f"| {' | '.join(cells)} | {_link(entry.paper)}|")
    return "\n".join(lines)


def _source(each: Part, entries: Mapping[str, Any]) -> str:
    """The name, linked to the file whose docstring has the rule."""
    module = f"kvsim.policies.{each.name}"
    if find_spec(module) is None:
        module = entries[each.name].piece.__module__
    label = shown(each).removeprefix("[EVICTION+]")
    return f"[`{label}`](../{module.replace('.', '/')}.py)"


def _link(paper: str) -> str:
    number = paper.removeprefix("arXiv ")
    return f"[{number}](https://arxiv.org/abs/{number}) " if number != paper else f"{paper} "


def _needs(each: Part) -> str:
    if each.policy.reads.context_again:
        return "context twice"
    whole = each.entry.innermost or each.entry.default
    texts = ["question"] * bool(whole and _reads_question(each.name)) + [needs(each)]
    return ", ".join(filter(None, texts))


def _reads_question(name: str) -> bool:
    """Whether kept sets change with the queries of the last rows of the prompt, all else equal."""
    free = {"protect_prompt": False} if has_parameter(name, "protect_prompt") else {}
    policy = kvsim.policy(name, **CATALOGUE[name].required, **free)
    one, other = (kvsim.replay(trace, policy, 288, prefill=True) for trace in _two_questions())
    return not np.array_equal(one.evicted_at, other.evicted_at)


@cache
def _two_questions() -> list[kvsim.Trace]:
    """Random traces that differ in the queries of the last 16 rows of the prompt."""
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((3, heads, 640, 16), np.float32) for heads in (4, 2, 2))
    other = q.copy()
    other[:, :, 496:512] *= -8  # enough for scores that are means over all rows
    rope = Rope([1e4 ** (-place / 8) for place in range(8)])
    return [kvsim.Trace.from_arrays(x, k, v, prompt_len=512, rope=rope) for x in (q, other)]


def lengths() -> str:
    """Return the lengths that `@scaled` scales at 64 entries, and their budgets."""
    lines = ["| policy | meant for | values (at a budget of 64) |", "| --- " * 3 + "|"]
    for name in names():
        base, _, preset = name.partition("@")
        entry = CATALOGUE[base].preset(preset)
        inside = "" if entry.innermost or entry.default else "+tova"
        built = kvsim.policy(name + inside, **entry.required)
        lengths = [length for length in built.lengths if length.depth == 0]
        values = (
            f"`{length.name}` {length.value}"
            + (f" ({length.at(64)})" if length.at(64) != length.value else "")
            for length in lengths
        )
        if any(length.at(64) != length.value for length in lengths):
            lines.append(f"| `{name}` | {lengths[0].entries} | {', '.join(values)} |")
    return "\n".join(lines)


def access() -> str:
    """Return the table of sparse attention, quantizers and mergers."""
    lines = ["| part | kind | rule | needs | paper |", "| --- " * 5 + "|"]
    for name, entry in ACCESS.items():
        each = describe(name)
        cells = (_source(each, ACCESS), entry.kind, entry.rule, needs(each))
        lines.append(f"| {' | '.join(cells)} | {_link(entry.paper)}|")
    return "\n".join(lines)


def parameters() -> str:
    """Return parameters with their defaults, and presets with what they change."""
    lines = ["| policy | parameters |", "| --- | --- |"]
    for name, entry in {**CATALOGUE, **ACCESS}.items():
        defaults = describe(name).params
        rows = {name: [_values(defaults)]}
        for preset in entry.presets:
            each = describe(f"{name}@{preset}")
            changed = {key: x for key, x in each.params.items() if x != defaults.get(key)}
            own = "" if each.entry.schedule == entry.schedule else f"evicts after {fires(each)}"
            rows[each.name] = [each.entry.rule, _values(changed), own]
        for label, texts in rows.items():
            if any(texts):
                lines.append(f"| `{label}` | {'; '.join(filter(None, texts))} |")
    return "\n".join(lines)


def _values(params: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key}={value}`" for key, value in params.items())


_WORDS = """## Rules

* The **score** of entry j is s_j. The entries with the highest scores stay.
* **Candidates** are the entries before the window; they compete for the budget.
* The **slot** of an entry is its index in the cache, which changes when earlier entries leave.
* The **mass** of an entry is its share of the attention.
* A **release** is the code that the authors of a paper published."""


def with_rules(page: str) -> str:
    """Append the rules to the page of policies, and link the names in its tables to them."""
    linked = re.sub(r"\[(`(\w+)[^`]*`)\]\(\.\./kvsim/\S+\.py\)", r"[\1](#\2)", page)
    return "\n\n".join([linked.rstrip(), _WORDS, *_policies(), *_access()]) + "\n"


def _policies() -> list[str]:
    """A section for each entry of the catalogue: the docstrings of its files, each once."""
    sections: list[str] = []
    places: dict[str, str] = {}
    for name, entry in CATALOGUE.items():
        presets = {preset: entry.preset(preset) for preset in entry.presets}
        pieces = [p for e in (entry, *presets.values()) for p in (e.piece, e.layer_budgets) if p]
        docs, elsewhere = [], []
        for module in dict.fromkeys(piece.__module__ for piece in pieces):
            if not module.startswith("kvsim.policies."):
                continue
            file = module.rpartition(".")[2]
            place = file if file in CATALOGUE else places.setdefault(module, name)
            if place == name:
                docs.append(inspect.cleandoc(sys.modules[module].__doc__ or ""))
            else:
                elsewhere.append(f"[{place}](#{place})")
        places_text = " and ".join(elsewhere)
        if docs and elsewhere:
            docs.append(f"See also {places_text}.")
        elif elsewhere:
            docs.append(f"Keeps {entry.summary}. The rule is under {places_text}.")
        sections += [f"### {name}", *docs]
    return sections


def _access() -> list[str]:
    """A section for each sparse attention and quantizer: the docstring of its class."""
    sections: list[str] = []
    first: dict[type, str] = {}
    for name, entry in ACCESS.items():
        place = first.setdefault(entry.piece, name)
        doc = inspect.cleandoc(entry.piece.__doc__ or "")
        sections += [f"### {name}", doc if place == name else f"As [{place}](#{place})."]
    return sections
