"""Propagation: selection of the prompt's rows for deeper layers, layer by layer.

A prefill that drops rows computes the layers in depth order. After a layer, a propagation may
select the rows that propagate; other rows have no query, key or cache entry in deeper layers. Other
pieces of the policy score and evict.
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

    rows: propagated places in the view, int [k], ascending; None for all. memory: passed to the
    next layer. done: no decision after this layer. notes: numbers of the layer by name.
    """

    rows: Tensor | None = None
    memory: Any = None
    done: bool = False
    notes: Mapping[str, float] = field(default_factory=dict)


class Forecast(NamedTuple):
    """Known effects of a propagation on a prompt before a run.

    rows: of the prompt in each layer; of the second pass if there are two. first: rows of each
    layer in the first of two passes. scored: layers after which scores are computed. layer: the
    expected selection layer, None if rows are not dropped after one layer; source: of the estimate,
    empty if the layer is fixed. whole: the prompt is too short for the rule, and all of it
    propagates.
    """

    rows: Sequence[int]
    first: Sequence[int] = ()
    scored: Sequence[int] = ()
    layer: float | None = None
    source: str = ""
    whole: bool = False


class Propagation(Piece, ABC):
    """Selects the prompt's rows for deeper layers."""

    #: contents of caches: a scorer's choice of a layer's rows, all of these, or the selected rows,
    #: which run through all layers again at positions 0, 1, 2, ...
    caches: ClassVar[Literal["chosen", "all", "again"]] = "chosen"
    #: caches of the layers up to the first selection: cut to the budget, or left whole
    kv_before: Literal["budget", "full"] = "budget"

    @property
    def effect(self) -> Effect:
        """Effect of the budget: layers hold as much, at most as much, only some do, or none."""
        return "exact" if self.kv_before == "budget" else "some"

    @property
    def least_budget(self) -> int:
        """The smallest valid budget."""
        return 1

    def facts(self, n_layers: int) -> Mapping[str, Any]:
        """Parameters derived from the number of layers; `layer`: a fixed selection layer."""
        return {}

    @abstractmethod
    def after(self, view: View, memory: Any) -> Step:
        """Return the propagated rows; `memory` is the last step's, None at the first layer.

        The view is of one layer at the end of the prefill, over its rows. Called after every layer
        but the last, and also after the last if the rows run again.
        """

    @abstractmethod
    def forecast(
        self, budget: int, prompt_len: int, n_layers: int, layer: int | None = None
    ) -> Forecast:
        """Forecast a prompt's rows by layer if rows are dropped after `layer`.

        layer None: the propagation's own rule, if it is known beforehand.
        """


def dropped_after(
    layer: int, kept: int, prompt_len: int, n_layers: int, *, again: bool = False
) -> Forecast:
    """Rows of each layer if `kept` of them propagate after `layer`, or run again."""
    kept = min(kept, prompt_len)
    if again:
        first = [prompt_len] * (layer + 1) if kept < prompt_len else []
        return Forecast([kept] * n_layers, first)
    return Forecast([prompt_len if at <= layer else kept for at in range(n_layers)])


def check_layer(name: str, layer: int | None, n_layers: int) -> None:
    """Raise PolicyError for a layer that the model does not have."""
    if layer is not None and layer >= n_layers:
        raise PolicyError(
            f"{name}: layer is {layer}, the model has layers 0..{n_layers - 1}; give one of them"
        )
