"""Propagation: which rows of the prompt reach deeper layers, decided layer by layer.

A prefill that drops rows computes the layers in depth order. After a layer, a propagation may name
the rows that propagate; the others never enter a deeper layer: no query, no key, no cache entry
there. Scores and caches are the business of the other pieces of a policy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from kvsim.core.lazy import Tensor
from kvsim.core.pieces import Effect, Piece
from kvsim.core.view import View
from kvsim.errors import PolicyError


@dataclass(frozen=True)
class Step:
    """Decision of a propagation after a layer.

    rows: places in the view that propagate, int [k], ascending; None for all of them. memory:
    handed to the next layer. done: nothing is decided behind this layer. notes: numbers by name
    that belong to the layer.
    """

    rows: Tensor | None = None
    memory: Any = None
    done: bool = False
    notes: Mapping[str, float] = field(default_factory=dict)


class Forecast(NamedTuple):
    """What a propagation does with a prompt, as far as it is known before a run.

    rows: of the prompt that each layer computes; where they run again, those of the second pass.
    first: rows of each layer of the first pass of two. scored: layers after which scores are
    computed. layer: the selection layer that is expected, None where rows are not dropped after one
    layer; source: of the estimate, empty where the layer is fixed. whole: the prompt is too short
    for the rule, and all of it propagates.
    """

    rows: Sequence[int]
    first: Sequence[int] = ()
    scored: Sequence[int] = ()
    layer: float | None = None
    source: str = ""
    whole: bool = False


class Propagation(Piece, ABC):
    """Which rows of the prompt reach deeper layers."""

    #: what caches hold: what a scorer chooses of the rows that a layer computes, all of these, or
    #: the rows that were chosen, which run through all layers again at positions 0, 1, 2, ...
    caches: ClassVar[Literal["chosen", "all", "again"]] = "chosen"
    #: caches of the layers up to the first selection: cut to the budget, or left whole
    kv_before: Literal["budget", "full"] = "budget"

    @property
    def effect(self) -> Effect:
        """What the budget does: layers hold as much, at most as much, only some do, or none."""
        return "exact" if self.kv_before == "budget" else "some"

    @property
    def least_budget(self) -> int:
        """The smallest budget that there is a rule for."""
        return 1

    def facts(self, n_layers: int) -> Mapping[str, Any]:
        """Parameters that follow from the number of layers; `layer`: a fixed selection layer."""
        return {}

    @abstractmethod
    def after(self, view: View, memory: Any) -> Step:
        """The rows that propagate; `memory` is the last step's, None at the first layer.

        The view is that of one layer at the end of the prefill, over the rows that it computes.
        Called after every layer but the last, and after that too where the rows run again.
        """

    @abstractmethod
    def forecast(
        self, budget: int, prompt_len: int, n_layers: int, layer: int | None = None
    ) -> Forecast:
        """Rows of a prompt by layer, before a run, if rows are dropped after `layer`.

        None: where the propagation drops them by its own rule, if that is known beforehand.
        """


def dropped_after(
    layer: int, kept: int, prompt_len: int, n_layers: int, *, again: bool = False
) -> Forecast:
    """Rows of each layer where `kept` of them propagate after `layer`, or run again."""
    kept = min(kept, prompt_len)
    if again:
        first = [prompt_len] * (layer + 1) if kept < prompt_len else []
        return Forecast([kept] * n_layers, first)
    return Forecast([prompt_len if at <= layer else kept for at in range(n_layers)])


def check_layer(name: str, layer: int | None, n_layers: int) -> None:
    """Raise PolicyError where a model has no such layer."""
    if layer is not None and layer >= n_layers:
        raise PolicyError(
            f"{name}: layer is {layer}, the model has layers 0..{n_layers - 1}; give one of them"
        )
