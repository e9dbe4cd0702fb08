"""The replay, row by row, as naively as the definitions read: numpy, float64, loops.

One loop over the rows appends the row's own entry to each layer, lets the row attend, then fires
the event if one is due:

    row r sees p  iff  p <= r <= evicted_at[p]

It is meant for traces of a few dozen tokens. Shapes: q [layer, qhead, pos, dim], k and v
[layer, head, pos, dim]; query head i belongs to KV head i // G, with G query heads to a KV head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kvsim.errors import BudgetError, PolicyError
from kvsim.schema import NEVER
from kvsim.testing.loops.basics import Floats, logits_of
from kvsim.testing.loops.event import Decision, Event, Rotary, Scored, Sets, first, last, union
from kvsim.testing.loops.outcome import Cut, Outcome
from kvsim.testing.loops.rule import Rule

#: Margin of a tie that no rule decides, because rounding may break it: below every tolerance.
UNSURE = 1e-300


# -------------------------------------------------------------------------------------- one event


@dataclass
class _Run:
    """All layers of a replay, and when their entries leave."""

    rule: Rule
    events: list[Event]
    budgets: list[int]  # of each KV head
    n_layers: int
    protect: tuple[int, int, bool]
    cuts: list[Cut] = field(default_factory=list)

    def __post_init__(self) -> None:
        n = self.events[0].logits.shape[1] if self.events else 0
        self.evicted_at = np.full((self.n_layers, len(self.budgets), n), NEVER, dtype=np.int32)

    def fire(self) -> None:
        """The event after the current row, on every layer that it acts on."""
        for event in self.events:
            event.budgets = list(self.budgets)
            event.protected = self._protected(event)
        room = len(self.events) * sum(self.budgets)
        if self.rule.across_layers and sum(map(_count, self.events)) <= room:
            return
        self._share_layers()
        for event in self.events:
            event.protected = self._protected(event)
            if self.rule.across_layers or _count(event) > sum(event.budgets):
                self._act(event)

    def _share_layers(self) -> None:
        """Give every layer its budget, where the rule has one for each."""
        if self.rule.layer_budgets is None:
            return
        of_layers, decisions = self.rule.layer_budgets(self.events, self.budgets[0])
        for event, budget in zip(self.events, of_layers, strict=True):
            event.budgets = [budget] * len(self.budgets)
        for decision in decisions:
            self._note(self.events[0], None, *decision)

    def _protected(self, event: Event) -> Sets:
        """What the replay and the rule protect whatever the scores are."""
        sink, recent, prompt = self.protect
        sink = max(sink, event.prompt_len) if prompt else sink
        protected = union(first(event, sink), last(event, recent))
        if self.rule.protect is not None:
            protected = union(protected, self.rule.protect(event))
        return protected

    def _act(self, event: Event) -> None:
        """Keep what the allocator keeps; everything else leaves, with its columns."""
        assert self.rule.score is not None  # noqa: S101  no event fires without a scorer
        scored, heads = self.rule.score(event), range(len(self.budgets))
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
            for p in set(event.live[h]) - survivors:
                self.evicted_at[event.layer, h, p] = event.row
                del event.received[h][p]
                for column in event.columns.values():
                    column[h].pop(p, None)
            event.live[h] = sorted(survivors)

    def _note(self, event: Event, head: int | None, margin: float, size: float) -> None:
        """A decision of one head, of all heads of a layer, or where layers share, of everything."""
        shared = self.rule.across_layers
        for other in self.events if shared else [event]:
            for h in range(len(self.budgets)) if shared or head is None else [head]:
                self.cuts.append(Cut(other.layer, h, event.row, margin, size))


def _count(event: Event) -> int:
    """Live entries of a layer."""
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
    pairs = [
        (score[i] - score[j]) / max(scored.size(head, i), scored.size(head, j))
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


# ------------------------------------------------------------------------------------- the replay


def replay(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    rule: Rule,
    *,
    prompt_len: int,
    budget: int | Sequence[int],
    interval: int | None = None,
    prefill: bool | None = None,
    scale: float | None = None,
    layers: Sequence[int] | None = None,
    rope: tuple[Sequence[float], float] | None = None,
    o_proj: npt.ArrayLike | None = None,
    protect: tuple[int, int, bool] = (0, 0, False),
) -> Outcome:
    """Replay a rule on one trace and return when each entry leaves.

    q [layer, qhead, pos, dim], k and v [layer, head, pos, dim]. budget: entries kept per KV head,
    or one number for each head. interval, prefill: replace the rule's own schedule. layers: which
    layers evict, all of them by default. rope: (inv_freq, attention_scaling), dimension i paired
    with i + half. o_proj [layer, qhead, dim, hidden]. protect: (sink, recent, prompt), protected in
    addition to what the rule protects.
    """
    queries, keys, values = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    if values.shape != keys.shape:
        raise ValueError(f"v has shape {values.shape}, k has {keys.shape}; expected the same")
    if not isinstance(budget, int) and (rule.layer_budgets or rule.propagate):
        raise PolicyError(
            f"{rule.name}: budget is {list(budget)}; expected one number, because each layer has "
            "a budget of its own"
        )
    arrays = _Arrays(
        queries,
        keys,
        values,
        rule=rule,
        prompt_len=prompt_len,
        whole_prompt=prompt_len,
        budget=budget,
        interval=rule.interval if interval is None else interval,
        prefill=rule.prefill if prefill is None else prefill,
        scale=keys.shape[-1] ** -0.5 if scale is None else scale,
        layers=range(len(keys)) if layers is None else layers,
        rope=None if rope is None else (tuple(float(f) for f in rope[0]), float(rope[1])),
        o_proj=None if o_proj is None else np.asarray(o_proj, dtype=np.float64),
        protect=protect,
    )
    return _in_parallel(arrays) if rule.propagate is None else _across(arrays)


@dataclass(frozen=True)
class _Arrays:
    """The arguments of `replay`, as float64.

    places: positions of the rows, 0, 1, 2 ... by default. prompt_len: rows of the prompt that the
    layers have, of `whole_prompt` in all.
    """

    queries: Floats
    keys: Floats
    values: Floats
    rule: Rule
    prompt_len: int
    whole_prompt: int
    budget: int | Sequence[int]
    interval: int | None
    prefill: bool
    scale: float
    layers: Sequence[int]
    rope: Rotary | None
    o_proj: Floats | None
    protect: tuple[int, int, bool]
    places: list[int] | None = None

    @property
    def n_sets(self) -> int:
        """Sets that a layer keeps: one for each KV head, or for each query head."""
        return len((self.queries if self.rule.per_query_head else self.keys)[0])

    def events(self, budgets: list[int]) -> list[Event]:
        """Each layer before its first row; keys and values as the rule's sets need them."""
        keys, values = self.keys, self.values
        if self.rule.per_query_head:
            group = self.queries.shape[1] // keys.shape[1]
            keys, values = (np.repeat(x, group, axis=1) for x in (keys, values))
        return [
            Event(
                layer=layer,
                row=0,
                prefill=False,
                logits=logits_of(self.queries[layer], keys[layer], self.scale),
                live=[[] for _ in budgets],
                received=[{} for _ in budgets],
                budgets=list(budgets),
                prompt_len=self.prompt_len,
                interval=self.interval,
                scale=self.scale,
                queries=self.queries[layer],
                keys=keys[layer],
                values=values[layer],
                o_proj=None if self.o_proj is None else self.o_proj[layer],
                rope=self.rope,
                places=self.places,
                n_layers=len(keys),
                whole_prompt=self.whole_prompt,
                fires_at_prefill=self.prefill,
            )
            for layer in self.layers
        ]


def _across(arrays: _Arrays) -> Outcome:
    """Each layer by itself, as if the prompt had been the rows that reach it, and nothing else."""
    rule, n, budget = arrays.rule, arrays.prompt_len, arrays.budget
    assert rule.propagate is not None  # noqa: S101  `replay` calls this for rules that have one
    assert isinstance(budget, int)  # noqa: S101  as above
    if rule.across_layers:
        raise PolicyError(f"{rule.name}: layers of different rows cannot share one budget")
    selection = rule.propagate(arrays.queries, arrays.keys, n, budget, arrays.scale)
    n_layers, _, length, _ = arrays.keys.shape
    heads = arrays.n_sets
    evicted_at = np.full((n_layers, heads, length), NEVER, dtype=np.int32)
    cuts = [
        Cut(layer, h, -1, doubt.margin, doubt.size)
        for doubt in selection.doubts
        for layer in doubt.layers
        for h in range(heads)
    ]
    for layer in arrays.layers:
        rows = [*selection.alive[layer], *range(n, length)]
        for p in set(range(n)) - set(rows):
            evicted_at[layer, :, p] = p - 1  # no row of this layer ever saw it
        if layer in selection.uncut:
            continue
        restricted = replace(
            arrays,
            queries=arrays.queries[:, :, rows],
            keys=arrays.keys[:, :, rows],
            values=arrays.values[:, :, rows],
            prompt_len=len(selection.alive[layer]),
            layers=[layer],
            places=rows,
        )
        inner = _in_parallel(restricted)
        for h in range(heads):
            for slot, row in enumerate(inner.evicted_at[layer, h].tolist()):
                if row != NEVER:
                    evicted_at[layer, h, rows[slot]] = rows[row]
        cuts += [replace(cut, row=rows[cut.row]) for cut in inner.cuts]
    return Outcome(evicted_at, tuple(cuts), selection)


def _in_parallel(arrays: _Arrays) -> Outcome:
    """All layers at once, row by row, on the rows that they have."""
    rule, budget = arrays.rule, arrays.budget
    n_layers, _, n, _ = arrays.keys.shape
    budgets = [budget] * arrays.n_sets if isinstance(budget, int) else [int(b) for b in budget]
    if min(budgets) < 1:
        raise BudgetError(f"budget is {min(budgets)}; expected at least 1")
    events = arrays.events(budgets)
    due = event_rows(n, arrays.prompt_len, interval=arrays.interval, prefill=arrays.prefill)
    run = _Run(rule, events, budgets, n_layers, arrays.protect)
    for row in range(n):
        for event in events:
            event.row, event.prefill = row, row == arrays.prompt_len - 1
            _attend_row(event, accumulate=rule.accumulates)
        if rule.score is not None and row in due:
            run.fire()
    return Outcome(run.evicted_at, tuple(run.cuts))


def _attend_row(event: Event, *, accumulate: bool) -> None:
    """The row's own entry joins the cache, and the row attends to what is live."""
    for h, live in enumerate(event.live):
        live.append(event.row)
        event.received[h][event.row] = 0.0
        if accumulate:
            for i in event.qheads(h):
                for p, a in event.attention(i, event.row).items():
                    event.received[h][p] += a


def event_rows(n: int, prompt_len: int, *, interval: int | None, prefill: bool | None) -> list[int]:
    """The rows after which events fire: prompt_len - 1 + m * interval, m = 0 after the prefill."""
    rows = [prompt_len - 1] if prefill in (None, True) else []
    if interval is not None:
        rows += range(prompt_len - 1 + interval, n, interval)
    return rows
