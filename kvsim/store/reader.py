"""Reading stored traces: metadata is checked before anything is decoded."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from reprlib import repr as short_repr
from typing import Any

import numpy as np

from kvsim.core.attention import Formula, Rope
from kvsim.core.checks import DTYPES, check_finite, check_shapes, check_texts
from kvsim.core.digest import fingerprint
from kvsim.core.header import OPTIONAL, Header, listed, printable
from kvsim.core.lazy import Tensor, torch
from kvsim.core.left_out import stored_part, whole_shapes
from kvsim.core.trace import Trace
from kvsim.errors import TraceNotFoundError, error_line, suggest
from kvsim.samples import SAMPLES, locate
from kvsim.schema import AXES, FORMAT_VERSION, object_at
from kvsim.store.group import damaged, open_group, reading
from kvsim.store.layout import BITS
from kvsim.store.projections import StoredProjections, find_projections

_ALL = slice(None)


def open_trace(path: str | Path) -> Trace:
    """Open the trace stored at `path`; arrays are read on demand.

    Args:
        path: a folder, a zip of its files (not compressed), or the URL of a folder, such as
            ``s3://bucket/x.zarr``.

    Raises:
        TraceNotFoundError: `path` does not exist, or is not marked as a trace.
        TraceError: the trace was recorded by another version of kvsim, lacks a file, or differs
            from docs/trace-format.md.

    Example:
        >>> trace = kvsim.open_trace(kvsim.sample_trace())
        >>> trace.n_layers, trace.n_heads, trace.n_pos
        (3, 4, 472)
    """
    stored = StoredTrace(path)
    return Trace(
        stored,
        stored.header,
        dtype=stored.compute_dtype,
        token_text=stored.token_text,
        fingerprint=stored.fingerprint,
        path=stored.path,
    )


class StoredTrace:
    """The arrays and the header of a trace, as a source of `Trace`; raises as `open_trace`."""

    def __init__(self, path: str | Path) -> None:
        self.path = _located(path)
        self.where = str(self.path)
        self.store, root, arrays = open_group(self.path, "kvsim_format", FORMAT_VERSION)
        self.attributes: dict[str, Any] = root["attributes"]
        for key, kind in {"digest": str, "checksums": dict}.items():
            if not isinstance(self.attributes.get(key), kind):
                found = short_repr(self.attributes.get(key))
                raise damaged(f"{self.where}: attribute {key} is {found}")
        self.digest = str(self.attributes["digest"])
        self.arrays = {name: array for name, array in arrays.items() if name in AXES}
        #: dtype of the numbers of each array, bfloat16 where it is of their bits
        self.numbers = {name: self._number(name) for name in self.arrays}
        floats = {name: x for name, x in self.numbers.items() if name != "tokens"}
        dtypes = {x: str(self.arrays[x].attrs.get("source_dtype", y)) for x, y in floats.items()}
        stored = {name: array.shape for name, array in self.arrays.items()}
        #: output projections next to the trace, None where it has its own or none
        self.projections: StoredProjections | None = None
        if "o_proj" not in self.arrays:
            meta = object_at(self.attributes, "meta")
            self.projections = find_projections(self.path, meta, self.where)
        if self.projections is not None:
            stored["o_proj"] = tuple(self.projections.facts.shape)
            dtypes["o_proj"] = self.projections.facts.source_dtype
        try:
            self.header = read_header(self.attributes, dtypes)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise damaged(f"{self.where}: its attributes: {error_line(error)}") from error
        with reading(f"{self.where}: its arrays"):
            #: shape of each array that `read` returns
            self.shapes: Mapping[str, tuple[int, ...]] = whole_shapes(stored, self.header.left_out)
            if missing := [name for name in "qkv" if name not in stored]:
                raise damaged(f"{self.where}: no array {', '.join(missing)}, expected q, k and v")
            check_shapes(self.shapes, self.where)
            if "token_text" in self.attributes:
                check_texts(self.token_text, self.shapes["q"][2], self.where)
            self.header.check(self.shapes, self.where)

    @property
    def positions(self) -> Tensor:
        """Positions 0, 1, 2, ... of the rows."""
        return torch.arange(self.shapes["q"][2])

    @property
    def compute_dtype(self) -> torch.dtype:
        """float64 where q, k or v is stored so, else float32."""
        double = any(self.numbers[name] == "float64" for name in "qkv")
        return torch.float64 if double else torch.float32

    @property
    def fingerprint(self) -> str:
        """The key of the trace in results, from its attributes (`kvsim.core.digest`)."""
        apart = {} if self.projections is None else {"o_proj": self.projections.facts.checksums}
        return fingerprint(self.digest, self.header, self.attributes["checksums"] | apart)

    @property
    def token_text(self) -> list[str] | None:
        """The text of each token, or None."""
        return self.attributes.get("token_text")

    def read(self, name: str, layers: slice, pos: slice) -> Tensor:
        """Return part of an array in its stored dtype, decoding only the needed chunks."""
        if name == "tokens":
            with reading(self.where):
                tokens = torch.from_numpy(np.asarray(self.arrays[name][pos]))
            if (tokens < 0).any():
                raise damaged(f"{self.where}: {name} has {int(tokens.min())}, expected 0 or more")
            return tokens
        if name == "o_proj" and self.projections is not None:
            return self.projections.read(layers)
        left_out = self.header.left_out
        pos = stored_part(name, pos, self.shapes["k"][2], left_out, self.where)
        return self.read_stored(name, layers, pos)

    def read_stored(self, name: str, layers: slice, pos: slice) -> Tensor:
        """Return part of an array with layers, as `read`; pos: indices of stored positions."""
        part = tuple({"layer": layers, "pos": pos}.get(axis, _ALL) for axis in AXES[name])
        with reading(self.where):
            stored = torch.from_numpy(np.asarray(self.arrays[name][part]))
            tensor = stored.view(getattr(torch, self.numbers[name]))
        # writers refuse NaN, so a reader that finds one has lost data
        places = zip(AXES[name], self.shapes[name], part, strict=True)
        first = {axis: range(n)[one].start for axis, n, one in places}
        check_finite(name, tensor, self.where, layer=first["layer"], pos=first.get("pos", 0))
        return tensor

    def _number(self, name: str) -> str:
        array, source = self.arrays[name], self.arrays[name].attrs.get("source_dtype")
        number = array.dtype.name
        if number == BITS and source == "bfloat16":
            number = "bfloat16"
        allowed = ["int32"] if name == "tokens" else [*DTYPES.values()]
        if number not in allowed or source not in (None, *DTYPES.values()):
            raise damaged(f"{self.where}: {name} is {number}, expected {' or '.join(allowed)}")
        return number


def attributes_of(header: Header) -> dict[str, Any]:
    """Return the attributes that describe the header of a trace."""
    ropes = list(dict.fromkeys(header.ropes))
    return {
        "kvsim_format": FORMAT_VERSION,
        "name": header.name,
        "prompt_len": header.prompt_len,
        "layer_ids": list(header.layer_ids),
        **header.optional,
        "attention": [
            {key: listed(x) for key, x in vars(formula).items() if x not in (None, ())}
            | {"rope": ropes.index(rope)}
            for formula, rope in zip(header.formulas, header.ropes, strict=True)
        ],
        "ropes": [{key: listed(x) for key, x in vars(rope).items()} for rope in ropes],
        "meta": dict(header.meta),
    }


def read_header(attributes: Mapping[str, Any], dtypes: Mapping[str, str]) -> Header:
    """The header that the attributes of a trace describe; dtypes: of each array, in the model."""
    ropes = [Rope(**rope) for rope in attributes["ropes"]]
    layers = [dict(layer) for layer in attributes["attention"]]
    places = [layer.pop("rope") for layer in layers]
    return Header(
        prompt_len=attributes["prompt_len"],
        formulas=tuple(Formula(**layer) for layer in layers),
        ropes=tuple(ropes[place] for place in places),
        layer_ids=attributes["layer_ids"],
        name=printable(str(attributes["name"])),
        source_dtypes=dtypes,
        meta=object_at(attributes, "meta"),
        **{key: attributes[key] for key in OPTIONAL if key in attributes},
    )


def _located(path: str | Path) -> str | Path:
    path = locate(path)
    with suppress(OSError, ValueError):
        if isinstance(path, str) or path.exists():
            return path
    raise TraceNotFoundError(
        f"{path} does not exist, expected a trace; record one with `kvsim capture`, or give "
        f"one that ships: {', '.join(SAMPLES)}{suggest(str(path), SAMPLES)}"
    )
