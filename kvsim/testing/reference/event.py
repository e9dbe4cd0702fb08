"""What a naive rule may look at when an event fires on a layer, and what it answers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvsim.errors import NeedsError, PolicyError
from kvsim.testing.reference.basics import Floats, softmax, turn

_NONE: Floats = np.zeros((0, 0, 0))

#: (inv_freq, attention_scaling) of a rotary embedding that pairs dimension i with i + half.
Rotary = tuple[tuple[float, ...], float]


@dataclass
class Event:
    """What a rule may look at when an event fires on a layer."""

    layer: int
    row: int
    prefill: bool
    logits: Floats  # [qhead, row, pos], already scaled, of every row of the trace
    live: list[list[int]]  # per KV head, the live positions in ascending order
    received: list[dict[int, float]]  # per KV head: what each live entry got from all rows so far
    budgets: list[int]  # per KV head
    params: Mapping[str, Any]
    prompt_len: int = 1
    interval: int | None = None
    scale: float = 1.0
    queries: Floats = field(default_factory=lambda: _NONE)  # [qhead, row, dim], after RoPE
    keys: Floats = field(default_factory=lambda: _NONE)  # [head, pos, dim], after RoPE
    values: Floats = field(default_factory=lambda: _NONE)  # [head, pos, dim]
    o_proj: Floats | None = None  # [qhead, dim, hidden]
    rope: Rotary | None = None
    calibration: Floats | None = None  # [qhead, row, dim], after RoPE, of another trace
    average: str = "all"  # what TOVA averages over: "all" heads, its "group", all heads by "slot"
    memory: list[dict[int, float]] = field(default_factory=list)  # per KV head, by position
    doubt: list[dict[int, float]] = field(default_factory=list)  # noise of what is remembered
    places: list[int] | None = None  # where RoPE has turned the rows to, if not to 0, 1, 2 ...

    def at(self, **changes: Any) -> Event:
        """The same event for another piece of the policy."""
        return replace(self, **changes)

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return len(self.logits) // len(self.live)

    def qheads(self, head: int) -> range:
        """The query heads of a KV head."""
        return range(head * self.group, (head + 1) * self.group)

    def place(self, rows: Iterable[int]) -> list[int]:
        """The positions that RoPE has turned these rows to."""
        return list(rows) if self.places is None else [self.places[row] for row in rows]

    def window(self, rows: int) -> range:
        """The last `rows` rows up to the event, or as many as there are."""
        return range(max(0, self.row + 1 - rows), self.row + 1)

    def attention(self, qhead: int, row: int) -> dict[int, float]:
        """Softmax of one query over the live entries at positions up to its own."""
        return self.attention_over(
            qhead, row, [p for p in self.live[qhead // self.group] if p <= row]
        )

    def attention_over(self, qhead: int, row: int, seen: list[int]) -> dict[int, float]:
        """Softmax of one query over chosen positions; nothing where there are none."""
        return dict(zip(seen, softmax(self.logits[qhead, row, seen]).tolist(), strict=True))

    def rotary(self) -> Rotary:
        """The rotary embedding, which must be known."""
        if self.rope is None:
            raise NeedsError("this policy needs the rotary embedding; give rope=")
        return self.rope

    def unrotated(self, rows: Iterable[int]) -> Floats:
        """[qhead, row, dim]: queries of these rows before RoPE."""
        chosen = list(rows)
        return unrotate(self.queries[:, chosen], self.place(chosen), self.rotary())

    def calibrated(self) -> tuple[Floats, list[int]]:
        """The calibration queries after RoPE [qhead, row, dim], and the positions of their rows."""
        source = self.params["calibration"]
        if not isinstance(source, str):
            if self.calibration is None:
                raise PolicyError("calibration is missing; give queries, 'prefix:N' or 'oracle'")
            return self.calibration, list(range(self.calibration.shape[1]))
        if source == "oracle":
            queries = self.queries
        else:
            rows = int(source.removeprefix("prefix:"))
            if not 1 <= rows <= self.row + 1:
                raise PolicyError(f"calibration is {source!r}, {self.row + 1} rows are seen so far")
            queries = self.queries[:, :rows]
        return queries, self.place(range(queries.shape[1]))

    def projected(self, qhead: int, pos: int) -> Floats:
        """[hidden]: the value at `pos` through the output projection of one query head."""
        if self.o_proj is None:
            raise NeedsError("this policy needs the output projection; give o_proj=")
        return np.asarray(self.values[qhead // self.group, pos] @ self.o_proj[qhead])


def unrotate(queries: Floats, pos: Iterable[int], rope: Rotary) -> Floats:
    """[..., row, dim] before RoPE, of queries after it at positions `pos`."""
    inv_freq, scaling = rope
    turned = 2 * len(inv_freq)
    scaled = queries.copy()
    scaled[..., :turned] /= scaling
    return turn(scaled, -np.asarray(list(pos)), inv_freq)


@dataclass
class Scored:
    """Scores and protected positions of one event, each per KV head.

    noise: the size of the terms that an entry's score is made of, where that is larger than the
    score itself (a difference, a ratio to a small number): rounding is proportional to it.
    decisions: (margin, size) of each choice taken on the way to the scores.
    exact: equal scores are equal in every dtype and order of summation (ranks, positions).
    rounded: rounding may break any tie, as it was broken or made on the way to the scores.
    """

    values: list[dict[int, float]]
    protected: list[set[int]]
    noise: list[dict[int, float]] | None = None
    decisions: list[list[tuple[float, float]]] | None = None
    exact: bool = False
    rounded: bool = False

    def size(self, head: int, pos: int) -> float:
        """The size of the terms of one score, at least that of the score."""
        own = abs(self.values[head][pos])
        return own if self.noise is None else max(own, self.noise[head].get(pos, 0.0))

    def taken(self, head: int) -> list[tuple[float, float]]:
        """The choices taken on the way to a head's scores."""
        return [] if self.decisions is None else self.decisions[head]


def unprotected(event: Event) -> list[set[int]]:
    """An empty set for each head."""
    return [set() for _ in event.live]


def first(event: Event, sink: int) -> list[set[int]]:
    """The live positions below `sink`, of each head."""
    return [{p for p in live if p < sink} for live in event.live]


def last(event: Event, rows: int) -> list[set[int]]:
    """The live entries of the last `rows` positions, of each head."""
    return [{p for p in live if p > event.row - rows} for live in event.live]


def union(*masks: Collection[set[int]]) -> list[set[int]]:
    """Head by head, the union of sets of positions."""
    return [set().union(*sets) for sets in zip(*masks, strict=True)]
