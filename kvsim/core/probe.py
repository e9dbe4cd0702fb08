"""A probe: tokens that a model reads after the context, to measure its attention to the context.

They are not rows of the sequence. The trace holds their queries and keys (`probe_q`, `probe_k`),
and `meta.probe` describes them (docs/trace-format.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvsim.schema import object_at

#: Its key in `meta`.
KEY = "probe"


class Chunk(NamedTuple):
    """Positions start..stop-1 of the context, and the number of probe rows for them."""

    start: int
    stop: int
    rows: int


@dataclass(frozen=True)
class Probe:
    """The chunks and tokens of a probe.

    kind: "repeat", rows that repeat the context. chunks: the parts of the context in order. tokens:
    of the rows, chunk by chunk; rows of each chunk directly follow the context.
    """

    kind: str
    chunks: tuple[Chunk, ...]
    tokens: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Rows of the longest chunk."""
        return max(chunk.rows for chunk in self.chunks)

    def document(self) -> dict[str, Any]:
        """Return `meta.probe`."""
        return {
            "kind": self.kind,
            "chunks": [list(chunk) for chunk in self.chunks],
            "tokens": list(self.tokens),
        }

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> Probe | None:
        """Return the probe of a trace; None without a valid one."""
        document: Any = object_at(meta, KEY)
        chunks, tokens = document.get("chunks"), document.get("tokens")
        listed = isinstance(chunks, list | tuple) and _whole(tokens)
        if not listed or not all(_whole(chunk) and len(chunk) == 3 for chunk in chunks):
            return None
        return cls(str(document.get("kind")), tuple(Chunk(*x) for x in chunks), tuple(tokens))

    def fits(self, end: int) -> bool:
        """Whether its chunks cover the `end` tokens of a context, and each row has a token."""
        joins = [0, *(part.stop for part in self.chunks)]
        return (
            self.kind == "repeat"
            and [part.start for part in self.chunks] == joins[:-1]
            and all(part.start < part.stop and part.rows > 0 for part in self.chunks)
            and joins[-1] == end
            and len(self.tokens) == sum(part.rows for part in self.chunks)
        )


def _whole(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(
        type(value) is int and 0 <= value < 1 << 31 for value in values
    )
