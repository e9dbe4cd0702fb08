"""Verification of a stored trace: its checksums, and attention recomputed from q, k, v."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zarr.core.sync import sync

from kvsim.core.attention import causal_attention
from kvsim.core.checks import as_array, logit_rounding, tolerance
from kvsim.core.digest import CHECKSUMMED, ContentDigest, content_digest, text_checksum
from kvsim.core.header import Header
from kvsim.core.lazy import torch
from kvsim.core.left_out import held_parts, stored_part
from kvsim.core.sources import narrowed
from kvsim.errors import TraceError
from kvsim.schema import AXES, CHUNK, object_at
from kvsim.store.group import ROOT
from kvsim.store.metadata import attributes_of
from kvsim.store.projections import Facts
from kvsim.store.reader import StoredTrace

_ALL = slice(None)

#: Attributes that a description has in another form, and checks of what was recorded.
_APART = ("kvsim_format", "attention", "ropes", "meta")
_CHECKS = ("agreement", "answer_check", "capture_check")

#: Rows of a block that is read and recomputed at once.
ROWS = 16 * CHUNK

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Verification:
    """Result of `verify`.

    Attributes:
        output_error: for each layer, the largest relative error of a head (`relative_error`)
            between recorded and recomputed attention output; empty if it is not recorded or was
            not recomputed.
        output_tolerance: its limit.
        lse_error: for each layer, the largest absolute error of the recorded log-sum-exp, which
            is the relative error of attention weights; empty as above.
        lse_tolerance: its limit, of the layer with the largest.
        problems: one sentence for each problem.
    """

    output_error: tuple[float, ...]
    output_tolerance: float
    lse_error: tuple[float, ...]
    lse_tolerance: float
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems


def verify(
    path: str | Path, *, deep: bool = False, progress: Progress | None = None
) -> Verification:
    """Read every file of the trace at `path` and compare it with its checksums and digest.

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
        self.errors: dict[str, list[float]] = {name: [] for name in ("attn_out", "lse")}
        sources, dtypes = stored.header.source_dtypes, stored.numbers
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

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Note an error of the trace as a problem."""
        try:
            yield
        except TraceError as error:
            self.problems.append(str(error))

    def layer(self, layer: int) -> None:
        """Check a layer, which is held in memory."""
        stored, arrays = self.stored, dict[str, torch.Tensor]()
        sizes = stored.header.sizes
        for name in [name for name in CHECKSUMMED[1:] if name in stored.arrays]:
            with self._noting():
                values = stored.read_stored(name, slice(layer, layer + 1), _ALL)[0]
                self._checksum(name, layer, values)
                arrays[name] = narrowed(name, values[None], sizes[layer])[0] if sizes else values
        with self._noting():
            if stored.projections is not None:
                stored.projections.check(layer)
        if self.deep and {"q", "k", "v"} <= arrays.keys():
            self._recompute(layer, arrays)

    def _recompute(self, layer: int, arrays: dict[str, torch.Tensor]) -> None:
        """Compare a layer with what its queries, keys and values give, in blocks of rows."""
        stored, dtype = self.stored, self.stored.compute_dtype
        latent, left_out = stored.header.latent, stored.header.left_out
        k, v = arrays["k"].to(dtype), arrays["v"].to(dtype)
        if latent is not None and not torch.equal(k[..., -latent:], v):
            self.problems.append(
                f"{stored.where}: values of layer {layer} are not the latents that end its keys; "
                "record the trace again"
            )
        n_pos, largest = k.shape[1], dict[str, torch.Tensor]()
        of_layer = tolerance(self.lse_dtype)
        for start in range(0, n_pos, ROWS):
            for pos in held_parts("q", range(start, min(start + ROWS, n_pos)), left_out):
                rows = stored_part("q", pos, n_pos, left_out, stored.where)
                q, end = arrays["q"][:, rows].to(dtype), pos.stop
                formula = stored.header.formulas[layer]
                out, lse = causal_attention(q, k[:, :end], v[:, :end], formula, pos.start)
                of_layer = max(of_layer, logit_rounding(lse.float()))
                found = {"size": out.abs().amax((-2, -1))}
                if "attn_out" in arrays:
                    recorded = arrays["attn_out"][:, rows].to(dtype)
                    found["gap"] = (recorded - out).abs().amax((-2, -1))
                if "lse" in arrays:
                    found["lse"] = (arrays["lse"][:, rows] - lse).abs().max()
                for name, x in found.items():
                    largest[name] = torch.maximum(largest.get(name, x), x)
        self.lse_tolerance = max(self.lse_tolerance, of_layer)
        if "gap" in largest:  # as `relative_error` has it
            gap, size = largest["gap"], largest["size"]
            error = float(torch.where(gap == 0, gap, gap / size).max())
            self._judge("attn_out", layer, error, self.output_tolerance)
        if "lse" in largest:
            self._judge("lse", layer, float(largest["lse"]), of_layer)

    def _checksum(self, name: str, layer: int, values: torch.Tensor) -> None:
        digest = ContentDigest()
        digest.update(name, layer, as_array(values))
        recorded = self.stored.attributes["checksums"].get(name, [])[layer : layer + 1]
        if recorded != digest.checksums()[name]:
            place = f" in layer {layer}" if "layer" in AXES[name] else ""
            self.problems.append(
                f"{self.stored.where}: the checksum of {name}{place} is not the recorded one; the "
                "array was changed after recording"
            )

    def _judge(self, name: str, layer: int, error: float, allowed: float) -> None:
        self.errors[name].append(error)
        if not error <= allowed:  # NaN is a problem too
            self.problems.append(
                f"{self.stored.where}: {name} of layer {layer} differs by {error:.3g} from what "
                f"q, k, v give, expected at most {allowed:g}; record the trace again"
            )

    def result(self) -> Verification:
        stored, recorded = self.stored, self.stored.attributes["checksums"]
        with self._noting():
            for key in stored.store.files:  # metadata, which nothing above has read
                if key.endswith(ROOT):
                    sync(stored.store.get(key))
            texts = stored.token_text
            if texts is not None and recorded.get("token_text") != [text_checksum(texts)]:
                self.problems.append(
                    f"{stored.where}: the text of the tokens is not the recorded one; "
                    "copy the trace again or record it again"
                )
            if "tokens" in stored.shapes:
                self._checksum("tokens", 0, stored.read("tokens", _ALL, _ALL))
            shapes = {name: array.shape for name, array in stored.arrays.items()}
            dtypes = {x: "float32" if y == "bfloat16" else y for x, y in stored.numbers.items()}
            sums = {name: x for name, x in recorded.items() if name in shapes}
            if content_digest(stored.header, shapes, dtypes, sums) != stored.digest:
                self.problems.append(f"{stored.where}: its digest is not that of its content")
        return Verification(
            output_error=tuple(self.errors["attn_out"]),
            output_tolerance=self.output_tolerance,
            lse_error=tuple(self.errors["lse"]),
            lse_tolerance=self.lse_tolerance,
            problems=tuple(self.problems),
        )


def describe(path: str | Path) -> dict[str, Any]:
    """Return shapes, dtypes, sizes, model, labels, spans, text and answer check, ready for JSON.

    Sizes are without the document of the group. Raises TraceError as `open_trace`.
    """
    stored = StoredTrace(path)
    header, meta = stored.header, stored.header.meta
    sizes = {key: size for key, (size, _) in stored.store.files.items()}
    n_layers, n_qheads, n_pos, dim = stored.shapes["q"]
    attributes, probe = attributes_of(header), header.probe
    turns = [
        {"answer": span, "right": object_at(header.turn(n), "answer_check").get("right")}
        for n, span in enumerate(map(list, header.answers(n_pos)), start=1)
    ]
    rows, chunks = (0, ()) if probe is None else (len(probe.tokens), [*map(list, probe.chunks)])
    notes = meta.get("notes")
    return {
        "path": stored.where,
        "format": stored.attributes["kvsim_format"],
        "digest": stored.digest,
        "tokens": n_pos,
        "context_len": None,
        **{key: x for key, x in attributes.items() if key not in _APART},
        **({"turns": turns} if header.questions else {}),
        "layers": n_layers,
        "qheads": n_qheads,
        "heads": stored.shapes["k"][1],
        "dim": dim,
        "value_dim": stored.shapes["v"][3],
        "latent": header.latent,
        "attention": _kinds(header),
        "arrays": {
            name: {
                "shape": list(array.shape),
                "dtype": stored.numbers[name],
                "source_dtype": header.source_dtypes.get(name),
                "bytes": sum(size for key, size in sizes.items() if key.startswith(f"{name}/")),
            }
            for name, array in stored.arrays.items()
        },
        "projections": _projections(stored),
        "probe": None if probe is None else {"kind": probe.kind, "rows": rows, "chunks": chunks},
        "bytes": sum(sizes.values()),
        "files": 1 + len(sizes),
        "model": {key: value for key, value in object_at(meta, "model").items() if key != "config"},
        "labels": header.labels,
        "spans": header.spans,
        "response_logprobs": list(header.response_logprobs),
        **{key: object_at(meta, key) for key in ("versions", "generation")},
        **{key: object_at(meta, key) or None for key in _CHECKS},
        **{key: _head(object_at(meta, "text").get(key)) for key in ("prompt", "response")},
        "notes": [str(note) for note in notes] if isinstance(notes, list) else [],
    }


def _projections(stored: StoredTrace) -> dict[str, Any] | None:
    facts, files = Facts.named(stored.header.meta, stored.where), None
    if facts is None:
        return None
    if stored.projections is not None:
        files = sum(size for size, _ in stored.projections.store.files.values())
    return {**asdict(facts), "folder": facts.folder, "present": files is not None, "bytes": files}


def _kinds(header: Header) -> list[dict[str, Any]]:
    """Return each kind of attention and RoPE, with the model's numbers of its layers."""
    kinds: dict[str, dict[str, Any]] = {}
    for number, formula, rope in zip(header.layer_ids, header.formulas, header.ropes, strict=True):
        of_rope = {"rotary_dim": rope.rotary_dim, "layout": rope.layout}
        kind = {**asdict(formula), "sinks": bool(formula.sinks), **of_rope}
        kinds.setdefault(repr(kind), {"layers": [], **kind})["layers"].append(number)
    return list(kinds.values())


def _head(text: object) -> str | None:
    if not isinstance(text, str):
        return None
    return text if len(text) <= 200 else text[:200] + "..."
