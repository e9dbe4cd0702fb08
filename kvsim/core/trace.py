"""A trace: one token sequence through one model, with all inputs of its attention.

`Trace` has the same interface for arrays in memory (`Trace.from_arrays`) and on disk
(`kvsim.open_trace`): it reads them from a `Source`. Its layers are numbered 0, 1, 2, ...;
`layer_ids` has the model's numbers. Axes: `schema.AXES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Final, Self

from kvsim.core.attention import Formula, Rope
from kvsim.core.checks import (
    DTYPES,
    ArrayLike,
    Positions,
    as_positions,
    as_tensor,
    as_tokens,
    check_finite,
    check_meta,
    check_shapes,
    check_steps,
    check_texts,
    in_memory,
    missing_array,
)
from kvsim.core.full import FullAttention
from kvsim.core.header import Header
from kvsim.core.lazy import Tensor, torch
from kvsim.core.left_out import HeldRows, whole_shapes
from kvsim.core.parameters import integer
from kvsim.core.shared_results import Memo
from kvsim.core.sources import (
    ArraySource,
    InMemory,
    OneSize,
    Size,
    is_sized,
)
from kvsim.errors import NeedsError, PositionError, TraceError
from kvsim.schema import AXES, numbered

_ALL = slice(None)


class _OfSize:
    """A size that all layers of a trace share; else NeedsError."""

    def __init__(self, place: int) -> None:
        self.place = place

    def __get__(self, trace: Trace, _: type[Trace]) -> int:
        return _size_of(trace, range(trace.n_layers))[self.place]


class Trace:
    """One token sequence through one model: q, k, v after RoPE, and its header.

    Use `Trace.from_arrays`, `kvsim.open_trace` or `kvsim.capture` to get one. Immutable.

    Args:
        source: the arrays.
        header: facts about the trace.
        dtype: the dtype that `read` returns: float64 for float64 arrays, float32 for all others.
        token_text: the text of each token, or None.
        fingerprint: the recorded one; computed from the arrays by default.
        path: of the stored trace, or its URL; None in memory.
        base: the trace whose KV heads `source` repeats, if any.

    Attributes:
        n_layers, n_qheads, n_heads: number of layers, of query heads and of KV heads.
        n_pos: number of tokens, prompt and response.
        dim, value_dim: dimensions of a key, and of a value.
        sizes: query heads, KV heads, dim and value_dim of each layer. If layers differ, n_qheads to
            entry_size (except n_pos) raise NeedsError, and so does reading different layers
            together; `part` returns the trace of layers of one size.
        readable: layers that can be read; others are of another size.
        prompt_len, formulas, ropes, layer_ids, name, meta: `Header`'s.
        owners: `Header`'s too; each layer its own owner by default.
    """

    n_qheads, n_heads, dim, value_dim = map(_OfSize, range(4))

    def __init__(
        self,
        source: ArraySource,
        header: Header,
        *,
        dtype: torch.dtype | None = None,
        token_text: Sequence[str] | None = None,
        fingerprint: str | None = None,
        path: Path | str | None = None,
        base: Trace | None = None,
    ) -> None:
        layers, qheads, n_pos, dim = source.shapes["q"]
        largest = qheads, source.shapes["k"][1], dim, source.shapes["v"][3]
        self.n_layers: Final = layers
        self.n_pos: Final = n_pos
        self.sizes: Final[tuple[Size, ...]] = header.sizes or (largest,) * layers
        self.readable = tuple(range(layers))
        self.prompt_len: Final = header.prompt_len
        self.formulas: Final = header.formulas
        self.ropes: Final = header.ropes
        self.layer_ids: Final = header.layer_ids
        self.owners: Final = header.owners or tuple(range(layers))
        self.name: Final = header.name
        self.meta: Final = header.meta
        self.header: Final = header
        self.source: Final = source
        self.dtype: Final[torch.dtype] = dtype or torch.float32
        self.token_text: Final = None if token_text is None else [*map(str, token_text)]
        self.path: Final = path
        self._fingerprint, self._base = fingerprint, base
        #: results shared by replays
        self.memo: Final = Memo()
        same = None if base is None else base.full_attention
        self.full_attention: FullAttention = FullAttention(
            source, header.formulas, self.dtype, cache=path is None, base=same
        )
        self._parts: dict[Size, Trace] = {}

    @classmethod
    def from_arrays(
        cls,
        q: ArrayLike,
        k: ArrayLike,
        v: ArrayLike,
        *,
        prompt_len: int,
        rope: Rope | Sequence[Rope],
        scale: float | None = None,
        formulas: Sequence[Formula] | None = None,
        layer_ids: Sequence[int] | None = None,
        tokens: ArrayLike | Sequence[int] | None = None,
        token_text: Sequence[str] | None = None,
        meta: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Self:
        """Build a trace of arrays in memory, each copied once at most.

        A tensor, or a read-only numpy array, is not copied if it is in C order, in the compute
        dtype and on the CPU. Do not write to it later.

        Args:
            q: queries after RoPE [layer, qhead, pos, dim].
            k: keys after RoPE [layer, head, pos, dim]; qhead is a multiple of head.
            v: values [layer, head, pos, value_dim].
            prompt_len: number of rows of the prefill, 1 to pos.
            rope: the rotary embedding of q and k, one for all layers or one each.
            scale: factor of the logits; dim ** -0.5 by default.
            formulas: the formula of each layer, instead of `scale`, if it is not plain causal
                attention: softcap, sliding window, chunks, sinks.
            layer_ids: the model's number of each layer; 0, 1, 2, ... by default.
            tokens: token ids [pos].
            token_text: the text of each token.
            meta: provenance, ready for JSON.
            more: other fields of `Header`, such as name and context_len, and other arrays of
                `docs/trace-format.md`, such as attn_out [layer, qhead, pos, value_dim] and lse
                [layer, qhead, pos], which are computed where they are missing, and o_proj [layer,
                qhead, value_dim, hidden].

        float64 arrays compute in float64, all others in float32.

        Raises:
            TraceError: shapes that do not fit, prompt_len out of range, NaN or infinity.
            TypeError: an unknown keyword.
        """
        given: dict[str, ArrayLike] = {"q": q, "k": k, "v": v}
        given |= {key: x for key in AXES if (x := more.pop(key, None)) is not None}
        name, left_out = more.get("name", "memory"), more.get("left_out")
        arrays = {key: as_tensor(key, array, name) for key, array in given.items()}
        shapes = whole_shapes({key: tuple(x.shape) for key, x in arrays.items()}, left_out)
        check_shapes(shapes, name)
        n_layers, _, n_pos, dim = shapes["q"]
        if formulas is None:
            dims = [size[2] for size in more.get("sizes", ())] or [dim] * n_layers
            formulas = [Formula(x**-0.5 if scale is None else scale) for x in dims]
        elif scale is not None:
            raise TraceError(f"{name}: both scale and formulas are given, expected one of them")
        check_meta(meta or {}, name)
        facts: dict[str, Any] = {  # `check` converts them to tuples
            "formulas": formulas,
            "ropes": [rope] * n_layers if isinstance(rope, Rope) else rope,
            "layer_ids": range(n_layers) if layer_ids is None else layer_ids,
            "source_dtypes": {key: DTYPES[array.dtype] for key, array in arrays.items()},
            "meta": dict(meta or {}),
        }
        header = Header(prompt_len, **facts, **more)
        header.check(shapes, name)
        double = any(arrays[key].dtype == torch.float64 for key in "qkv")
        dtype = torch.float64 if double else torch.float32
        arrays = {key: in_memory(array, dtype) for key, array in arrays.items()}
        for key, array in arrays.items():
            check_finite(key, array, name)
        if tokens is not None:
            arrays["tokens"] = as_tokens(tokens, n_pos, name)
        if token_text is not None:
            check_texts(token_text, n_pos, name)
        source = HeldRows(InMemory(arrays), left_out, name)
        return cls(source, header, dtype=dtype, token_text=token_text)

    def part(self, layers: Iterable[int] | None = None) -> Trace:
        """Return the trace for layers of one size, by the same places; other layers are unreadable.

        layers: by default those with eviction (not `windowed`). Returns itself if all layers have
        one size. Raises NeedsError if these layers have several sizes.
        """
        if not self.header.sizes:
            return self
        if layers is None:
            layers = (i for i in range(self.n_layers) if i not in self.windowed)
        size = _size_of(self, layers)
        if size not in self._parts:
            source, header = OneSize(self.source, self.sizes, size), replace(self.header, sizes=())
            part = derived(self, source, header, fingerprint=self.fingerprint)
            self._parts[size] = part
            part.windowed = self.windowed
            part.readable = tuple(i for i, x in enumerate(self.sizes) if x == size)
        return self._parts[size]

    @property
    def group(self) -> int:
        """Query heads per KV head; query head i belongs to KV head i // group."""
        return self.n_qheads // self.n_heads

    @property
    def entry_size(self) -> int:
        """Numbers per entry and head in a cache; a latent value is part of its key."""
        return self.dim + (0 if self.header.latent else self.value_dim)

    @cached_property
    def windowed(self) -> tuple[int, ...]:
        """Places of layers without eviction.

        A window or chunks mask out entries of some row, or the size differs from that of the last
        layer without such a mask.
        """
        n_pos = self.n_pos
        whole = [i for i, x in enumerate(self.formulas) if (x.reach or n_pos) >= n_pos]
        size = self.sizes[whole[-1]] if whole else None
        return tuple(i for i, x in enumerate(self.sizes) if i not in whole or x != size)

    @property
    def segments(self) -> tuple[tuple[str, int, int], ...]:
        """(kind, start, stop) of `context`, then `question` and `answer` of each turn.

        Empty ones, such as the answer of a bare prompt, are left out.
        """
        questions = self.header.questions
        ends = [0, self.header.context_len or 0, self.prompt_len, *chain(*questions), self.n_pos]
        kinds = ["context", *["question", "answer"] * (1 + len(questions))]
        spans = zip(kinds, *zip(*pairwise(ends), strict=True), strict=True)
        return tuple((kind, start, stop) for kind, start, stop in spans if start < stop)

    @property
    def extent(self) -> tuple[int, int, int | None, tuple[tuple[int, int], ...]]:
        """Arguments of `Schedule.rows`: prompt_len, n_pos, context_len, questions."""
        return self.prompt_len, self.n_pos, self.header.context_len, self.header.questions

    @property
    def answers(self) -> tuple[tuple[int | None, slice], ...]:
        """Number of each turn, from 1, and the rows of its answer, counted from the end.

        With one turn: None and all rows.
        """
        if not self.header.questions:
            return ((None, slice(None)),)
        n, spans = self.n_pos, self.header.answers(self.n_pos)
        return tuple(enumerate((slice(a - n, b - n or None) for a, b in spans), start=1))

    @property
    def positions(self) -> Tensor:
        """RoPE position of each row in the sequence; int64 [pos]."""
        return self.source.positions

    @property
    def digest(self) -> str:
        """SHA-256 of the inputs of attention, the same in memory and on disk."""
        digest, _, rest = self.fingerprint.partition("+")
        return digest + rest[16:]

    @property
    def fingerprint(self) -> str:
        """The digest and other inputs of results (`kvsim.core.digest.fingerprint`)."""
        if self._base is not None:
            return f"{self._base.fingerprint}/per_query_head"
        if self._fingerprint is None:
            from kvsim.core.digest import array_fingerprint  # noqa: PLC0415 on demand

            facts = self.source, self.header, self.dtype, self.token_text
            self._fingerprint = array_fingerprint(*facts)
        return self._fingerprint

    def has(self, name: str) -> bool:
        """Whether the array `name` is recorded; computable arrays do not count."""
        return name in self.source.shapes

    def __repr__(self) -> str:
        qheads, heads, dim, _ = map(max, *self.sizes, self.sizes[0])
        return (
            f"Trace({self.name!r}, layers={self.n_layers}, qheads={qheads}, "
            f"heads={heads}, pos={self.n_pos}, dim={dim}, prompt_len={self.prompt_len})"
        )

    def read(
        self, name: str, layers: slice = _ALL, pos: slice = _ALL, *, stored: bool = False
    ) -> Tensor:
        """Return part of an array in the compute dtype (`tokens`: int64); a view if in memory.

        Args:
            name: an array of `kvsim.schema.AXES` that the trace has.
            layers: layers by their place in the trace, step 1.
            pos: positions, step 1; for `attention`, rows; ignored for `o_proj` and probes.
            stored: keep the stored dtype.

        Raises:
            NeedsError: the trace has no such array, or left out some of these rows.
            TraceError: the stored array is damaged.
        """
        if not self.has(name):
            raise NeedsError(missing_array(name, self.source.shapes, self.meta, self.name))
        check_steps(layers, pos)
        source = self.source
        if self.header.sizes and is_sized(name):
            source = self.part(range(*layers.indices(self.n_layers))).source
        part = source.read(name, layers, pos)
        return part if stored else part.to(torch.int64 if name == "tokens" else self.dtype)

    @property
    def tokens(self) -> Tensor | None:
        """Token ids [pos], int64, or None."""
        return self.read("tokens") if self.has("tokens") else None

    def full(self, layers: slice = _ALL, rows: slice = _ALL) -> tuple[Tensor, Tensor]:
        """Return full attention of rows: attn_out [layer, qhead, pos, value_dim] and lse.

        As recorded, else computed; traces in memory keep the result.
        """
        check_steps(layers, rows)
        part = self.part(range(*layers.indices(self.n_layers)))
        return part.full_attention.layers(layers, rows)

    def attention(self, layer: int, rows: Positions, pos: Positions | None = None) -> Tensor:
        """Return exact rows of full attention [qhead, row, pos], from the log-sum-exp.

        Args:
            layer: a layer by its place in the trace.
            rows: query positions.
            pos: key positions, all of them by default; masked ones have weight 0.

        Raises PositionError for layers, rows or positions out of range.
        """
        if integer(layer) is None or not -self.n_layers <= layer < self.n_layers:
            raise PositionError(f"layer is {layer!r}; expected 0..{self.n_layers - 1}")
        at = as_positions(rows, self.n_pos)
        to = as_positions(_ALL if pos is None else pos, self.n_pos)
        part = self.part([range(self.n_layers)[layer]])
        if not len(at) or not len(to):
            return torch.zeros((part.n_qheads, len(at), len(to)), dtype=self.dtype)
        return part.full_attention.weights(range(self.n_layers)[layer], at, to)


def _size_of(trace: Trace, layers: Iterable[int]) -> Size:
    places: dict[Size, list[int]] = {}
    for layer in layers if trace.header.sizes else (0,):
        places.setdefault(trace.sizes[layer], []).append(layer)
    if len(places) > 1:
        kinds = ", ".join(f"{numbered(x)} {size}" for size, x in places.items())
        raise NeedsError(
            f"{trace.name}: layers differ in (query heads, KV heads, dimensions, of values): "
            f"{kinds}; expected layers of one size, read one by one or by Trace.part"
        )
    return next(iter(places), trace.sizes[0])


def derived(trace: Trace, source: ArraySource, header: Header | None = None, **more: Any) -> Trace:
    """Return a trace with another source, and header if given; more: as for `Trace`."""
    facts: dict[str, Any] = {"token_text": trace.token_text, "path": trace.path}
    return Trace(source, header or trace.header, dtype=trace.dtype, **facts | more)
