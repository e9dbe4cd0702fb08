"""Rows that a trace omits, and the stored sums over them that policies read instead.

The first block of rows stays, for policies calibrated on the beginning of a text. At the end of the
omitted rows, `received` has the attention that each position received from all earlier rows, and
`moments` the mean and covariance of the pre-RoPE queries of all rows but the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvsim.core.attention import Formula, Rope
from kvsim.core.lazy import Tensor, torch
from kvsim.core.moments import SINKS, Moments, merged
from kvsim.core.weights import row_grid, row_weights
from kvsim.errors import NeedsError
from kvsim.schema import CHUNK, OF_ROWS

if TYPE_CHECKING:
    from kvsim.core.sources import ArraySource

#: Rows start..stop-1, whole blocks of 256.
LeftOut = tuple[int, int] | None


def left_out_before(end: int, rows: int) -> LeftOut:
    """Return the omitted rows for a prompt, or its context, of `end` tokens.

    At least `rows` of its last rows stay, and always the last one.
    """
    stop = max(0, min(end - rows, end - 1)) // CHUNK * CHUNK
    return (CHUNK, stop) if stop > CHUNK else None


def stored_shape(name: str, shape: tuple[int, ...], left_out: LeftOut) -> tuple[int, ...]:
    """Return the stored shape of an array; of the whole one, if borders are swapped."""
    if left_out is None or name not in OF_ROWS:
        return shape
    return (*shape[:2], shape[2] - left_out[1] + left_out[0], *shape[3:])


def whole_shapes(
    shapes: Mapping[str, tuple[int, ...]], left_out: LeftOut
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of arrays with the omitted rows, from the stored shapes."""
    swapped = None if left_out is None else (left_out[1], left_out[0])
    return {name: stored_shape(name, shape, swapped) for name, shape in shapes.items()}


def left_out_among(rows: Tensor, left_out: LeftOut) -> LeftOut:
    """Return the places of rows [n], ascending, that are left out."""
    start, stop = torch.searchsorted(rows, torch.tensor(left_out or (0, 0))).tolist()
    return (start, stop) if start < stop else None


def stored_part(name: str, pos: slice, n_pos: int, left_out: LeftOut, where: str) -> slice:
    """Map positions to the stored part of an array; NeedsError if some are omitted.

    pos: step 1.
    """
    if left_out is None or name not in OF_ROWS:
        return pos
    start, stop, _ = pos.indices(n_pos)
    first, end = left_out
    if stop <= first or start >= stop:
        return slice(start, stop)
    if start >= end:
        return slice(start - end + first, stop - end + first)
    raise NeedsError(
        f"{where}: {name} of rows {max(start, first)} to {min(stop, end) - 1} was left out when it "
        "was recorded (--rows); record it with more rows before the response (--rows response+N), "
        "or with all of them"
    )


def held_parts(name: str, pos: range, left_out: LeftOut) -> list[slice]:
    """Return the runs of positions that an array has."""
    first, end = left_out if left_out and name in OF_ROWS else (pos.start, pos.start)
    ends = (pos.start, min(pos.stop, first)), (max(pos.start, end), pos.stop)
    return [slice(*each) for each in ends if each[0] < each[1]]


class HeldRows:
    """A source of the stored rows, by positions of the whole text; errors call it `where`."""

    def __init__(self, stored: ArraySource, left_out: LeftOut, where: str) -> None:
        self.stored, self._left_out, self._where = stored, left_out, where
        self.shapes = whole_shapes(stored.shapes, left_out)
        self.positions = torch.arange(self.shapes["q"][2])

    def read(self, name: str, layers: slice, pos: slice) -> Tensor:
        """Part of an array; NeedsError for omitted rows."""
        pos = stored_part(name, pos, len(self.positions), self._left_out, self._where)
        return self.stored.read(name, layers, pos)


class Sums:
    """The sums of one layer, added up row by row like `kvsim.core.view.View`.

    rope: None if pre-RoPE queries are unknown.
    """

    def __init__(self, formula: Formula, rope: Rope | None) -> None:
        self.formula, self.rope = formula, rope
        self._received = torch.zeros(0)
        self._moments: Moments | None = None
        self._end = 0

    def add(self, q: Tensor, k: Tensor) -> None:
        """Add the next rows; q [qhead, w, d] of a block, k [head, n, d] up to its last row."""
        start, self._end = self._end, k.shape[1]
        rows = q.unflatten(0, (len(k), -1))  # [H, G, w, d]
        total = rows.new_zeros(*rows.shape[:2], self._end)
        total[..., :start] = self._received.to(total)
        if self.formula.reach is None or self.formula.reach >= self._end:  # else nothing reads it
            self._add_received(total, rows, k, start)
        self._received = total
        if self.rope is not None:
            first = max(start, SINKS)
            at = torch.arange(first, self._end, device=q.device)
            samples = self.rope.unrotate(rows[None, :, :, first - start :], at)
            self._moments = merged(self._moments, samples)

    def _add_received(self, total: Tensor, q: Tensor, k: Tensor, start: int) -> None:
        size = q[:, :, 0, 0].numel() * q.element_size()
        for low, high in row_grid(start, self._end, size):
            part = q[:, :, low - start : high - start].flatten(1, 2)  # [H, G * w, d]
            row = torch.arange(low, high, device=q.device).expand(q.shape[1], -1).flatten()
            last = torch.arange(low + 1, high, device=q.device).expand(len(q), -1)
            weights = row_weights(part, k[:, :high], self.formula, row, last, 1)
            total[..., :high] += weights.unflatten(1, (q.shape[1], -1)).sum(2)

    def arrays(self) -> dict[str, Tensor]:
        """Return `received` [qhead, n] and `moments` [qhead, 1 + d, d]: mean, then products."""
        out = {"received": self._received.flatten(0, 1)}
        if self._moments is not None:
            _, mean, spread = self._moments
            out["moments"] = torch.cat([mean.unsqueeze(-2), spread], -2)[0].flatten(0, 1)
        return out
