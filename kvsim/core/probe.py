"""A probe: tokens that a model reads after the context, to see what it attends to there.

They are no rows of the sequence. The trace holds their queries and keys (`probe_q`, `probe_k`), and
`meta.probe` says what they are (docs/trace-format.md).
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvsim.core.lazy import Tensor
from kvsim.errors import TraceError
from kvsim.schema import object_at

#: Its key in `meta`.
KEY = "probe"

#: Its arrays.
ARRAYS = ("probe_q", "probe_k")


class Chunk(NamedTuple):
    """Positions start..stop-1 of the context, and how many rows of the probe ask for them."""

    start: int
    stop: int
    rows: int


@dataclass(frozen=True)
class Probe:
    """The chunks and tokens of a probe.

    kind: "repeat", rows that repeat the context. chunks: the parts of the context in order. tokens:
    of the rows, chunk after chunk; those of each chunk follow the context directly.
    """

    kind: str
    chunks: tuple[Chunk, ...]
    tokens: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Rows of the longest chunk, which follow the context in the model."""
        return max(chunk.rows for chunk in self.chunks)

    def document(self) -> dict[str, Any]:
        """Return `meta.probe`."""
        return {
            "kind": self.kind,
            "chunks": [list(chunk) for chunk in self.chunks],
            "tokens": list(self.tokens),
        }

    @classmethod
    def of(cls, meta: Mapping[str, Any], end: int, where: str) -> Probe | None:
        """Return the probe of a trace whose context has `end` tokens; None if it has no probe.

        Raises TraceError unless its chunks are the context, and its rows have a token each.
        """
        given, document = meta.get(KEY), object_at(meta, KEY)
        if given is None:
            return None
        chunks: Any = document.get("chunks")
        tokens: Any = document.get("tokens")
        whole = isinstance(chunks, list | tuple) and all(
            _whole(chunk) and len(chunk) == 3 for chunk in chunks
        )
        parts = [Chunk(*chunk) for chunk in chunks] if whole else []
        joins = [0, *(part.stop for part in parts)]
        fits = (
            document.keys() == {"kind", "chunks", "tokens"}
            and document["kind"] == "repeat"
            and [part.start for part in parts] == joins[:-1]
            and all(part.start < part.stop and part.rows > 0 for part in parts)
            and joins[-1] == end
            and _whole(tokens)
            and len(tokens) == sum(part.rows for part in parts)
        )
        if not fits:
            raise TraceError(
                f"{where}: meta.probe is {reprlib.repr(given)}, expected rows that repeat the "
                f"{end} tokens of its context in chunks; record the trace again"
            )
        return cls("repeat", tuple(parts), tuple(tokens))


class ProbeRows(NamedTuple):
    """Queries [L, H, G, P, d] and keys [L, H, P, d] of a probe after RoPE, and its chunks."""

    queries: Tensor
    keys: Tensor
    chunks: tuple[Chunk, ...]


def check_probe(probe: Probe | None, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raise TraceError unless a probe and its arrays are both there and of one size, or neither."""
    rows = None if probe is None else len(probe.tokens)
    for name in ARRAYS:
        recorded = shapes[name][2] if name in shapes else None
        if recorded != rows:
            raise TraceError(
                f"{where}: {name} has {recorded or 'no'} rows and meta.probe {rows or 'none'}, "
                "expected as many, or neither of them; record the trace again"
            )


def _whole(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(
        type(value) is int and 0 <= value < 1 << 31 for value in values
    )
