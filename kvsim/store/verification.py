"""Verification of a stored trace: its checksums, and attention recomputed from q, k, v."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvsim.core.attention import attention_weights, causal_attention, recent_attention
from kvsim.core.checks import first_row, relative_error, tolerance
from kvsim.core.digest import CHECKSUMMED, ContentDigest, text_checksum
from kvsim.core.header import Header
from kvsim.core.lazy import torch
from kvsim.errors import TraceError
from kvsim.schema import AXES, CHUNK
from kvsim.store.layout import DENSE
from kvsim.store.metadata import object_at
from kvsim.store.projections import Facts
from kvsim.store.reader import StoredTrace

_ALL = slice(None)

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Verification:
    """Result of `verify`.

    Attributes:
        path: the trace.
        layers: the model's numbers of the stored layers.
        chunks: number of chunks read.
        output_error: for each layer, the largest relative error of a head (`relative_error`)
            between recorded and recomputed attention output; empty if it is not recorded or was
            not recomputed.
        output_tolerance: its limit.
        lse_error: for each layer, the largest absolute error of the recorded log-sum-exp, which
            is the relative error of attention weights; empty as above.
        lse_tolerance: its limit.
        attention_error: the same for dense attention, the largest difference of a weight.
        digest: the recorded digest.
        problems: one sentence for each problem.
    """

    path: str
    layers: tuple[int, ...]
    chunks: int
    output_error: tuple[float, ...]
    output_tolerance: float
    lse_error: tuple[float, ...]
    lse_tolerance: float
    attention_error: tuple[float, ...]
    digest: str
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Return the result as a dict, ready for JSON."""
        return {**asdict(self), "ok": self.ok}


def verify(
    path: str | Path, *, deep: bool = False, progress: Progress | None = None
) -> Verification:
    """Read every chunk of the trace at `path` and compare it with checksums and digest.

    Args:
        path: a stored trace.
        deep: also recompute attention from q, k, v and compare it with the recorded one, which
            takes time that grows with the square of the length.
        progress: called with (layers done, total layers).

    Raises:
        TraceError: the trace cannot be opened; see `open_trace`. Later problems are in the result.
    """
    check = _Check(StoredTrace(path), deep=deep)
    n_layers = len(check.stored.header.layer_ids)
    for layer in range(n_layers):
        check.layer(layer)
        if progress is not None:
            progress(layer + 1, n_layers)
    return check.result()


class _Check:
    """The results of `verify` so far."""

    def __init__(self, stored: StoredTrace, *, deep: bool) -> None:
        self.stored, self.deep = stored, deep
        self.problems: list[str] = []
        self.errors: dict[str, list[float]] = {name: [] for name in ("attn_out", "lse", *DENSE)}
        sources = stored.header.source_dtypes
        dtypes = {name: stored.array(name).dtype.name for name in sources}
        involved = [sources.get("attn_out", "float32"), sources["q"]]
        involved += [dtypes[name] for name in ("q", "k", "v", "attn_out") if name in dtypes]
        self.output_tolerance = tolerance(*involved)
        # that of the capture may be larger: a kernel may round more than its dtype does
        recorded = object_at(stored.header.meta, "capture_check").get("tolerance")
        if isinstance(recorded, int | float):
            self.output_tolerance = max(self.output_tolerance, min(float(recorded), 0.5))
        # it was computed from the stored q, k in float32 or float64: their rounding has no effect
        self.lse_tolerance = tolerance(dtypes.get("lse", "float32"))

    def layer(self, layer: int) -> None:
        parts: dict[str, torch.Tensor] = {}
        for name in CHECKSUMMED[1:]:
            values = self._read(name, layer) if name in self.stored.arrays else None
            if values is not None:
                parts[name] = values
                self._checksum(name, layer, values)
        if self.stored.projections is not None:
            self._read("o_proj", layer)  # compares its checksum
        if {"q", "k", "v"} <= parts.keys():
            self._attention(layer, parts)

    def _read(self, name: str, layer: int, pos: slice = _ALL) -> torch.Tensor | None:
        """Read one layer of an array; None, and a problem, if it is damaged."""
        try:
            read = self.stored.read if name == "o_proj" else self.stored.read_stored
            return read(name, slice(layer, layer + 1), pos)[0]
        except TraceError as error:
            self.problems.append(str(error))
            return None

    def _attention(self, layer: int, parts: Mapping[str, torch.Tensor]) -> None:
        """Recompute attention if deep; always check dense attention, which has no checksum."""
        stored, dtype = self.stored, self.stored.compute_dtype
        dense = [name for name in DENSE if name in stored.arrays]
        q, k, v = (parts[name].to(dtype) for name in "qkv")
        lse = parts.get("lse")
        latent = stored.header.latent
        if self.deep and latent is not None and not torch.equal(k[..., -latent:], v):
            self.problems.append(
                f"{stored.where}: values of layer {layer} are not the latents that end its keys; "
                "record the trace again"
            )
        if self.deep or (dense and lse is None):
            out, computed = _attention(q, k, v, stored.header, layer)
            if "attn_out" in parts:
                worst = float(relative_error(parts["attn_out"].to(dtype), out).max())
                self._judge("attn_out", layer, worst, self.output_tolerance)
            if lse is not None:
                self._judge("lse", layer, float((lse - computed).abs().max()), self.lse_tolerance)
            lse = computed
        if lse is not None:
            for name in dense:
                self._dense(name, layer, q, k, lse)

    def _dense(
        self, name: str, layer: int, q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor
    ) -> None:
        stored = self.stored
        n_pos, first = q.shape[1], first_row(stored.shapes[name])
        worst, pos = 0.0, torch.arange(n_pos)
        for start in range(first, n_pos, CHUNK):
            rows = slice(start, min(start + CHUNK, n_pos))
            recorded = self._read(name, layer, slice(rows.start - first, rows.stop - first))
            if recorded is None:
                return
            expected = attention_weights(
                q[:, rows], k, lse[:, rows], stored.header.formulas[layer], pos[rows], pos
            )
            worst = max(worst, float((recorded - expected).abs().max()))
        self._judge(name, layer, worst, self.lse_tolerance)

    def _embeddings(self, tokens: torch.Tensor) -> None:
        """Check that equal tokens have equal embeddings in the residual stream of layer 0.

        Models without RoPE in any layer add the position to their embeddings and are skipped.
        """
        if not any(rope.inv_freq for rope in self.stored.header.ropes):
            return
        rows = self.stored.read("residual", slice(0, 1), _ALL)[0]  # [pos, hidden]
        distinct, index = tokens.unique(return_inverse=True)
        example = torch.empty_like(distinct, dtype=torch.int64)
        example[index] = torch.arange(len(tokens))  # a position of each distinct token
        different = (rows != rows[example[index]]).any(-1).nonzero()
        if len(different):
            first = int(different[0])
            self.problems.append(
                f"{self.stored.where}: residual of layer 0 differs between positions {first} and "
                f"{int(example[index[first]])}, which are the same token, expected its embedding "
                "at both; record the trace again"
            )

    def _checksum(self, name: str, layer: int, values: torch.Tensor) -> None:
        digest, axes = ContentDigest(), AXES[name]
        if "pos" in axes:
            digest.update_all(name, layer, values.numpy(), axes.index("pos") - ("layer" in axes))
        else:
            digest.update(name, layer, values.numpy())
        ((computed,),) = digest.checksums().values()
        recorded = self.stored.attributes["checksums"][name][layer]
        if computed != recorded:
            place = f" in layer {layer}" if "layer" in axes else ""
            self.problems.append(
                f"{self.stored.where}: the checksum of {name}{place} is {computed[:12]}..., "
                f"expected {recorded[:12]}...; the array was changed after recording"
            )

    def _judge(self, name: str, layer: int, error: float, allowed: float) -> None:
        self.errors[name].append(error)
        if not error <= allowed:  # NaN is a problem too
            self.problems.append(
                f"{self.stored.where}: {name} of layer {layer} differs by {error:.3g} from what "
                f"q, k, v give, expected at most {allowed:g}; record the trace again"
            )

    def result(self) -> Verification:
        stored = self.stored
        try:
            texts = stored.token_text
            recorded = stored.attributes["checksums"].get("token_text")
            if texts is not None and recorded != [text_checksum(texts)]:
                self.problems.append(
                    f"{stored.where}: the text of the tokens is not the recorded one; "
                    "copy the trace again or record it again"
                )
            if "tokens" in stored.shapes:
                tokens = stored.read("tokens", _ALL, _ALL)
                self._checksum("tokens", 0, tokens)
                embedded = "residual" in stored.shapes and stored.header.layer_ids[0] == 0
                if embedded and not self.problems:
                    self._embeddings(tokens)
        except TraceError as error:
            self.problems.append(str(error))
        return Verification(
            path=stored.where,
            layers=stored.header.layer_ids,
            chunks=sum(array.nchunks for array in stored.arrays.values()),
            output_error=tuple(self.errors["attn_out"]),
            output_tolerance=self.output_tolerance,
            lse_error=tuple(self.errors["lse"]),
            lse_tolerance=self.lse_tolerance,
            attention_error=tuple(error for name in DENSE for error in self.errors[name]),
            digest=stored.digest,
            problems=tuple(self.problems),
        )


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, header: Header, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of all rows that a layer has."""
    formula = header.formulas[layer]
    if header.left_out is None:
        return causal_attention(q, k, v, formula)
    first, stop = header.left_out
    out, lse = causal_attention(q[:, :first], k[:, :first], v[:, :first], formula)
    rows = q[:, first:].unflatten(0, (len(k), -1))
    later = recent_attention(rows, k[:, None], v[:, None], formula, stop)
    pairs = zip((out, lse), (x.flatten(0, 1) for x in later), strict=True)
    out, lse = (torch.cat(pair, 1) for pair in pairs)
    return out, lse


def describe(path: str | Path) -> dict[str, Any]:
    """Return shapes, dtypes, sizes, model, labels, spans, text and answer check, ready for JSON.

    Sizes are None where files cannot be listed, as over HTTP. Raises TraceError as `open_trace`.
    """
    stored = StoredTrace(path)
    sizes = stored.sizes
    meta = stored.header.meta
    text = object_at(meta, "text")
    notes = meta.get("notes")
    n_layers, n_qheads, n_pos, dim = stored.shapes["q"]
    latent = stored.header.latent
    return {
        "path": stored.where,
        "name": stored.header.name,
        "format": stored.attributes["kvsim_format"],
        "digest": stored.digest,
        "tokens": n_pos,
        "prompt_len": stored.header.prompt_len,
        "context_len": stored.header.context_len,
        **({"left_out": list(left_out)} if (left_out := stored.header.left_out) else {}),
        "layers": n_layers,
        "layer_ids": list(stored.header.layer_ids),
        "qheads": n_qheads,
        "heads": stored.shapes["k"][1],
        "dim": dim,
        **({"value_dim": stored.shapes["v"][3]} if stored.shapes["v"][3] != dim else {}),
        **({} if latent is None else {"latent": latent}),
        "attention": _kinds(stored.header),
        "arrays": {
            name: {
                "shape": list(array.shape),
                "dtype": "string" if name == "token_text" else array.dtype.name,
                "source_dtype": stored.header.source_dtypes.get(name),
                "bytes": None if sizes is None else _bytes(sizes, f"{name}/"),
            }
            for name, array in stored.arrays.items()
        },
        "projections": _projections(stored),
        "probe": _probe(stored.header),
        "bytes": None if sizes is None else _bytes(sizes),
        "files": None if sizes is None else len(sizes),
        "model": {key: value for key, value in object_at(meta, "model").items() if key != "config"},
        "versions": object_at(meta, "versions"),
        "generation": object_at(meta, "generation"),
        "labels": stored.header.labels,
        "spans": stored.header.spans,
        "response_logprobs": list(stored.header.response_logprobs),
        "prompt": _head(text.get("prompt")),
        "response": _head(text.get("response")),
        "answer_check": object_at(meta, "answer_check") or None,
        "capture_check": object_at(meta, "capture_check") or None,
        "notes": [str(note) for note in notes] if isinstance(notes, list) else [],
    }


def _projections(stored: StoredTrace) -> dict[str, Any] | None:
    facts = Facts.named(stored.header.meta, stored.where)
    if facts is None:
        return None
    sizes = None if stored.projections is None else stored.projections.place.sizes()
    return {
        **asdict(facts),
        "folder": facts.folder,
        "present": stored.projections is not None,
        "bytes": None if sizes is None else sum(sizes.values()),
    }


def _probe(header: Header) -> dict[str, Any] | None:
    probe = header.probe
    if probe is None:
        return None
    return {"kind": probe.kind, "rows": len(probe.tokens), "chunks": [*map(list, probe.chunks)]}


def _bytes(sizes: Mapping[str, int], prefix: str = "") -> int:
    return sum(size for key, size in sizes.items() if key.startswith(prefix))


def _kinds(header: Header) -> list[dict[str, Any]]:
    """Return each kind of attention and RoPE, with the model's numbers of its layers."""
    kinds: dict[str, dict[str, Any]] = {}
    for number, formula, rope in zip(header.layer_ids, header.formulas, header.ropes, strict=True):
        kind = {
            "scale": formula.scale,
            "softcap": formula.softcap,
            "window": formula.window,
            "chunk": formula.chunk,
            "sinks": bool(formula.sinks),
            "rotary_dim": rope.rotary_dim,
            "layout": rope.layout,
        }
        kinds.setdefault(repr(kind), {"layers": [], **kind})["layers"].append(number)
    return list(kinds.values())


def _head(text: object) -> str | None:
    if not isinstance(text, str):
        return None
    return text if len(text) <= 200 else text[:200] + "..."
