# ruff: noqa: INP001 - lies in docs/, which is no package
"""The rules of all policies for the site: the docstrings of kvsim/policies, as Markdown."""

from __future__ import annotations

import inspect
import re
import sys

from kvsim.policies import ACCESS, CATALOGUE


def with_rules(page: str) -> str:
    """Append the rules to the page of policies, and link the names in its tables to them."""
    linked = re.sub(r"\[(`(\w+)[^`]*`)\]\(\.\./kvsim/\S+\.py\)", r"[\1](#\2)", page)
    return "\n\n".join([linked.rstrip(), *_policies(), *_access()]) + "\n"


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
