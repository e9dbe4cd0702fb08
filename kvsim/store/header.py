"""What a trace says about itself besides its arrays, and the digest of its content.

The header is the part of `docs/trace-format.md` that lives in the attributes of the zarr group. It
holds no tensors and knows nothing about files.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.core.attention import Formula, Rope
from kvsim.errors import TraceError
from kvsim.schema import CHUNK, FORMAT_VERSION, LABELS
from kvsim.store.documents import brief, said

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
        formulas: what each stored layer computes from q, k, v.
        ropes: the rotary embedding that q and k of each stored layer went through.
        layer_ids: the model's number of each stored layer.
        name: for people; no part of the digest.
        source_dtypes: for each array, the dtype it had in the model, such as ``bfloat16``.
        meta: provenance, ready for JSON; no part of the digest.
    """

    prompt_len: int
    formulas: tuple[Formula, ...]
    ropes: tuple[Rope, ...]
    layer_ids: tuple[int, ...]
    name: str = "memory"
    source_dtypes: Mapping[str, str] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def labels(self) -> dict[str, str | int]:
        """What the prompt says of itself, of `LABELS`; what is neither text nor number is none."""
        return labels_of(self.meta)

    @property
    def alike(self) -> bool:
        """Whether all layers compute plain causal attention, with one scale and one rotation."""
        return self.formulas[0].plain and len({*zip(self.formulas, self.ropes, strict=True)}) == 1

    @property
    def version(self) -> int:
        """The oldest format version whose readers understand this header."""
        return 1 if self.alike else FORMAT_VERSION

    def within(self, n_pos: int) -> Header:
        """The header of so many positions: a window that hides nothing from them is none."""
        formulas = (
            replace(formula, window=None) if (formula.window or 0) >= n_pos else formula
            for formula in self.formulas
        )
        return replace(self, formulas=tuple(formulas))

    def attributes(self) -> dict[str, Any]:
        """The header as attributes of the zarr group, in the format of its `version`."""
        facts: dict[str, Any] = {"kvsim_format": self.version, "name": self.name}
        facts["prompt_len"] = self.prompt_len
        if self.alike:
            facts["scale"], facts["mask"] = self.formulas[0].scale, {"kind": "causal"}
            facts["rope"] = _rope_facts(self.ropes[0])
        else:
            ropes = list(dict.fromkeys(self.ropes))
            facts["attention"] = [
                {**_formula_facts(formula), "rope": ropes.index(rope)}
                for formula, rope in zip(self.formulas, self.ropes, strict=True)
            ]
            facts["ropes"] = [_rope_facts(rope) for rope in ropes]
        return {**facts, "meta": dict(self.meta)}

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
        attributes = _upgraded(attributes, len(layer_ids), where)
        listed = _get(attributes, "attention", list, where)
        known = [_rope(rope, where) for rope in _get(attributes, "ropes", list, where)]
        ropes, formulas = [], []
        for layer in listed:
            formulas.append(_formula(layer, where))
            place = layer.get("rope")
            if not isinstance(place, int) or isinstance(place, bool) or not 0 <= place < len(known):
                raise TraceError(
                    f"{where}: rope {brief(place)} of a layer is not among the {len(known)} of "
                    "attribute ropes; record the trace again"
                )
            ropes.append(known[place])
        meta = attributes.get("meta", {})
        return cls(
            prompt_len=_get(attributes, "prompt_len", int, where),
            formulas=tuple(formulas),
            ropes=tuple(ropes),
            layer_ids=layer_ids,
            name=_text(str(attributes.get("name", where))),
            source_dtypes=source_dtypes,
            meta=meta if isinstance(meta, dict) else {},
        )

    def check(self, *, n_layers: int, n_qheads: int, n_pos: int, dim: int, where: str) -> None:
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
        for name, listed in (("formulas", self.formulas), ("ropes", self.ropes)):
            if len(listed) != n_layers:
                raise TraceError(
                    f"{where}: {len(listed)} {name} for {n_layers} layers; expected one for each"
                )
        width = max(2 * len(rope.inv_freq) for rope in self.ropes)
        if width > dim:
            raise TraceError(
                f"{where}: rope turns {width} dimensions, but a head has {dim}; "
                f"expected at most {dim // 2} frequencies"
            )
        for formula in self.formulas:
            if len(formula.sinks) not in (0, n_qheads):
                raise TraceError(
                    f"{where}: {len(formula.sinks)} sinks for {n_qheads} query heads; "
                    "expected one for each, or none"
                )


def labels_of(meta: Mapping[str, Any]) -> dict[str, str | int]:
    """The labels that provenance holds, of `LABELS`; what is neither text nor number is none."""
    found = meta.get("labels")
    said = found if isinstance(found, dict) else {}
    known = {name: said[name] for name in LABELS if isinstance(said.get(name), str | int)}
    return {name: _text(one) if isinstance(one, str) else one for name, one in known.items()}


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


def _upgraded(attributes: Mapping[str, Any], n_layers: int, where: str) -> Mapping[str, Any]:
    """Attributes of format version 1 as version 2 writes them; those of version 2 as they are.

    Version 1 knew one scale and one rotary embedding for all layers, and causal attention only.
    """
    if attributes.get("kvsim_format") != 1:
        return attributes
    mask = _get(attributes, "mask", dict, where).get("kind")
    if mask != "causal":
        raise TraceError(
            f"{where}: attribute mask.kind is {brief(mask)}, expected 'causal', the only one of "
            "format version 1; record the trace again"
        )
    layer = {"scale": attributes.get("scale"), "rope": 0}
    return {
        **attributes,
        "attention": [layer] * n_layers,
        "ropes": [_get(attributes, "rope", dict, where)],
    }


def _formula_facts(formula: Formula) -> dict[str, Any]:
    sinks = list(formula.sinks) or None
    facts = {"softcap": formula.softcap, "window": formula.window, "sinks": sinks}
    return {"scale": formula.scale, **{key: x for key, x in facts.items() if x is not None}}


def _formula(facts: Any, where: str) -> Formula:
    try:
        softcap, window = facts.get("softcap"), facts.get("window")
        return Formula(
            _number(facts["scale"]),
            softcap=None if softcap is None else _number(softcap),
            window=None if window is None else operator.index(window),
            sinks=tuple(_number(sink) for sink in facts.get("sinks") or ()),
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise TraceError(
            f"{where}: what a layer computes is not readable ({said(error)}), expected scale, and "
            "maybe softcap, window and sinks; record the trace again"
        ) from error


def _rope_facts(rope: Rope) -> dict[str, Any]:
    return {
        "inv_freq": list(rope.inv_freq),
        "attention_scaling": rope.attention_scaling,
        "rotary_dim": rope.rotary_dim,
        "layout": rope.layout,
    }


def _rope(facts: Any, where: str) -> Rope:
    try:
        return Rope(
            tuple(_number(frequency) for frequency in facts["inv_freq"]),
            _number(facts["attention_scaling"]),
            operator.index(facts["rotary_dim"]),
            facts["layout"],
        )
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise TraceError(
            f"{where}: attribute rope is not readable ({said(error)}), expected inv_freq, "
            "attention_scaling, rotary_dim and layout; record the trace again"
        ) from error


def _number(value: Any) -> float:
    """A finite JSON number, or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{brief(value)} is no finite number")
    return float(value)


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


def text_checksum(texts: Sequence[str]) -> str:
    """SHA-256 in hex of texts, as a JSON list in ASCII without spaces."""
    text = json.dumps(list(texts), separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def content_digest(
    header: Header,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, str],
    checksums: Mapping[str, list[str]],
) -> str:
    """The digest of a trace from the checksums of its arrays."""
    facts: dict[str, Any] = {
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
        "prompt_len": header.prompt_len,
    }
    if header.alike:
        facts["mask"], facts["rope"] = "causal", _rope_bits(header.ropes[0])
        facts["scale"] = _bits(header.formulas[0].scale)
    else:
        facts["attention"] = [
            {**_formula_bits(formula), "rope": _rope_bits(rope)}
            for formula, rope in zip(header.formulas, header.ropes, strict=True)
        ]
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return "sha256:" + hashlib.sha256(text.encode("ascii")).hexdigest()


def _formula_bits(formula: Formula) -> dict[str, Any]:
    return {
        "scale": _bits(formula.scale),
        "sinks": [_bits(sink) for sink in formula.sinks],
        "softcap": None if formula.softcap is None else _bits(formula.softcap),
        "window": formula.window,
    }


def _rope_bits(rope: Rope) -> dict[str, Any]:
    return {
        "attention_scaling": _bits(rope.attention_scaling),
        "inv_freq": [_bits(frequency) for frequency in rope.inv_freq],
        "layout": rope.layout,
        "rotary_dim": rope.rotary_dim,
    }


def _bits(number: float) -> str:
    """The IEEE double in hex, big end first: no language disagrees about how to print it."""
    return struct.pack(">d", number).hex()
