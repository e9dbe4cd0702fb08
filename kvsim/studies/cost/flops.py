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
from typing import Any

from kvsim.core.policy import Even, Everything, Policy, Uniform
from kvsim.errors import PolicyError
from kvsim.policies import capkv, compactor, triattention
from kvsim.policies.adakv import AdaKV
from kvsim.policies.ams import AMS
from kvsim.policies.asl import ASL, TwoPass
from kvsim.policies.cake import Cake, CakeBudgets
from kvsim.policies.capkv import CapKV
from kvsim.policies.chunkkv import ChunkKV
from kvsim.policies.compactor import Compactor
from kvsim.policies.criticalkv import CriticalKV
from kvsim.policies.curdkv import CurDKV
from kvsim.policies.dms import DMS
from kvsim.policies.dropkv import DropKV
from kvsim.policies.duo import Duo
from kvsim.policies.expected_attention import ExpectedAttention
from kvsim.policies.fastkv import FastKV
from kvsim.policies.finch import Finch
from kvsim.policies.full import Full
from kvsim.policies.gemfilter import GemFilter
from kvsim.policies.gkv import GKV, Global, Local
from kvsim.policies.h2o import H2O, ObservedAttention
from kvsim.policies.headkv import HeadKV
from kvsim.policies.keydiff import KeyDiff
from kvsim.policies.knorm import Knorm
from kvsim.policies.kvcompose import Composed, KVCompose
from kvsim.policies.kvzip import KVzip, Pooled, chunk_lengths
from kvsim.policies.lacache import LaCache
from kvsim.policies.lagkv import LagKV
from kvsim.policies.lukv import LUKV
from kvsim.policies.morphkv import MorphKV
from kvsim.policies.oracle import Oracle
from kvsim.policies.paged import NormRatio, Paged
from kvsim.policies.pyramidinfer import PyramidInfer
from kvsim.policies.pyramidkv import Pyramid
from kvsim.policies.qfilter import QFilter
from kvsim.policies.raas import RaaS
from kvsim.policies.random_sets import Random
from kvsim.policies.rkv import RKV
from kvsim.policies.rpc import RPC, AmsRPC, Growing
from kvsim.policies.snapkv import SnapKV
from kvsim.policies.streaming_llm import StreamingLLM
from kvsim.policies.tova import TOVA
from kvsim.policies.triattention import TriAttention
from kvsim.policies.union import Union
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

    entries: of a KV head, before the event. seen: tokens so far. since: rows since the last event
    that acted, whose attention a score may add up. later: rows still to come, for the clairvoyant.
    """

    model: Model
    entries: float
    seen: int
    since: int
    budget: int
    prompt: bool = False
    later: float = 0

    @property
    def sizes(self) -> tuple[int, int, int, float]:
        """H, G, d, n."""
        return self.model.n_qheads, self.model.n_heads, self.model.dim, self.entries

    def window(self, rows: int) -> int:
        """So many recent rows, if there are."""
        return min(rows, self.seen)

    def attention(self, rows: float) -> Flops:
        """Softmax attention of so many rows over all entries: 2 H w n d, and 3 H w n."""
        h, _, d, n = self.sizes
        return Flops(2 * h * rows * n * d, 3 * h * rows * n)

    def received(self) -> Flops:
        """Attention of the rows since the last event, each over what it saw, added up."""
        h, _, d, n = self.sizes
        pairs = self.since * (n - (self.since - 1) / 2)
        return Flops(2 * h * pairs * d, 4 * h * pairs)


def _nothing(piece: Any, event: Event) -> Flops:
    """A rule that computes nothing, compares alone, or computes a few numbers for each layer."""
    return Flops()


def _pooling(piece: Any) -> int:
    """FLOPs of `smooth` for each number that it returns."""
    return 0 if piece.pool is None else int(piece.pool_kernel)


def _similarity(event: Event, keys: float) -> Flops:
    """Cosine of every two keys, 2 G n^2 d, threshold, sum, softmax; the search takes no more."""
    _, g, d, _ = event.sizes
    return Flops(2 * g * keys**2 * d, g * (2 * keys**2 + 3 * keys * d + 3 * keys))


def _snapkv(piece: Any, event: Event) -> Flops:
    """Attention of the window, its sum, pooled per query head, summed over the heads."""
    h, _, _, n = event.sizes
    w = event.window(piece.window)
    return event.attention(w) + Flops(0, h * n * (w + _pooling(piece) + 1))


def _local(piece: Any, event: Event) -> Flops:
    """Attention, the group's largest, its mean over the window, pooling."""
    h, g, _, n = event.sizes
    w = event.window(piece.window)
    return event.attention(w) + Flops(0, h * w * n + g * n * (w + _pooling(piece)))


def _gkv(piece: GKV, event: Event) -> Flops:
    """The local score, normalised (2) and fused (3), less the redundancy of all keys."""
    score = _local(piece, event) + _global(piece, event)
    return score + _similarity(event, event.entries) if piece.signed else score


def _global(piece: Any, event: Event) -> Flops:
    """Each score normalised (2) and fused (3)."""
    return Flops(0, 5 * event.model.n_heads * event.entries)


def _rkv(piece: RKV, event: Event) -> Flops:
    """The local score, and the redundancy of all keys, or of the candidates'."""
    n = event.entries
    among = n - event.window(piece.window) if piece.variant == "ams" else n
    return _local(piece, event) + _similarity(event, among)


def _morphkv(piece: MorphKV, event: Event) -> Flops:
    """Attention, the group's largest, and the fusion over the window."""
    h, g, _, n = event.sizes
    w = event.window(piece.window)
    return event.attention(w) + Flops(0, (h + g) * w * n)


def _finch(piece: Finch, event: Event) -> Flops:
    """Attention of the window, scaled, summed over it and over the heads."""
    h, _, _, n = event.sizes
    w = event.window(piece.window)
    return event.attention(w) + Flops(0, h * n * (2 * w + 1))


def _raas(piece: RaaS, event: Event) -> Flops:
    """Attention of the rows since the last event, and its mean over the group."""
    h, _, _, n = event.sizes
    w = event.window(min(piece.query_buffer, event.since))
    return event.attention(w) + Flops(0, h * w * n)


def _rpc(piece: Any, event: Event) -> Flops:
    """Attention, its sum over the window, mean over heads, pooling."""
    h, g, _, n = event.sizes
    w = event.window(piece.window)
    return event.attention(w) + Flops(0, h * w * n + h * n + g * n * piece.pool_kernel)


def _cake(piece: Cake, event: Event) -> Flops:
    """Attention, mean over the window, and its variance (3) where it counts; pooling."""
    h, g, _, n = event.sizes
    w = event.window(piece.window)
    heads = g if piece.group == "max" else h
    spread = 3 if event.prompt or piece.decoding else 0
    return event.attention(w) + Flops(
        0, h * w * n + heads * n * ((1 + spread) * w + _pooling(piece))
    )


def _cake_budgets(piece: CakeBudgets, event: Event) -> Flops:
    """Entropy (2) and variance (3) of the attention that the score has computed."""
    h, _, _, n = event.sizes
    return Flops(0, 5 * h * event.window(piece.window) * n)


def _dropkv(piece: DropKV, event: Event) -> Flops:
    """Attention, outputs and their products with values; the rest for each weight."""
    h, g, d, n = event.sizes
    w = event.window(piece.window)
    weights, pooling = h * w * n, g * n * piece.pool_kernel
    return event.attention(w) + Flops(4 * weights * d, 8 * weights + 2 * g * n * d + pooling)


def _capkv(piece: CapKV, event: Event) -> Flops:
    """Mean query; per query head cosines 2 n d, A 2 n d^2 and leverage 2 n d^2; the rest."""
    h, g, d, n = event.sizes
    rows = (event.seen if event.prompt else min(capkv.BUFFER, event.seen)) - piece.sink
    products = 2 * h * n * d + 4 * h * n * d**2
    return Flops(products, rows * h * d + 3 * g * n * d + 3 * h * n * d + 5 * h * n)


def _compactor(piece: Compactor, event: Event) -> Flops:
    """Of m new rows: 2 H d for each pair in a chunk; X^T X and leverage, 2 G m d^2 each."""
    h, g, d, _ = event.sizes
    m, out = event.since, Flops()
    if piece.parts != "leverage":
        pairs = m // piece.chunk * piece.chunk**2 + (m % piece.chunk) ** 2
        pooled = (2 * d + compactor.KERNEL) * g * m
        out += Flops(2 * h * pairs * d, 4 * h * pairs + pooled)
    if piece.parts != "attention":
        out += Flops(4 * g * m * d**2, 6 * g * m * d)
    return out


def _criticalkv(piece: CriticalKV, event: Event) -> Flops:
    """W_o v of every query head, 2 H m d D, and its L1 norm, for m new entries."""
    h, _, d, n = event.sizes
    hidden, new = event.model.hidden, min(n, event.since)
    return Flops(2 * h * new * d * hidden, 2 * h * new * hidden)


def _expected_attention(piece: ExpectedAttention, event: Event) -> Flops:
    """Moments of m queries, expected logits, and norms of values.

    Per query head: mean and covariance, 2 m d + 2 m d^2; k.Sigma k, 2 n d^2 + 2 n d; mu.k,
    2 n d; softmax, 3 n. Per KV head: keys rotated back, 3 n d; norms, 2 n d.
    """
    h, g, d, n = event.sizes
    m = event.seen - piece.sink
    if not event.prompt and piece.origin == "next":
        m = min(piece.query_buffer, m)
    elif not event.prompt:
        m = min(event.since, piece.query_buffer + 1) - piece.sink
    times = piece.n_future if piece.rope == "mixture" else 1  # one per position of the future
    out = Flops(2 * n * h * d * times, (3 * h * n + 3 * g * n * d) * times + m * h * d)
    if piece.covariance:
        out += Flops(2 * m * h * d**2 + 2 * n * h * d**2 * times, (m + 2 * n * times) * h * d)
    if piece.value_norm == "v":
        out += Flops(0, 2 * g * n * d)
    if piece.value_norm == "wo_v":  # W W^T, and v.(W W^T) v
        out += Flops(2 * h * event.model.hidden * d**2 + 2 * n * h * d**2, 2 * n * h * d)
    return out


def _triattention(piece: TriAttention, event: Event) -> Flops:
    """A series and a norm per query head, standardised.

    The series takes 2 n d (for each distance with offsets="max"), the norm of d / 2 pairs n d,
    the z-scores 6 n.
    """
    h, g, d, n = event.sizes
    series = len(triattention.OFFSETS) if piece.offsets == "max" else 1
    return Flops(2 * h * n * d * series + h * n * d, 2 * g * n * d + (6 + series) * h * n)


def _kvzip(piece: Any, event: Event) -> Flops:
    """At the prompt: 2 H P (C + P) d and 4 H P (C + P) for each chunk, with P = C rows."""
    h, _, d, n = event.sizes
    pairs = sum(2 * chunk**2 for chunk in chunk_lengths(n)) if event.prompt else 0
    return Flops(2 * h * pairs * d, 4 * h * pairs)


def _oracle(piece: Oracle, event: Event) -> Flops | None:
    """Weights of all later rows; by="output" also distances to outputs, 3 per number.

    Unknown of the optimum, whose steps depend on the weights.
    """
    h, _, d, n = event.sizes
    pairs = h * event.later * n
    distances = 3 * d + 3 if piece.by == "output" else 0
    return None if piece.by == "optimum" else Flops(2 * pairs * d, pairs * (2 + distances))


def _paged(piece: Paged, event: Event) -> Flops:
    """Sums over the heads and over the pages, 2 G n; with norms, 4 G n d more."""
    _, g, d, n = event.sizes
    return Flops(0, 2 * g * n + (4 * g * n * d if piece.reduction == "norms" else 0))


def _ams(piece: AMS, event: Event) -> Flops:
    """Attention of the window, summed by a product; pooling; mass, credit, mixture (10)."""
    h, g, _, n = event.sizes
    w = max(1, min(event.window(piece.window), event.budget, int(n) - 1))
    usage = event.attention(w) + Flops(2 * h * w * n)
    return usage + Flops(0, g * n * (piece.pool_kernel + 10))


def _asl(piece: Any, event: Event) -> Flops:
    """Pooled scores, and the variance (3) of ranks: at most L_obs k tokens, L_obs layers."""
    tokens = min(piece.look_back * max(0, event.budget - piece.window), event.entries)
    return _snapkv(piece, event) + Flops(0, 3 * piece.look_back * tokens)


def _gemfilter(piece: GemFilter, event: Event) -> Flops:
    """Products of the last row, summed over the heads, pooled."""
    h, _, d, n = event.sizes
    return Flops(2 * h * n * d, n * (h + piece.pool_kernel))


def _pyramidinfer(piece: PyramidInfer, event: Event) -> Flops:
    """Attention of the last 1 + R rows, mean over the heads, weighted sum over the rows."""
    h, _, _, n = event.sizes
    rows = 1 + int(piece.recent * event.seen)
    context = n - rows
    return event.attention(rows) + Flops(2 * rows * context, h * rows * context)


def _h2o(piece: H2O, event: Event) -> Flops:
    """Attention of the rows since the last event."""
    return event.received()


def _observed(piece: Any, event: Event) -> Flops:
    """Attention of the prompt, then of the last row."""
    return event.received() if event.prompt else event.attention(1)


def _tova(piece: TOVA, event: Event) -> Flops:
    """Attention of the last row, and its mean over the heads."""
    return event.attention(1) + Flops(0, event.model.n_qheads * event.entries)


def _per_number(keys: int, entry: int = 0) -> Callable[[Any, Event], Flops]:
    """So many for each number of keys, G n d, and for each entry, G n."""

    def flops(piece: Any, event: Event) -> Flops:
        _, g, d, n = event.sizes
        return Flops(0, g * n * (keys * d + entry))

    return flops


def _qfilter(piece: QFilter, event: Event) -> Flops:
    """A product of each key with the filter."""
    _, g, d, n = event.sizes
    return Flops(2 * g * n * d)


_FREE = (Even, Everything, Uniform, AdaKV, Composed, DMS, Duo, Full, Growing, HeadKV, LUKV, LaCache)
_FORMULAS: Mapping[type, Callable[[Any, Event], Flops | None]] = {
    **dict.fromkeys((*_FREE, Pooled, Pyramid, StreamingLLM), _nothing),
    **dict.fromkeys((SnapKV, FastKV), _snapkv),
    **dict.fromkeys((ASL, TwoPass), _asl),
    **dict.fromkeys((RPC, AmsRPC), _rpc),
    **dict.fromkeys((KVzip, KVCompose), _kvzip),
    AMS: _ams,
    Cake: _cake,
    CakeBudgets: _cake_budgets,
    CapKV: _capkv,
    ChunkKV: _per_number(0, 2),  # sums over the heads and over the chunks
    Compactor: _compactor,
    CriticalKV: _criticalkv,
    CurDKV: _per_number(4, 6),  # norms of keys and values (2 each), shares, what is made of them
    DropKV: _dropkv,
    ExpectedAttention: _expected_attention,
    Finch: _finch,
    GKV: _gkv,
    GemFilter: _gemfilter,
    Global: _global,
    H2O: _h2o,
    KeyDiff: _per_number(8),  # unit keys (3), their mean (1), cosines with it (4)
    Knorm: _per_number(2),
    LagKV: _per_number(14),  # of keys and values: range (2), scaling (2), deviation (3)
    Local: _local,
    MorphKV: _morphkv,
    NormRatio: _per_number(4, 1),  # norms of keys and values (2 each), and their ratio
    ObservedAttention: _observed,
    Oracle: _oracle,
    Paged: _paged,
    PyramidInfer: _pyramidinfer,
    QFilter: _qfilter,
    RKV: _rkv,
    RaaS: _raas,
    Random: _per_number(0, 1),  # one division for each entry; hashes are of integers
    TOVA: _tova,
    TriAttention: _triattention,
    Union: _per_number(0, 1),  # each score is read once
}


def unknown(policy: Policy, event: Event) -> list[str]:
    """Return the names of the pieces that have no formula of such an event."""
    pieces = [*_pieces(policy), *filter(None, [policy.propagation])]
    return [type(piece).__name__ for piece in pieces if _flops(piece, event) is None]


def event_flops(policy: Policy, event: Event) -> Flops:
    """FLOPs of one event in one layer. Raises PolicyError where a piece's are unknown."""
    if policy.per_query_head:
        event = replace(event, model=event.model.per_query_head())
    return total_flops(policy.name, _pieces(policy), event)


def total_flops(policy: str, pieces: Iterable[Any], event: Event) -> Flops:
    """FLOPs of some pieces of a policy at an event; raises as `event_flops`."""
    total = Flops()
    for piece in pieces:
        flops = _flops(piece, event)
        if flops is None:
            raise PolicyError(f"{policy}: there is no formula of FLOPs of {type(piece).__name__}")
        total += flops
    return total


def _pieces(policy: Policy) -> list[Any]:
    """Return the pieces that compute at an event; scorers from the outside in."""
    return [*policy.scorers, policy.allocator, policy.layer_budgets]


def _flops(piece: Any, event: Event) -> Flops | None:
    formula = _FORMULAS.get(type(piece))
    return formula and formula(piece, event)
