"""FLOPs of scoring: what each piece of a policy computes at one event, in one layer.

With H query heads, G KV heads, head dimension d, hidden size D, n entries of a head before the
event and w rows of a window. `products` are multiply-adds of matrix products, 2 FLOPs each, and
follow the formulas of the policies' files exactly; a test counts them while the real scorers run.
`pointwise` is the rest to leading order: 3 per softmax weight, 1 per number that is added, compared
or scaled, the kernel's width per pooled number, 2 per number of a norm. Comparisons that sort or
select count nothing.

Nothing is shared: attention weights that a scorer asks for are computed anew, as they must be where
a fused kernel gives none away, and once for each piece that asks. Calibration happens once per
model and is left out. A piece that is not in the table, such as a user's own, is unknown; nobody
guesses what it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvsim.core.policy import Even, Everything, Policy, Uniform
from kvsim.cost.model import Model
from kvsim.errors import PolicyError
from kvsim.policies.adakv import AdaKV
from kvsim.policies.ams import AMS
from kvsim.policies.asl import ASL, Selecting, TwoPass
from kvsim.policies.cake import Cake, CakeBudgets
from kvsim.policies.chunkkv import ChunkKV
from kvsim.policies.criticalkv import CriticalKV
from kvsim.policies.expected_attention import ExpectedAttention
from kvsim.policies.fastkv import FastKV
from kvsim.policies.full import Full
from kvsim.policies.gemfilter import GemFilter
from kvsim.policies.gkv import GKV, Global, Local
from kvsim.policies.h2o import H2O, ObservedAttention
from kvsim.policies.keydiff import KeyDiff
from kvsim.policies.knorm import Knorm
from kvsim.policies.lagkv import LagKV
from kvsim.policies.morphkv import MorphKV
from kvsim.policies.oracle import Oracle
from kvsim.policies.pyramidinfer import PyramidInfer
from kvsim.policies.pyramidkv import Pyramid
from kvsim.policies.qfilter import QFilter
from kvsim.policies.random import Random
from kvsim.policies.rkv import RKV
from kvsim.policies.rpc import RPC, AmsRPC, Growing
from kvsim.policies.snapkv import SnapKV
from kvsim.policies.streaming_llm import StreamingLLM
from kvsim.policies.tova import TOVA
from kvsim.policies.triattention import TriAttention

# Distances into the future at which TriAttention scores a key.
_TRI_OFFSETS = 17


@dataclass(frozen=True)
class Flops:
    """Of matrix products, and of everything else."""

    products: float = 0.0
    pointwise: float = 0.0

    @property
    def total(self) -> float:
        """Both."""
        return self.products + self.pointwise

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.products + other.products, self.pointwise + other.pointwise)

    def __mul__(self, times: float) -> Flops:
        return Flops(self.products * times, self.pointwise * times)


@dataclass(frozen=True)
class Event:
    """One event of one layer.

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


Formula = Callable[[Any, Event], Flops]


# --------------------------------------------------------------------------------------- scorers


def _nothing(_piece: object, _event: Event) -> Flops:
    """Positions, comparisons, or numbers known beforehand."""
    return Flops()


def _per_entry(times: float) -> Formula:
    """So many FLOPs per entry of a KV head."""
    return lambda _, event: Flops(0, times * event.model.n_heads * event.entries)


def _per_number(times: float) -> Formula:
    """So many FLOPs per number of the keys."""

    def formula(_: object, event: Event) -> Flops:
        _, g, d, n = event.sizes
        return Flops(0, times * g * n * d)

    return formula


def _h2o(_piece: H2O, event: Event) -> Flops:
    return event.received()


def _observed(_piece: ObservedAttention, event: Event) -> Flops:
    return event.received() if event.prompt else event.attention(1)


def _tova(_piece: TOVA, event: Event) -> Flops:
    h, _, _, n = event.sizes
    return event.attention(1) + Flops(0, h * n)


def _snapkv(piece: SnapKV, event: Event) -> Flops:
    """Attention, its mean over the window, pooling and mean over the group per query head."""
    h, _, _, n = event.sizes
    w = event.window(piece.window)
    return event.attention(w) + Flops(0, h * n * (w + _kernel(piece) + 1))


def _local(piece: Local | GKV | RKV, event: Event) -> Flops:
    """Attention, the group's largest, its mean over the window, pooling."""
    h, g, _, n = event.sizes
    w = event.window(piece.window)
    return event.attention(w) + Flops(0, h * w * n + g * n * (w + _kernel(piece)))


def _gkv(piece: GKV, event: Event) -> Flops:
    """The local score, normalised (2) and fused (3), less the redundancy of all keys."""
    _, g, _, n = event.sizes
    score = _local(piece, event) + Flops(0, 5 * g * n)
    return score + _redundancy(event, n) if piece.signed else score


def _rkv(piece: RKV, event: Event) -> Flops:
    _, _, _, n = event.sizes
    among = n - event.window(piece.window) if piece.variant == "ams" else n
    return _local(piece, event) + _redundancy(event, among)


def _redundancy(event: Event, keys: float) -> Flops:
    """Cosine of every two keys, 2 G n^2 d; threshold, sum and softmax.

    kvsim's own shortcut may stop earlier, and needs this at most.
    """
    _, g, d, _ = event.sizes
    return Flops(2 * g * keys**2 * d, g * (2 * keys**2 + 3 * keys * d + 3 * keys))


def _morphkv(piece: MorphKV, event: Event) -> Flops:
    h, g, _, n = event.sizes
    w = event.window(piece.window)
    return event.attention(w) + Flops(0, (h + g) * w * n)


def _cake(piece: Cake, event: Event) -> Flops:
    """Attention, mean over the window, and its variance (3) where it counts; pooling."""
    h, g, _, n = event.sizes
    w = event.window(piece.window)
    heads = g if piece.group == "max" else h
    spread = 3 if event.prompt or piece.decoding else 0
    return event.attention(w) + Flops(
        0, h * w * n + heads * n * ((1 + spread) * w + _kernel(piece))
    )


def _cake_budgets(piece: CakeBudgets, event: Event) -> Flops:
    """Entropy (2) and variance (3) of the attention that the score has computed."""
    h, _, _, n = event.sizes
    return Flops(0, 5 * h * event.window(piece.window) * n)


def _rpc(piece: RPC | AmsRPC, event: Event) -> Flops:
    h, g, _, n = event.sizes
    w = event.window(piece.window)
    return event.attention(w) + Flops(0, h * w * n + h * n + g * n * piece.pool_kernel)


def _expected_attention(piece: ExpectedAttention, event: Event) -> Flops:
    """Moments of m queries, expected logits, and norms of values.

    Per query head: mean and covariance, 2 m d + 2 m d^2; k.Sigma k, 2 n d^2 + 2 n d; mu.k, 2 n d;
    softmax, 3 n. Per KV head: keys turned back, 3 n d; norms, 2 n d.
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


def _qfilter(_piece: QFilter, event: Event) -> Flops:
    _, g, d, n = event.sizes
    return Flops(2 * g * n * d)


def _triattention(piece: TriAttention, event: Event) -> Flops:
    """A series and a norm per query head, standardised.

    The series takes 2 n d (for each distance with offsets="max"), the norm of d / 2 pairs n d, the
    z-scores 6 n.
    """
    h, g, d, n = event.sizes
    series = _TRI_OFFSETS if piece.offsets == "max" else 1
    return Flops(2 * h * n * d * series + h * n * d, 2 * g * n * d + (6 + series) * h * n)


def _oracle(piece: Oracle, event: Event) -> Flops:
    """Weights of all later rows; by="output" also distances of values and outputs, 3 per number."""
    h, _, d, n = event.sizes
    pairs = h * event.later * n
    return Flops(2 * pairs * d, pairs * (2 + (3 * d + 3 if piece.by == "output" else 0)))


def _kernel(piece: Any) -> int:
    """Width of the pooling."""
    return int(piece.pool_kernel) if piece.pool is not None else 0


# --------------------------------------------------------- wrappers and allocators add their own


def _criticalkv(_piece: CriticalKV, event: Event) -> Flops:
    """W_o v of every query head, 2 H n d D, and its L1 norm."""
    h, _, d, n = event.sizes
    hidden = event.model.hidden
    return Flops(2 * h * n * d * hidden, 2 * h * n * hidden)


def _ams(piece: AMS, event: Event) -> Flops:
    """Attention of the window, summed by a product; pooling, mass, credit and its mixture (10)."""
    h, g, _, n = event.sizes
    w = max(1, min(event.window(piece.window), event.budget, int(n) - 1))
    usage = event.attention(w) + Flops(2 * h * w * n)
    return usage + Flops(0, g * n * (piece.pool_kernel + 10))


#: What a piece computes at an event, by its class; wrappers and allocators without what is inside.
FORMULAS: Mapping[type, Formula] = {
    Full: _nothing,
    Random: _per_entry(1),  # integer hashes, and one division
    StreamingLLM: _nothing,
    H2O: _h2o,
    ObservedAttention: _observed,
    TOVA: _tova,
    SnapKV: _snapkv,
    Local: _local,
    GKV: _gkv,
    RKV: _rkv,
    MorphKV: _morphkv,
    Cake: _cake,
    RPC: _rpc,
    AmsRPC: _rpc,
    KeyDiff: _per_number(8),  # unit keys (3), their mean (1), cosines with it (4)
    Knorm: _per_number(2),
    LagKV: _per_number(14),  # keys and values: range (2), scaling (2), deviation (3)
    ExpectedAttention: _expected_attention,
    QFilter: _qfilter,
    TriAttention: _triattention,
    Oracle: _oracle,
    Global: _per_entry(5),  # normalised (2), fused (3)
    CriticalKV: _criticalkv,
    AdaKV: _nothing,
    ChunkKV: _per_entry(2),
    AMS: _ams,
    Uniform: _nothing,
    Everything: _nothing,
    Even: _nothing,
    Pyramid: _nothing,
    Growing: _nothing,
    CakeBudgets: _cake_budgets,
}


def pieces(policy: Policy) -> list[Any]:
    """What scores, chooses and shares out at an event; scorers from the outside in."""
    chain: list[Any] = [policy.scorer]
    while hasattr(chain[-1], "scorer"):
        chain.append(chain[-1].scorer)
    return [*chain, policy.allocator, policy.layer_budgets]


def unknown(policy: Policy) -> list[str]:
    """Names of the pieces that no formula is known for."""
    known = {*FORMULAS, *PROPAGATIONS}
    parts = [*pieces(policy), *([policy.propagation] if policy.propagation is not None else [])]
    return [type(piece).__name__ for piece in parts if type(piece) not in known]


def event_flops(policy: Policy, event: Event) -> Flops:
    """FLOPs of one event in one layer. Raises PolicyError where a piece is unknown."""
    _check_known(policy)
    model = event.model.per_query_head() if policy.per_query_head else event.model
    at = replace(event, model=model)
    return sum((FORMULAS[type(piece)](piece, at) for piece in pieces(policy)), Flops())


def _check_known(policy: Policy) -> None:
    missing = unknown(policy)
    if missing:
        raise PolicyError(
            f"{policy.name}: no formula for the FLOPs of {', '.join(missing)}; expected pieces of "
            "kvsim's own policies"
        )


# ----------------------------------------------------------------------------------- propagations


def _selecting(piece: Selecting | FastKV, event: Event) -> Flops:
    """Attention of the window, its sum, pooled per query head, summed over the heads."""
    h, _, _, n = event.sizes
    w = event.window(piece.window)
    return event.attention(w) + Flops(0, h * n * (w + _kernel(piece) + 1))


def _asl(piece: Selecting, event: Event) -> Flops:
    """The same, and the variance (3) of the ranks: at most L_obs k tokens over L_obs layers."""
    tokens = min(piece.look_back * max(0, event.budget - piece.window), event.entries)
    return _selecting(piece, event) + Flops(0, 3 * piece.look_back * tokens)


def _gemfilter(piece: GemFilter, event: Event) -> Flops:
    h, _, d, n = event.sizes
    return Flops(2 * h * n * d, n * (h + piece.pool_kernel))


def _pyramidinfer(piece: PyramidInfer, event: Event) -> Flops:
    """Attention of the last 1 + R rows, mean over the heads, weighted sum over the rows."""
    h, _, _, n = event.sizes
    rows = 1 + int(piece.recent * event.seen)
    context = n - rows
    return event.attention(rows) + Flops(2 * rows * context, h * rows * context)


#: What a propagation computes behind one layer that it looks at, by its class.
PROPAGATIONS: Mapping[type, Formula] = {
    ASL: _asl,
    TwoPass: _asl,
    FastKV: _selecting,
    GemFilter: _gemfilter,
    PyramidInfer: _pyramidinfer,
}


def propagation_flops(
    policy: Policy, model: Model, *, prompt: int, budget: int, rows: Sequence[int], layer: int
) -> Flops:
    """FLOPs of choosing rows during a prefill that drops some, over all layers; as `event_flops`.

    rows: of each layer in the first pass. layer: the selection layer, the last one for none.
    """
    _check_known(policy)
    piece = policy.propagation
    if piece is None:
        return Flops()
    looked: Sequence[int] = range(layer + 1)
    if isinstance(piece, PyramidInfer):
        looked = [at for at in range(len(rows) - 1) if rows[at + 1] < rows[at]]
    elif not piece.restarts and layer == model.n_layers - 1:
        looked = range(layer)  # nothing is dropped behind the last layer
    elif isinstance(piece, FastKV | GemFilter):
        looked = range(layer, layer + 1)
    of = (Event(model, rows[at], prompt, prompt, budget, prompt=True) for at in looked)
    return sum((PROPAGATIONS[type(piece)](piece, event) for event in of), Flops())
