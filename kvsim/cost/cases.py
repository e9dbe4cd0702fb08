"""What a policy costs where it drops rows after one given layer: rows, entries and FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvsim.core.flops import Event, Flops
from kvsim.core.policy import Policy
from kvsim.cost.model import Model
from kvsim.cost.scoring import event_flops, propagation_flops


@dataclass(frozen=True)
class Case:
    """What happens where rows are dropped behind one layer, and how much the case weighs.

    first, last: rows of each layer in the first pass and in the last, which is the first one where
    nothing restarts. whole: layers whose cache is never cut. budgets, entries, peak, mean: of each
    layer, as in Cost.
    """

    weight: float
    layer: int
    budget: int
    prompt: int
    context: int
    first: Sequence[int]
    last: Sequence[int]
    whole: Sequence[bool]
    budgets: Sequence[int]
    entries: Sequence[float]
    peak: Sequence[float]
    mean: Sequence[float]

    @staticmethod
    def of(
        model: Model,
        policy: Policy,
        budget: int,
        context: int,
        prompt: int,
        *,
        layer: int,
        weight: float,
    ) -> Case:
        """The case that rows are dropped after `layer`."""
        n_layers, piece, interval = model.n_layers, policy.propagation, policy.schedule.interval
        last = [prompt] * n_layers
        if piece is not None:
            last = piece.counts(budget, prompt, n_layers, layer)
        twice = piece is not None and piece.restarts and prompt > budget
        alone = piece is not None and piece.alone
        before = piece is not None and piece.kv_before == "full"
        whole = [alone or (before and at <= layer) for at in range(n_layers)]
        budgets = _budgets(policy, n_layers, budget, context, prompt)
        sizes: list[tuple[float, float, float]] = []
        for rows, kept_whole, own in zip(last, whole, budgets, strict=True):
            held = rows + context - prompt  # at the end of the context, if nothing is evicted
            if kept_whole or interval is None:
                after = rows if kept_whole else min(own, rows)
                sizes.append((after, after + context - prompt, after + context - prompt))
            else:
                after = min(own, held)
                most, average = min(held, after + interval), min(held, after + (interval + 1) / 2)
                sizes.append((after, most, average))
        entries, peak, mean = zip(*sizes, strict=True)
        return Case(
            weight=weight,
            layer=layer,
            budget=budget,
            prompt=prompt,
            context=context,
            first=[prompt] * (layer + 1) if twice else last,
            last=last,
            whole=whole,
            budgets=budgets,
            entries=entries,
            peak=peak,
            mean=mean,
        )

    @property
    def passes(self) -> list[int]:
        """Rows of every layer that is computed, those of a first pass too."""
        return [*self.last] if self.first is self.last else [*self.first, *self.last]

    @property
    def rows(self) -> list[int]:
        """The same, added up for each layer."""
        again = [0] * len(self.last) if self.first is self.last else self.first
        return [n + (again[at] if at < len(again) else 0) for at, n in enumerate(self.last)]

    def time(self, layer_time: Callable[[float], float]) -> float:
        """Prefill time relative to that of all layers over all rows."""
        return sum(map(layer_time, self.passes)) / (len(self.last) * layer_time(self.prompt))

    def prefill_flops(self, model: Model) -> float:
        """FLOPs of the prefill, without those of the policy."""
        return sum(map(model.layer_flops, self.passes)) + 2 * model.hidden * model.vocab

    def prompt_scoring(self, policy: Policy, model: Model) -> Flops:
        """FLOPs of choosing rows, and of the event that ends the prefill in layers that act."""
        sizes = {"prompt": self.prompt, "budget": self.budget}
        total = propagation_flops(policy, model, **sizes, rows=self.first, layer=self.layer)
        if policy.schedule.prefill:
            for rows, whole, own in zip(self.last, self.whole, self.budgets, strict=True):
                if rows > own and not whole:
                    later = self.context - self.prompt
                    event = Event(model, rows, rows, rows, own, prompt=True, later=later)
                    total += event_flops(policy, event)
        return total

    def event_scoring(self, policy: Policy, model: Model) -> Flops:
        """FLOPs of an event while decoding, in layers that are full.

        Half of the generated tokens are still to come, for the clairvoyant.
        """
        interval, total = policy.schedule.interval, Flops()
        later = (self.context - self.prompt) / 2
        for kept, whole, own in zip(self.entries, self.whole, self.budgets, strict=True):
            if interval is not None and not whole and kept == own < self.context:
                event = Event(model, kept + interval, self.context, interval, own, later=later)
                total += event_flops(policy, event)
        return total


def _budgets(policy: Policy, n_layers: int, budget: int, context: int, prompt: int) -> list[int]:
    """What each layer is cut to; the context where nothing is."""
    size = policy.layer_budgets.unbounded_size(prompt, context)
    if size is not None:
        return [size] * n_layers
    never = policy.schedule.interval is None and not policy.schedule.prefill
    if never or not (policy.allocator.bounded and policy.layer_budgets.bounded):
        return [context] * n_layers
    longest = policy.schedule.longest(prompt, budget)
    planned = [*policy.layer_budgets.planned(budget, n_layers, longest)]
    return planned if len(planned) == n_layers else planned * n_layers


def mean_of(cases: Sequence[Case], name: str) -> tuple[float, ...]:
    """The weighted mean of the cases for each layer: of rows, entries, peak or mean."""
    weights = [case.weight for case in cases]
    columns = zip(*(getattr(case, name) for case in cases), strict=True)
    return tuple(sum(w * n for w, n in zip(weights, column, strict=True)) for column in columns)
