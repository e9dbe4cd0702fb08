"""Hypothesis strategies: small traces from a few integers and a seed, schedules, and budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import product
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from kvsim.core.attention import Rope
from kvsim.core.probe import KEY, Chunk, Probe
from kvsim.core.trace import Trace
from kvsim.schema import Spans

T = TypeVar("T")

_rope = cache(Rope.default)

# Rows of a probe, of which each of two chunks has some.
_PROBE_ROWS = 7

#: Kinds of traces. "grid" holds small integers and a power-of-two scale: its logits are
#: exact in any order of summation, and often equal. "half" was rounded to float16 first.
#: "steep" has logits hundreds apart, so that most weights vanish next to the largest.
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

_STRETCHED = {"sharp": 2.5, "steep": 6.0}

#: Sizes of a GQA group: one query head per KV head, and the groups of common models.
GROUPS = (1, 2, 4, 7)


@dataclass(frozen=True)
class Case:
    """A trace as arrays: q [layer, qhead, pos, dim], k and v [layer, head, pos, dim].

    o_proj [layer, qhead, dim, hidden]. probe_q [layer, qhead, probe, dim] and probe_k [layer, head,
    probe, dim]: of rows that repeat the context.
    """

    kind: str
    seed: int
    prompt_len: int
    scale: float
    q: npt.NDArray[np.floating] = field(repr=False)
    k: npt.NDArray[np.floating] = field(repr=False)
    v: npt.NDArray[np.floating] = field(repr=False)
    o_proj: npt.NDArray[np.floating] = field(repr=False)
    probe_q: npt.NDArray[np.floating] = field(repr=False)
    probe_k: npt.NDArray[np.floating] = field(repr=False)

    @property
    def n(self) -> int:
        """Positions, prompt included."""
        return int(self.k.shape[2])

    @property
    def shape(self) -> tuple[int, ...]:
        """(layers, KV heads, query heads of a group, positions, dim)."""
        layers, heads, n, dim = self.k.shape
        return layers, heads, self.q.shape[1] // heads, n, dim

    @cached_property
    def rope(self) -> Rope:
        """The rotary embedding of base 10,000."""
        return _rope(self.shape[-1])

    def permuted(self, order: npt.NDArray[np.intp], queries: npt.NDArray[np.intp]) -> Case:
        """The case with its KV heads in an order, and its query heads in theirs."""
        names = {"k": order, "v": order, "probe_k": order}
        names |= dict.fromkeys(("q", "o_proj", "probe_q"), queries)
        arrays: Any = {name: getattr(self, name)[:, heads] for name, heads in names.items()}
        return replace(self, **arrays)

    def chunks(self, end: int) -> tuple[Chunk, ...]:
        """Chunks of a context of `end` tokens: two, if there are as many."""
        middle, rows = end // 2, self.probe_q.shape[2]
        if not middle:
            return (Chunk(0, end, rows),)
        return Chunk(0, middle, rows // 2), Chunk(middle, end, rows - rows // 2)

    def trace(self, context_len: int | None = None, questions: Spans = ()) -> Trace:
        """The arrays as a Trace, with a context of the prompt's first rows, and later questions.

        The same one each time: what it computes of its arrays is computed once.
        """
        key = context_len, tuple(questions)
        if key not in self._traces:
            end = self.prompt_len if context_len is None else context_len
            probe = Probe("repeat", self.chunks(end), (0,) * self.probe_q.shape[2])
            self._traces[key] = Trace.from_arrays(
                self.q,
                self.k,
                self.v,
                prompt_len=self.prompt_len,
                context_len=context_len,
                questions=questions,
                rope=self.rope,
                scale=self.scale,
                o_proj=self.o_proj,
                probe_q=self.probe_q,
                probe_k=self.probe_k,
                name=repr(self),
                meta={KEY: probe.document()},
            )
        return self._traces[key]

    @cached_property
    def _traces(self) -> dict[tuple[int | None, Spans], Trace]:
        return {}

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
        printer.text(repr(self))

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in zip("LHGnd", self.shape, strict=True))
        return (
            f"Case({self.kind}, {sizes}, prompt_len={self.prompt_len}, "
            f"seed={self.seed}, {self.q.dtype})"
        )


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
    if kind in _STRETCHED:
        q, k = _STRETCHED[kind] * q, _STRETCHED[kind] * k
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
    o_proj = rng.standard_normal((layers, heads * group, dim, 5))
    probe_q = rng.standard_normal((layers, heads * group, _PROBE_ROWS, dim))
    probe_k = rng.standard_normal((layers, heads, _PROBE_ROWS, dim))
    if kind == "grid":
        probe_q, probe_k = np.round(probe_q), np.round(probe_k)
    arrays = (np.ascontiguousarray(x, dtype) for x in (q, k, v, o_proj, probe_q, probe_k))
    return Case(kind, seed, prompt_len, scale, *arrays)


_OF_TWELVE = st.integers(0, 11)


def mostly(draw: st.DrawFn, usual: st.SearchStrategy[T], edge: st.SearchStrategy[T]) -> T:
    """`usual` in eleven draws of twelve, else `edge`; no strategy, which takes longer to build."""
    return draw(usual if draw(_OF_TWELVE) < 11 else edge)


@cache
def _shapes(
    max_layers: int, max_heads: int, groups: tuple[int, ...]
) -> st.SearchStrategy[tuple[int, int, int, int]]:
    """(layers, heads, group, dim) at once; the small ones, which take less time, more often."""
    layers, heads = (1, 1, 2, 2, *range(3, max_layers + 1)), (1, 2, 2, *range(3, max_heads + 1))
    every = product(
        (x for x in layers if x <= max_layers),
        (x for x in heads if x <= max_heads),
        (x for x in (1, 1, *GROUPS[1:], 2) if x in groups),
        (4, 4, 8, 16),
    )
    return st.sampled_from(sorted(every))


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
    groups: tuple[int, ...] = GROUPS,
) -> Case:
    """Traces of 1 to 3 layers and heads, groups of 1, 2, 4, 7, dim 4 to 16, any prompt length."""
    usual = st.integers(max(min_n, min(12, max_n)), max_n)
    n = mostly(draw, usual, st.integers(min_n, max_n))
    layers, heads, group, dim = draw(_shapes(max_layers, max_heads, groups))
    return make_case(
        draw(st.sampled_from(kinds)),
        layers=layers,
        heads=heads,
        group=group,
        n=n,
        dim=dim,
        prompt_len=mostly(draw, st.integers(1, n), st.sampled_from((1, n))),
        seed=draw(st.integers(0, 2**16)),
        dtype=draw(st.sampled_from(dtypes)) if len(dtypes) > 1 else dtypes[0],
    )


_INTERVALS = st.sampled_from((None, 1)) | st.integers(2, 8)
_PREFILL = st.sampled_from((None, True))
_NO_PREFILL = st.just(value=False)


def draw_schedule(draw: st.DrawFn, n: int, prompt_len: int) -> tuple[int | None, bool | None]:
    """(interval, prefill): the policy's own, every row, a few rows, or more rows than remain."""
    rest = max(1, n - prompt_len)
    interval = mostly(draw, _INTERVALS, st.integers(rest, rest + 3))
    return interval, mostly(draw, _PREFILL, _NO_PREFILL)


def draw_budget(draw: st.DrawFn, least: int, most: int, *, above: bool = True) -> int:
    """Entries to keep: mostly about the protected size and below `most`, sometimes above it."""
    most = max(least, most)
    near = st.integers(least, min(least + 3, most)) | st.integers(least, most)
    return mostly(draw, near, st.integers(most, most + 3)) if above else draw(near)
