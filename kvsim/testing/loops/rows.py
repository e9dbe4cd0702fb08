"""The replay, row by row, as naively as the definitions read: numpy, float64, loops.

One loop over the rows appends the row's own entry to each layer, lets the row attend, then fires
the event if one is due:

    row r sees p  iff  p <= r <= evicted_at[p]

It is meant for traces of a few dozen tokens (`kvsim.testing.strategies.Case`). Query head i belongs
to KV head i // G, with G query heads to a KV head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvsim.errors import BudgetError
from kvsim.schema import NEVER
from kvsim.testing.loops.event import (
    Decision,
    Descended,
    Event,
    Ints,
    Rule,
    Scored,
    Sets,
    first,
    last,
    logits_of,
    union,
)

#: Margin of a tie that no rule decides, because rounding may break it: below every tolerance.
UNSURE = 1e-300


class Cut(NamedTuple):
    """One decision of one head, between the last entry kept and the first one dropped.

    margin: their score difference relative to the larger of the two, or to the size of the terms
    that they are made of; 0 for an exact tie, infinite where scores decided nothing (all or none of
    the unprotected entries stay). size: the larger of the two scores.

    A decision on the way to the scores (a threshold, a rank) is a cut too, and where heads or
    layers share a budget, a decision of one counts for all of them.
    """

    layer: int
    head: int
    row: int
    margin: float
    size: float


@dataclass(frozen=True)
class Outcome:
    """Result of the naive replay: `evicted_at` int32 [layer, head, pos], and each cut.

    selection: which rows each layer worked on, where the rule drops rows. That choice is a cut
    after row -1 in every layer that depends on it.
    """

    evicted_at: Ints
    cuts: tuple[Cut, ...]
    selection: Descended | None = None

    def sure_until(self, tolerance: float, *, ties: bool = True, faint: float = 0.0) -> Ints:
        """int32 [layer, head]: the row of the first cut that rounding could reverse, else NEVER.

        A cut is unsure where its margin is below `tolerance` or both scores are below `faint`.
        With `ties` an exact tie is sure: the tie rule (lower position) decides it.
        """
        sure = np.full(self.evicted_at.shape[:2], NEVER, dtype=np.int32)
        for cut in self.cuts:
            exact = ties and cut.margin == 0.0
            if cut.size < faint or (cut.margin < tolerance and not exact):
                sure[cut.layer, cut.head] = min(sure[cut.layer, cut.head], cut.row)
        return sure

    def agrees(
        self, evicted_at: npt.ArrayLike, tolerance: float, *, ties: bool = True, faint: float = 0.0
    ) -> bool:
        """Whether another replay evicted the same entries, up to each head's first unsure cut."""
        limit = self.sure_until(tolerance, ties=ties, faint=faint)[:, :, None]
        same_shape = np.shape(evicted_at) == self.evicted_at.shape
        return same_shape and first_difference(self.evicted_at, evicted_at, limit) is None

    def choices(self, until: Ints) -> int:
        """Events of heads before `until` [layer, head] in which different scores decide."""
        events = {cut[:3] for cut in self.cuts if cut.row >= 0 and 0 < cut.margin < math.inf}
        return len([row for layer, head, row in events if row < until[layer, head]])


def first_difference(
    mine: npt.ArrayLike, other: npt.ArrayLike, until: npt.ArrayLike
) -> tuple[int, ...] | None:
    """(layer, head, position) that two replays first evict otherwise, up to the rows `until`."""
    a, b = (np.minimum(evicted_at, until) for evicted_at in (mine, other))
    row = np.where(a == b, NEVER, np.minimum(a, b))
    at = np.unravel_index(row.argmin(), row.shape)
    return None if row[at] == NEVER else tuple(map(int, at))


@dataclass
class _Run:
    """Layers of a replay, and when their entries leave."""

    rule: Rule
    budget: int  # of each KV head
    protect: tuple[int, int, bool]
    evicted_at: Ints
    store: Callable[[Event], None] | None = None
    asked: Sequence[int] = ()  # rows after which events fire, too
    events: list[Event] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)

    def through(self, events: list[Event]) -> None:
        """Replay some layers at once, row by row, on the rows that they have."""
        self.events = events
        if not events:
            return
        layer = events[0]
        n, prefill = layer.logits.shape[1], layer.fires_at_prefill
        fires: dict[str, Any] = {"interval": layer.interval, "prefill": prefill}
        due, prompt = event_rows(n, layer.prompt_len, chunk=layer.chunk, **fires), layer.prompt_len
        due += [row - (self.evicted_at.shape[-1] - n) for row in self.asked]
        for row in range(n):
            for event in events:
                if layer.chunk is not None and row in due and row < prompt:
                    event.prompt_len = event.whole_prompt = row + 1  # all that is known of it
                event.row, event.prefill = row, row == event.prompt_len - 1
                _attend_row(event, accumulate=self.rule.accumulates)
            if self.rule.score is not None and row in due:
                self.fire()
            if self.store is not None:
                for event in events:
                    self.store(event)

    def fire(self) -> None:
        """The event after the current row, on every layer that it acts on."""
        for event in self.events:
            event.budgets = [self.budget] * len(event.live)
            event.protected = self._protected(event)
        room = sum(sum(event.budgets) for event in self.events)
        if self.rule.across_layers and sum(map(_count, self.events)) <= room:
            return
        self._share_layers()
        for event in self.events:
            event.protected = self._protected(event)
            if self.rule.across_layers or _count(event) > sum(event.budgets):
                self._act(event)

    def _share_layers(self) -> None:
        if self.rule.layer_budgets is None:
            return
        of_layers, decisions = self.rule.layer_budgets(self.events, self.budget)
        for event, budget in zip(self.events, of_layers, strict=True):
            event.budgets = [budget] * len(event.live)
        for decision in decisions:
            self._note(self.events[0], None, *decision)

    def _protected(self, event: Event) -> Sets:
        sink, recent, prompt = self.protect
        sink = max(sink, event.prompt_len) if prompt else sink
        protected = union(first(event, sink), last(event, recent))
        if self.rule.protect is not None:
            protected = union(protected, self.rule.protect(event))
        return protected

    def _act(self, event: Event) -> None:
        assert self.rule.score is not None  # noqa: S101  no event fires without a scorer
        scored, heads = self.rule.score(event), range(len(event.live))
        protected = union(scored.protected, event.protected)
        if self.rule.allocate is None:
            kept = []
            for h in heads:
                chosen, margin, size = choose(self.rule.name, event, h, scored, protected[h])
                kept.append(chosen)
                near = closest(scored, h, chosen - protected[h], set(event.live[h]) - chosen)
                for decision in (*scored.taken(h), (margin, size), *near):
                    self._note(event, h, *decision)
        else:
            kept, decisions = self.rule.allocate(event, scored, protected)
            decisions = [_coarser(scored, *decision) for decision in decisions]
            for decision in (*decisions, *(d for h in heads for d in scored.taken(h))):
                self._note(event, None, *decision)
        for h, survivors in enumerate(kept):
            gone = set(event.live[h]) - survivors
            self.evicted_at[event.layer, h, event.place(gone)] = event.place([event.row])
            for p in gone:
                del event.received[h][p]
                for column in event.columns.values():
                    column[h].pop(p, None)
            event.live[h] = sorted(survivors)

    def _note(self, event: Event, head: int | None, margin: float, size: float) -> None:
        """A decision of one head, of all heads of a layer, or where layers share, of everything."""
        shared, (row,) = self.rule.across_layers, event.place([event.row])
        for other in self.events if shared else [event]:
            for h in range(len(event.live)) if shared or head is None else [head]:
                self.cuts.append(Cut(other.layer, h, row, margin, size))


def _count(event: Event) -> int:
    return sum(map(len, event.live))


def choose(
    name: str, event: Event, head: int, scored: Scored, protected: set[int]
) -> tuple[set[int], float, float]:
    """Protected first, then the higher score, then the lower position: exactly the budget.

    Returns the kept set, and the margin and size of the cut.
    """
    budget, live, scores = event.budgets[head], event.live[head], scored.values[head]
    if len(protected) > budget:
        raise BudgetError(
            f"{name} protects {len(protected)} entries, budget is {budget}; "
            f"give at least {len(protected)}"
        )
    ranking = sorted((p for p in live if p not in protected), key=lambda p: (-scores[p], p))
    free = min(budget - len(protected), len(ranking))
    margin = size = math.inf
    if 0 < free < len(ranking):
        last_kept, first_out = ranking[free - 1], ranking[free]
        gap = scores[last_kept] - scores[first_out]
        size = max(abs(scores[last_kept]), abs(scores[first_out]))
        terms = max(scored.size(head, last_kept), scored.size(head, first_out))
        margin = gap / terms if terms > 0 else 0.0
        if gap == 0 and (scored.exact or scored.rounded):
            margin = math.inf if scored.exact else UNSURE
    return protected | set(ranking[:free]), margin, size


def closest(scored: Scored, head: int, kept: set[int], dropped: set[int]) -> list[Decision]:
    """The pair across a cut whose terms are largest relative to their difference, ties apart.

    Where terms are larger than scores, it need not be the pair next to the cut.
    """
    if scored.noise is None:
        return []
    score = scored.values[head]
    size = {p: scored.size(head, p) for p in kept | dropped}
    pairs = [
        (score[i] - score[j]) / max(size[i], size[j])
        for i in kept
        for j in dropped
        if score[i] > score[j]
    ]
    return [(min(pairs), math.inf)] if pairs else []


def _coarser(scored: Scored, margin: float, size: float) -> Decision:
    """A margin relative to the terms of the scores instead of the scores, at the most."""
    if margin == 0 and scored.rounded:
        return UNSURE, size
    if margin in (0.0, math.inf) or size in (0.0, math.inf):
        return margin, size
    pairs = [
        (abs(score), scored.size(h, p))
        for h, scores in enumerate(scored.values)
        for p, score in scores.items()
    ]
    largest = max((terms for _, terms in pairs), default=size)
    ratio = max((terms / score if score > 0 else math.inf for score, terms in pairs), default=1.0)
    return margin * size / max(size, min(largest, size * ratio)), size


def replay(
    case: Any,
    rule: Rule,
    *,
    budget: int,
    interval: int | None = None,
    prefill: bool | None = None,
    protect: tuple[int, int, bool] = (0, 0, False),
    context: int | None = None,
    chunk: int | None = None,
    asked: Sequence[int] = (),
    store: Callable[[Event], None] | None = None,
) -> Outcome:
    """Replay a rule on one `Case`, whose values may have any size; when each entry leaves.

    budget: entries kept per KV head. interval, prefill: replace the rule's own schedule. protect:
    (sink, recent, prompt), protected in addition to what the rule protects. context: tokens that
    rows repeat, by default those of the prompt. chunk: rows of the prompt between events. asked:
    the last rows of later questions, after which events fire. store: called after each row, and the
    event after it, for each layer; it may change the event's keys, values and logits, as rounding
    does.
    """
    arrays = case.q, case.k, case.v, case.o_proj, case.probe_q, case.probe_k
    queries, keys, values, projection, *repeated = (np.asarray(x, dtype=np.float64) for x in arrays)
    prompt_len, scale = case.prompt_len, case.scale
    n_layers, heads, n, _ = keys.shape
    if rule.per_query_head:  # keys and values as the rule's sets need them
        heads = queries.shape[1]
    own_keys, own_values, repeated[1] = (
        np.repeat(x, heads // x.shape[1], axis=1) for x in (keys, values, repeated[1])
    )
    events = [
        Event(
            layer=layer,
            row=0,
            prefill=False,
            logits=logits_of(queries[layer], own_keys[layer], scale),
            live=[[] for _ in range(heads)],
            received=[{} for _ in range(heads)],
            budgets=[budget] * heads,
            prompt_len=prompt_len,
            interval=rule.interval if interval is None else interval,
            scale=scale,
            queries=queries[layer],
            keys=own_keys[layer],
            values=own_values[layer],
            o_proj=projection[layer],
            repeated=(*(x[layer] for x in repeated), case.chunks(context or prompt_len)),
            rope=(tuple(map(float, case.rope.inv_freq)), float(case.rope.attention_scaling)),
            n_layers=n_layers,
            whole_prompt=prompt_len,
            chunk=chunk,
            fires_at_prefill=rule.prefill if prefill is None else prefill,
        )
        for layer in range(n_layers)
    ]
    evicted_at = np.full((n_layers, heads, n), NEVER, dtype=np.int32)
    run = _Run(rule, budget, protect, evicted_at, store, asked)
    if rule.descend is None:
        run.through(events)
        return Outcome(run.evicted_at, tuple(run.cuts))
    selection = rule.descend(queries, keys, prompt_len, budget, scale)
    run.cuts += [
        Cut(layer, h, -1, doubt.margin, doubt.size)
        for doubt in selection.doubts
        for layer in doubt.layers
        for h in range(heads)
    ]
    # each layer by itself, as if the prompt had been the rows that reach it, and nothing else
    for event in events:
        alive = selection.alive[event.layer]
        for p in set(range(prompt_len)) - set(alive):
            run.evicted_at[event.layer, :, p] = p - 1  # no row of this layer ever saw it
        if event.layer not in selection.uncut:
            run.through([event.among([*alive, *range(prompt_len, n)], len(alive))])
    return Outcome(run.evicted_at, tuple(run.cuts), selection)


def _attend_row(event: Event, *, accumulate: bool) -> None:
    """The row's own entry joins the cache, and the row attends to what is live."""
    for h, live in enumerate(event.live):
        live.append(event.row)
        event.received[h][event.row] = 0.0
        if accumulate:
            for i in event.qheads(h):
                for p, a in event.attention(i, event.row).items():
                    event.received[h][p] += a


def event_rows(
    n: int,
    prompt_len: int,
    *,
    interval: int | None,
    prefill: bool | None,
    chunk: int | None = None,
) -> list[int]:
    """The rows after which events fire: prompt_len - 1 + m * interval, m = 0 after the prefill.

    chunk: rows of the prompt between events before that after the prefill, if there is one.
    """
    rows = []
    if prefill in (None, True):
        rows = [*range((chunk or n) - 1, prompt_len - 1, chunk or n), prompt_len - 1]
    if interval is not None:
        rows += range(prompt_len - 1 + interval, n, interval)
    return rows
