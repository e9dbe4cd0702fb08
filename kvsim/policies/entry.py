"""An entry of the catalogue: a name's pieces, schedule, presets and paper."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvsim.core.merging import Merger
from kvsim.core.parameters import Parameter, parameters
from kvsim.core.policy import Allocator, Schedule, Scorer, Wrapper
from kvsim.core.propagation import Propagation
from kvsim.core.reading import Reader
from kvsim.core.storing import Codec


@dataclass(frozen=True)
class Preset:
    """Differences of an implementation: other pieces, parameters or schedule."""

    summary: str
    piece: type[Any] | None = None
    layer_budgets: type[Any] | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)
    inner: Mapping[str, Mapping[str, Any]] | None = None
    meant_for: Mapping[str, int] | None = None


@dataclass(frozen=True)
class Entry:
    """A name of the catalogue: what it keeps, from which paper, its pieces and presets.

    piece: a scorer, a wrapper (a scorer that has a field `scorer`), an allocator or a propagation.
    schedule: its own; None where the scorer inside decides. paper: by default the first one that
    the piece's file names in the first two paragraphs of its docstring. layer_budgets: takes the
    piece's parameters of the same names. policy: other fields of the Policy. inner: parameters that
    a scorer inside, by name, takes for its defaults there. default: the scorer inside where none is
    named, of a reader the eviction in front. shares: of a propagation, parameters whose values that
    scorer takes over. required: parameters without a default, and an example of each. meant_for:
    parameters that are lengths, and the budget that their values are meant for; the preset `scaled`
    shrinks them with it.
    """

    summary: str
    piece: type[Any]
    schedule: Schedule | None
    paper: str = ""
    presets: Mapping[str, Preset] = field(default_factory=dict)
    layer_budgets: type[Any] | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)
    inner: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    default: str = ""
    shares: tuple[str, ...] = ()
    required: Mapping[str, Any] = field(default_factory=dict)
    meant_for: Mapping[str, int] = field(default_factory=dict)
    scaled: bool = False

    def __post_init__(self) -> None:
        if not self.paper:
            module = sys.modules.get((self.layer_budgets or self.piece).__module__)
            head = (getattr(module, "__doc__", None) or "").split("\n\n")[:2]
            cited = re.search(r"(arXiv|openreview) [\w.]*\w", " ".join(" ".join(head).split()))
            object.__setattr__(self, "paper", cited[0] if cited else "")

    @property
    def kind(self) -> str:
        """`propagation`, `allocator`, `wrapper`, `scorer`, `reader`, `codec` or `merger`.

        It says where in a name the entry may stand.
        """
        bases = (Propagation, Allocator, Wrapper, Scorer, Reader, Merger, Codec)
        return next(base.__name__.lower() for base in bases if issubclass(self.piece, base))

    @property
    def innermost(self) -> bool:
        """Whether nothing stands inside: a scorer, or a propagation that leaves caches whole."""
        return self.kind == "scorer" or (self.kind == "propagation" and self.piece.alone)

    def preset(self, name: str) -> Entry:
        """The entry as the preset has it; `PRESET@scaled` or `scaled` alone also scales lengths."""
        name, scaled = self.split(name)
        if scaled:
            return replace(self.preset(name), scaled=True)
        if not name:
            return self
        preset = self.presets[name]
        policy = {**self.policy, **preset.policy}
        return replace(
            self,
            summary=preset.summary,
            piece=preset.piece or self.piece,
            layer_budgets=preset.layer_budgets or self.layer_budgets,
            schedule=policy.pop("schedule", self.schedule),
            params={**self.params, **preset.params},
            policy=policy,
            inner=self.inner if preset.inner is None else preset.inner,
            meant_for=self.meant_for if preset.meant_for is None else preset.meant_for,
        )

    @staticmethod
    def split(preset: str) -> tuple[str, bool]:
        """A preset without `scaled`, and whether it was there."""
        if preset == "scaled" or preset.endswith("@scaled"):
            return preset.removesuffix("scaled").removesuffix("@"), True
        return preset, False

    def has_preset(self, name: str) -> bool:
        """Whether there is such a preset; `scaled` of what has lengths."""
        rest, scaled = self.split(name)
        there = rest in self.presets or (scaled and name == "scaled")
        return there and (not scaled or bool(self.preset(rest).meant_for))

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Its parameters by name; one that pieces share is that of the first of them."""
        first = parameters(self.piece)
        then = {} if self.layer_budgets is None else parameters(self.layer_budgets)
        return {key: each for key, each in {**first, **then, **first}.items() if key != "scorer"}
