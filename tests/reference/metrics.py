"""The metrics once more, as naively as their definitions read: numpy, float64, loops."""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from kvsim.schema import NEVER
from kvsim.testing.loops.event import Bools, Floats, logits_of, softmax
from reference.event import rotate


def attention(
    q: npt.ArrayLike, k: npt.ArrayLike, scale: float, last: npt.ArrayLike = NEVER
) -> Floats:
    """[qhead, row, pos]: attention of a layer, 0 for what is later than the row.

    last: the last row that sees an entry [head, pos], as in `evicted_at`; every row by default.
    """
    queries, keys = (np.asarray(x, dtype=np.float64) for x in (q, k))
    z = logits_of(queries, keys, scale)
    out, pos = np.zeros(z.shape), np.arange(z.shape[-1])
    gone = np.broadcast_to(last, (np.shape(last)[0] if np.ndim(last) else 1, len(pos)))
    gone = gone.repeat(len(z) // len(gone), 0)
    for head, row in np.ndindex(z.shape[:2]):
        seen = (pos <= row) & (row <= gone[head])
        out[head, row, seen] = softmax(z[head, row, seen])
    return out


@dataclass(frozen=True)
class Outputs:
    """Attention of every row over its visible entries, and over everything before it.

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
        """[layer, qhead, row]: share of the full attention row that lies on visible entries."""
        return np.minimum(np.exp(self.lse_seen - self.lse_full), 1.0)

    @property
    def missing_mass(self) -> Floats:
        """[layer, qhead, row]: share of the full attention row that lies on evicted entries."""
        return 1.0 - self.retained_mass

    @property
    def distance(self) -> Floats:
        """[layer, qhead, row]: |o_evicted - o_seen| / |o_full|, NaN where nothing is evicted."""
        return _ratio(_norm(self.out_evicted - self.out_seen), _norm(self.out_full))


def projected(out: Floats, o_proj: npt.ArrayLike) -> Floats:
    """[layer, row, hidden]: outputs [layer, qhead, row, dim] through their projections, summed."""
    weights = np.asarray(o_proj, dtype=np.float64)
    layers, qheads, n, _ = out.shape
    stream = np.zeros((layers, n, weights.shape[-1]))
    for layer in range(layers):
        for head in range(qheads):
            for row in range(n):
                stream[layer, row] += out[layer, head, row] @ weights[layer, head]
    return stream


def added(found: Outputs, o_proj: npt.ArrayLike) -> Floats:
    """[layer, row]: length of what eviction adds to the residual stream behind each layer."""
    return _norm(projected(found.out_seen, o_proj) - projected(found.out_full, o_proj))


def outputs(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    evicted_at: npt.ArrayLike,
    *,
    scale: float | None = None,
    slot_theta: float | None = None,
) -> Outputs:
    """Attention of every row over its visible entries (`evicted_at` per KV or per query head).

    slot_theta: base of a rotary embedding; for out_seen, visible entries are then rotated from
    their position to their slot in the cache, and the query to the last slot. Everything else keeps
    its position.
    """
    queries, keys, values = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    n_layers, qheads, n, dim = queries.shape
    heads = keys.shape[1]
    last = np.repeat(np.asarray(evicted_at), qheads // np.shape(evicted_at)[1], axis=1)
    shape = (n_layers, qheads, n)
    result = Outputs(
        out_full=np.zeros((*shape, values.shape[3])),
        out_seen=np.zeros((*shape, values.shape[3])),
        out_evicted=np.zeros((*shape, values.shape[3])),
        lse_full=np.zeros(shape),
        lse_seen=np.zeros(shape),
    )
    factor = dim**-0.5 if scale is None else scale
    for layer in range(n_layers):
        z = logits_of(queries[layer], keys[layer], factor)
        for i in range(qheads):
            value = values[layer, i // (qheads // heads)]
            for row in range(n):
                past = np.arange(n) <= row
                seen = past & (row <= last[layer, i])
                at = layer, i, row
                result.out_full[at], result.lse_full[at] = _attend(z[i, row], value, past)
                result.out_seen[at], result.lse_seen[at] = _attend(z[i, row], value, seen)
                if slot_theta is not None:
                    shift = np.cumsum(seen) - 1 - np.arange(n)  # slot - position
                    turns = slot_theta ** (-np.arange(dim // 2) / (dim // 2))
                    key = rotate(keys[layer, i // (qheads // heads)], shift, turns)
                    query = rotate(queries[layer, i, row], shift[row], turns)
                    result.out_seen[at], _ = _attend(factor * (key @ query), value, seen)
                result.out_evicted[at], _ = _attend(z[i, row], value, past & ~seen)
    return result


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
class Overlap:
    """Retained-set IoU between two events, and the mean of random choices of the same sizes."""

    iou: float
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
    a, b, pool = len(kept), len(then), len(kept) + second - first
    random_iou = 0.0
    for both in range(max(0, a + b - pool), min(a, b) + 1):
        likely = Fraction(math.comb(a, both) * math.comb(pool - a, b - both), math.comb(pool, b))
        random_iou += float(likely) * both / (a + b - both)
    return Overlap(
        iou=len(kept & then) / len(kept | then),
        random_iou=random_iou,
    )


@dataclass(frozen=True)
class WindowOverlap:
    """How much of the last window's top keys the three windows before it had on top, per layer."""

    before: tuple[float, float, float]  # one window each, the oldest first
    union: float
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
    weights = attention(queries, keys, dim**-0.5 if scale is None else scale)
    domain = n - 4 * window
    if domain < 1:
        raise ValueError(
            f"four windows of {window} rows leave no key of {n}; give a smaller window"
        )
    top = math.ceil(Fraction(str(share)) * domain)  # 0.1 * 30 is a little above 3 in floats
    shares = []
    for h in range(heads):
        scores = []
        for block in range(4):
            score = np.zeros(domain)
            for row in range(domain + block * window, domain + (block + 1) * window):
                own = weights[h * group : (h + 1) * group, row, :domain]
                score += own.max(axis=0) / window
            scores.append(score)
        sets = [_top(score, top) for score in scores]
        union = sets[0] | sets[1] | sets[2]
        merged = np.max([score / score.max() for score in scores[:3]], axis=0)
        shares.append(
            [
                *(len(sets[3] & sets[i]) / top for i in range(3)),
                len(sets[3] & union) / top,
                len(sets[3] & _top(merged, top)) / top,
            ]
        )
    a, b, c, union_share, equal = np.mean(shares, axis=0).tolist()
    return WindowOverlap((a, b, c), union_share, equal, top / domain, 1 - (1 - top / domain) ** 3)


def _top(score: Floats, count: int) -> set[int]:
    """The `count` largest, the lower position first among equals."""
    return set(sorted(range(len(score)), key=lambda p: (-score[p], p))[:count])
