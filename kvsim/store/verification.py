"""Verification of a stored trace: its checksums, and attention recomputed from q, k, v."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zarr.core.sync import sync

from kvsim.core.attention import causal_attention
from kvsim.core.checks import as_array, logit_rounding, tolerance
from kvsim.core.digest import CHECKSUMMED, ContentDigest, content_digest, text_checksum
from kvsim.core.header import Header
from kvsim.core.lazy import Tensor, torch
from kvsim.core.left_out import held_parts, stored_part
from kvsim.core.sources import narrowed
from kvsim.errors import TraceError
from kvsim.schema import AXES, CHUNK, object_at
from kvsim.store.group import ROOT
from kvsim.store.projections import Facts
from kvsim.store.reader import StoredTrace, attributes_of

_ALL = slice(None)

#: Attributes that a description has in another form, and checks of the recording.
_APART = ("kvsim_format", "attention", "ropes", "meta")
_CHECKS = ("agreement", "answer_check", "capture_check")

#: Rows of a block that is read and recomputed at once.
ROWS = 16 * CHUNK

Progress = Callable[[int, int], None]


@dataclass
class Verification:
    """Result of `verify`.

    Attributes:
        output_tolerance, lse_tolerance: limits of the errors; of lse that of the layer with the
            largest.
        output_error: for each layer, the largest relative error of a head (`relative_error`)
            between recorded and recomputed attention output; empty if it is not recorded or was
            not recomputed.
        lse_error: for each layer, the largest absolute error of the recorded log-sum-exp, which
            is the relative error of attention weights; empty as above.
        problems: one sentence for each problem.
    """

    output_tolerance: float
    lse_tolerance: float
    output_error: list[float] = field(default_factory=list)
    lse_error: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note an error of the trace as a problem."""
        try:
            yield
        except TraceError as error:
            self.problems.append(str(error))


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
    stored = StoredTrace(path)
    header, dtypes = stored.header, stored.numbers
    involved = [header.source_dtypes.get("attn_out", "float32"), header.source_dtypes["q"]]
    involved += [dtypes[name] for name in ("q", "k", "v", "attn_out") if name in dtypes]
    # the capture's may be larger: a kernel may round more than its dtype does
    recorded = object_at(header.meta, "capture_check").get("tolerance")
    recorded = min(float(recorded), 0.5) if isinstance(recorded, int | float) else 0.0
    # lse was computed from the stored q, k in float32 or float64: their rounding has no effect
    limits = max(tolerance(*involved), recorded), tolerance(dtypes.get("lse", "float32"))
    result, n_layers = Verification(*limits), len(header.layer_ids)
    for layer in range(n_layers):
        arrays = dict[str, Tensor]()
        for name in [name for name in CHECKSUMMED[1:] if name in stored.arrays]:
            with result.noting():
                values = stored.read_stored(name, slice(layer, layer + 1), _ALL)
                _compare_checksum(stored, result, name, layer, values[0])
                sizes = header.sizes
                arrays[name] = (narrowed(name, values, sizes[layer]) if sizes else values)[0]
        with result.noting():
            if stored.projections is not None:
                stored.projections.check(layer)
        if deep and {"q", "k", "v"} <= arrays.keys():
            _recompute(stored, result, layer, arrays)
        if progress is not None:
            progress(layer + 1, n_layers)
    with result.noting():
        _compare_rest(stored, result)
    return result


def _recompute(
    stored: StoredTrace, result: Verification, layer: int, arrays: dict[str, Tensor]
) -> None:
    """Compare a layer with attention recomputed from its queries, keys and values, by blocks."""
    where, dtype, header = stored.where, stored.compute_dtype, stored.header
    latent, left_out, formula = header.latent, header.left_out, header.formulas[layer]
    k, v = arrays["k"].to(dtype), arrays["v"].to(dtype)
    if latent is not None and not torch.equal(k[..., -latent:], v):
        result.problems.append(
            f"{where}: values of layer {layer} are not the latents that end its keys; "
            "record the trace again"
        )
    n_pos, largest = k.shape[1], dict[str, Tensor]()
    of_layer = tolerance(stored.numbers.get("lse", "float32"))
    for start in range(0, n_pos, ROWS):
        for pos in held_parts("q", range(start, min(start + ROWS, n_pos)), left_out):
            rows = stored_part("q", pos, n_pos, left_out, where)
            q, end = arrays["q"][:, rows].to(dtype), pos.stop
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
    result.lse_tolerance = max(result.lse_tolerance, of_layer)
    checks = []
    if "gap" in largest:  # as `relative_error` has it
        gap = largest["gap"]
        error = torch.where(gap == 0, gap, gap / largest["size"]).max()
        checks.append(("attn_out", result.output_error, error, result.output_tolerance))
    if "lse" in largest:
        checks.append(("lse", result.lse_error, largest["lse"], of_layer))
    for name, errors, error, allowed in checks:
        errors.append(float(error))
        if not error <= allowed:  # NaN is a problem too
            result.problems.append(
                f"{where}: {name} of layer {layer} differs by {error:.3g} from "
                f"that of q, k, v, expected at most {allowed:g}; record the trace again"
            )


def _compare_checksum(
    stored: StoredTrace, result: Verification, name: str, layer: int, values: Tensor
) -> None:
    digest = ContentDigest()
    digest.update(name, layer, as_array(values))
    recorded = stored.attributes["checksums"].get(name, [])[layer : layer + 1]
    if recorded != digest.checksums()[name]:
        place = f" in layer {layer}" if "layer" in AXES[name] else ""
        result.problems.append(
            f"{stored.where}: the checksum of {name}{place} is not the recorded one; the "
            "array was changed after recording"
        )


def _compare_rest(stored: StoredTrace, result: Verification) -> None:
    """Compare metadata, tokens, their text, and the digest."""
    recorded = stored.attributes["checksums"]
    for key in stored.store.files:
        if key.endswith(ROOT):
            sync(stored.store.get(key))
    texts = stored.token_text
    if texts is not None and recorded.get("token_text") != [text_checksum(texts)]:
        result.problems.append(
            f"{stored.where}: the text of the tokens is not the recorded one; "
            "copy the trace again or record it again"
        )
    if "tokens" in stored.shapes:
        _compare_checksum(stored, result, "tokens", 0, stored.read("tokens", _ALL, _ALL))
    shapes = {name: array.shape for name, array in stored.arrays.items()}
    dtypes = {x: "float32" if y == "bfloat16" else y for x, y in stored.numbers.items()}
    sums = {name: x for name, x in recorded.items() if name in shapes}
    if content_digest(stored.header, shapes, dtypes, sums) != stored.digest:
        result.problems.append(f"{stored.where}: its digest is not that of its content")


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
