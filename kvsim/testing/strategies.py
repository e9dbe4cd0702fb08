"""Hypothesis strategies: small traces, policies whose windows bind, and budgets near the edge.

Everything is drawn as a few integers and a seed; the numbers of a trace come from a numpy generator
with that seed, so cases stay cheap and shrink by shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from kvsim.core.attention import Rope
from kvsim.core.trace import Trace
from kvsim.testing import reference

T = TypeVar("T")

#: What a trace is made of. "grid" holds small integers and a power-of-two scale: its logits are
#: exact in any order of summation, and often equal. "half" was rounded to float16 first.
#: "steep" has logits hundreds apart, so that most weights vanish beside the largest.
KINDS = (
    "normal",
    "sharp",
    "steep",
    "sink",
    "grid",
    "half",
    "zero_keys",
    "repeated_keys",
    "zero_values",
)

#: Sizes of a GQA group: one query head per KV head, and the groups of common models.
GROUPS = (1, 2, 4, 7)


@dataclass(frozen=True)
class Case:
    """A trace as arrays: q [layer, qhead, pos, dim], k and v [layer, head, pos, dim].

    o_proj [layer, qhead, dim, hidden].
    """

    kind: str
    seed: int
    prompt_len: int
    scale: float
    q: npt.NDArray[np.floating] = field(repr=False)
    k: npt.NDArray[np.floating] = field(repr=False)
    v: npt.NDArray[np.floating] = field(repr=False)
    o_proj: npt.NDArray[np.floating] | None = field(repr=False)

    @property
    def n(self) -> int:
        """Positions, prompt included."""
        return int(self.k.shape[2])

    @property
    def shape(self) -> tuple[int, ...]:
        """(layers, KV heads, query heads of a group, positions, dim)."""
        layers, heads, n, dim = self.k.shape
        return layers, heads, self.q.shape[1] // heads, n, dim

    @property
    def rope(self) -> Rope:
        """The rotary embedding of base 10,000."""
        return Rope.default(self.shape[-1])

    def trace(self) -> Trace:
        """The arrays as a Trace."""
        return Trace.from_arrays(
            self.q,
            self.k,
            self.v,
            prompt_len=self.prompt_len,
            rope=self.rope,
            scale=self.scale,
            o_proj=self.o_proj,
            name=repr(self),
        )

    def naive(
        self,
        policy: str,
        params: Mapping[str, Any],
        *,
        budget: int | Sequence[int],
        interval: int | None,
        prefill: bool | None,
        protect: tuple[int, int, bool] = (0, 0, False),
    ) -> reference.Outcome:
        """The naive float64 replay of a policy by name."""
        return reference.replay(
            self.q,
            self.k,
            self.v,
            prompt_len=self.prompt_len,
            policy=policy,
            params=params,
            budget=budget,
            interval=interval,
            prefill=prefill,
            scale=self.scale,
            rope=([float(f) for f in self.rope.inv_freq], self.rope.attention_scaling),
            o_proj=self.o_proj,
            protect=protect,
        )

    def ties_are_exact(self, policy: str) -> bool:
        """Whether scores of `policy` that tie in one order of summation tie in every other.

        They do where a score is one number, or a sum of two, that equal entries share; not where
        different numbers happen to add up to the same, or small ones vanish beside a large one; nor
        where an allocator or a wrapper computes with the scores of others.
        """
        if "+" in policy or policy.startswith("ams"):
            return False
        if self.kind == "zero_keys":
            return policy.startswith("tova")
        return self.kind not in ("grid", "repeated_keys", "steep") and self.shape[2] <= 2

    @property
    def tolerance(self) -> float:
        """Relative score difference below which rounding may decide, in the trace's own dtype.

        Weights are exponentials: an error of a few units in the last place of a logit of size z
        becomes z times as many in the weight.
        """
        if self.q.dtype == np.float64:
            return 1e-9
        return 1e-3 if self.kind == "steep" else 1e-4

    @property
    def faint(self) -> float:
        """Score below which weights vanish in the dtype that the trace computes in.

        A row replayed in a block shares the block's maximum, which may be 1e20 times its own: so
        much of the dtype's range is not there.
        """
        return 1e-280 if self.q.dtype == np.float64 else 1e-30

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """How Hypothesis shows it: without the arrays."""
        printer.text(repr(self))

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in zip("LHGnd", self.shape, strict=True))
        return (
            f"Case({self.kind}, {sizes}, prompt_len={self.prompt_len}, "
            f"seed={self.seed}, {self.q.dtype})"
        )


@dataclass(frozen=True)
class Setup:
    """A policy by name, its parameters, and how it is replayed."""

    policy: str
    params: Mapping[str, Any]
    budget: int
    interval: int | None
    prefill: bool | None


def make_case(
    kind: str,
    *,
    layers: int = 1,
    heads: int = 1,
    group: int = 1,
    n: int = 16,
    dim: int = 4,
    prompt_len: int = 1,
    seed: int = 0,
    dtype: npt.DTypeLike = np.float64,
) -> Case:
    """One trace of a given kind and shape; the numbers depend on the seed alone."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((layers, heads * group, n, dim))
    k, v = (rng.standard_normal((layers, heads, n, dim)) for _ in range(2))
    scale = dim**-0.5
    if kind == "sharp":
        q, k = 2.5 * q, 2.5 * k
    elif kind == "steep":
        q, k = 6.0 * q, 6.0 * k
    elif kind == "sink":  # queries lean on the first key, as trained models do
        q += 0.5
        k[:, :, 0] += 2.0
    elif kind == "grid":
        q, k = np.round(q), np.round(k)
        scale = 0.25
    elif kind == "half":
        q, k, v = (x.astype(np.float16).astype(np.float64) for x in (q, k, v))
    elif kind == "zero_keys":
        k[:] = 0.0
    elif kind == "repeated_keys":
        k[:] = k[:, :, rng.integers(0, 3, size=n) % n]
    elif kind == "zero_values":
        v[:] = 0.0
    elif kind != "normal":
        raise ValueError(f"kind is {kind!r}; expected one of {', '.join(KINDS)}")
    o_proj = rng.standard_normal((layers, heads * group, dim, 5))
    arrays = (np.ascontiguousarray(x, dtype) for x in (q, k, v, o_proj))
    return Case(kind, seed, prompt_len, scale, *arrays)


_OF_TWELVE = st.integers(0, 11)


def _mostly(draw: st.DrawFn, usual: st.SearchStrategy[T], edge: st.SearchStrategy[T]) -> T:
    """`usual` in eleven draws of twelve, else `edge`; shrinks towards `usual`.

    As the functions below it is no strategy: making one for every draw takes longer than drawing.
    """
    return draw(usual if draw(_OF_TWELVE) < 11 else edge)


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    kinds: Sequence[str] = KINDS,
    dtypes: Sequence[npt.DTypeLike] = (np.float64,),
    min_n: int = 1,
    max_n: int = 48,
    max_layers: int = 3,
    max_heads: int = 3,
) -> Case:
    """Traces of 1 to 3 layers and heads, groups of 1, 2, 4, 7, dim 4 to 16, any prompt length.

    One-entry traces and prompts of one or all tokens come up too.
    """
    usual = st.integers(max(min_n, min(12, max_n)), max_n)
    n = _mostly(draw, usual, st.integers(min_n, max_n))
    return make_case(
        draw(st.sampled_from(kinds)),
        layers=draw(st.integers(1, max_layers)),
        heads=draw(st.integers(1, max_heads)),
        group=draw(st.sampled_from(GROUPS)),
        n=n,
        dim=draw(st.sampled_from((4, 8, 16))),
        prompt_len=_mostly(draw, st.integers(1, n), st.sampled_from((1, n))),
        seed=draw(st.integers(0, 2**16)),
        dtype=draw(st.sampled_from(dtypes)),
    )


def _whole(least: int, most: int) -> Callable[[int], st.SearchStrategy[Any]]:
    return lambda _: st.integers(least, most)


_SWITCH = (True, False)


def _one(*values: Any) -> Callable[[int], st.SearchStrategy[Any]]:
    return lambda _: st.sampled_from(values)


#: What a parameter may be, given the longest window that is useful; the others keep their defaults.
_DRAWN: Mapping[str, Callable[[int], st.SearchStrategy[Any]]] = {
    "sink": lambda most: st.integers(0, min(6, most)),
    "recent": lambda most: st.integers(0, min(6, most)),
    "seed": _whole(0, 5),
    "window": lambda most: st.integers(1, most),
    "pool": _one("max", "avg", None),
    "pool_kernel": _one(1, 3, 5, 7),
    "lag": _whole(1, 6),
    "cross_scoring": _one(*_SWITCH),
    "n_future": _whole(1, 20),
    "covariance": _one(*_SWITCH),
    "value_norm": _one("v", "none", "wo_v"),
    "query_buffer": _whole(2, 12),
    "rope": _one("mean", "mixture"),
    "calibration": _one("prefix:1", "prefix:3", "prefix:8", "oracle"),
    "protect_prompt": _one(*_SWITCH),
    "offsets": _one("mean", "max"),
    "by": _one("mass", "output"),
    "fusion": _one("max", "sum"),
    "decay": _one(0.0, 0.5, 0.8, 1.0),
    "redundancy": _one(*_SWITCH),
    "mix_lambda": _one(0.0, 0.3, 0.7, 1.0),
    "threshold": _one(0.2, 0.5),
    "gamma": _one(0.0, 3.0, 200.0),
    "dispersion": _one("var", "std"),
    "beta": _one(1.0, 3.0, 20.0),
    "compression": _whole(1, 4),
    "floor": _one(0.0, 0.2, 0.5, 1.0),
    "chunk": _whole(1, 6),
    "first_stage": _one(0.0, 0.5, 1.0),
    "segment_mass": _one(0.05, 0.1, 0.3, 2.0),
    "min_segment": _whole(1, 5),
    "max_segment": _whole(5, 12),
    "min_quota": _whole(0, 3),
    "credit": _one(*_SWITCH),
    "credit_decay": _one(0.0, 0.5, 0.9),
    "credit_mix": _one(0.0, 0.5, 1.0),
    "suffix_fill": _one("head_max", "global_max", "head_mean", "observed", "zero"),
    "mode": _one("strict", "reference"),
    "weights": _one("mass", "length", "equal"),
    "segmentation": _one("mass", "mass", "fixed"),
    "segment_length": _whole(1, 8),
}


def draw_parameters(draw: st.DrawFn, name: str, most: int) -> dict[str, Any]:
    """Parameters of a built-in policy, small enough to bind; a window of at most `most` rows."""
    drawn: dict[str, Any] = {}
    for key, default in reference.defaults(name).items():
        plain = key.rpartition("scorer__")[2]
        if plain not in _DRAWN:
            continue
        value = draw(_DRAWN[plain](most))
        # half of the budget by default; and a preset that shares between heads is meant to
        drawn[key] = draw(st.sampled_from((None, value))) if default is None and value else value
        if plain == "calibration":
            drawn[key] = value
    return drawn


_INTERVALS = st.sampled_from((None, 1)) | st.integers(2, 8)
_PREFILL = st.sampled_from((None, True))
_NO_PREFILL = st.just(value=False)


def draw_schedule(draw: st.DrawFn, n: int, prompt_len: int) -> tuple[int | None, bool | None]:
    """(interval, prefill): the policy's own, every row, a few rows, or more rows than remain."""
    rest = max(1, n - prompt_len)
    interval = _mostly(draw, _INTERVALS, st.integers(rest, rest + 3))
    return interval, _mostly(draw, _PREFILL, _NO_PREFILL)


def draw_budget(draw: st.DrawFn, least: int, most: int) -> int:
    """Entries to keep: mostly about the protected size and below `most`, sometimes above it."""
    most = max(least, most)
    near = st.integers(least, min(least + 3, most)) | st.integers(least, most)
    return _mostly(draw, near, st.integers(most, most + 3))


@st.composite
def setups(draw: st.DrawFn, case: Case, names: Sequence[str] = tuple(reference.RULES)) -> Setup:
    """A built-in policy with parameters, schedule and a budget that it has a rule for.

    Most budgets are below what the last event finds, so that something is evicted.
    """
    name = draw(st.sampled_from(names))
    interval, prefill = draw_schedule(draw, case.n, case.prompt_len)
    every = reference.parse(name).schedule[0] if interval is None else interval
    last = max(
        reference.event_rows(case.n, case.prompt_len, interval=every, prefill=prefill), default=0
    )
    useful = _mostly(draw, st.just(max(1, min(10, last))), st.just(10))
    params = draw_parameters(draw, name, useful)
    least = reference.smallest_budget(name, params, case.n - 1, prompt_len=case.prompt_len)
    if "n_future" in params:  # moments need two samples behind the sinks
        sink = next(v for k, v in reversed(params.items()) if k.endswith("sink"))
        least = max(least, min(sink + 1, case.n))
    return Setup(name, params, draw_budget(draw, least, last), interval, prefill)


@st.composite
def evictions(draw: st.DrawFn, heads: int = 2, most: int = 40) -> npt.NDArray[np.int32]:
    """`evicted_at` [heads, T] of one layer: a few rows evict, what leaves when is anything."""
    total = draw(st.integers(1, most))
    rows = draw(st.lists(st.integers(0, total - 1), max_size=8, unique=True))
    choices = np.array([*sorted(rows), reference.NEVER], np.int32)
    first = np.searchsorted(choices, np.arange(total))  # nothing leaves before it came
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    stays = draw(st.sampled_from((0.0, 0.2, 0.8)))
    at = rng.integers(first, len(choices), size=(heads, total))
    return choices[np.where(rng.random(at.shape) < stays, len(rows), at)]
