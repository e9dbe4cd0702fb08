"""What a trace says about itself besides its arrays, and the digest of its content.

The header is the part of `docs/trace-format.md` that lives in the attributes of the zarr group. It
holds no tensors and knows nothing about files.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.attention import Rope
from kvsim.errors import TraceError
from kvsim.schema import CHUNK, LABELS
from kvsim.store.documents import brief

#: Arrays whose content makes up the digest, in this order, as far as a trace has them.
DIGESTED = ("tokens", "q", "k", "v", "attn_out", "lse")

#: Arrays that have checksums. Arrays that came after the digest was defined are no part of it.
CHECKSUMMED = (*DIGESTED, "o_proj", "residual")

Array = NDArray[Any]


@dataclass(frozen=True)
class Header:
    """Facts about one trace.

    Attributes:
        prompt_len: rows 0 to prompt_len - 1 are the prefill.
        scale: factor of the logits q . k.
        rope: the rotary embedding that q and k went through.
        layer_ids: the model's number of each stored layer.
        name: for people; no part of the digest.
        source_dtypes: for each array, the dtype it had in the model, such as ``bfloat16``.
        meta: provenance, ready for JSON; no part of the digest.
    """

    prompt_len: int
    scale: float
    rope: Rope
    layer_ids: tuple[int, ...]
    name: str = "memory"
    source_dtypes: Mapping[str, str] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def labels(self) -> dict[str, str | int]:
        """What the prompt says of itself, of `LABELS`; what is neither text nor number is none."""
        found = self.meta.get("labels")
        said = found if isinstance(found, dict) else {}
        known = {name: said[name] for name in LABELS if isinstance(said.get(name), str | int)}
        return {name: _text(one) if isinstance(one, str) else one for name, one in known.items()}

    def attributes(self) -> dict[str, Any]:
        """The header as attributes of the zarr group."""
        return {
            "name": self.name,
            "prompt_len": self.prompt_len,
            "scale": self.scale,
            "mask": {"kind": "causal"},
            "rope": {
                "inv_freq": list(self.rope.inv_freq),
                "attention_scaling": self.rope.attention_scaling,
                "rotary_dim": self.rope.rotary_dim,
                "layout": self.rope.layout,
            },
            "meta": dict(self.meta),
        }

    @classmethod
    def from_attributes(
        cls,
        attributes: Mapping[str, Any],
        *,
        layer_ids: tuple[int, ...],
        source_dtypes: Mapping[str, str],
        where: str,
    ) -> Header:
        """The header that `attributes` describes; `where` names the trace in error messages."""
        mask = _get(attributes, "mask", dict, where).get("kind")
        if mask != "causal":
            raise TraceError(
                f"{where}: attribute mask.kind is {brief(mask)}, expected 'causal'; "
                "this version of kvsim replays causal attention only"
            )
        rope = _get(attributes, "rope", dict, where)
        try:
            rotary = Rope(
                tuple(rope["inv_freq"]),
                float(rope["attention_scaling"]),
                int(rope["rotary_dim"]),
                rope["layout"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(
                f"{where}: attribute rope is not readable ({brief(error)}), expected inv_freq, "
                "attention_scaling, rotary_dim and layout; record the trace again"
            ) from error
        meta = attributes.get("meta", {})
        return cls(
            prompt_len=_get(attributes, "prompt_len", int, where),
            scale=float(_get(attributes, "scale", (int, float), where)),
            rope=rotary,
            layer_ids=layer_ids,
            name=_text(str(attributes.get("name", where))),
            source_dtypes=source_dtypes,
            meta=meta if isinstance(meta, dict) else {},
        )

    def check(self, *, n_layers: int, n_pos: int, dim: int, where: str) -> None:
        """Raise TraceError where the header does not fit arrays of this size."""
        if not 1 <= self.prompt_len <= n_pos:
            raise TraceError(
                f"{where}: prompt_len is {self.prompt_len}, expected 1 to {n_pos}, "
                "the number of tokens"
            )
        if len(self.layer_ids) != n_layers:
            raise TraceError(
                f"{where}: {len(self.layer_ids)} layer numbers for {n_layers} layers; "
                "expected one for each"
            )
        if self.layer_ids[0] < 0 or any(b <= a for a, b in pairwise(self.layer_ids)):
            raise TraceError(
                f"{where}: layer is {brief(list(self.layer_ids))}, expected the model's numbers of "
                "the layers, increasing from 0 or more"
            )
        width = 2 * len(self.rope.inv_freq)
        if width > dim:
            raise TraceError(
                f"{where}: rope turns {width} dimensions, but a head has {dim}; "
                f"expected at most {dim // 2} frequencies"
            )
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise TraceError(f"{where}: scale is {self.scale}, expected a positive number")


def _text(said: str) -> str:
    """Text that UTF-8 holds: JSON may have halves of surrogate pairs, which are escaped."""
    return said.encode("utf-8", "backslashreplace").decode("utf-8")


def _get(attributes: Mapping[str, Any], key: str, kind: Any, where: str) -> Any:
    # JSON values are Any; the caller names the type it needs.
    value = attributes.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TraceError(
            f"{where}: attribute {key} is {brief(value)}, which docs/trace-format.md does not "
            "allow; record the trace again"
        )
    return value


class ContentDigest:
    """Checksums of the arrays, fed block by block, and the digest of the whole.

    Each array and layer has one SHA-256, over its blocks of 256 positions in order, each block as
    C-order little-endian bytes in the stored dtype; an array without positions is one block. The
    digest is the SHA-256 of a canonical JSON text with the checksums of `DIGESTED`, dtypes, shapes
    and the facts that decide what attention is computed.
    """

    def __init__(self) -> None:
        self._hashes: dict[str, dict[int, Any]] = {}
        self._dtypes: dict[str, str] = {}

    def update(self, name: str, layer: int, block: Array) -> None:
        """Add the next block of `layer` (0 for `tokens`, which has none), without a layer axis."""
        data = np.ascontiguousarray(block, dtype=block.dtype.newbyteorder("<"))
        self._dtypes[name] = data.dtype.name
        self._hashes.setdefault(name, {}).setdefault(layer, hashlib.sha256()).update(data.data)

    def update_all(self, name: str, layer: int, array: Array, axis: int) -> None:
        """Add a whole layer, cut into blocks along its position `axis`."""
        for start in range(0, array.shape[axis], CHUNK):
            cut = [slice(None)] * array.ndim
            cut[axis] = slice(start, start + CHUNK)
            self.update(name, layer, array[tuple(cut)])

    def checksums(self) -> dict[str, list[str]]:
        """SHA-256 in hex of each array's layers."""
        return {
            name: [layers[index].hexdigest() for index in sorted(layers)]
            for name, layers in self._hashes.items()
        }

    def total(self, header: Header, shapes: Mapping[str, tuple[int, ...]]) -> str:
        """The digest of the trace, ``sha256:`` and 64 hex digits; shapes as stored."""
        return content_digest(header, shapes, self._dtypes, self.checksums())


def content_digest(
    header: Header,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, str],
    checksums: Mapping[str, list[str]],
) -> str:
    """The digest of a trace from the checksums of its arrays."""
    facts = {
        "arrays": {
            name: {
                "dtype": dtypes[name],
                "shape": list(shapes[name]),
                "layers": checksums[name],
            }
            for name in DIGESTED
            if name in checksums
        },
        "layer_ids": list(header.layer_ids),
        "mask": "causal",
        "prompt_len": header.prompt_len,
        "rope": {
            "attention_scaling": _bits(header.rope.attention_scaling),
            "inv_freq": [_bits(frequency) for frequency in header.rope.inv_freq],
            "layout": header.rope.layout,
            "rotary_dim": header.rope.rotary_dim,
        },
        "scale": _bits(header.scale),
    }
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return "sha256:" + hashlib.sha256(text.encode("ascii")).hexdigest()


def _bits(number: float) -> str:
    """The IEEE double in hex, big end first: no language disagrees about how to print it."""
    return struct.pack(">d", number).hex()
