"""The replay once more, as naively as the definitions read: numpy, float64, loops.

Nothing here is shared with the engine or the policies, so that agreement means something. One loop
over the rows appends the row's own entry to each layer, lets the row attend, then fires the event
if one is due:

    row r sees p  iff  p <= r <= evicted_at[p]

It is meant for traces of a few dozen tokens. Shapes: q [layer, qhead, pos, dim], k and v
[layer, head, pos, dim]; query head i belongs to KV head i // G, G query heads to a KV head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsim.errors import BudgetError, PolicyError
from kvsim.testing.reference import allocation
from kvsim.testing.reference.basics import NEVER, Floats, Ints, logits_of
from kvsim.testing.reference.event import Event, Rotary, Scored, first, last, union
from kvsim.testing.reference.propagation import Propagated, propagate
from kvsim.testing.reference.rules import Chain, own_protection, parse
from kvsim.testing.reference.windows import cake, cake_preference

#: Margin of a tie that no rule decides, because rounding may break it: below every tolerance.
UNSURE = 1e-300


# ------------------------------------------------------------------------------------ the outcome


@dataclass(frozen=True)
class Cut:
    """One choice of one head: what was at stake between the last entry kept and the first dropped.

    margin: their score difference relative to the larger of the two, or to the size of the terms
    that they are made of; 0 for an exact tie, infinite where scores decided nothing (all or none of
    the unprotected entries stay). size: the larger of the two scores.

    A choice taken on the way to the scores (a threshold, a rank) is one too, and where heads or
    layers share a budget, a choice of one counts for all of them.
    """

    layer: int
    head: int
    row: int
    margin: float
    size: float


@dataclass(frozen=True)
class Outcome:
    """What the naive replay found: `evicted_at` int32 [layer, head, pos], and each cut.

    selection: which rows each layer worked on, where the policy has a propagation. What it chose is
    a cut after row -1 in every layer that depends on it.
    """

    evicted_at: Ints
    cuts: tuple[Cut, ...]
    selection: Propagated | None = None

    @property
    def margin(self) -> float:
        """The smallest decision margin of the whole replay, exact ties included (as 0)."""
        return min((cut.margin for cut in self.cuts), default=math.inf)

    def sure_until(self, tolerance: float, *, ties: bool = True, faint: float = 0.0) -> Ints:
        """int32 [layer, head]: the row of the first cut that rounding could turn, else NEVER.

        A cut is unsure where its margin is below `tolerance` or both scores are below `faint`.
        Exact ties are sure while `ties`: the tie rule (lower position) decides them.
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
        other = np.asarray(evicted_at)
        return other.shape == self.evicted_at.shape and bool(
            (np.minimum(other, limit) == np.minimum(self.evicted_at, limit)).all()
        )


# -------------------------------------------------------------------------------------- one event


@dataclass
class _Run:
    """All layers of a replay, and what became of their entries."""

    policy: str
    chain: Chain
    events: list[Event]
    given: list[int]  # the budget of each KV head
    n_layers: int
    prefill: bool
    protect: tuple[int, int, bool]
    prompt: int  # rows of the prompt, those that do not reach all layers included
    cuts: list[Cut] = field(default_factory=list)

    def __post_init__(self) -> None:
        heads, n = len(self.given), self.events[0].logits.shape[1] if self.events else 0
        self.evicted_at = np.full((self.n_layers, heads, n), NEVER, dtype=np.int32)
        # what each piece remembers of the entries of each layer: [layer][piece][head][position]
        self.memory, self.doubt = (
            [
                [[dict[int, float]() for _ in range(heads)] for _ in self.chain.params]
                for _ in self.events
            ]
            for _ in range(2)
        )

    def fire(self) -> None:
        """The event after the current row, on every layer that it acts on."""
        if self.chain.rule.layers == "cake":
            if sum(map(_held, self.events)) <= len(self.events) * sum(self.given):
                return
            self._share_layers()
        else:
            for event in self.events:
                event.budgets = [self._budget(event, budget) for budget in self.given]
        for i, event in enumerate(self.events):
            if self.chain.rule.layers == "cake" or _held(event) > sum(event.budgets):
                found = self.chain.score(event, self.memory[i], self.doubt[i])
                self._choose(i, found, self._protect(event, found))

    def _protect(self, event: Event, found: Scored) -> list[set[int]]:
        """What the scorer, the allocator and the replay protect on a layer."""
        protected = self._beside(event, found.protected)
        if self.chain.allocator in ("ams", "ams@release"):
            sink, recent = own_protection(self.chain.params[0], event.budgets[0])
            protected = union(protected, first(event, sink), last(event, recent))
        return protected

    def _beside(self, event: Event, protected: list[set[int]]) -> list[set[int]]:
        """Protected sets, and what the replay protects beside them."""
        sink, recent, prompt = self.protect
        sink = max(sink, event.prompt_len) if prompt else sink
        return union(protected, first(event, sink), last(event, recent))

    def _choose(self, i: int, found: Scored, protected: list[set[int]]) -> None:
        """Keep what the allocator keeps; the rest leaves, with all that was remembered of it."""
        event, heads = self.events[i], range(len(self.given))
        if self.chain.allocator is None:
            all_kept = []
            for h in heads:
                kept, margin, size = choose(self.policy, event, h, found, protected[h])
                all_kept.append(kept)
                near = closest(found, h, kept - protected[h], set(event.live[h]) - kept)
                for decision in (*found.taken(h), (margin, size), *near):
                    self._note(event, h, *decision)
        else:
            all_kept, decisions = self._allocate(i, found, protected)
            for h in heads:
                decisions = [*decisions, *found.taken(h)]
            for decision in decisions:
                self._note(event, None, *decision)
        for h, kept in enumerate(all_kept):
            for p in set(event.live[h]) - kept:
                self.evicted_at[event.layer, h, p] = event.row
                del event.received[h][p]
                for piece in (*self.memory[i], *self.doubt[i]):
                    piece[h].pop(p, None)
            event.live[h] = sorted(kept)

    def _allocate(
        self, i: int, found: Scored, protected: list[set[int]]
    ) -> tuple[list[set[int]], list[tuple[float, float]]]:
        params = self.chain.params[0]
        event = self.events[i].at(params=params)
        budget, scores = event.budgets[0], found.values
        if self.chain.allocator in ("ams", "ams@release"):
            kept, decisions = allocation.ams(
                event, scores, protected, budget=budget, params=params, credit=self.memory[i][0]
            )
        elif self.chain.allocator in ("adakv", "adakv@kvpress"):
            kept, decisions = allocation.adakv(
                event,
                scores,
                protected,
                budget=budget,
                floor=float(params["floor"]),
                inside=self.chain.allocator == "adakv@kvpress",
            )
        else:
            kept, decisions = allocation.chunkkv(
                event,
                scores,
                protected,
                budget=budget,
                chunk=int(params["chunk"]),
                exact=self.chain.allocator == "chunkkv",
            )
        return kept, [_coarser(found, margin, size) for margin, size in decisions]

    def _note(self, event: Event, head: int | None, margin: float, size: float) -> None:
        """A choice of one head, of all heads of a layer, or where layers share, of everything."""
        shared = self.chain.rule.layers == "cake"
        for other in self.events if shared else [event]:
            for h in range(len(self.given)) if shared or head is None else [head]:
                self.cuts.append(Cut(other.layer, h, event.row, margin, size))

    # ------------------------------------------------------------------------ budgets of layers

    def _budget(self, event: Event, given: int) -> int:
        """Entries that a head of this layer may keep."""
        kind, params = self.chain.rule.layers, self.chain.params[-1]
        if kind == "even":
            return given
        if kind == "growing":
            if event.interval is None:
                return event.prompt_len + int(params["window"])
            generated = event.row + 1 - event.prompt_len
            earned = generated // event.interval * event.interval // int(params["compression"])
            return event.prompt_len + int(params["window"]) + earned
        window, beta = int(params["window"]), float(params["beta"])
        if kind == "pyramid":
            longest = max(
                self.prompt if self.prefill and self.prompt > given else 0,
                given + event.interval if event.interval is not None else 0,
            )
            if longest == 0:  # no event can find more than fits
                return given
            of_layers = allocation.pyramid(
                given, self.n_layers, window=window, beta=beta, longest=longest
            )
            return of_layers[event.layer]
        return allocation.pyramid_at_event(
            given,
            event.layer,
            max(2, self.n_layers),  # a single layer is the first of a slope
            max(map(len, event.live)),
            window=window,
            beta=beta,
        )

    def _share_layers(self) -> None:
        """CAKE: what each layer may keep, by what its window asks for."""
        preferences, floor = [], []
        for event in self.events:
            at = event.at(params=self.chain.params[-1])
            preferences.append(cake_preference(at))
            protected = self._beside(event, cake(at).protected)
            if self.chain.allocator in ("ams", "ams@release"):
                # less would be asked for with less room, but the window takes its part either way
                sink, recent = own_protection(self.chain.params[0], self.given[0])
                protected = union(protected, first(event, sink), last(event, recent))
            floor.append(max(map(len, protected)))
        cap = [_held(event) // len(event.live) for event in self.events]
        total = len(self.events) * self.given[0]
        if sum(floor) > total:
            raise BudgetError(
                f"{self.policy} protects {max(floor)} entries, budget is {self.given[0]}"
            )

        def shares(wanted: list[float]) -> list[int]:
            return allocation.cake_budgets(wanted, total, floor, cap)

        found = shares(preferences)
        for event, budget in zip(self.events, found, strict=True):
            event.budgets = [budget] * len(self.given)
        self._note(self.events[0], None, _stability(shares, preferences), max(preferences))


def _held(event: Event) -> int:
    """Live entries of a layer."""
    return sum(map(len, event.live))


def _stability(shares: Callable[[list[float]], list[int]], wanted: list[float]) -> float:
    """The smallest relative change of one number that was found to change the outcome."""
    found = shares(wanted)
    for power in range(-14, 0):
        for i in range(len(wanted)):
            for sign in (1.0, -1.0):
                near = list(wanted)
                near[i] *= 1.0 + sign * 10.0**power
                if shares(near) != found:
                    return 10.0 ** (power - 1)
    return math.inf


def choose(
    policy: str, event: Event, head: int, found: Scored, protected: set[int]
) -> tuple[set[int], float, float]:
    """Protected first, then the higher score, then the lower position: exactly the budget.

    Returns the kept set, and the margin and size of the cut.
    """
    budget, live, scores = event.budgets[head], event.live[head], found.values[head]
    if len(protected) > budget:
        raise BudgetError(
            f"{policy} protects {len(protected)} entries, budget is {budget}; "
            f"give at least {len(protected)}"
        )
    ranking = sorted((p for p in live if p not in protected), key=lambda p: (-scores[p], p))
    free = min(budget - len(protected), len(ranking))
    margin = size = math.inf
    if 0 < free < len(ranking):
        last_kept, first_out = ranking[free - 1], ranking[free]
        gap = scores[last_kept] - scores[first_out]
        size = max(abs(scores[last_kept]), abs(scores[first_out]))
        terms = max(found.size(head, last_kept), found.size(head, first_out))
        margin = gap / terms if terms > 0 else 0.0
        if gap == 0 and (found.exact or found.rounded):
            margin = math.inf if found.exact else UNSURE
    return protected | set(ranking[:free]), margin, size


def closest(
    found: Scored, head: int, kept: set[int], dropped: set[int]
) -> list[tuple[float, float]]:
    """The pair across a cut whose terms are largest beside their difference, ties apart.

    Where terms are larger than scores, it need not be the pair next to the cut.
    """
    if found.noise is None:
        return []
    score = found.values[head]
    pairs = [
        (score[i] - score[j]) / max(found.size(head, i), found.size(head, j))
        for i in kept
        for j in dropped
        if score[i] > score[j]
    ]
    return [(min(pairs), math.inf)] if pairs else []


def _coarser(found: Scored, margin: float, size: float) -> tuple[float, float]:
    """A margin relative to the terms of the scores instead of the scores, at the most."""
    if margin == 0 and found.rounded:
        return UNSURE, size
    if margin in (0.0, math.inf) or size in (0.0, math.inf):
        return margin, size
    pairs = [
        (abs(score), found.size(h, p))
        for h, own in enumerate(found.values)
        for p, score in own.items()
    ]
    largest = max((terms for _, terms in pairs), default=size)
    ratio = max((terms / score if score > 0 else math.inf for score, terms in pairs), default=1.0)
    return margin * size / max(size, min(largest, size * ratio)), size


# ------------------------------------------------------------------------------------- the replay


def replay(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    *,
    prompt_len: int,
    policy: str,
    params: Mapping[str, Any] | None = None,
    budget: int | Sequence[int],
    interval: int | None = None,
    prefill: bool | None = None,
    scale: float | None = None,
    layers: Sequence[int] | None = None,
    rope: tuple[Sequence[float], float] | None = None,
    o_proj: npt.ArrayLike | None = None,
    calibration: npt.ArrayLike | str | None = None,
    protect: tuple[int, int, bool] = (0, 0, False),
) -> Outcome:
    """Replay `policy` on one trace and return what each event evicted.

    q [layer, qhead, pos, dim], k and v [layer, head, pos, dim]. budget: entries kept per KV head,
    or one number for each head (TOVA then ranks each head by its own group). layers: which layers
    evict, all of them by default. policy, params: names and keywords as `rules.parse` takes them.

    rope: (inv_freq, attention_scaling), dimension i paired with i + half. o_proj [layer, qhead,
    dim, hidden]. calibration: queries after RoPE [layer, qhead, row, dim] of another trace, or
    "prefix:N" or "oracle", as params["calibration"] too. protect: (sink, recent, prompt), kept
    beside what the policy itself protects.
    """
    chain = _calibrate(parse(policy, params), calibration)
    queries, keys, values = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    if values.shape != keys.shape:
        raise ValueError(f"v has shape {values.shape}, k has {keys.shape}; expected the same")
    given = _Given(
        queries,
        keys,
        values,
        prompt_len=prompt_len,
        policy=policy,
        chain=chain,
        budget=budget,
        interval=interval,
        prefill=prefill,
        factor=keys.shape[-1] ** -0.5 if scale is None else scale,
        layers=range(len(keys)) if layers is None else layers,
        rope=None if rope is None else (tuple(float(f) for f in rope[0]), float(rope[1])),
        o_proj=None if o_proj is None else np.asarray(o_proj, dtype=np.float64),
        protect=protect,
        prompt=prompt_len,
    )
    return _in_parallel(given) if chain.propagation is None else _across(given)


@dataclass(frozen=True)
class _Given:
    """What `replay` was given.

    places: positions of the rows, 0, 1, 2 ... by default; prompt: rows of the prompt, those that
    do not reach all layers included.
    """

    queries: Floats
    keys: Floats
    values: Floats
    prompt_len: int
    policy: str
    chain: Chain
    budget: int | Sequence[int]
    interval: int | None
    prefill: bool | None
    factor: float
    layers: Sequence[int]
    rope: Rotary | None
    o_proj: Floats | None
    protect: tuple[int, int, bool]
    prompt: int
    places: list[int] | None = None


def _across(given: _Given) -> Outcome:
    """Each layer by itself, as if the prompt had been the rows that reach it, and nothing else."""
    chain, n, budget = given.chain, given.prompt_len, given.budget
    if not isinstance(budget, int) or chain.rule.layers == "cake":
        raise PolicyError(f"{given.policy}: each layer has a budget, the same for each head")
    found = propagate(
        chain.propagation or "",
        chain.across,
        given.queries,
        given.keys,
        prompt_len=n,
        budget=budget,
        scale=given.factor,
    )
    n_layers, heads, length, _ = given.keys.shape
    if chain.rule.per_query_head:
        heads = given.queries.shape[1]
    evicted_at = np.full((n_layers, heads, length), NEVER, dtype=np.int32)
    cuts = [
        Cut(layer, h, -1, doubt.margin, doubt.size)
        for doubt in found.doubts
        for layer in doubt.layers
        for h in range(heads)
    ]
    for layer in given.layers:
        rows = [*found.alive[layer], *range(n, length)]
        for p in set(range(n)) - set(rows):
            evicted_at[layer, :, p] = p - 1  # no row of this layer ever saw it
        if layer in found.uncut:
            continue
        restricted = replace(
            given,
            queries=given.queries[:, :, rows],
            keys=given.keys[:, :, rows],
            values=given.values[:, :, rows],
            prompt_len=len(found.alive[layer]),
            layers=[layer],
            places=rows,
        )
        inner = _in_parallel(restricted)
        for h in range(heads):
            for slot, row in enumerate(inner.evicted_at[layer, h].tolist()):
                if row != NEVER:
                    evicted_at[layer, h, rows[slot]] = rows[row]
        cuts += [replace(cut, row=rows[cut.row]) for cut in inner.cuts]
    return Outcome(evicted_at, tuple(cuts), found)


def _in_parallel(given: _Given) -> Outcome:
    """All layers at once, row by row; the propagation, if there is one, has been."""
    chain, budget, prompt_len = given.chain, given.budget, given.prompt_len
    rule = chain.rule
    queries, keys, values = given.queries, given.keys, given.values
    if rule.per_query_head:
        group = queries.shape[1] // keys.shape[1]
        keys, values = (np.repeat(x, group, axis=1) for x in (keys, values))
    n_layers, heads, n, _ = keys.shape
    budgets = [budget] * heads if isinstance(budget, int) else [int(b) for b in budget]
    if min(budgets) < 1:
        raise BudgetError(f"budget is {min(budgets)}; expected at least 1")
    own = chain.schedule
    interval = own[0] if given.interval is None else given.interval
    prefill = own[1] if given.prefill is None else given.prefill
    due = set(event_rows(n, prompt_len, interval=interval, prefill=prefill))
    calibration = chain.calibration
    events = [
        Event(
            layer=layer,
            row=0,
            prefill=False,
            logits=logits_of(queries[layer], keys[layer], given.factor),
            live=[[] for _ in range(heads)],
            received=[{} for _ in range(heads)],
            budgets=list(budgets),
            params={},
            prompt_len=prompt_len,
            interval=interval,
            scale=given.factor,
            queries=queries[layer],
            keys=keys[layer],
            values=values[layer],
            o_proj=None if given.o_proj is None else given.o_proj[layer],
            rope=given.rope,
            calibration=None
            if calibration is None
            else np.asarray(calibration, dtype=np.float64)[layer],
            average="all" if isinstance(budget, int) else "group",
            places=given.places,
        )
        for layer in given.layers
    ]
    run = _Run(given.policy, chain, events, budgets, n_layers, prefill, given.protect, given.prompt)
    for row in range(n):
        for event in events:
            event.row, event.prefill = row, row == prompt_len - 1
            _attend_row(event, accumulate=rule.accumulates)
        if rule.score is not None and row in due:
            run.fire()
    return Outcome(run.evicted_at, tuple(run.cuts))


def _calibrate(chain: Chain, calibration: npt.ArrayLike | str | None) -> Chain:
    if calibration is None:
        return chain
    return replace(
        chain, params=(*chain.params[:-1], {**chain.params[-1], "calibration": calibration})
    )


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
