"""A policy by name as one `Rule` of the naive replay: its pieces, put together."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvsim.errors import BudgetError
from kvsim.testing import loops
from kvsim.testing.loops.event import Decision, Floats, Numbers, Scored, Sets, first, last, union
from kvsim.testing.strategies import Case
from reference import allocation, engines, repeated
from reference.event import Event
from reference.propagation import Descended, propagate
from reference.rules import OUTER, Chain, known, own_protection, parse
from reference.windows import cake, cake_preference


def rule(policy: str, params: Mapping[str, Any] | None = None) -> loops.Rule:
    """The rule of a policy by name; `params` as `parse` takes them."""
    chain = parse(policy, params)
    pieces = _Pieces(policy, chain)
    schedule, kind = chain.built.schedule, "none" if chain.allocator == "dms" else chain.layers
    return loops.Rule(
        score=None if chain.score is None else pieces.score,
        interval=schedule.interval,
        prefill=schedule.prefill,
        protect=pieces.protect if pieces.is_ams or chain.allocator == "dms" else None,
        allocate=None if chain.allocator is None and not chain.pooled else pieces.allocate,
        layer_budgets=pieces.together
        if chain.across_layers or chain.pooled
        else _LAYERS.get(kind, lambda _: None)(pieces),
        across_layers=chain.layers == "CakeBudgets" or chain.across_layers or chain.pooled,
        descend=None if chain.propagation is None else pieces.propagate,
        per_query_head=chain.built.per_query_head,
        accumulates=chain.scorer == "h2o",
        ties=lambda case: ties_are_exact(policy, case),
        name=policy,
    )


def ties_are_exact(policy: str, case: Case) -> bool:
    """Whether scores of `policy` that tie in one order of summation tie in every other.

    They do where a score is one number, or a sum of two, that equal entries share; not where
    different numbers happen to add up to the same, or small ones vanish beside a large one; nor
    where an allocator or a wrapper computes with the scores of others.
    """
    if "+" in policy or policy.startswith("ams"):
        return False
    if case.kind == "zero_keys":
        return policy.startswith("tova")
    return case.kind not in ("grid", "repeated_keys", "steep") and case.shape[2] <= 2


@dataclass(frozen=True)
class _Pieces:
    """The pieces of a policy, as the functions of a `Rule`."""

    policy: str
    chain: Chain
    #: scores of this event by layer, where they depend on each other
    of_layers: dict[int, Scored] = field(default_factory=dict)
    #: sets that stay after this event by layer, and what decided them, where all share one ranking
    sets: dict[int, tuple[Sets, list[Decision]]] = field(default_factory=dict)

    @property
    def is_ams(self) -> bool:
        """Whether the allocator is AMS."""
        return self.chain.allocator in ("ams", "ams@release")

    def score(self, event: loops.Event) -> Scored:
        """The scorer, then its wrappers from the inside out."""
        if self.chain.across_layers or self.chain.pooled:
            return self.of_layers[event.layer]
        return self.score_layers([event])[0]

    def score_layers(self, events: list[loops.Event]) -> list[Scored]:
        """The scores of layers, of which some wrappers put together what others score alone."""
        chain = self.chain
        assert chain.score is not None
        scored = []
        for event in events:
            at = Event.of(
                event,
                params=chain.params[-1],
                memory=_memory(event, len(chain.params) - 1),
                average=chain.average,
            )
            scored.append(chain.score(at))
        if chain.shares:
            scored = engines.shared(chain.params[-1], scored)
        signed = chain.signed
        for i in range(len(chain.wrappers), 0, -1):
            name = chain.wrappers[i - 1]
            wrap = known(OUTER, name)[0]
            if name == "union":
                scored = wrap(chain.params[i], scored)
                signed = signed and chain.params[i]["reduction"] != "rank"
                continue
            for layer, event in enumerate(events):
                inside = Event.of(
                    event,
                    params=chain.params[i],
                    memory=_memory(event, i),
                    doubt=event.column(f"doubt of piece {i}"),
                )
                scored[layer] = wrap(inside, scored[layer], signed=signed)
            signed = False
        return scored

    def together(self, events: list[loops.Event], budget: int) -> tuple[list[int], list[Decision]]:
        """The same budget for all layers, whose scores are computed before any entry leaves."""
        scored = self.score_layers(events)
        self.of_layers.update({e.layer: s for e, s in zip(events, scored, strict=True)})
        if self.chain.pooled:
            ranking = {"Pooled": repeated.pooled, "Composed": repeated.composed}
            kept, decision = ranking[self.chain.layers](events, scored, budget)
            self.sets.update({e.layer: (s, [decision]) for e, s in zip(events, kept, strict=True)})
        return [budget] * len(events), []

    def protect(self, event: loops.Event) -> Sets:
        """AMS's own sink and recent entries, or DMS's window."""
        if not self.is_ams:
            return last(event, int(self.chain.params[0]["window"]))
        sink, recent = own_protection(self.chain.params[0], event.budgets[0])
        return union(first(event, sink), last(event, recent))

    def allocate(
        self, event: loops.Event, scored: Scored, protected: Sets
    ) -> tuple[Sets, list[Decision]]:
        """What the allocator keeps."""
        if self.chain.pooled:
            return self.sets[event.layer]
        at = Event.of(event, params=self.chain.params[0], memory=_memory(event, 0))
        kept: tuple[Sets, list[Decision]] = known(OUTER, self.chain.allocator)[0](
            at, scored, protected
        )
        return kept

    def propagate(
        self, q: Floats, k: Floats, prompt_len: int, budget: int, scale: float
    ) -> Descended:
        """The rows of the prompt that each layer works on."""
        name, params = self.chain.propagation or "", self.chain.across
        return propagate(name, params, q, k, prompt_len=prompt_len, budget=budget, scale=scale)

    def growing(self, event: loops.Event, budget: int) -> int:
        """RPC: the prompt, the window, and a share of what was generated."""
        params = self.chain.params[-1]
        earned = (event.row + 1 - event.prompt_len) // int(params["compression"])
        return event.prompt_len + int(params["window"]) + earned

    def pyramid(self, event: loops.Event, budget: int) -> int:
        """PyramidKV: for the longest cache that an event has found, were it cut to the budget."""
        params = self.chain.params[-1]
        prompt, tokens = event.whole_prompt, event.row + 1 - event.prompt_len + event.whole_prompt
        fires = {"interval": event.interval, "prefill": event.fires_at_prefill}
        fires["chunk"] = event.chunk
        held, before, longest = 0, -1, 0
        for row in loops.event_rows(tokens, prompt, **fires):
            held, before = held + row - before, row
            longest = max(longest, held)
            held = min(held, budget)
        window, beta = int(params["window"]), float(params["beta"])
        longest = longest or event.row + 1  # a question comes before the first event
        of_layers = allocation.pyramid(
            budget, event.n_layers, window=window, beta=beta, longest=longest
        )
        return of_layers[event.layer]

    def pyramid_at_event(self, event: loops.Event, budget: int) -> int:
        """PyramidKV as released: by what the layer holds."""
        params = self.chain.params[-1]
        return allocation.pyramid_at_event(
            budget,
            event.layer,
            max(2, event.n_layers),  # a single layer is the first of a slope
            max(map(len, event.live)),
            window=int(params["window"]),
            beta=float(params["beta"]),
        )

    def cake(self, events: list[loops.Event], budget: int) -> tuple[list[int], list[Decision]]:
        """CAKE: what each layer may keep, by what its window asks for."""
        preferences, floor = [], []
        for event in events:
            at = Event.of(event, params=self.chain.params[-1])
            preferences.append(cake_preference(at))
            # of AMS less would be protected with less room, but the window has its part either way
            floor.append(max(map(len, union(cake(at).protected, event.protected))))
        cap = [sum(map(len, event.live)) // len(event.live) for event in events]
        total = len(events) * budget
        if sum(floor) > total:
            raise BudgetError(f"{self.policy} protects {max(floor)} entries, budget is {budget}")

        def shares(wanted: list[float]) -> list[int]:
            return allocation.cake_budgets(wanted, total, floor, cap)

        return shares(preferences), [(_stability(shares, preferences), max(preferences))]


def _memory(event: loops.Event, piece: int) -> Numbers:
    """What one piece remembers of the entries."""
    return event.column(f"memory of piece {piece}")


def _one_by_one(of_layer: Callable[[loops.Event, int], int]) -> Any:
    """The budgets of layers that do not depend on each other."""
    return lambda events, budget: ([of_layer(event, budget) for event in events], [])


#: The budgets of layers by the kind that a rule names; "even" is the replay's own.
_LAYERS: dict[str, Callable[[_Pieces], Any]] = {
    "none": lambda _: lambda events, _: ([0] * len(events), []),  # whatever is held, it acts
    "Growing": lambda pieces: _one_by_one(pieces.growing),
    "Pyramid fixed": lambda pieces: _one_by_one(pieces.pyramid),
    "Pyramid event": lambda pieces: _one_by_one(pieces.pyramid_at_event),
    "CakeBudgets": lambda pieces: pieces.cake,
}


def _stability(shares: Callable[[list[float]], list[int]], wanted: list[float]) -> float:
    """The smallest relative change of one number that was found to change the outcome."""
    outcome = shares(wanted)
    for power in range(-14, 0):
        for i in range(len(wanted)):
            for sign in (1.0, -1.0):
                near = list(wanted)
                near[i] *= 1.0 + sign * 10.0**power
                if shares(near) != outcome:
                    return 10.0 ** (power - 1)
    return math.inf
