"""A policy as a rule of the naive replay: what it may look at in an event, and what it returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]

_EMPTY: Floats = np.zeros((0, 0, 0))

#: (margin, size) of one decision: the score difference between the last entry kept and the first
#: one dropped relative to the larger of the two scores, and that larger score. A margin of 0 is an
#: exact tie.
Decision = tuple[float, float]
#: A number for each live entry of each KV head, by position.
Numbers = list[dict[int, float]]
#: Positions of each KV head.
Sets = list[set[int]]
#: (inv_freq, attention_scaling) of a rotary embedding that pairs dimension i with i + half.
Rotary = tuple[tuple[float, ...], float]


def softmax(z: Floats) -> Floats:
    """Weights of logits [n] that sum to 1; an empty array of an empty one."""
    if not len(z):
        return z
    weight: Floats = np.exp(z - np.maximum.reduce(z))
    weight /= np.add.reduce(weight)
    return weight


def logits_of(q: Floats, k: Floats, scale: float) -> Floats:
    """[qhead, row, pos] of one layer: scale times the product of every query with every key."""
    group = len(q) // len(k)
    return np.stack([scale * (q[i] @ k[i // group].T) for i in range(len(q))])


@dataclass
class Event:
    """The state of a layer at an event, as a rule may read it."""

    layer: int
    row: int
    #: whether this is the event that ends the prefill
    prefill: bool
    #: [qhead, row, pos], already scaled, of every row of the trace
    logits: Floats
    #: the live positions of each KV head, ascending
    live: list[list[int]]
    #: attention that each live entry received from all rows so far (`Rule.accumulates`)
    received: Numbers
    #: entries that each KV head may keep
    budgets: list[int]
    prompt_len: int = 1
    interval: int | None = None
    scale: float = 1.0
    queries: Floats = field(default_factory=lambda: _EMPTY)  # [qhead, row, dim], after RoPE
    keys: Floats = field(default_factory=lambda: _EMPTY)  # [head, pos, dim], after RoPE
    values: Floats = field(default_factory=lambda: _EMPTY)  # [head, pos, dim]
    o_proj: Floats | None = None  # [qhead, dim, hidden]
    #: queries [qhead, row, dim] and keys [head, row, dim] of rows that repeat the context, and
    #: (start, stop, rows) of its chunks
    repeated: tuple[Floats, Floats, Sequence[tuple[int, int, int]]] | None = None
    rope: Rotary = (), 1.0
    #: the positions that RoPE rotated the rows to, where they are not 0, 1, 2 ...
    places: list[int] | None = None
    #: layers of the trace
    n_layers: int = 1
    #: tokens of the whole prompt; `prompt_len` counts the rows of it that this layer has
    whole_prompt: int = 1
    #: rows between events of the prefill; None for one event
    chunk: int | None = None
    #: whether the schedule has an event that ends the prefill
    fires_at_prefill: bool = True
    #: what the policy protects whatever its scorer says
    protected: Sets = field(default_factory=list)
    columns: dict[str, Numbers] = field(default_factory=dict)

    def column(self, name: str) -> Numbers:
        """Numbers that stay with live entries between events, first empty; change them in place."""
        return self.columns.setdefault(name, [{} for _ in self.live])

    def at(self, **changes: object) -> Event:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]  # checked when a test runs

    def among(self, rows: list[int], prompt_len: int) -> Event:
        """The event of a layer that has these rows alone, `prompt_len` of them of the prompt."""
        q, k, v = (x[:, rows] for x in (self.queries, self.keys, self.values))
        logits = logits_of(q, k, self.scale)
        return self.at(
            queries=q, keys=k, values=v, logits=logits, prompt_len=prompt_len, places=rows
        )

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return len(self.logits) // len(self.live)

    def qheads(self, head: int) -> range:
        """The query heads of a KV head."""
        return range(head * self.group, (head + 1) * self.group)

    def place(self, rows: Iterable[int]) -> list[int]:
        """The positions that RoPE rotated these rows to."""
        return list(rows) if self.places is None else [self.places[row] for row in rows]

    def window(self, rows: int) -> range:
        """The last `rows` rows up to the event, or as many as there are."""
        return range(max(0, self.row + 1 - rows), self.row + 1)

    def attention(self, qhead: int, row: int) -> dict[int, float]:
        """Softmax of one query over the live entries at positions up to its own."""
        return self.attention_over(
            qhead, row, [p for p in self.live[qhead // self.group] if p <= row]
        )

    def attention_over(self, qhead: int, row: int, visible: list[int]) -> dict[int, float]:
        """Softmax of one query over these positions; empty where there are none."""
        return dict(zip(visible, softmax(self.logits[qhead, row, visible]).tolist(), strict=True))


@dataclass
class Scored:
    """Scores of one event, and the positions that the scorer protects; each per KV head.

    An entry without a score is protected. noise: the size of the terms that a score is made of,
    where that is larger than the score itself (a difference, a ratio to a small number): rounding
    is proportional to it. decisions: (margin, size) of each decision on the way to the scores
    (a threshold, a rank). exact: equal scores are equal in every dtype and order of summation
    (ranks, positions). rounded: rounding may break any tie.
    """

    values: Numbers
    protected: Sets = field(default_factory=list)
    noise: Numbers | None = None
    decisions: list[list[Decision]] | None = None
    exact: bool = False
    rounded: bool = False

    def size(self, head: int, pos: int) -> float:
        """The size of the terms of one score, at least that of the score."""
        score = abs(self.values[head][pos])
        return score if self.noise is None else max(score, self.noise[head].get(pos, 0.0))

    def taken(self, head: int) -> list[Decision]:
        """The decisions on the way to a head's scores."""
        return [] if self.decisions is None else self.decisions[head]


@dataclass(frozen=True)
class Doubt:
    """How close a choice of rows was: its margin and size, and the layers that depend on it."""

    layers: range
    margin: float
    size: float = math.inf


@dataclass(frozen=True)
class Descended:
    """Rows of the prompt of each layer, ascending; uncut: layers whose cache is never cut."""

    alive: tuple[tuple[int, ...], ...]
    uncut: range = range(0)
    doubts: tuple[Doubt, ...] = ()

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows of the prompt that each layer works on."""
        return tuple(map(len, self.alive))


@dataclass(frozen=True)
class Rule:
    """Rule of a policy, written from its definition and not from its code.

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

    descend: which rows of the prompt each layer works on, from `q, k, prompt_len, budget, scale`
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
    descend: Callable[[Floats, Floats, int, int, float], Descended] | None = None
    per_query_head: bool = False
    accumulates: bool = False
    ties: Callable[[Any], bool] = lambda _: False
    name: str = "the rule"


def unprotected(event: Event) -> Sets:
    """An empty set for each head."""
    return [set() for _ in event.live]


def first(event: Event, sink: int) -> Sets:
    """The live positions below `sink`, of each head."""
    return [{p for p in live if p < sink} for live in event.live]


def last(event: Event, rows: int) -> Sets:
    """The live entries of the last `rows` positions, of each head."""
    return [{p for p in live if p > event.row - rows} for live in event.live]


def union(*masks: Collection[set[int]]) -> Sets:
    """The union of sets of positions, head by head; no sets at all count as empty ones."""
    return [set().union(*sets) for sets in zip(*(m for m in masks if m), strict=True)]
