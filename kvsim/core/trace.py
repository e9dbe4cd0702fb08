"""A trace: one token sequence through one model, with everything its attention depends on.

`Trace` has the same interface whether its arrays are in memory (`Trace.from_arrays`) or on disk
(`kvsim.open_trace`): it reads them from a `Source` and knows nothing of files. Layers are counted
0, 1, 2, ... among those of the trace; `layer_ids` has the model's numbers. Axes: `schema.AXES`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import torch
from torch import Tensor

from kvsim.core.arguments import ArrayLike, Positions, as_positions, as_tensor, as_tokens
from kvsim.core.attention import Formula, Rope
from kvsim.core.checks import DTYPES, check_finite, check_shapes
from kvsim.core.digest import array_digest
from kvsim.core.full import FullAttention
from kvsim.core.header import Header
from kvsim.core.sources import Memory, PerQueryHead, SelectedRows, Source, check_steps
from kvsim.errors import NeedsError, TraceError

if TYPE_CHECKING:
    import xarray

T = TypeVar("T")

_ALL = slice(None)

# Arrays that `kvsim capture` records only when asked.
_ON_REQUEST = {
    "attention": "--attention full (attention=True)",
    "attention_window": "--attention window:N (attention='window:N')",
    "o_proj": "--o-proj (o_proj=True)",
    "residual": "--residual (residual=True)",
}


class Trace:
    """One token sequence through one model: q, k, v after RoPE, and its header.

    Use `Trace.from_arrays`, `kvsim.open_trace` or `kvsim.capture` to get one. Immutable.

    Args:
        source: the arrays.
        header: facts about the trace.
        dtype: the compute dtype.
        token_text: the text of each token.
        digest: the recorded digest; computed from the arrays by default.
        path: where the trace is stored; None in memory.
        base: the trace whose KV heads `source` repeats, if it does.
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
        base: Trace | None = None,
    ) -> None:
        self.source, self.header, self._dtype = source, header, dtype
        self._token_text = None if token_text is None else list(token_text)
        self._digest, self._path, self._base = digest, path, base
        same = None if base is None else base.full_attention
        self.full_attention: FullAttention = FullAttention(
            source, header.formulas, dtype, cache=path is None, base=same
        )

    # --- building and saving ---

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
        """Build a trace of arrays in memory, not copied where their dtype is the compute dtype.

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
        """Write the trace to `path`, as `kvsim.save_trace`, and return the path."""
        return cast("Path | str", _public("save_trace")(self, path, overwrite=overwrite))

    def to_xarray(self) -> xarray.Dataset:
        """Return the arrays with named dimensions, as `kvsim.to_xarray`."""
        return cast("xarray.Dataset", _public("to_xarray")(self))

    def per_query_head(self) -> Trace:
        """Return the trace with keys and values repeated, so that each query head has its own.

        Nothing is copied before it is read.
        """
        if self.group == 1:
            return self
        return Trace(
            PerQueryHead(self.source, self.group),
            self.header,
            dtype=self._dtype,
            token_text=self._token_text,
            path=self._path,
            base=self,
        )

    def only(self, prompt_rows: Tensor) -> Trace:
        """Return the trace of layers to which only some rows of the prompt are propagated.

        prompt_rows: their positions, int [k], ascending. Rows after the prompt stay. The new trace
        counts these rows; its `positions` are those in the sequence. Nothing is copied before it is
        read; attention is that of these rows among themselves, with the recorded q, k, v.
        """
        after = torch.arange(self.prompt_len, self.n_pos)
        rows = torch.cat([prompt_rows.to("cpu", torch.int64), after])
        header = replace(self.header, prompt_len=len(prompt_rows))
        return Trace(SelectedRows(self.source, rows), header, dtype=self._dtype)

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
        return self.header.prompt_len

    @property
    def positions(self) -> Tensor:
        """Position of each row in the sequence, by which RoPE rotated it; int64 [pos]."""
        return self.source.positions

    @property
    def formulas(self) -> tuple[Formula, ...]:
        """What each layer computes from q, k, v."""
        return self.header.formulas

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary embedding that q and k of each layer went through."""
        return self.header.ropes

    @property
    def scale(self) -> float:
        """Factor of the logits q . k, if all layers share it; else NeedsError."""
        return self._shared("scale", [formula.scale for formula in self.formulas])

    @property
    def rope(self) -> Rope:
        """The rotary embedding, if all layers share it; else NeedsError."""
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
        """Layers, by their place, whose sliding window masks something out for some row."""
        windows = ((i, formula.window) for i, formula in enumerate(self.formulas))
        return tuple(i for i, window in windows if window is not None and window < self.n_pos)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that `read` returns: float64 for float64 arrays, float32 for all others."""
        return self._dtype

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The model's number of each layer."""
        return self.header.layer_ids

    @property
    def whole(self) -> bool:
        """Whether these are all layers of the model, as far as `meta` has their number."""
        model = self.meta.get("model")
        layers = model.get("layers") if isinstance(model, dict) else None
        return self.layer_ids == tuple(range(layers if isinstance(layers, int) else self.n_layers))

    @property
    def name(self) -> str:
        """A name for tables and figures."""
        return self.header.name

    @property
    def path(self) -> Path | str | None:
        """Where the trace is stored, its URL if it is not on this machine; None in memory."""
        return self._path

    @property
    def meta(self) -> Mapping[str, Any]:
        """Provenance: model, text, generation settings, answer check, versions."""
        return self.header.meta

    @property
    def labels(self) -> dict[str, str | int]:
        """Labels of the prompt, as far as it has them: `task`, `domain`, `level`."""
        return self.header.labels

    @property
    def source_dtypes(self) -> Mapping[str, str]:
        """For each array, the dtype that it had in the model."""
        return self.header.source_dtypes

    @property
    def token_text(self) -> list[str] | None:
        """The text of each token, or None."""
        return self._token_text

    @property
    def digest(self) -> str:
        """SHA-256 of what attention depends on, the same in memory and on disk."""
        if self._digest is None:
            if self._base is not None:
                self._digest = f"{self._base.digest}/per_query_head"
            else:
                self._digest = array_digest(self.source, self.header, self._dtype)
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
        """Return part of an array in the compute dtype (`tokens`: int64); a view if in memory.

        Args:
            name: an array of `kvsim.schema.AXES` that the trace has.
            layers: layers by their place in the trace, step 1.
            pos: positions, step 1; for `attention`, rows; ignored for `o_proj`.

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
        check_steps(layers, pos)
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

        residual[0] is the input of the first layer: the embedding of each token after everything
        that the model does to it. The output of layer l is residual[l + 1]; the output of the
        model's last layer is not stored.

        Raises:
            NeedsError: it was not recorded; `kvsim capture --residual` does.
        """
        return self.read("residual")

    @property
    def tokens(self) -> Tensor | None:
        """Token ids [pos], int64, or None."""
        return self.read("tokens") if self.has("tokens") else None

    def full(self, layers: slice = _ALL) -> tuple[Tensor, Tensor]:
        """Return full attention of `layers`: attn_out [layer, qhead, pos, dim], lse without dim.

        As recorded, else computed from q, k, v; traces in memory keep what they have computed.
        """
        check_steps(layers)
        return self.full_attention.layers(layers)

    def attention(self, layer: int, rows: Positions, pos: Positions | None = None) -> Tensor:
        """Return exact rows of full attention [qhead, row, pos], computed by the log-sum-exp.

        Args:
            layer: a layer by its place in the trace.
            rows: query positions.
            pos: key positions, all of them by default; masked ones have weight 0.
        """
        at = as_positions(rows, self.n_pos)
        to = as_positions(_ALL if pos is None else pos, self.n_pos)
        if not len(at) or not len(to):
            return torch.zeros((self.n_qheads, len(at), len(to)), dtype=self._dtype)
        return self.full_attention.weights(range(self.n_layers)[layer], at, to)


def _plain(scale: float, where: str) -> Formula:
    try:
        return Formula(float(scale))
    except ValueError as error:
        raise TraceError(f"{where}: {error}") from None


def _public(name: str) -> Any:
    """The public function `kvsim.NAME`, found at call time: core knows nothing of files."""
    return getattr(import_module("kvsim"), name)
