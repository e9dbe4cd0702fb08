"""The layer after which a policy drops rows of the prompt: given, fixed, measured or assumed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from kvsim.core.policy import Policy
from kvsim.core.propagation import Selection
from kvsim.core.trace import Trace
from kvsim.cost.model import Model
from kvsim.engine import replay
from kvsim.errors import PolicyError


@dataclass(frozen=True)
class SelectionLayer:
    """Where rows are dropped; None where they are not, or where a trace never selects.

    source: how that is known, None for policies and prompts without such a layer. remarks: what a
    reader should know of it.
    """

    layer: float | None = None
    source: str | None = None
    remarks: tuple[str, ...] = ()

    def weights(self, n_layers: int) -> list[tuple[int, float]]:
        """The layers around a fractional one and their weights; the last one for none."""
        if self.layer is None:
            return [(n_layers - 1, 1.0)]
        below, part = math.floor(self.layer), self.layer - math.floor(self.layer)
        return [(below, 1 - part), (below + 1, part)] if part else [(below, 1.0)]


def no_selection(policy: Policy, budget: int, prompt: int) -> str:
    """Why there is no one layer behind which rows are dropped; empty where there is."""
    piece, any_depth = policy.propagation, 1  # whether there is one does not depend on the depth
    if piece is None or piece.expected_layer(any_depth) is None:
        return f"{policy.name} has no such layer"
    if piece.keeps_whole(budget, prompt):
        return f"{policy.name} keeps a prompt of {prompt} tokens whole at a budget of {budget}"
    return ""


def selection_layer(
    policy: Policy,
    model: Model,
    budget: int,
    prompt: int,
    given: float | None,
    trace: Trace | None,
) -> SelectionLayer:
    """The layer that is given, else the policy's own, else the trace's, else the literature's."""
    name, last = policy.name, model.n_layers - 1
    why = no_selection(policy, budget, prompt)
    if why and given is None:
        return SelectionLayer()
    if why:
        remark = f"{name}: selection layer {given:g} is without effect; {why}"
        return SelectionLayer(remarks=(remark,))
    if given is not None:
        if not 0 <= given <= last:
            raise PolicyError(f"{name}: selection layer is {given:g}; expected 0..{last}")
        return SelectionLayer(given, "given")
    expected = policy.propagation and policy.propagation.expected_layer(model.n_layers)
    layer, source = expected or (None, "")
    if not source:
        return SelectionLayer(layer, "the policy's")
    if trace is not None and trace.n_layers != model.n_layers:
        raise PolicyError(
            f"{name}: trace {trace.name} has {trace.n_layers} layers and {model.name} has "
            f"{model.n_layers}; expected a trace of this model, to measure the selection layer on"
        )
    remarks = []
    if trace is not None:
        measured = replay(trace, policy, budget).selection if trace.prompt_len > budget else None
        if measured is not None:
            remarks = [*_measured(policy, trace, prompt, measured)]
            return SelectionLayer(measured.layer, f"measured on {trace.name}", tuple(remarks))
        remarks.append(
            f"{name}: no selection layer can be measured on {trace.name}, whose prompt of "
            f"{trace.prompt_len} tokens is within the budget"
        )
    remarks.append(
        f"{name}: selection layer {layer:.1f} of {model.n_layers} is assumed, {source}; it depends "
        "on the text, measure it on a trace"
    )
    return SelectionLayer(layer, "assumed", tuple(remarks))


def _measured(policy: Policy, trace: Trace, prompt: int, selection: Selection) -> Iterator[str]:
    """What a reader should know of a selection that was measured."""
    name, piece = policy.name, policy.propagation
    if selection.layer is None:
        yield f"{name}: never selects on {trace.name}, so every layer computes the whole prompt"
    elif piece is not None and (remark := piece.selection_remark(selection)):
        yield f"{name}: on {trace.name} {remark}"
    if trace.prompt_len != prompt:
        yield (
            f"{name}: the selection is that of a prompt of {trace.prompt_len} tokens, and counted "
            f"is one of {prompt}"
        )
