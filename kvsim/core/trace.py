"""A trace: one token sequence through one model, as its attention saw it.

`Trace` answers the same questions whether its arrays are in memory (`Trace.from_arrays`) or on disk
(`open_trace`, format in `docs/trace-format.md`). Layers are counted 0, 1, 2, ... among those that
the trace holds; `layer_ids` gives the model's numbers. Axes are those of `kvsim.schema.AXES`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from kvsim.core.attention import Formula, Rope, attention_weights, causal_attention
from kvsim.errors import NeedsError, TraceError
from kvsim.schema import AXES, is_url
from kvsim.store.checks import DTYPES, check_finite, check_shapes, stored_dtype
from kvsim.store.header import CHECKSUMMED, DIGESTED, ContentDigest, Header
from kvsim.store.memory import ArrayLike, Memory, Source, as_tensor, as_tokens

if TYPE_CHECKING:
    import xarray

__all__ = ["Trace", "open_trace"]

T = TypeVar("T")

Positions = Sequence[int] | slice | Tensor

_ALL = slice(None)

# Arrays that `kvsim capture` records only when asked.
_ON_REQUEST = {
    "attention": "--attention full (attention=True)",
    "attention_window": "--attention window:N (attention='window:N')",
    "o_proj": "--o-proj (o_proj=True)",
    "residual": "--residual (residual=True)",
}


class _PerQueryHead:
    """Another trace with the keys and values of a KV head repeated for each of its queries."""

    def __init__(self, base: Trace) -> None:
        self.base = base

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes = dict(self.base.source.shapes)
        for name in ("k", "v"):
            layers, heads, *rest = shapes[name]
            shapes[name] = (layers, heads * self.base.group, *rest)
        return shapes

    def read(self, name: str, layers: slice, pos: slice) -> Tensor:
        part = self.base.source.read(name, layers, pos)
        return part.repeat_interleave(self.base.group, dim=1) if name in ("k", "v") else part


class _Rows:
    """Another trace with the rows at some positions alone, as a model that runs on them alone.

    at: int64 [n], ascending. What full attention gave is left out: these rows see each other only.
    """

    _KEPT = ("q", "k", "v", "o_proj")

    def __init__(self, base: Trace, at: Tensor) -> None:
        self.base, self.at = base, at

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes = {name: self.base.source.shapes[name] for name in self._KEPT if self.base.has(name)}
        for name in ("q", "k", "v"):
            layers, heads, _, dim = shapes[name]
            shapes[name] = (layers, heads, len(self.at), dim)
        return shapes

    def read(self, name: str, layers: slice, pos: slice) -> Tensor:
        at = self.at[pos]
        if name == "o_proj" or not len(at):
            return self.base.source.read(name, layers, pos)
        first, stop = int(at[0]), int(at[-1]) + 1
        part = self.base.source.read(name, layers, slice(first, stop))
        return part if stop - first == len(at) else part.index_select(2, at - first)


class Trace:
    """One token sequence through one model: q, k, v after RoPE, and what is known about them.

    Made by `Trace.from_arrays`, `open_trace` or `kvsim.capture`, not by hand. Immutable.
    """

    def __init__(
        self,
        source: Source,
        header: Header,
        *,
        dtype: torch.dtype = torch.float32,
        token_text: Sequence[str] | None = None,
        digest: str | None = None,
        path: Path | str | None = None,
    ) -> None:
        self.source, self._header, self._dtype = source, header, dtype
        self._token_text = None if token_text is None else list(token_text)
        self._digest, self._path = digest, path
        # attention of in-memory traces without a recorded one, filled layer by layer
        self._computed: tuple[Tensor, Tensor] | None = None
        self._computed_layers: set[int] = set()

    # --- making and saving ---

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
        attn_out: ArrayLike | None = None,
        lse: ArrayLike | None = None,
        o_proj: ArrayLike | None = None,
        residual: ArrayLike | None = None,
        tokens: ArrayLike | Sequence[int] | None = None,
        token_text: Sequence[str] | None = None,
        name: str = "memory",
        layer_ids: Sequence[int] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> Self:
        """A trace of arrays in memory, used without a copy where the dtype is the compute dtype.

        Args:
            q: queries after RoPE [layer, qhead, pos, dim].
            k: keys after RoPE [layer, head, pos, dim]; qhead is a multiple of head.
            v: values [layer, head, pos, dim].
            prompt_len: number of rows of the prefill, 1 to pos.
            rope: the rotary embedding that q and k went through, one for all layers or one each.
            scale: factor of the logits; dim ** -0.5 by default.
            formulas: for each layer what it computes, instead of `scale`, where that is not plain
                causal attention: softcap, sliding window, sinks.
            attn_out: attention output before the output projection, like q; computed if missing.
            lse: log-sum-exp of each row's logits [layer, qhead, pos]; computed if missing.
            o_proj: output projection of each query head [layer, qhead, dim, hidden].
            residual: input of each decoder layer [layer, pos, hidden].
            tokens: token ids [pos].
            token_text: the text of each token.
            name: for tables and figures.
            layer_ids: the model's number of each layer; 0, 1, 2, ... by default.
            meta: provenance, ready for JSON.

        float64 arrays compute in float64, all others in float32.

        Raises:
            TraceError: shapes that do not fit, prompt_len out of range, NaN or infinity.
        """
        given = {"q": q, "k": k, "v": v, "attn_out": attn_out, "lse": lse, "o_proj": o_proj}
        given["residual"] = residual
        arrays = {key: as_tensor(key, array) for key, array in given.items() if array is not None}
        check_shapes({key: tuple(array.shape) for key, array in arrays.items()}, name)
        n_layers, n_qheads, n_pos, dim = arrays["q"].shape
        if formulas is None:
            formulas = [_plain(dim**-0.5 if scale is None else scale, name)] * n_layers
        elif scale is not None:
            raise TraceError(f"{name}: both scale and formulas are given, expected one of them")
        header = Header(
            prompt_len=int(prompt_len),
            formulas=tuple(formulas),
            ropes=(rope,) * n_layers if isinstance(rope, Rope) else tuple(rope),
            layer_ids=tuple(range(n_layers) if layer_ids is None else map(int, layer_ids)),
            name=name,
            source_dtypes={key: DTYPES[array.dtype] for key, array in arrays.items()},
            meta=dict(meta or {}),
        )
        header.check(n_layers=n_layers, n_qheads=n_qheads, n_pos=n_pos, dim=dim, where=name)
        double = any(arrays[key].dtype == torch.float64 for key in "qkv")
        dtype = torch.float64 if double else torch.float32
        arrays = {key: array.to(dtype) for key, array in arrays.items()}
        for key, array in arrays.items():
            check_finite(key, array, name)
        if tokens is not None:
            arrays["tokens"] = as_tokens(tokens, n_pos, name)
        if token_text is not None and len(token_text) != n_pos:
            raise TraceError(
                f"{name}: token_text has {len(token_text)} entries, expected {n_pos}, one per token"
            )
        return cls(Memory(arrays), header, dtype=dtype, token_text=token_text)

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path | str:
        """Write the trace to `path` in the format of `docs/trace-format.md`; gives the path.

        Stores what the trace has, attention output and log-sum-exp included if there are any.

        Args:
            path: a folder to be, or a URL of a store, such as ``s3://bucket/x.zarr``.
            overwrite: replace a trace that is there; not for a URL.

        Raises:
            TraceExistsError: something is at `path`, and it is no trace or `overwrite` is False.
        """
        if is_url(path):
            from kvsim.store.remote import check_free, upload  # noqa: PLC0415  an optional extra

            check_free(str(path), overwrite=overwrite)
            with TemporaryDirectory(prefix="kvsim-") as staging:
                return upload(Path(self.save(Path(staging, "trace"))), str(path))
        from kvsim.store.writer import write_trace  # noqa: PLC0415  the writer needs zarr

        names = [key for key in CHECKSUMMED if self.has(key)]

        def read(key: str, layer: int) -> Tensor:
            layers = slice(layer, layer + 1)
            part = self.source.read(key, layers, _ALL)
            return part if AXES[key][0] != "layer" else part[0]

        return write_trace(
            Path(path),
            self._header,
            shapes={key: self.source.shapes[key] for key in names},
            compute_dtype=DTYPES[self._dtype],
            read=read,
            token_text=self._token_text,
            overwrite=overwrite,
        )

    def per_query_head(self) -> Trace:
        """The same trace with keys and values repeated, so that every query head has its own.

        Nothing is copied before it is read.
        """
        if self.group == 1:
            return self
        return Trace(
            _PerQueryHead(self),
            self._header,
            dtype=self._dtype,
            token_text=self._token_text,
            path=self._path,
        )

    def only(self, prompt_rows: Tensor) -> Trace:
        """The trace as layers see it that go on with some rows of the prompt alone.

        prompt_rows: their positions, int [k], ascending. Rows after the prompt stay. Places in the
        new trace count these rows; `positions` says where they are. Nothing is copied before it is
        read; attention is that of these rows among themselves, with the recorded q, k, v.
        """
        after = torch.arange(self.prompt_len, self.n_pos)
        at = torch.cat([prompt_rows.to("cpu", torch.int64), after])
        header = replace(self._header, prompt_len=len(prompt_rows))
        return Trace(_Rows(self, at), header, dtype=self._dtype)

    # --- facts ---

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return self.source.shapes["q"][0]

    @property
    def n_qheads(self) -> int:
        """Number of query heads."""
        return self.source.shapes["q"][1]

    @property
    def n_heads(self) -> int:
        """Number of KV heads."""
        return self.source.shapes["k"][1]

    @property
    def group(self) -> int:
        """Query heads of one KV head; query head i belongs to KV head i // group."""
        return self.n_qheads // self.n_heads

    @property
    def n_pos(self) -> int:
        """Number of tokens, prompt and response."""
        return self.source.shapes["q"][2]

    @property
    def dim(self) -> int:
        """Dimensions of a head."""
        return self.source.shapes["q"][3]

    @property
    def prompt_len(self) -> int:
        """Rows 0 to prompt_len - 1 are the prefill."""
        return self._header.prompt_len

    @property
    def positions(self) -> Tensor:
        """Position of each row in the text, which RoPE turned it by; int64 [pos]."""
        source = self.source
        if isinstance(source, _PerQueryHead):
            return source.base.positions
        return source.at if isinstance(source, _Rows) else torch.arange(self.n_pos)

    @property
    def formulas(self) -> tuple[Formula, ...]:
        """What each layer computes from q, k, v."""
        return self._header.formulas

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary embedding that q and k of each layer went through."""
        return self._header.ropes

    @property
    def scale(self) -> float:
        """Factor of the logits q . k, where it is that of all layers; else NeedsError."""
        return self._shared("scale", [formula.scale for formula in self.formulas])

    @property
    def rope(self) -> Rope:
        """The rotary embedding, where it is that of all layers; else NeedsError."""
        return self._shared("rope", self.ropes)

    def _shared(self, name: str, of_layers: Sequence[T]) -> T:
        if len({*of_layers}) > 1:
            raise NeedsError(
                f"{self.name}: the layers have {len({*of_layers})} kinds of {name}, expected one; "
                f"see trace.formulas and trace.ropes, which have one for each layer"
            )
        return of_layers[0]

    @property
    def windowed(self) -> tuple[int, ...]:
        """Layers, by their place, whose sliding window hides something from some row."""
        windows = ((i, formula.window) for i, formula in enumerate(self.formulas))
        return tuple(i for i, window in windows if window is not None and window < self.n_pos)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that `read` gives: float64 for float64 arrays, float32 for all others."""
        return self._dtype

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The model's number of each layer."""
        return self._header.layer_ids

    @property
    def whole(self) -> bool:
        """Whether these are all layers of the model, as far as the trace says how many it has."""
        model = self.meta.get("model")
        said = model.get("layers") if isinstance(model, dict) else None
        return self.layer_ids == tuple(range(said if isinstance(said, int) else self.n_layers))

    @property
    def name(self) -> str:
        """A name for tables and figures."""
        return self._header.name

    @property
    def path(self) -> Path | str | None:
        """Where the trace is stored, its URL if it is not on this machine; None in memory."""
        return self._path

    @property
    def meta(self) -> Mapping[str, Any]:
        """Provenance: model, text, generation settings, answer check, versions."""
        return self._header.meta

    @property
    def labels(self) -> dict[str, str | int]:
        """What the prompt says of itself, as far as it does: `task`, `domain`, `level`."""
        return self._header.labels

    @property
    def source_dtypes(self) -> Mapping[str, str]:
        """For each array, the dtype that it had in the model."""
        return self._header.source_dtypes

    @property
    def token_text(self) -> list[str] | None:
        """The text of each token, or None."""
        return self._token_text

    @property
    def digest(self) -> str:
        """SHA-256 of what attention saw, the same in memory and on disk (docs/trace-format.md)."""
        if self._digest is None:
            if isinstance(self.source, _PerQueryHead):
                self._digest = f"{self.source.base.digest}/per_query_head"
            else:
                self._digest = self._compute_digest()
        return self._digest

    def has(self, name: str) -> bool:
        """Whether the array `name` is recorded; one that can be computed does not count."""
        return name in self.source.shapes

    def __repr__(self) -> str:
        return (
            f"Trace({self.name!r}, layers={self.n_layers}, qheads={self.n_qheads}, "
            f"heads={self.n_heads}, pos={self.n_pos}, dim={self.dim}, prompt_len={self.prompt_len})"
        )

    # --- arrays ---

    def read(self, name: str, layers: slice = _ALL, pos: slice = _ALL) -> Tensor:
        """Part of an array in the compute dtype (`tokens`: int64); a view where it is in memory.

        Args:
            name: an array of `kvsim.schema.AXES` that the trace has.
            layers: layers by their place in the trace, step 1.
            pos: positions, step 1; for `attention`, rows; without meaning for `o_proj`.

        Raises:
            NeedsError: the trace has no such array.
            TraceError: the stored array is damaged.
        """
        if not self.has(name):
            raise NeedsError(
                f"{self.name}: the trace has no array {name!r}, it has "
                f"{', '.join(self.source.shapes)}; record it again with "
                f"{_ON_REQUEST.get(name, 'what is missing')}"
            )
        for part in (layers, pos):
            if part.step not in (None, 1):
                raise ValueError(f"step is {part.step}, expected 1")
        array = self.source.read(name, layers, pos)
        return array.to(torch.int64 if name == "tokens" else self._dtype)

    @property
    def q(self) -> Tensor:
        """All queries after RoPE [layer, qhead, pos, dim]."""
        return self.read("q")

    @property
    def k(self) -> Tensor:
        """All keys after RoPE [layer, head, pos, dim]."""
        return self.read("k")

    @property
    def v(self) -> Tensor:
        """All values [layer, head, pos, dim]."""
        return self.read("v")

    @property
    def attn_out(self) -> Tensor:
        """Attention output before the output projection [layer, qhead, pos, dim]."""
        return self.full(_ALL)[0]

    @property
    def lse(self) -> Tensor:
        """Log-sum-exp of the logits of each row of full attention [layer, qhead, pos]."""
        return self.full(_ALL)[1]

    @property
    def o_proj(self) -> Tensor:
        """Output projection of each query head [layer, qhead, dim, hidden].

        A layer's attention gives sum_i attn_out[layer, i] @ o_proj[layer, i], and a bias, which
        depends on no head and is not stored.

        Raises:
            NeedsError: it was not recorded; `kvsim capture --o-proj` does.
        """
        return self.read("o_proj")

    @property
    def residual(self) -> Tensor:
        """Residual stream: the input of each decoder layer [layer, pos, hidden].

        residual[0] is what the first layer is given, the embedding of each token and what the model
        makes of it; the output of layer l is residual[l + 1];
        the output of the model's last layer is not stored.

        Raises:
            NeedsError: it was not recorded; `kvsim capture --residual` does.
        """
        return self.read("residual")

    @property
    def tokens(self) -> Tensor | None:
        """Token ids [pos], int64, or None."""
        return self.read("tokens") if self.has("tokens") else None

    def full(self, layers: slice = _ALL) -> tuple[Tensor, Tensor]:
        """Full attention of `layers`: attn_out [layer, qhead, pos, dim], lse [layer, qhead, pos].

        As recorded, else computed from q, k, v; what is computed stays in memory only for traces
        that are in memory themselves.
        """
        if isinstance(self.source, _PerQueryHead):  # queries are the same, so is the output
            return self.source.base.full(layers)
        recorded = {name: self.read(name, layers) for name in ("attn_out", "lse") if self.has(name)}
        if len(recorded) == 2:
            return recorded["attn_out"], recorded["lse"]
        out, lse = self._compute_full(range(*layers.indices(self.n_layers)))
        return recorded.get("attn_out", out), recorded.get("lse", lse)

    def _compute_full(self, wanted: range) -> tuple[Tensor, Tensor]:
        stored = self._path is not None
        if stored or self._computed is None:
            shape = (len(wanted) if stored else self.n_layers, self.n_qheads, self.n_pos)
            out = torch.empty((*shape, self.dim), dtype=self._dtype)
            lse = torch.empty(shape, dtype=self._dtype)
            if not stored:
                self._computed = out, lse
        else:
            out, lse = self._computed
        first = wanted.start if stored else 0
        for layer in wanted:
            if not stored and layer in self._computed_layers:
                continue
            one = slice(layer, layer + 1)
            q, k, v = (self.read(name, one)[0] for name in "qkv")
            out[layer - first], lse[layer - first] = causal_attention(q, k, v, self.formulas[layer])
            if not stored:
                self._computed_layers.add(layer)
        return (out, lse) if stored else (out[_slice(wanted)], lse[_slice(wanted)])

    def attention(self, layer: int, rows: Positions, pos: Positions | None = None) -> Tensor:
        """Exact rows of full attention [qhead, row, pos], computed through the log-sum-exp.

        Args:
            layer: a layer by its place in the trace.
            rows: query positions.
            pos: key positions, all of them by default; what the row does not see gives 0.
        """
        at = _positions(rows, self.n_pos)
        to = _positions(_ALL if pos is None else pos, self.n_pos)
        if not len(at) or not len(to):
            return torch.zeros((self.n_qheads, len(at), len(to)), dtype=self._dtype)
        layer = range(self.n_layers)[layer]
        one = slice(layer, layer + 1)
        q = self._pick("q", one, at)
        k = self._pick("k", one, to)
        if self.has("lse"):
            lse = self._pick("lse", one, at)
        else:
            lse = self.full(one)[1][0].index_select(1, at)
        return attention_weights(q, k, lse, self.formulas[layer], at, to)

    def _pick(self, name: str, layer: slice, at: Tensor) -> Tensor:
        """Positions `at` of one layer, reading no more than from the first to the last of them."""
        low, high = int(at.min()), int(at.max())
        return self.read(name, layer, slice(low, high + 1))[0].index_select(1, at - low)

    def to_xarray(self) -> xarray.Dataset:
        """The arrays as an xarray Dataset with named dimensions; lazy for a stored trace.

        Raises:
            ImportError: xarray is not installed (`pip install kvsim[xarray]`).
        """
        import xarray as xr  # noqa: PLC0415  an optional extra

        from kvsim.store.labelled import variables  # noqa: PLC0415  as xarray
        from kvsim.store.reader import StoredTrace  # noqa: PLC0415  the reader needs zarr

        data: dict[str, Any]
        if isinstance(self.source, StoredTrace):
            data = dict(variables(self.source))
        else:
            data = {
                name: (AXES[name], self.read(name).numpy())
                for name in self.source.shapes
                if name != "attention"
            }
        if self._token_text is not None:
            data["token_text"] = (AXES["token_text"], np.array(self._token_text))
        coordinates = {"layer": list(self.layer_ids)}
        return xr.Dataset(data, coords=coordinates, attrs=self._header.attributes())

    def _compute_digest(self) -> str:
        digest = ContentDigest()
        shapes = dict(self.source.shapes)
        for name in DIGESTED:
            if name not in shapes:
                continue
            if name == "tokens":
                digest.update_all(name, 0, self.tokens_int32(), axis=0)
                continue
            stored = stored_dtype(self.source_dtypes.get(name, DTYPES[self._dtype]))
            for layer in range(self.n_layers):
                part = self.source.read(name, slice(layer, layer + 1), _ALL)[0]
                digest.update_all(name, layer, part.to(stored).numpy(), axis=1)
        return digest.total(self._header, shapes)

    def tokens_int32(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Token ids as they are stored."""
        return self.read("tokens").numpy().astype(np.int32)


def open_trace(path: str | Path) -> Trace:
    """The trace stored at `path`; arrays are read when they are asked for.

    Args:
        path: a folder, a packed trace (`kvsim trace pack`), or the URL of a folder, such as
            ``s3://bucket/x.zarr``.

    Raises:
        TraceNotFoundError: there is nothing at `path`, or nothing that says it is a trace.
        TraceError: what is there is incomplete, damaged or of a newer format.
    """
    from kvsim.store.reader import StoredTrace  # noqa: PLC0415  the reader needs zarr

    stored = StoredTrace(path)
    return Trace(
        stored,
        stored.header,
        dtype=stored.compute_dtype,
        token_text=stored.token_text,
        digest=stored.digest,
        path=stored.path,
    )


def _positions(at: Positions, n_pos: int) -> Tensor:
    if isinstance(at, slice):
        return torch.arange(n_pos)[at]
    index = torch.as_tensor(at, dtype=torch.int64)
    index = torch.where(index < 0, index + n_pos, index)
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < n_pos:
        raise IndexError(f"position out of range, expected 0 to {n_pos - 1}")
    return index


def _plain(scale: float, where: str) -> Formula:
    try:
        return Formula(float(scale))
    except ValueError as error:
        raise TraceError(f"{where}: {error}") from None


def _slice(wanted: range) -> slice:
    return slice(wanted.start, wanted.stop)
