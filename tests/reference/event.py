"""What the rules of kvsim's own policies look at beyond an `Event` of `kvsim.testing.loops`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvsim.errors import NeedsError, PolicyError
from kvsim.testing import loops
from kvsim.testing.loops.event import Floats, Numbers, Rotary


@dataclass
class Event(loops.Event):
    """An event with the parameters of a piece, and what that piece carries with the entries.

    average: what TOVA averages over: "all" heads, its "group", all heads by "slot". memory: per KV
    head, by position; doubt: the noise of what is remembered.
    """

    params: Mapping[str, Any] = field(default_factory=dict)
    average: str = "all"
    memory: Numbers = field(default_factory=list)
    doubt: Numbers = field(default_factory=list)

    @classmethod
    def of(cls, event: loops.Event, **changes: Any) -> Event:
        """The event for one piece of a policy."""
        return cls(**{**vars(event), **changes})

    def calibrated(self) -> tuple[Floats, list[int]]:
        """The calibration queries after RoPE [qhead, row, dim], and the positions of their rows."""
        source = self.params["calibration"]
        if source == "oracle":
            queries = self.queries
        else:
            rows = int(source.removeprefix("prefix:"))
            if not 1 <= rows <= self.row + 1:
                raise PolicyError(f"calibration is {source!r}, {self.row + 1} rows are seen so far")
            queries = self.queries[:, :rows]
        return queries, self.place(range(queries.shape[1]))

    def unrotated(self, rows: Iterable[int]) -> Floats:
        """Queries of these rows before RoPE; [qhead, row, dim]."""
        chosen = list(rows)
        return unrotate(self.queries[:, chosen], self.place(chosen), self.rope)

    def projected(self, qhead: int, pos: int) -> Floats:
        """[hidden]: the value at `pos` through the output projection of one query head."""
        if self.o_proj is None:
            raise NeedsError("this policy needs the output projection; give o_proj=")
        return np.asarray(self.values[qhead // self.group, pos] @ self.o_proj[qhead])


def rotate(x: Floats, by: Any, inv_freq: Sequence[float] | Floats) -> Floats:
    """x [..., dim] rotated forward by `by` [...] positions, each pair at its own frequency.

    Dimension i is paired with i + half, half the number of frequencies; dimensions from 2 half on
    are not rotated.
    """
    half = len(inv_freq)
    angle = np.multiply.outer(by, np.asarray(inv_freq, dtype=np.float64))
    a, b = x[..., :half], x[..., half : 2 * half]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], axis=-1)


def unrotate(queries: Floats, pos: Iterable[int], rope: Rotary) -> Floats:
    """[..., row, dim] before RoPE, of queries after it at positions `pos`."""
    inv_freq, scaling = rope
    rotated = 2 * len(inv_freq)
    scaled = queries.copy()
    scaled[..., :rotated] /= scaling
    return rotate(scaled, -np.asarray(list(pos)), inv_freq)


def pool(values: Sequence[float], kind: str | None, kernel: int) -> list[float]:
    """Stride 1, same length: "max" pads with -inf, "avg" pads with 0 and divides by the kernel."""
    if kind is None or kernel == 1:
        return list(values)
    pads = [-math.inf if kind == "max" else 0.0] * (kernel // 2)
    padded = [*pads, *values, *pads]
    shifts = range(2 * len(pads) + 1)
    near = zip(*(padded[shift : shift + len(values)] for shift in shifts), strict=True)
    return [max(of_slot) if kind == "max" else sum(of_slot) / kernel for of_slot in near]
