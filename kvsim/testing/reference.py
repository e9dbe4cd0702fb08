"""The replay and its metrics once more, as naively as the definitions read: numpy, float64, loops.

Nothing here is shared with the engine or the policies, so that agreement means something. One loop
over the rows appends the row's own entry, lets the row attend, then fires the event if one is due:

    row r sees p  iff  p <= r <= evicted_at[p]

It is meant for traces of a few dozen tokens. Shapes: q [layer, qhead, pos, dim], k and v
[layer, head, pos, dim]; query head i belongs to KV head i // G, G query heads to a KV head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsim.errors import BudgetError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]

#: `evicted_at` of an entry that never leaves.
NEVER = 2**31 - 1


# ------------------------------------------------------------------------------------ the outcome


@dataclass(frozen=True)
class Cut:
    """One choice of one head: what was at stake between the last entry kept and the first dropped.

    margin: their score difference relative to `size`, the larger of the two; 0 for an exact tie,
    infinite where scores decided nothing (all or none of the unprotected entries stay).
    """

    layer: int
    head: int
    row: int
    margin: float
    size: float


@dataclass(frozen=True)
class Outcome:
    """What the naive replay found: `evicted_at` int32 [layer, head, pos], and each cut."""

    evicted_at: Ints
    cuts: tuple[Cut, ...]

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


# ------------------------------------------------------------------------ the policies, naively


@dataclass
class Event:
    """What a rule may look at when an event fires on a layer."""

    layer: int
    row: int
    prefill: bool
    logits: Floats  # [qhead, row, pos], already scaled
    live: list[list[int]]  # per KV head, the live positions in ascending order
    received: list[dict[int, float]]  # per KV head: what each live entry got from all rows so far
    budgets: list[int]  # per KV head
    params: Mapping[str, Any]

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return len(self.logits) // len(self.live)

    def attention(self, qhead: int, row: int) -> dict[int, float]:
        """Softmax of one query over the live entries at positions up to its own."""
        seen = [p for p in self.live[qhead // self.group] if p <= row]
        return dict(zip(seen, _softmax(self.logits[qhead, row, seen]).tolist(), strict=True))


#: Scores and protected positions of one event: per KV head {position: score} and a set.
Scored = tuple[list[dict[int, float]], list[set[int]]]


def _softmax(z: Floats) -> Floats:
    weight = np.exp(z - z.max())
    return np.asarray(weight / weight.sum(), dtype=np.float64)


def _random(event: Event) -> Scored:
    seed = int(event.params["seed"])
    return [
        {p: hash_score(seed, event.layer, event.row, h, p) for p in live}
        for h, live in enumerate(event.live)
    ], [set() for _ in event.live]


def hash_score(seed: int, layer: int, row: int, head: int, pos: int) -> float:
    """The random policy's score in [0, 1): 53 bits of a chain of splitmix64."""
    h = _splitmix64(seed)
    for x in (layer, row, head, pos):
        h = _splitmix64(h ^ x)
    return float((h >> 11) / 2**53)


def _splitmix64(z: int) -> int:
    wrap = 2**64 - 1
    z = (z + 0x9E3779B97F4A7C15) & wrap
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & wrap
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & wrap
    return z ^ (z >> 31)


def _streaming_llm(event: Event) -> Scored:
    sink = int(event.params["sink"])
    scores = [{p: float(p) for p in live} for live in event.live]
    return scores, [{p for p in live if p < sink} for live in event.live]


def _h2o(event: Event) -> Scored:
    protected = []
    for live, budget in zip(event.live, event.budgets, strict=True):
        given = event.params["recent"]
        recent = budget // 2 if given is None else int(given)
        protected.append(set(live[len(live) - recent :]) if recent else set())
    return [dict(received) for received in event.received], protected


def _h2o_kvpress(event: Event) -> Scored:
    scores: list[dict[int, float]] = []
    for h, live in enumerate(event.live):
        n = len(live)
        score = dict.fromkeys(live, 0.0)
        for i in range(h * event.group, (h + 1) * event.group):
            for row in range(event.row + 1) if event.prefill else [event.row]:
                for p, a in event.attention(i, row).items():
                    score[p] += a / event.group
        scores.append({p: score[p] / (n - slot) for slot, p in enumerate(live)})
    return scores, [set() for _ in event.live]


def _tova(event: Event) -> Scored:
    # one shared ranking: every head holds the same entries, as TOVA alone always has it
    if any(live != event.live[0] for live in event.live):
        raise ValueError("TOVA's average over all heads needs the same entries in every head")
    qheads = len(event.logits)
    shared = dict.fromkeys(event.live[0], 0.0)
    for i in range(qheads):
        for p, a in event.attention(i, event.row).items():
            shared[p] += a / qheads
    last = {event.row} if event.params["protect_last"] else set()
    return [shared for _ in event.live], [set(last) for _ in event.live]


def _tova_grouped(event: Event) -> Scored:
    """TOVA where heads hold different entries: the mean over each KV head's own group."""
    scores = []
    for h, live in enumerate(event.live):
        score = dict.fromkeys(live, 0.0)
        for i in range(h * event.group, (h + 1) * event.group):
            for p, a in event.attention(i, event.row).items():
                score[p] += a / event.group
        scores.append(score)
    return scores, [set() for _ in event.live]


def _snapkv(event: Event) -> Scored:
    window = min(int(event.params["window"]), event.row + 1)
    rows = range(event.row - window + 1, event.row + 1)
    scores: list[dict[int, float]] = []
    for h, live in enumerate(event.live):
        candidates = [p for p in live if p < rows[0]]
        score = dict.fromkeys(candidates, 0.0)
        for i in range(h * event.group, (h + 1) * event.group):
            mean = dict.fromkeys(candidates, 0.0)
            for row in rows:
                attention = event.attention(i, row)
                for p in candidates:
                    mean[p] += attention[p] / window
            pooled = _pool([mean[p] for p in candidates], event.params)
            for p, s in zip(candidates, pooled, strict=True):
                score[p] += s / event.group
        scores.append(score)
    return scores, [{p for p in live if p >= rows[0]} for live in event.live]


def _pool(values: list[float], params: Mapping[str, Any]) -> list[float]:
    """Stride 1, same length: "max" pads with -inf, "avg" pads with 0 and divides by the kernel."""
    kind, kernel = params["pool"], int(params["pool_kernel"])
    if kind is None:
        return values
    pooled = []
    for slot in range(len(values)):
        near = values[max(0, slot - kernel // 2) : slot + kernel // 2 + 1]
        pooled.append(max(near) if kind == "max" else sum(near) / kernel)
    return pooled


@dataclass(frozen=True)
class Rule:
    """A policy as the reference knows it."""

    score: Callable[[Event], Scored] | None  # None: never evicts
    params: Mapping[str, Any] = field(default_factory=dict)
    every_row: bool = True  # its own schedule: after every row, or after the prefill alone
    accumulates: bool = False
    per_query_head: bool = False


_SNAP = {"window": 32, "pool": "max", "pool_kernel": 7}

#: Every policy and preset that the reference replays.
RULES: dict[str, Rule] = {
    "full": Rule(None),
    "random": Rule(_random, {"seed": 0}),
    "streaming_llm": Rule(_streaming_llm, {"sink": 4}),
    "streaming_llm@original": Rule(_streaming_llm, {"sink": 4}),
    "h2o": Rule(_h2o, {"recent": None}, accumulates=True),
    "h2o@kvpress": Rule(_h2o_kvpress, every_row=False),
    "tova": Rule(_tova, {"protect_last": False}),
    "tova@kvpress": Rule(_tova, {"protect_last": True}, every_row=False),
    "snapkv": Rule(_snapkv, _SNAP, every_row=False),
    "snapkv@kvpress": Rule(
        _snapkv, {"window": 64, "pool": "avg", "pool_kernel": 5}, every_row=False
    ),
    "snapkv@original": Rule(_snapkv, _SNAP, every_row=False, per_query_head=True),
}


def smallest_budget(name: str, params: Mapping[str, Any], row: int) -> int:
    """The fewest entries that a policy can keep at an event after `row`: its protected size."""
    full = {**RULES[name].params, **params}
    if "sink" in full:
        return max(1, min(int(full["sink"]), row + 1))
    if full.get("recent") is not None:
        return max(1, min(int(full["recent"]), row + 1))
    if "window" in full:
        return min(int(full["window"]), row + 1)
    return 1


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
) -> Outcome:
    """Replay `policy` on one trace and return what each event evicted.

    q [layer, qhead, pos, dim], k and v [layer, head, pos, dim]. budget: entries kept per KV head,
    or one number for each head (TOVA then ranks each head by its own group). layers: which layers
    evict, all of them by default. v is not looked at: none of these policies scores values.
    """
    rule = RULES[policy]
    settings = {**rule.params, **(params or {})}
    queries, keys = np.asarray(q, dtype=np.float64), np.asarray(k, dtype=np.float64)
    if np.shape(v) != keys.shape:
        raise ValueError(f"v has shape {np.shape(v)}, k has {keys.shape}; expected the same")
    if rule.per_query_head:
        keys = np.repeat(keys, queries.shape[1] // keys.shape[1], axis=1)
    n_layers, heads, n, dim = keys.shape
    budgets = [budget] * heads if isinstance(budget, int) else [int(b) for b in budget]
    if min(budgets) < 1:
        raise BudgetError(f"budget is {min(budgets)}; expected at least 1")
    score = rule.score
    if score is _tova and not isinstance(budget, int):
        score = _tova_grouped
    if interval is None and rule.every_row:
        interval = 1
    due = set(event_rows(n, prompt_len, interval=interval, prefill=prefill))
    evicted_at = np.full((n_layers, heads, n), NEVER, dtype=np.int32)
    cuts: list[Cut] = []
    for layer in range(n_layers) if layers is None else layers:
        logits = _logits(queries[layer], keys[layer], dim**-0.5 if scale is None else scale)
        event = Event(
            layer=layer,
            row=0,
            prefill=False,
            logits=logits,
            live=[[] for _ in range(heads)],
            received=[{} for _ in range(heads)],
            budgets=budgets,
            params=settings,
        )
        for row in range(n):
            event.row, event.prefill = row, row == prompt_len - 1
            _attend_row(event, accumulate=rule.accumulates)
            if score is None or row not in due or sum(map(len, event.live)) <= sum(budgets):
                continue
            scores, protected = score(event)
            for h in range(heads):
                kept, margin, size = _choose(policy, event, h, scores[h], protected[h])
                cuts.append(Cut(layer, h, row, margin, size))
                for p in set(event.live[h]) - kept:
                    evicted_at[layer, h, p] = row
                    del event.received[h][p]
                event.live[h] = sorted(kept)
    return Outcome(evicted_at, tuple(cuts))


def _attend_row(event: Event, *, accumulate: bool) -> None:
    """The row's own entry joins the cache, and the row attends to what is live."""
    for h, live in enumerate(event.live):
        live.append(event.row)
        event.received[h][event.row] = 0.0
        if accumulate:
            for i in range(h * event.group, (h + 1) * event.group):
                for p, a in event.attention(i, event.row).items():
                    event.received[h][p] += a


def event_rows(n: int, prompt_len: int, *, interval: int | None, prefill: bool | None) -> list[int]:
    """The rows after which events fire: prompt_len - 1 + m * interval, m = 0 after the prefill."""
    rows = [prompt_len - 1] if prefill in (None, True) else []
    if interval is not None:
        rows += range(prompt_len - 1 + interval, n, interval)
    return rows


def _logits(q: Floats, k: Floats, scale: float) -> Floats:
    """[qhead, row, pos] of one layer: scale times the product of every query with every key."""
    group = len(q) // len(k)
    return np.stack([scale * (q[i] @ k[i // group].T) for i in range(len(q))])


def _choose(
    policy: str, event: Event, head: int, scores: dict[int, float], protected: set[int]
) -> tuple[set[int], float, float]:
    """Protected first, then the higher score, then the lower position: exactly the budget.

    Returns the kept set, and the margin and size of the cut.
    """
    budget, live = event.budgets[head], event.live[head]
    if len(protected) > budget:
        raise BudgetError(
            f"{policy} protects {len(protected)} entries, budget is {budget}; "
            f"give at least {len(protected)}"
        )
    ranking = sorted((p for p in live if p not in protected), key=lambda p: (-scores[p], p))
    free = min(budget - len(protected), len(ranking))
    margin = size = math.inf
    if 0 < free < len(ranking):
        last, first = scores[ranking[free - 1]], scores[ranking[free]]
        size = max(abs(last), abs(first))
        margin = (last - first) / size if size > 0 else 0.0
    return protected | set(ranking[:free]), margin, size


# ------------------------------------------------------------------------------------ the metrics


def seen_by(evicted_at: npt.ArrayLike, row: int) -> Bools:
    """bool [layer, head, pos]: p <= row <= evicted_at[p]."""
    last = np.asarray(evicted_at)
    return np.asarray((np.arange(last.shape[-1]) <= row) & (row <= last), dtype=np.bool_)


@dataclass(frozen=True)
class Outputs:
    """Attention of every row over what it sees, beside attention over everything before it.

    out_full, out_seen, out_evicted [layer, qhead, row, dim]: softmax-weighted means of the values
    over all entries, those seen, and those evicted (NaN where there are none);
    lse_full, lse_seen [layer, qhead, row]: log-sum-exp of the logits.
    """

    out_full: Floats
    out_seen: Floats
    out_evicted: Floats
    lse_full: Floats
    lse_seen: Floats

    @property
    def relative_error(self) -> Floats:
        """[layer, qhead, row]: |o_full - o_seen| / |o_full|, 0 where both vanish."""
        return _ratio(_norm(self.out_full - self.out_seen), _norm(self.out_full))

    @property
    def retained_mass(self) -> Floats:
        """[layer, qhead, row]: share of the full attention row that lies on what the row sees."""
        return np.minimum(np.exp(self.lse_seen - self.lse_full), 1.0)

    @property
    def missing_mass(self) -> Floats:
        """[layer, qhead, row]: share of the full attention row that lies on evicted entries."""
        return 1.0 - self.retained_mass

    @property
    def distance(self) -> Floats:
        """[layer, qhead, row]: |o_evicted - o_seen| / |o_full|, NaN where nothing is evicted."""
        return _ratio(_norm(self.out_evicted - self.out_seen), _norm(self.out_full))


def outputs(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    evicted_at: npt.ArrayLike,
    *,
    scale: float | None = None,
    slot_theta: float | None = None,
) -> Outputs:
    """Attention of every row over what it sees (`evicted_at` per KV head or per query head).

    slot_theta: base of a rotary embedding; for out_seen, what a row sees is then rotated from its
    position to its slot in the cache, and the query to the last slot. All else keeps positions.
    """
    queries, keys, values = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    n_layers, qheads, n, dim = queries.shape
    heads = keys.shape[1]
    last = np.repeat(np.asarray(evicted_at), qheads // np.shape(evicted_at)[1], axis=1)
    shape = (n_layers, qheads, n)
    found = Outputs(
        out_full=np.zeros((*shape, dim)),
        out_seen=np.zeros((*shape, dim)),
        out_evicted=np.zeros((*shape, dim)),
        lse_full=np.zeros(shape),
        lse_seen=np.zeros(shape),
    )
    factor = dim**-0.5 if scale is None else scale
    for layer in range(n_layers):
        z = _logits(queries[layer], keys[layer], factor)
        for i in range(qheads):
            value = values[layer, i // (qheads // heads)]
            for row in range(n):
                past = np.arange(n) <= row
                seen = past & (row <= last[layer, i])
                at = layer, i, row
                found.out_full[at], found.lse_full[at] = _attend(z[i, row], value, past)
                found.out_seen[at], found.lse_seen[at] = _attend(z[i, row], value, seen)
                if slot_theta is not None:
                    shift = np.cumsum(seen) - 1 - np.arange(n)  # slot - position
                    key = _turn(keys[layer, i // (qheads // heads)], shift, slot_theta)
                    query = _turn(queries[layer, i, row], shift[row], slot_theta)
                    found.out_seen[at], _ = _attend(factor * (key @ query), value, seen)
                found.out_evicted[at], _ = _attend(z[i, row], value, past & ~seen)
    return found


def _turn(x: Floats, by: Any, theta: float) -> Floats:
    """x [..., dim] turned forward by `by` [...] positions; dimension i goes with i + dim / 2."""
    half = x.shape[-1] // 2
    angle = np.multiply.outer(by, theta ** (-np.arange(half) / half))
    a, b = x[..., :half], x[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _attend(z: Floats, value: Floats, mask: Bools) -> tuple[Floats, float]:
    if not mask.any():
        return np.full(value.shape[1], np.nan), -math.inf
    top = z[mask].max()
    weight = np.exp(z[mask] - top)
    return weight @ value[mask] / weight.sum(), float(top + np.log(weight.sum()))


def _norm(x: Floats) -> Floats:
    return np.asarray(np.sqrt((x * x).sum(axis=-1)), dtype=np.float64)


def _ratio(top: Floats, bottom: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where((top == 0) & (bottom == 0), 0.0, top / bottom), dtype=np.float64)


def acting_rows(evicted_at: npt.ArrayLike, layer: int | None = None) -> list[int]:
    """The rows after which at least one entry left (of one layer, or of any)."""
    last = np.asarray(evicted_at)
    last = last if layer is None else last[layer]
    return sorted({int(row) for row in last.ravel()} - {NEVER})


@dataclass(frozen=True)
class Wipeout:
    """Region wipe-out of one head at one event: regions, those lost so far, those lost just now."""

    regions: int
    wiped: int
    alive_before: int
    wiped_now: int

    @property
    def cumulative(self) -> float:
        """Share of the regions that are wiped out, NaN without a region."""
        return self.wiped / self.regions if self.regions else math.nan

    @property
    def hazard(self) -> float:
        """Share of the regions alive before the event that it wiped out, NaN without one."""
        return self.wiped_now / self.alive_before if self.alive_before else math.nan


def wipeout(
    evicted_at: npt.ArrayLike,
    layer: int,
    head: int,
    row: int,
    *,
    length: int = 32,
    threshold: float = 0.0,
    sink: int = 4,
    recent: int = 32,
) -> Wipeout:
    """Regions [k*length, (k+1)*length) lying whole in [sink, N - recent) after the event at `row`.

    N = row + 1 positions exist. A region survives while more than `threshold` of it is retained.
    """
    last = np.asarray(evicted_at)[layer, head]
    regions = wiped = alive = now = 0
    k = 0
    while (k + 1) * length <= row + 1 - recent:
        if k * length >= sink:
            region = last[k * length : (k + 1) * length]
            before = sum(1 for e in region if e >= row) / length
            after = sum(1 for e in region if e > row) / length
            regions += 1
            wiped += after <= threshold
            alive += before > threshold
            now += before > threshold >= after
        k += 1
    return Wipeout(regions, wiped, alive, now)


@dataclass(frozen=True)
class Overlap:
    """Retained-set IoU between two events, and that of a random choice of the same sizes."""

    iou: float
    survival: float
    random_iou: float


def retained_iou(
    evicted_at: npt.ArrayLike, layer: int, head: int, first: int, second: int
) -> Overlap:
    """|K and K'| / |K or K'| of the sets kept after rows `first` and `second`, by position.

    The null draws the second set at random from the first and the entries that came since.
    """
    last = np.asarray(evicted_at)[layer, head]
    kept = {p for p in range(first + 1) if last[p] > first}
    then = {p for p in range(second + 1) if last[p] > second}
    pool = len(kept) + second - first
    expected = len(then) * len(kept) / pool
    return Overlap(
        iou=len(kept & then) / len(kept | then),
        survival=len(kept & then) / len(kept),
        random_iou=expected / (len(kept) + len(then) - expected),
    )


@dataclass(frozen=True)
class WindowOverlap:
    """How much of the last window's top keys the three windows before it had on top, per layer."""

    before: tuple[float, float, float]  # one window each, the oldest first
    union: float
    union_size: float
    equal_budget: float
    chance: float
    chance_union: float


def window_overlap(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    layer: int,
    *,
    window: int,
    share: float,
    scale: float | None = None,
) -> WindowOverlap:
    """Four blocks of `window` rows at the end; keys before the first of them; mean over KV heads.

    A window's score of a key: full attention of each row, max over the group, mean over the rows.
    Top = ceil(share * keys). The equal-budget version ranks by the largest of the three earlier
    windows' scores, each divided by its own maximum.
    """
    queries, keys = (np.asarray(x, dtype=np.float64)[layer] for x in (q, k))
    heads, n, dim = keys.shape
    group = len(queries) // heads
    z = _logits(queries, keys, dim**-0.5 if scale is None else scale)
    domain = n - 4 * window
    if domain < 1:
        raise ValueError(
            f"four windows of {window} rows leave no key of {n}; give a smaller window"
        )
    top = math.ceil(Fraction(str(share)) * domain)  # 0.1 * 30 is a little above 3 in floats
    found = []
    for h in range(heads):
        scores = []
        for block in range(4):
            score = np.zeros(domain)
            for row in range(domain + block * window, domain + (block + 1) * window):
                rows = [z[h * group + g, row, : row + 1] for g in range(group)]
                score += np.max([_softmax(x)[:domain] for x in rows], axis=0) / window
            scores.append(score)
        sets = [_top(score, top) for score in scores]
        union = sets[0] | sets[1] | sets[2]
        merged = np.max([score / score.max() for score in scores[:3]], axis=0)
        found.append(
            [
                *(len(sets[3] & sets[i]) / top for i in range(3)),
                len(sets[3] & union) / top,
                len(union) / domain,
                len(sets[3] & _top(merged, top)) / top,
            ]
        )
    a, b, c, union_share, union_size, equal = np.mean(found, axis=0).tolist()
    return WindowOverlap(
        (a, b, c), union_share, union_size, equal, top / domain, 1 - (1 - top / domain) ** 3
    )


def _top(score: Floats, count: int) -> set[int]:
    """The `count` largest, the lower position first among equals."""
    return set(sorted(range(len(score)), key=lambda p: (-score[p], p))[:count])
