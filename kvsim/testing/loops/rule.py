"""A policy as the naive replay takes it: plain functions of an event."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvsim.testing.loops.event import Decision, Event, Floats, Scored, Sets


@dataclass(frozen=True)
class Doubt:
    """How close a choice of rows was: its margin and size, and the layers that depend on it."""

    layers: range
    margin: float
    size: float = math.inf


@dataclass(frozen=True)
class Propagated:
    """The rows of the prompt that each layer works on.

    alive: ascending positions, for each layer. uncut: layers whose cache is never cut.
    """

    alive: tuple[tuple[int, ...], ...]
    uncut: range = range(0)
    doubts: tuple[Doubt, ...] = ()

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows of the prompt that each layer works on."""
        return tuple(map(len, self.alive))


@dataclass(frozen=True)
class Rule:
    """What a policy does, written from its definition and not from its code.

    score: scores of an event; None for a policy that never evicts.

    interval, prefill: the policy's own schedule; with an interval of None it acts after the prompt
    alone.

    protect: what the policy protects beyond what its scorer does.

    allocate: given an event, its scores and the protected sets, the kept set of each head and the
    decisions that led to it. By default every head keeps its budget: protected entries first, then
    the higher score, then the lower position.

    layer_budgets: given the events of all layers and the budget, what a head of each layer may
    keep, and the decisions that led to it. By default every layer has the budget. across_layers:
    the layers share one budget, so that all act as soon as they hold more than that together.

    propagate: which rows of the prompt each layer works on, from `q, k, prompt_len, budget, scale`
    by position. By default every layer works on all of them.

    per_query_head: each query head keeps a set of its own. accumulates: scores need
    `Event.received`.

    ties: whether scores that tie on a `Case` tie in every order of summation, so that the tie rule
    decides and not rounding. By default no tie counts.
    """

    score: Callable[[Event], Scored] | None
    interval: int | None = 1
    prefill: bool = True
    protect: Callable[[Event], Sets] | None = None
    allocate: Callable[[Event, Scored, Sets], tuple[Sets, list[Decision]]] | None = None
    layer_budgets: Callable[[list[Event], int], tuple[list[int], list[Decision]]] | None = None
    across_layers: bool = False
    propagate: Callable[[Floats, Floats, int, int, float], Propagated] | None = None
    per_query_head: bool = False
    accumulates: bool = False
    ties: Callable[[Any], bool] = lambda _: False
    name: str = "the rule"
