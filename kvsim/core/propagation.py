"""Propagation: which rows of the prompt reach deeper layers, decided layer by layer.

A prefill that drops rows computes the layers in depth order. After a layer, a propagation may name
the rows that propagate; the others never enter a deeper layer: no query, no key, no cache entry
there. Scores and caches are the business of the other pieces of a policy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from kvsim.core.lazy import Tensor
from kvsim.core.pieces import Piece
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


@dataclass(frozen=True)
class Selection:
    """Decisions of a propagation for one prompt.

    dropped: layers after which rows were dropped, ascending. counts: rows of the prompt that each
    layer computes, first to last. restarted: these rows went through all layers once more, at
    new contiguous positions. notes: by name, one number per layer, or one for all.
    """

    dropped: tuple[int, ...]
    counts: tuple[int, ...]
    restarted: bool = False
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def layer(self) -> int | None:
        """The selection layer: the first after which rows were dropped."""
        return self.dropped[0] if self.dropped else None


class Propagation(Piece, ABC):
    """Which rows of the prompt reach deeper layers."""

    #: the rows that were chosen run through all layers again, at positions 0, 1, 2, ...
    restarts: ClassVar[bool] = False
    #: caches hold all rows that a layer computes; False where a scorer chooses among them
    alone: ClassVar[bool] = False
    #: caches of the layers up to the first selection: cut to the budget, or left whole
    kv_before: Literal["budget", "full"] = "budget"

    @property
    def window_rows(self) -> int:
        """Most rows whose attention is read at once."""
        return 1

    @property
    def bounded(self) -> bool:
        """False where the budget does not bind what every layer holds."""
        return self.kv_before == "budget"

    @property
    def exact(self) -> bool:
        """False where a layer may hold less than the budget after the prefill."""
        return True

    @property
    def least_budget(self) -> int:
        """The smallest budget that there is a rule for."""
        return 1

    def check(self, n_layers: int) -> None:
        """Raise PolicyError for a model that the propagation has no rule for."""

    def facts(self, n_layers: int) -> Mapping[str, Any]:
        """Parameters that follow from the number of layers, as they were used."""
        return {}

    def whole(self, selection: Selection, layer: int) -> bool:
        """Whether a layer's cache is never cut, because it comes before the selection."""
        before = selection.layer is None or layer <= selection.layer
        return self.kv_before == "full" and before

    @abstractmethod
    def after(self, view: View, memory: Any) -> Step:
        """The rows that propagate; `memory` is the last step's, None at the first layer.

        The view is that of one layer at the end of the prefill, over the rows that it computes.
        Called after every layer but the last, and after that too where the propagation restarts.
        """

    @abstractmethod
    def counts(
        self, budget: int, prompt_len: int, n_layers: int, layer: int | None = None
    ) -> list[int]:
        """Rows of the prompt that each layer computes if rows are dropped after `layer`.

        None: where the propagation drops them by its own rule, if that is known beforehand. Of a
        propagation that restarts, the rows of the second pass.
        """

    def budget_counts(
        self, budget: int, prompt_len: int, n_layers: int, layer: int | None = None
    ) -> list[int]:
        """`counts` of a propagation that restarts: the budget in each layer of the second pass."""
        return [min(budget, prompt_len)] * n_layers

    # ----------------------------------------------------------------------- what `cost` reads

    def keeps_whole(self, budget: int, prompt_len: int) -> bool:
        """Whether a prompt is too short for the rule: all of it propagates."""
        return prompt_len <= budget

    def expected_layer(self, n_layers: int) -> tuple[float, str] | None:
        """The selection layer and the source of the estimate, empty where the layer is fixed.

        None where rows are not dropped after one layer.
        """
        return None

    def scored_layers(self, rows: Sequence[int], layer: int) -> Sequence[int]:
        """Layers after which it computes scores: by default those up to the selection layer.

        rows: that each layer of the (first) pass computes; layer: the last one for none.
        """
        return range(len(rows)) if self.restarts else range(min(layer + 1, len(rows) - 1))


def dropped_after(layer: int | None, kept: int, prompt_len: int, n_layers: int) -> list[int]:
    """Rows of each layer where `kept` of them propagate after `layer`."""
    last = n_layers - 1 if layer is None else layer
    return [prompt_len if at <= last else min(kept, prompt_len) for at in range(n_layers)]


def check_layer(name: str, layer: int | None, n_layers: int) -> None:
    """Raise PolicyError where a model has no such layer."""
    if layer is not None and layer >= n_layers:
        raise PolicyError(
            f"{name}: layer is {layer}, the model has layers 0..{n_layers - 1}; give one of them"
        )
