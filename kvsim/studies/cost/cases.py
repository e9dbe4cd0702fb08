"""The layer after which a policy drops rows of the prompt; its rows, entries and FLOPs there.

FLOPs of scoring are those of the pieces of the policy, added up (`kvsim.studies.cost.flops`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from kvsim.core.policy import Policy
from kvsim.core.propagation import Selection
from kvsim.core.trace import Trace
from kvsim.engine import replay
from kvsim.errors import PolicyError
from kvsim.studies.cost.flops import Event, Flops, event_flops, total_flops
from kvsim.studies.cost.model import Model


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
    """Return why no layer is the one after which rows are dropped; empty if one is."""
    piece, any_depth = policy.propagation, 1  # whether there is one does not depend on the depth
    if piece is None or piece.expected_layer(any_depth) is None:
        return f"{policy.name} has no such layer"
    if piece.keeps_whole(budget, prompt):
        return f"{policy.name} keeps a prompt of {prompt} tokens whole at a budget of {budget}"
    return ""


def find_selection(
    policy: Policy, model: Model, budget: int, prompt: int, given: float | None, trace: Trace | None
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
    """Yield the remarks on a selection that was measured."""
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


@dataclass(frozen=True)
class CostCase:
    """A prefill and its decoding where rows are dropped after `layer`, and the case's weight.

    Lists have one value per layer.
    """

    model: Model
    policy: Policy
    budget: int
    context: int
    prompt: int
    layer: int
    weight: float

    @cached_property
    def last(self) -> list[int]:
        """Rows of the last pass, which is the only one where nothing restarts."""
        piece, n_layers = self.policy.propagation, self.model.n_layers
        if piece is None:
            return [self.prompt] * n_layers
        return piece.counts(self.budget, self.prompt, n_layers, self.layer)

    @property
    def first(self) -> list[int]:
        """Rows of the first pass, which may end after `layer`."""
        piece = self.policy.propagation
        if piece is not None and piece.restarts and self.prompt > self.budget:
            return [self.prompt] * (self.layer + 1)
        return self.last

    @property
    def passes(self) -> list[int]:
        """Rows of every computed layer, a first pass included."""
        return self.last if self.first is self.last else [*self.first, *self.last]

    @property
    def rows(self) -> list[int]:
        """Rows that each layer computes, in both passes."""
        again = [] if self.first is self.last else self.first
        return [n + (again[at] if at < len(again) else 0) for at, n in enumerate(self.last)]

    @cached_property
    def whole(self) -> list[bool]:
        """Whether the cache of a layer is never cut."""
        piece = self.policy.propagation
        alone = piece is not None and piece.alone
        before = piece is not None and piece.kv_before == "full"
        return [alone or (before and at <= self.layer) for at in range(self.model.n_layers)]

    @cached_property
    def budgets(self) -> list[int]:
        """Entries that each layer is cut to; the context where nothing is evicted."""
        policy, n_layers = self.policy, self.model.n_layers
        size = policy.layer_budgets.unbounded_size(self.prompt, self.context)
        if size is not None:
            return [size] * n_layers
        never = policy.schedule.interval is None and not policy.schedule.prefill
        if never or not (policy.allocator.bounded and policy.layer_budgets.bounded):
            return [self.context] * n_layers
        longest = policy.schedule.longest(self.prompt, self.budget, self.context)
        planned = [*policy.layer_budgets.planned(self.budget, n_layers, longest)]
        return planned if len(planned) == n_layers else planned * n_layers

    @cached_property
    def sizes(self) -> list[tuple[float, ...]]:
        """`entries`, `peak` and `mean` of `Cost`, means over the heads of a layer."""
        layers = [*zip(self.last, self.whole, self.budgets, strict=True)]
        sizes = [self._sizes(*layer) for layer in layers]
        shares = self.policy.allocator.bound_shares(self.model.n_layers)
        if shares is None:
            return sizes
        return [  # the other heads hold everything
            tuple(
                share * x + (1 - share) * y
                for x, y in zip(self._sizes(rows, whole, self.budget), size, strict=True)
            )
            for share, size, (rows, whole, _) in zip(shares, sizes, layers, strict=True)
        ]

    def _sizes(self, rows: int, whole: bool, budget: int) -> tuple[float, ...]:
        """`entries`, `peak` and `mean` of a head in a layer whose heads are cut to a budget."""
        interval, later = self.policy.schedule.interval, self.context - self.prompt
        if whole or interval is None:
            after = rows if whole else min(budget, rows)
            return after, after + later, after + later
        end = rows + later  # entries at the end of the context, if nothing is evicted
        after = min(budget, end)
        peak, mean = after + interval, after + (interval + 1) / 2
        return after, min(end, peak), min(end, mean)

    def time(self, layer_time: Callable[[float], float]) -> float:
        """Prefill time relative to that of all layers over all rows."""
        return sum(map(layer_time, self.passes)) / (len(self.last) * layer_time(self.prompt))

    @property
    def prefill_flops(self) -> float:
        """FLOPs of the prefill, without the policy."""
        model = self.model
        return sum(map(model.layer_flops, self.passes)) + 2 * model.hidden * model.vocab

    @property
    def prompt_scoring(self) -> Flops:
        """FLOPs of choosing rows, and of the event that ends the prefill in layers that act."""
        total, piece = Flops(), self.policy.propagation
        if piece is not None and not piece.keeps_whole(self.budget, self.prompt):
            sizes = (self.prompt, self.prompt, self.budget)
            for at in piece.scored_layers(self.first, self.layer):
                event = Event(self.model, self.first[at], *sizes, prompt=True)
                total += total_flops(self.policy.name, [piece], event)
        if self.policy.schedule.prefill:
            later = self.context - self.prompt
            for rows, whole, budget in zip(self.last, self.whole, self.budgets, strict=True):
                if (rows > budget or self.policy.allocator.always_acts) and not whole:
                    event = Event(self.model, rows, rows, rows, budget, prompt=True, later=later)
                    total += event_flops(self.policy, event)
        return total

    @property
    def event_scoring(self) -> Flops:
        """FLOPs of an event while decoding, in layers that are full, or act all the same.

        Half of the generated tokens are still to come, for the clairvoyant.
        """
        interval, total = self.policy.schedule.interval, Flops()
        later = (self.context - self.prompt) / 2
        always = self.policy.allocator.always_acts
        for (kept, _, mean), whole, budget in zip(
            self.sizes, self.whole, self.budgets, strict=True
        ):
            full = kept == budget < self.context
            if interval is not None and not whole and (full or always):
                seen = (kept + interval if full else mean, self.context, interval, budget)
                total += event_flops(self.policy, Event(self.model, *seen, later=later))
        return total
