"""An entry of the catalogue: a name's pieces, schedule, presets and paper."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Literal

from kvsim.core.parameters import Parameter, parameters
from kvsim.core.pieces import Even, Schedule, Uniform

#: A class, or "FILE:CLASS" of one in kvsim.policies.
Class = type[Any] | str
_KINDS = "propagation", "allocator", "wrapper", "scorer", "sparse attention", "merger", "quantizer"
_KIND_OF = {kind.title().replace(" ", ""): kind for kind in _KINDS}


def load(given: Class) -> type[Any]:
    """The class that a text names, imported on demand; a class as it is."""
    if not isinstance(given, str):
        return given
    file, _, name = given.partition(":")
    loaded: type[Any] = getattr(import_module(f"kvsim.policies.{file}"), name)
    return loaded


def of_file(target: str, schedule: Schedule | None = None, **fields: Any) -> Entry:
    """An entry whose summary is the first line of its file."""
    return Entry("", target, schedule, **fields)


def variant(summary: str, **changes: Any) -> Mapping[str, Any]:
    """A preset: changed fields of an Entry, and parameters."""
    of_entry = {key: changes.pop(key) for key in changes.keys() & Entry.__dataclass_fields__.keys()}
    return {"summary": summary, **of_entry, **({"params": changes} if changes else {})}


def with_presets(
    entries: Mapping[str, Entry], presets: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, Entry]:
    """Entries by name, with the presets called NAME@PRESET."""
    own = [(full.partition("@"), changes) for full, changes in presets.items()]
    return {
        name: replace(entry, presets={of[2]: changes for of, changes in own if of[0] == name})
        for name, entry in entries.items()
    }


@dataclass(frozen=True)
class Entry:
    """A name of the catalogue: summary, paper, pieces and presets.

    target: the class of a scorer, a wrapper (a scorer that has a field `scorer`), an allocator or a
    propagation, sparse attention, a quantizer or a merger. schedule: the policy's own; None to take
    that of the inner scorer. cites: the paper, by default the first one that the piece's file names
    in the first two paragraphs of its docstring. by_layer: budgets of the layers, which take the
    piece's parameters of the same names. inner: defaults for parameters of an inner scorer, by its
    name. default: the inner scorer, or the eviction in front, if the name has none.
    shares: parameters of a propagation whose values that scorer takes over. required: parameters
    without a default, and an example of each. meant_for: parameters that are lengths, and the
    paper's budget for their values; the preset `scaled` shrinks them with the budget. ordinal: an
    allocator that uses only the order of scores, and so takes log scores (`log=True`). underflows:
    parameter values under which scores underflow and need logarithms.
    """

    summary: str
    target: Class
    schedule: Schedule | None = None
    cites: str = ""
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    by_layer: Class = Even
    allocator: Class = Uniform
    positions: Literal["absolute", "slot"] = "absolute"
    per_query_head: bool = False
    params: Mapping[str, Any] = field(default_factory=dict)
    inner: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    default: str = ""
    shares: tuple[str, ...] = ()
    required: Mapping[str, Any] = field(default_factory=dict)
    meant_for: Mapping[str, int] = field(default_factory=dict)
    scaled: bool = False
    ordinal: bool = False
    underflows: Mapping[str, Any] | None = None

    @property
    def piece(self) -> type[Any]:
        """The class of its piece."""
        return load(self.target)

    @property
    def layer_budgets(self) -> type[Any]:
        """The class of its budgets of layers."""
        return load(self.by_layer)

    @property
    def paper(self) -> str:
        """The paper, such as `arXiv 2404.14469`; empty without one."""
        head = self._docstring.split("\n\n")[:2]
        cited = re.search(r"(arXiv|openreview) [\w.]*\w", " ".join(" ".join(head).split()))
        return self.cites or (cited[0] if cited else "")

    @property
    def rule(self) -> str:
        """Its summary, else the first line of the piece's file without the name."""
        return self.summary or self._docstring.partition("\n")[0].partition(": ")[2].rstrip(".")

    @property
    def _docstring(self) -> str:
        kind = self.piece if self.layer_budgets is Even else self.layer_budgets
        return getattr(sys.modules.get(kind.__module__), "__doc__", None) or ""

    @property
    def kind(self) -> str:
        """Its kind, such as `scorer`, which determines its place in a name."""
        of_core = (x.__name__ for x in self.piece.__mro__ if x.__module__.startswith("kvsim.core."))
        return next((_KIND_OF[name] for name in of_core if name in _KIND_OF), "")

    @property
    def innermost(self) -> bool:
        """Whether it has no inner part: a scorer, or a propagation that leaves caches whole."""
        return self.kind == "scorer" or getattr(self.piece, "caches", "chosen") != "chosen"

    def preset(self, name: str) -> Entry:
        """The entry with a preset; `PRESET@scaled` or only `scaled` also scales lengths.

        Raises KeyError for an unknown one.
        """
        entry = self
        for part in name.split("@") if name else ():
            if part == "scaled" and entry.meant_for:
                entry = replace(entry, scaled=True)
            else:
                entry = replace(self, **{"cites": self.paper, **self.presets[part]})
        return entry

    @property
    def variants(self) -> list[str]:
        """Its presets by name, `scaled` among them if it has lengths."""
        return [*self.presets, "scaled"] if self.meant_for else [*self.presets]

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Its parameters by name; of pieces with the same parameter, the first counts."""
        first, others = parameters(self.piece), (self.layer_budgets, load(self.allocator))
        then = {key: each for kind in others for key, each in parameters(kind).items()}
        return {key: each for key, each in {**first, **then, **first}.items() if key != "scorer"}
