"""FLOPs of scoring: the matrix products of each piece of a policy at one event, in one layer.

With H query heads, G KV heads, head dimension d, n entries of a head before the event and w rows of
a window. A multiply-add is 2 FLOPs. Softmax, norms, comparisons and sorting count 0. Products are
exact: a test counts them while the real pieces run.

A piece that reads the attention of some rows (`reads`) computes 2 H w n d, and any other one 0,
unless it is listed here. Pieces share nothing: each recomputes the attention weights that it uses,
as it must where a fused kernel returns none. Calibration happens once per model and is left out.
The cost of a user's own piece is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar

from kvsim.core.parameters import of_a_user
from kvsim.core.policy import Policy, Wrapper, chain_of
from kvsim.policies import triattention
from kvsim.policies.kvzip import chunk_lengths
from kvsim.studies.cost.model import Model


@dataclass(frozen=True)
class Event:
    """One event of one layer, as sizes.

    n: entries of a KV head, before the event. seen: tokens so far. since: rows since the last event
    that acted, whose attention a score may add up. later: rows still to come, for the clairvoyant.
    w: most rows whose attention a piece reads, of those that there are.
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

    def attention(self, rows: float) -> Any:
        """Logits of rows, each with all entries."""
        return 2 * self.h * rows * self.n * self.d

    def received(self) -> Any:
        """Logits of the rows since the last event, each with its visible entries."""
        return 2 * self.h * self.since * (self.n - (self.since - 1) / 2) * self.d

    def similarity(self, keys: float) -> Any:
        """Of every two keys; a search for redundancy takes no more."""
        return 2 * self.g * keys**2 * self.d


def _compactor(p: Any, e: Event) -> Any:
    """Of m new rows: 2 H d for each pair in a chunk; X^T X and leverage, 2 G m d^2 each."""
    m = e.since
    pairs = m // p.chunk * p.chunk**2 + (m % p.chunk) ** 2
    attention = 0 if p.parts == "leverage" else 2 * e.h * pairs * e.d
    return attention + (0 if p.parts == "attention" else 4 * e.g * m * e.d**2)


def _expected_attention(p: Any, e: Event) -> Any:
    """Per query head: mean and covariance, 2 m d^2; k.Sigma k, 2 n d^2; mu.k, 2 n d."""
    m = e.seen - p.sink
    if not e.prompt and p.origin == "next":
        m = min(p.query_buffer, m)
    elif not e.prompt:
        m = min(e.since, p.query_buffer + 1) - p.sink
    times = p.n_future if p.rope == "mixture" else 1  # one per position of the future
    total = 2 * e.n * e.h * e.d * times
    if p.covariance:
        total += 2 * e.h * e.d**2 * (m + e.n * times)
    if p.value_norm == "wo_v":  # W W^T, and v.(W W^T) v
        total += 2 * e.h * e.d**2 * (e.model.hidden + e.n)
    return total


def _ams(p: Any, e: Event) -> Any:
    """Attention of the window, summed by a product."""
    w = max(1, min(e.w, e.budget, int(e.n) - 1))
    return e.attention(w) + 2 * e.h * w * e.n


def _pyramidinfer(p: Any, e: Event) -> Any:
    """Attention of the last 1 + R rows, weighted over the rows."""
    rows = 1 + int(p.recent * e.seen)
    return e.attention(rows) + 2 * rows * (e.n - rows)


#: By the names of kvsim's classes.
_FORMULAS: Mapping[str, Callable[[Any, Event], float | None]] = {
    "AMS": _ams,
    "CakeBudgets": lambda _, __: 0,  # of the attention that the score has computed
    # per query head: cosines, 2 n d, and A and leverage, 2 n d^2 each
    "CapKV": lambda _, e: e.attention(1) * (1 + 2 * e.d),
    "Compactor": _compactor,
    "CriticalKV": lambda _, e: 2 * e.h * min(e.n, e.since) * e.d * e.model.hidden,  # W_o v
    "DropKV": lambda _, e: 3 * e.attention(e.w),  # outputs, and their products with values
    "ExpectedAttention": _expected_attention,
    "GKV": lambda p, e: e.attention(e.w) + (e.similarity(e.n) if p.scale == "signed" else 0),
    **dict.fromkeys(["GemFilter", "TOVA"], lambda _, e: e.attention(1)),
    "H2O": lambda _, e: e.received(),
    # at the prompt: each chunk again, whose rows see the chunk before them, too
    **dict.fromkeys(
        ["KVzip", "KVCompose"],
        lambda _, e: 4 * e.h * e.d * sum(c**2 for c in chunk_lengths(e.n)) if e.prompt else 0,
    ),
    # after the prompt its last rows, then each row; each over all entries
    "LayerH2O": lambda _, e: e.attention(e.w if e.prompt else e.since),
    "LayerSnapKV": lambda _, e: e.attention(e.w if e.prompt else 1),
    # the keys of what competes, all heads together
    "LayerRKV": lambda _, e: e.attention(e.w) + e.similarity(e.n),
    "ObservedAttention": lambda _, e: e.received() if e.prompt else e.attention(1),
    # all later rows; the steps of the optimum depend on the weights
    "Oracle": lambda p, e: None if p.by == "optimum" else e.attention(e.later),
    "PyramidInfer": _pyramidinfer,
    "QFilter": lambda _, e: 2 * e.g * e.n * e.d,
    # the redundancy of all keys, or of the candidates'
    "RKV": lambda p, e: e.attention(e.w) + e.similarity(e.n - (e.w if p.variant == "ams" else 0)),
    "RaaS": lambda p, e: e.attention(min(p.query_buffer, e.since, e.seen)),
    # a series for each distance, 2 n d, and the norm of d / 2 pairs, n d
    **dict.fromkeys(
        ["TriAttention", "EngineTriAttention"],
        lambda p, e: e.attention((len(triattention.OFFSETS) if p.offsets == "max" else 1) + 0.5),
    ),
}


def pieces_of(policy: Policy) -> list[Any]:
    """Return the pieces that compute at an event; scorers from the outside in."""
    return [*chain_of(policy.scorer), policy.allocator, policy.layer_budgets]


def flops_of(piece: Any, event: Event) -> float | None:
    """FLOPs of the products of a piece at an event; None for an unknown piece."""
    kind, rows = type(piece), min(piece.reads.rows, event.seen)
    if of_a_user(kind):
        return None
    if (formula := _FORMULAS.get(kind.__name__)) is not None:
        return formula(piece, replace(event, w=rows))
    attends = not isinstance(piece, Wrapper) and (rows > 1 or not piece.reads.copies)
    return event.attention(rows) if attends else 0
