"""The digest of a trace: SHA-256 over the inputs of its attention (docs/trace-format.md)."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.core.attention import Rope
from kvsim.core.checks import DTYPES, stored_dtype
from kvsim.core.header import Header
from kvsim.core.lazy import torch
from kvsim.core.left_out import stored_shape
from kvsim.core.sources import ArraySource
from kvsim.schema import AXES, CHUNK

#: Arrays in the digest, in this order, as far as a trace has them.
DIGESTED = ("tokens", "q", "k", "v", "attn_out", "lse", "received", "moments")

#: Arrays that have checksums. Arrays added after the digest was defined are not part of it.
CHECKSUMMED = (*DIGESTED, *(name for name in AXES if name not in (*DIGESTED, "evicted_at")))

Array = NDArray[Any]

_ALL = slice(None)


class ContentDigest:
    """Checksums of the arrays of a trace, updated block by block, and the digest of the whole.

    Each array and layer has one SHA-256, over its blocks of 256 positions in order, each block as
    C-order little-endian bytes in the stored dtype, bfloat16 as float32; an array without positions
    is one block. The digest is the SHA-256 of a canonical JSON text with the checksums of
    `DIGESTED`, dtypes, shapes and the header's facts on which attention depends.
    """

    def __init__(self) -> None:
        self._hashes: dict[str, dict[int, Any]] = {}
        self.dtypes: dict[str, str] = {}

    def update(self, name: str, layer: int, block: Array) -> None:
        """Add the next blocks of `layer` (0 for `tokens`, which has none), without a layer axis."""
        axes = [axis for axis in AXES[name] if axis != "layer"]
        borders = range(CHUNK, block.shape[axes.index("pos")] if "pos" in axes else 0, CHUNK)
        for part in np.split(block, borders, axes.index("pos") if borders else 0):
            data = np.ascontiguousarray(part, dtype=part.dtype.newbyteorder("<"))
            if data.dtype == np.uint16:  # the bits of bfloat16
                data = (data.astype("<u4") << 16).view("<f4")
            self.dtypes[name] = data.dtype.name
            self._hashes.setdefault(name, {}).setdefault(layer, hashlib.sha256()).update(data.data)

    def checksums(self) -> dict[str, list[str]]:
        """Return the SHA-256 in hex of each layer of each array."""
        return {
            name: [layers[index].hexdigest() for index in sorted(layers)]
            for name, layers in self._hashes.items()
        }


#: Keys of `meta` without effect on results; projections are among the checksums.
_APART = ("versions", "capture_check", "notes", "projections", "settings")


def fingerprint(digest: str, header: Header, checksums: Mapping[str, Any]) -> str:
    """Return the key of a trace in results: its digest, and 16 hex digits of their other inputs.

    These are `meta` (needle, labels, answers, turns, sensitivity of layers, model) and the
    checksums of texts and of arrays outside the digest. The digest identifies only the attention,
    and so the queries, keys and values of a calibration.
    """
    facts = {
        "meta": {key: fact for key, fact in header.meta.items() if key not in _APART},
        "checksums": {name: x for name, x in checksums.items() if name not in DIGESTED},
    }
    return f"{digest}+{document_digest(facts).removeprefix('sha256:')[:16]}"


def array_fingerprint(
    source: ArraySource, header: Header, dtype: torch.dtype, texts: Sequence[str] | None
) -> str:
    """Return the fingerprint of a trace of these arrays and texts of tokens, or None.

    dtype: of arrays without one in the header.
    """
    digest = ContentDigest()
    shapes = dict(source.shapes)
    for name in CHECKSUMMED:
        if name not in shapes:
            continue
        if name == "tokens":
            ids = source.read(name, _ALL, _ALL).numpy().astype(np.int32)
            digest.update(name, 0, ids)
            continue
        stored = stored_dtype(header.source_dtypes.get(name, DTYPES[dtype]))
        for layer in range(shapes["q"][0]):
            runs = header.held(name, range(shapes["k"][2]))
            for pos in runs if "pos" in AXES[name] else [_ALL]:
                part = source.read(name, slice(layer, layer + 1), pos)[0]
                digest.update(name, layer, part.to(stored).numpy())
    shapes = {name: stored_shape(name, x, header.left_out) for name, x in shapes.items()}
    checksums = digest.checksums()
    if texts is not None:
        checksums["token_text"] = [text_checksum(texts)]
    return fingerprint(content_digest(header, shapes, digest.dtypes, checksums), header, checksums)


def text_checksum(texts: Sequence[str]) -> str:
    """Return the SHA-256 in hex of texts, as a JSON list in ASCII without spaces."""
    return document_digest([*texts]).removeprefix("sha256:")


def content_digest(
    header: Header,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, str],
    checksums: Mapping[str, list[str]],
) -> str:
    """Return the digest of a trace, given the checksums of its arrays."""
    facts: dict[str, Any] = {
        "arrays": {
            name: {"dtype": dtypes[name], "shape": list(shapes[name]), "layers": checksums[name]}
            for name in DIGESTED
            if name in checksums
        },
        "layer_ids": list(header.layer_ids),
        "prompt_len": header.prompt_len,
    }
    facts |= header.optional
    if header.uniform:
        facts["mask"], facts["rope"] = "causal", _rope_bits(header.ropes[0])
        facts["scale"] = _bits(header.formulas[0].scale)
    else:
        facts["attention"] = [
            {
                "rope": _rope_bits(rope),
                "scale": _bits(formula.scale),
                "sinks": [_bits(sink) for sink in formula.sinks],
                "softcap": None if formula.softcap is None else _bits(formula.softcap),
                "window": formula.window,
                **({} if formula.chunk is None else {"chunk": formula.chunk}),
            }
            for formula, rope in zip(header.formulas, header.ropes, strict=True)
        ]
    return document_digest(facts)


def document_digest(document: Mapping[str, Any] | Sequence[str]) -> str:
    """Return ``sha256:`` and 64 hex digits of a JSON document: keys sorted, no spaces, ASCII."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return "sha256:" + hashlib.sha256(text.encode("ascii")).hexdigest()


def _rope_bits(rope: Rope) -> dict[str, Any]:
    return {
        "attention_scaling": _bits(rope.attention_scaling),
        "inv_freq": [_bits(frequency) for frequency in rope.inv_freq],
        "layout": rope.layout,
        "rotary_dim": rope.rotary_dim,
    }


def _bits(number: float) -> str:
    """The IEEE double in hex, big end first: printed decimals differ between languages."""
    return struct.pack(">d", number).hex()
