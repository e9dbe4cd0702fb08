"""Verification of a stored trace: its checksums, and attention recomputed from q, k, v."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvsim.core.attention import attention_weights, causal_attention
from kvsim.core.checks import as_array, first_row, logit_rounding, tolerance
from kvsim.core.digest import CHECKSUMMED, ContentDigest, text_checksum
from kvsim.core.header import Header
from kvsim.core.lazy import torch
from kvsim.core.left_out import held_parts, stored_part
from kvsim.core.sources import narrowed
from kvsim.errors import TraceError
from kvsim.schema import AXES, CHUNK, OF_ROWS, object_at
from kvsim.store.layout import DENSE
from kvsim.store.projections import Facts
from kvsim.store.reader import StoredTrace

_ALL = slice(None)

#: Rows of a block that is read and recomputed at once.
ROWS = 16 * CHUNK

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
        lse_tolerance: its limit, of the layer with the largest.
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
        dtypes = {name: stored.array(name).number for name in sources}
        involved = [sources.get("attn_out", "float32"), sources["q"]]
        involved += [dtypes[name] for name in ("q", "k", "v", "attn_out") if name in dtypes]
        self.output_tolerance = tolerance(*involved)
        # that of the capture may be larger: a kernel may round more than its dtype does
        recorded = object_at(stored.header.meta, "capture_check").get("tolerance")
        if isinstance(recorded, int | float):
            self.output_tolerance = max(self.output_tolerance, min(float(recorded), 0.5))
        # it was computed from the stored q, k in float32 or float64: their rounding has no effect
        self.lse_dtype = dtypes.get("lse", "float32")
        self.lse_tolerance = tolerance(self.lse_dtype)

    def layer(self, layer: int) -> None:
        """Check a layer: its keys and values whole, other arrays a block of rows at a time."""
        stored, digest, damaged = self.stored, ContentDigest(), set[str]()
        sizes, left_out = stored.header.sizes, stored.header.left_out

        def read(name: str, pos: slice = _ALL) -> torch.Tensor | None:
            values = None if name in damaged else self._read(name, layer, pos)
            if values is None:
                damaged.add(name)
                return None
            _update(digest, name, layer, values)
            return narrowed(name, values[None], sizes[layer])[0] if sizes else values

        names = [name for name in CHECKSUMMED[1:] if name in stored.arrays]
        blocked = [name for name in names if name in (*OF_ROWS, "residual")]
        whole = {name: read(name) for name in names if name not in blocked}
        attention, n_pos = _Attention(stored, layer, deep=self.deep), stored.shapes["k"][2]
        for start in range(0, n_pos, ROWS):
            for pos in held_parts("q", range(start, min(start + ROWS, n_pos)), left_out):
                rows = stored_part("q", pos, n_pos, left_out, stored.where)
                parts = {name: read(name, rows) for name in blocked}
                if not damaged & {"q", "k", "v"}:
                    held = {**whole, **parts}
                    known = {name: x for name, x in held.items() if x is not None}
                    attention.add(pos.start, known)
        if stored.projections is not None:
            self._read("o_proj", layer)  # compares its checksum
        for name, (computed,) in digest.checksums().items():
            if name not in damaged:
                self._checksum(name, layer, computed)
        latent, k, v = stored.header.latent, whole["k"], whole["v"]
        if k is None or v is None or damaged & {"q"}:
            return
        if self.deep and latent is not None and not torch.equal(k[..., -latent:], v):
            self.problems.append(
                f"{stored.where}: values of layer {layer} are not the latents that end its keys; "
                "record the trace again"
            )
        of_layer = max(tolerance(self.lse_dtype), attention.lse_rounding)
        self.lse_tolerance = max(self.lse_tolerance, of_layer)
        for name, error in attention.errors.items():
            if name not in damaged:
                allowed = self.output_tolerance if name == "attn_out" else of_layer
                self._judge(name, layer, error, allowed)
        if attention.recomputed or "lse" not in damaged:
            for name in attention.dense:
                self._dense(name, layer, k.to(stored.compute_dtype), attention.lse, of_layer)

    def _read(self, name: str, layer: int, pos: slice = _ALL) -> torch.Tensor | None:
        """Read one layer of an array; None, and a problem, if it is damaged."""
        try:
            read = self.stored.read if name == "o_proj" else self.stored.read_stored
            return read(name, slice(layer, layer + 1), pos)[0]
        except TraceError as error:
            self.problems.append(str(error))
            return None

    def _dense(
        self, name: str, layer: int, k: torch.Tensor, blocks: list[torch.Tensor], allowed: float
    ) -> None:
        stored, lse = self.stored, torch.cat(blocks, 1)
        n_pos, first = k.shape[1], first_row(stored.shapes[name])
        worst, pos = 0.0, torch.arange(n_pos)
        for start in range(first, n_pos, CHUNK):
            rows = slice(start, min(start + CHUNK, n_pos))
            recorded = self._read(name, layer, slice(rows.start - first, rows.stop - first))
            q = self._read("q", layer, rows)
            if recorded is None or q is None:
                return
            expected = attention_weights(
                q.to(k.dtype), k, lse[:, rows], stored.header.formulas[layer], pos[rows], pos
            )
            worst = max(worst, float((recorded - expected).abs().max()))
        self._judge(name, layer, worst, allowed)

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

    def _checksum(self, name: str, layer: int, computed: str) -> None:
        recorded = self.stored.attributes["checksums"][name][layer]
        if computed != recorded:
            place = f" in layer {layer}" if "layer" in AXES[name] else ""
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
                tokens, digest = stored.read("tokens", _ALL, _ALL), ContentDigest()
                _update(digest, "tokens", 0, tokens)
                self._checksum("tokens", 0, *digest.checksums()["tokens"])
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


class _Attention:
    """Attention of a layer, recomputed a block of rows at a time, and the errors of what is stored.

    lse: that of all rows, in blocks: recomputed, or as it is stored.
    """

    def __init__(self, stored: StoredTrace, layer: int, *, deep: bool) -> None:
        self.dense = [name for name in DENSE if name in stored.arrays]
        self.recomputed = deep or bool(self.dense and "lse" not in stored.arrays)
        self.formula, self.dtype = stored.header.formulas[layer], stored.compute_dtype
        self.lse: list[torch.Tensor] = []
        self.lse_rounding = 0.0
        self._largest: dict[str, torch.Tensor] = {}

    def add(self, start: int, parts: Mapping[str, torch.Tensor]) -> None:
        """Add rows from `start` on; k and v are whole."""
        q, k, v = (parts[name].to(self.dtype) for name in "qkv")
        stop, lse = start + q.shape[1], parts.get("lse")
        if self.recomputed:
            out, computed = causal_attention(q, k[:, :stop], v[:, :stop], self.formula, start)
            if "attn_out" in parts:
                self._note("gap", (parts["attn_out"].to(self.dtype) - out).abs().amax((-2, -1)))
                self._note("size", out.abs().amax((-2, -1)))
            if lse is not None:
                self._note("lse", (lse - computed).abs().max())
                self.lse_rounding = max(self.lse_rounding, logit_rounding(computed.float()))
            lse = computed
        self.lse += [] if lse is None else [lse]

    def _note(self, name: str, x: torch.Tensor) -> None:
        self._largest[name] = torch.maximum(self._largest.get(name, x), x)

    @property
    def errors(self) -> dict[str, float]:
        """The largest error of each stored array: of outputs as `relative_error` has it."""
        found = {name: float(x) for name, x in self._largest.items() if name == "lse"}
        if "gap" not in self._largest:
            return found
        gap, size = self._largest["gap"], self._largest["size"]
        return {"attn_out": float(torch.where(gap == 0, gap, gap / size).max()), **found}


def _update(digest: ContentDigest, name: str, layer: int, values: torch.Tensor) -> None:
    """Add values of a layer, without a layer axis, to the checksum of an array."""
    axes = AXES[name]
    if "pos" in axes:
        digest.update_all(name, layer, as_array(values), axes.index("pos") - ("layer" in axes))
    else:
        digest.update(name, layer, as_array(values))


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
    turns = [
        {"answer": span, "right": object_at(stored.header.turn(n), "answer_check").get("right")}
        for n, span in enumerate(map(list, stored.header.answers(n_pos)), start=1)
    ]
    return {
        "path": stored.where,
        "name": stored.header.name,
        "format": stored.attributes["kvsim_format"],
        "digest": stored.digest,
        "tokens": n_pos,
        "prompt_len": stored.header.prompt_len,
        "context_len": stored.header.context_len,
        **({"turns": turns} if stored.header.questions else {}),
        **({"left_out": list(left_out)} if (left_out := stored.header.left_out) else {}),
        "layers": n_layers,
        "layer_ids": list(stored.header.layer_ids),
        "qheads": n_qheads,
        "heads": stored.shapes["k"][1],
        "dim": dim,
        **({"value_dim": stored.shapes["v"][3]} if stored.shapes["v"][3] != dim else {}),
        **({} if latent is None else {"latent": latent}),
        **({"sizes": [*map(list, stored.header.sizes)]} if stored.header.sizes else {}),
        "attention": _kinds(stored.header),
        "arrays": {
            name: {
                "shape": list(array.shape),
                "dtype": "string" if name == "token_text" else array.number,
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
        "agreement": object_at(meta, "agreement") or None,
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
