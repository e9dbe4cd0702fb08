"""FLOPs of scoring: what each piece of a policy computes at one event, in one layer.

With H query heads, G KV heads, head dimension d, hidden size D, n entries of a head before the
event and w rows of a window. `products` are multiply-adds of matrix products, 2 FLOPs each, and
follow the formulas of the policies' files exactly; a test counts them while the real scorers run.
`pointwise` is the rest to leading order: 3 per softmax weight, 1 per number that is added, compared
or scaled, the kernel's width per pooled number, 2 per number of a norm. Comparisons that sort or
select count nothing.

Nothing is shared: attention weights that a scorer uses are computed anew, as they must be where a
fused kernel returns none, and once for each piece that uses them. Calibration happens once per
model and is left out. A piece that has no formula here, such as a user's own, is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar

from kvsim.core.policy import Policy, chain_of
from kvsim.policies import capkv, compactor, triattention
from kvsim.policies.kvzip import chunk_lengths
from kvsim.studies.cost.model import Model


@dataclass(frozen=True)
class Flops:
    """Of matrix products, and of everything else."""

    products: float = 0.0
    pointwise: float = 0.0

    @property
    def total(self) -> float:
        """Products and other operations together."""
        return self.products + self.pointwise

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.products + other.products, self.pointwise + other.pointwise)

    def __mul__(self, times: float) -> Flops:
        return Flops(self.products * times, self.pointwise * times)


@dataclass(frozen=True)
class Event:
    """One event of one layer, as sizes.

    n: entries of a KV head, before the event. seen: tokens so far. since: rows since the last event
    that acted, whose attention a score may add up. later: rows still to come, for the clairvoyant.
    w: rows of the window of a piece, or all that there are.
    """

    model: Model
    n: float
    seen: int
    since: int
    budget: int
    prompt: bool = False
    later: float = 0
    w: int = 0

    h: ClassVar[Any] = property(attrgetter("model.n_qheads"))
    g: ClassVar[Any] = property(attrgetter("model.n_heads"))
    d: ClassVar[Any] = property(attrgetter("model.dim"))

    def attention(self, rows: float, pointwise: float = 0, products: float = 0) -> Flops:
        """Softmax attention of rows, 2 H w n d and 3 H w n, and n times what else is computed."""
        each = self.h * rows
        return Flops(self.n * (2 * each * self.d + products), self.n * (3 * each + pointwise))

    def received(self) -> Flops:
        """Attention of the rows since the last event, each over what it saw, added up."""
        pairs = self.h * self.since * (self.n - (self.since - 1) / 2)
        return Flops(2 * pairs * self.d, 4 * pairs)


def _entries(numbers: int, entry: int = 0) -> Callable[[Any, Event], Flops]:
    """So many for each number of keys, G n d, and for each entry, G n."""
    return lambda _, e: Flops(0, e.g * e.n * (numbers * e.d + entry))


def _pooling(p: Any) -> int:
    """FLOPs of `smooth` for each number that it returns."""
    return 0 if p.pool is None else int(p.pool_kernel)


def _snapkv(p: Any, e: Event) -> Flops:
    """Attention of the window, its sum, pooled per query head, summed over the heads."""
    return e.attention(e.w, e.h * (e.w + _pooling(p) + 1))


def _local(p: Any, e: Event) -> Flops:
    """Attention, the group's largest, its mean over the window, pooling."""
    return e.attention(e.w, e.h * e.w + e.g * (e.w + _pooling(p)))


def _similarity(e: Event, keys: float) -> Flops:
    """Cosine of every two keys, 2 G n^2 d, threshold, sum, softmax; the search takes no more."""
    return Flops(2 * e.g * keys**2 * e.d, e.g * (2 * keys**2 + 3 * keys * e.d + 3 * keys))


def _gkv(p: Any, e: Event) -> Flops:
    """The local score, normalised (2) and fused (3), less the redundancy of all keys."""
    score = _local(p, e) + _entries(0, 5)(p, e)
    return score + _similarity(e, e.n) if p.scale == "signed" else score


def _cake(p: Any, e: Event) -> Flops:
    """Attention, mean over the window, and its variance (3) where it counts; pooling."""
    passes = 4 if e.prompt or p.decoding else 1
    heads = e.g if p.group == "max" else e.h
    return e.attention(e.w, e.h * e.w + heads * (passes * e.w + _pooling(p)))


def _dropkv(p: Any, e: Event) -> Flops:
    """Attention, outputs and their products with values; the rest for each weight."""
    weights, pooling = e.h * e.w, e.g * p.pool_kernel
    return e.attention(e.w, 8 * weights + 2 * e.g * e.d + pooling, 4 * weights * e.d)


def _capkv(p: Any, e: Event) -> Flops:
    """Mean query; per query head cosines 2 n d, A 2 n d^2 and leverage 2 n d^2; the rest."""
    rows = (e.seen if e.prompt else min(capkv.BUFFER, e.seen)) - p.sink
    products = 2 * e.h * e.n * e.d + 4 * e.h * e.n * e.d**2
    return Flops(products, rows * e.h * e.d + 3 * e.n * e.d * (e.g + e.h) + 5 * e.h * e.n)


def _compactor(p: Any, e: Event) -> Flops:
    """Of m new rows: 2 H d for each pair in a chunk; X^T X and leverage, 2 G m d^2 each."""
    m, out = e.since, Flops()
    if p.parts != "leverage":
        pairs = e.h * (m // p.chunk * p.chunk**2 + (m % p.chunk) ** 2)
        out += Flops(2 * pairs * e.d, 4 * pairs + (2 * e.d + compactor.KERNEL) * e.g * m)
    if p.parts != "attention":
        out += Flops(4 * e.g * m * e.d**2, 6 * e.g * m * e.d)
    return out


def _expected_attention(p: Any, e: Event) -> Flops:
    """Moments of m queries, expected logits, and norms of values.

    Per query head: mean and covariance, 2 m d + 2 m d^2; k.Sigma k, 2 n d^2 + 2 n d; mu.k,
    2 n d; softmax, 3 n. Per KV head: keys rotated back, 3 n d; norms, 2 n d.
    """
    h, g, d, n, m = e.h, e.g, e.d, e.n, e.seen - p.sink
    if not e.prompt and p.origin == "next":
        m = min(p.query_buffer, m)
    elif not e.prompt:
        m = min(e.since, p.query_buffer + 1) - p.sink
    times = p.n_future if p.rope == "mixture" else 1  # one per position of the future
    out = Flops(2 * n * h * d * times, (3 * h * n + 3 * g * n * d) * times + m * h * d)
    if p.covariance:
        out += Flops(2 * h * d**2 * (m + n * times), (m + 2 * n * times) * h * d)
    if p.value_norm == "v":
        out += Flops(0, 2 * g * n * d)
    if p.value_norm == "wo_v":  # W W^T, and v.(W W^T) v
        out += Flops(2 * h * d**2 * (e.model.hidden + n), 2 * n * h * d)
    return out


def _triattention(p: Any, e: Event) -> Flops:
    """A series and a norm per query head, standardised.

    The series takes 2 n d (for each distance with offsets="max"), the norm of d / 2 pairs n d,
    the z-scores 6 n.
    """
    series = len(triattention.OFFSETS) if p.offsets == "max" else 1
    pointwise = 2 * e.g * e.n * e.d + (6 + series) * e.h * e.n
    return Flops((2 * series + 1) * e.h * e.n * e.d, pointwise)


def _kvzip(_: Any, e: Event) -> Flops:
    """At the prompt: 2 H P (C + P) d and 4 H P (C + P) for each chunk, with P = C rows."""
    pairs = e.h * sum(2 * chunk**2 for chunk in chunk_lengths(e.n)) if e.prompt else 0
    return Flops(2 * pairs * e.d, 4 * pairs)


def _oracle(p: Any, e: Event) -> Flops | None:
    """Weights of all later rows; by="output" also distances to outputs, 3 per number.

    Unknown of the optimum, whose steps depend on the weights.
    """
    pairs = e.h * e.later * e.n
    distances = 3 * e.d + 3 if p.by == "output" else 0
    return None if p.by == "optimum" else Flops(2 * pairs * e.d, pairs * (2 + distances))


def _ams(p: Any, e: Event) -> Flops:
    """Attention of the window, summed by a product; pooling; mass, credit, mixture (10)."""
    w = max(1, min(e.w, e.budget, int(e.n) - 1))
    return e.attention(w, e.g * (p.pool_kernel + 10), 2 * e.h * w)


def _asl(p: Any, e: Event) -> Flops:
    """Pooled scores, and the variance (3) of ranks: at most L_obs k tokens, L_obs layers."""
    tokens = min(p.look_back * max(0, e.budget - p.window), e.n)
    return _snapkv(p, e) + Flops(0, 3 * p.look_back * tokens)


def _pyramidinfer(p: Any, e: Event) -> Flops:
    """Attention of the last 1 + R rows, mean over the heads, weighted sum over the rows."""
    rows = 1 + int(p.recent * e.seen)
    pairs = rows * (e.n - rows)
    return e.attention(rows) + Flops(2 * pairs, e.h * pairs)


def _raas(p: Any, e: Event) -> Flops:
    """Attention of the rows since the last event, and its mean over the group."""
    w = min(p.query_buffer, e.since, e.seen)
    return e.attention(w, e.h * w)


#: Pieces that compare alone, or compute a few numbers for each layer.
_FREE = "Even Everything Uniform AdaKV Composed DMS Duo Full Growing HeadKV LUKV LaCache Pooled"
#: By the names of kvsim's classes.
_FORMULAS: Mapping[str, Callable[[Any, Event], Flops | None]] = {
    **dict.fromkeys([*_FREE.split(), "Pyramid", "StreamingLLM"], _entries(0)),
    **dict.fromkeys(["SnapKV", "FastKV"], _snapkv),
    **dict.fromkeys(["ASL", "TwoPass"], _asl),
    # attention, its sum over the window, mean over heads, pooling
    **dict.fromkeys(
        ["RPC", "AmsRPC"],
        lambda p, e: e.attention(e.w, e.h * (e.w + 1) + e.g * p.pool_kernel),
    ),
    **dict.fromkeys(["KVzip", "KVCompose"], _kvzip),
    "AMS": _ams,
    "Cake": _cake,
    # entropy (2) and variance (3) of the attention that the score has computed
    "CakeBudgets": lambda _, e: Flops(0, 5 * e.h * e.w * e.n),
    "CapKV": _capkv,
    "ChunkKV": _entries(0, 2),  # sums over the heads and over the chunks
    "Compactor": _compactor,
    # W_o v of every query head, 2 H m d D, and its L1 norm, for m new entries
    "CriticalKV": lambda _, e: Flops(2 * e.h * e.d, 2 * e.h) * (min(e.n, e.since) * e.model.hidden),
    "CurDKV": _entries(4, 6),  # norms of keys and values (2 each), shares, what is made of them
    "DropKV": _dropkv,
    "ExpectedAttention": _expected_attention,
    # attention, scaled, summed over the window and over the heads
    "Finch": lambda _, e: e.attention(e.w, e.h * (2 * e.w + 1)),
    "GKV": _gkv,
    # products of the last row, summed over the heads, pooled
    "GemFilter": lambda p, e: Flops(2 * e.h * e.n * e.d, e.n * (e.h + p.pool_kernel)),
    "Global": _entries(0, 5),  # each score normalised (2) and fused (3)
    "H2O": lambda _, e: e.received(),
    "KeyDiff": _entries(8),  # unit keys (3), their mean (1), cosines with it (4)
    "Knorm": _entries(2),
    "LagKV": _entries(14),  # of keys and values: range (2), scaling (2), deviation (3)
    "Local": _local,
    # the group's largest, and the fusion over the window
    "MorphKV": lambda _, e: e.attention(e.w, (e.h + e.g) * e.w),
    "NormRatio": _entries(4, 1),  # norms of keys and values (2 each), and their ratio
    # of the prompt, then of the last row
    "ObservedAttention": lambda _, e: e.received() if e.prompt else e.attention(1),
    "Oracle": _oracle,
    # sums over the heads and over the pages; norms
    "Paged": lambda p, e: _entries(4 if p.reduction == "norms" else 0, 2)(p, e),
    "PyramidInfer": _pyramidinfer,
    "QFilter": lambda _, e: Flops(2 * e.g * e.n * e.d),  # a product of each key with the filter
    # the local score, and the redundancy of all keys, or of the candidates'
    "RKV": lambda p, e: _local(p, e) + _similarity(e, e.n - (e.w if p.variant == "ams" else 0)),
    "RaaS": _raas,
    "Random": _entries(0, 1),  # one division for each entry; hashes are of integers
    "TOVA": lambda _, e: e.attention(1, e.h),  # of the last row, and its mean over the heads
    "TriAttention": _triattention,
    "Union": _entries(0, 1),  # each score is read once
}


def pieces_of(policy: Policy) -> list[Any]:
    """Return the pieces that compute at an event; scorers from the outside in."""
    return [*chain_of(policy.scorer), policy.allocator, policy.layer_budgets]


def flops_of(pieces: Iterable[Any], event: Event) -> tuple[Flops, list[str]]:
    """FLOPs of pieces of a policy at an event, and the names of those that have no formula."""
    total, unknown = Flops(), []
    for piece in pieces:
        kind, window = type(piece), min(getattr(piece, "window", 0), event.seen)
        formula = _FORMULAS.get(kind.__name__) if kind.__module__.startswith("kvsim.") else None
        flops = formula and formula(piece, replace(event, w=window))
        if flops is None:
            unknown.append(kind.__name__)
        else:
            total += flops
    return total, unknown
