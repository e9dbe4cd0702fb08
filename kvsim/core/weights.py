"""Attention weights of blocks of rows, and the blocks for sums over rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvsim.core.attention import Formula, softmax
from kvsim.core.lazy import Tensor, torch
from kvsim.schema import CHUNK

#: Bytes of logits that a View holds at once in blocks of rows.
LOGIT_BYTES = 16 << 20

#: Bytes of a chain of operations on a CPU, which fit its cache.
CACHE_BYTES = 1 << 20

# Products of fewer rows are slower.
_LEAST_ROWS = 64

#: Fewest rows summed at once, because each block reads all keys.
LEAST_ADDED = 16


def row_weights(
    q: Tensor,
    k: Tensor,
    formula: Formula,
    row: Tensor,
    last: Tensor,
    layers: int,
    *,
    live: Tensor | None = None,
    before: tuple[Tensor, Tensor] | None = None,
    weigh: bool = True,
) -> Tensor:
    """Softmax, or logits, of rows q [L * H, G * w, d] over keys k [L * H, n, d]; [L * H, G * w, n].

    row [G * w]: their positions. last [L * H, m]: positions of the last keys, which may be later
    than some rows. live [L * H, n]: False on pads. before: earlier keys, and the row up to which
    each was in place [L * H, n].
    """
    sinks, first = None, k.shape[1] - last.shape[1]
    if weigh and formula.sinks:
        heads = len(k) // layers
        count = len(row) // (len(formula.sinks) // heads)
        sinks = formula.sink(q, heads).repeat_interleave(count, 1).repeat(layers, 1)
    out = q.new_empty(*q.shape[:2], k.shape[1])
    for heads_at, rows_at in _parts(out):
        z = formula.capped((q[heads_at, rows_at] @ k[heads_at].mT).mul_(formula.scale))
        if before is not None:
            keys, until = before
            earlier = q[heads_at, rows_at] @ keys[heads_at].mT
            earlier = formula.capped(earlier.mul_(formula.scale))
            z = earlier.where(row[rows_at, None] <= until[heads_at, None], z)
        if last.shape[1]:
            hidden = last[heads_at, None] > row[rows_at, None]
            z[..., first:].masked_fill_(hidden, -torch.inf)
        if live is not None:
            z.masked_fill_(~live[heads_at].unsqueeze(1), -torch.inf)
        if not weigh:
            out[heads_at, rows_at] = z
        elif sinks is None:
            torch.softmax(z, -1, out=out[heads_at, rows_at])
        else:
            out[heads_at, rows_at] = softmax(z, sinks[heads_at, rows_at])
    return out


def row_grid(start: int, stop: int, size: int = 0) -> Iterator[tuple[int, int]]:
    """Blocks of rows start..stop-1 with borders that depend only on positions.

    size: bytes of a row's weights on one entry. A block holds a quarter of `LOGIT_BYTES`, and at
    least `LEAST_ADDED` rows.
    """
    while start < stop:
        end, step = (start // CHUNK + 1) * CHUNK, CHUNK
        while step > LEAST_ADDED and step * end * size > LOGIT_BYTES // 4:
            step //= 2
        border = min((start // step + 1) * step, stop)
        yield start, border
        start = border


def by_heads(compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Apply `compute` to tensors [L, H, ...], as many heads at once as `LOGIT_BYTES` hold.

    compute: takes parts of the tensors, [1, h, ...], and returns [1, h, ...].
    """
    flat = [x.flatten(0, 1) for x in tensors]
    size = max(x[:1].numel() * x.element_size() for x in flat)
    parts = zip(*(x.split(max(1, LOGIT_BYTES // max(1, size))) for x in flat), strict=True)
    heads = torch.cat([compute(*(x.unsqueeze(0) for x in part))[0] for part in parts])
    out: Tensor = heads.unflatten(0, tensors[0].shape[:2])
    return out


def _parts(of: Tensor) -> Iterator[tuple[slice, slice]]:
    first, second = of.shape[:2]
    most = first * second
    if of.device.type == "cpu":
        most = max(1, CACHE_BYTES // max(1, of.shape[2] * of.element_size()))
    rows = min(second, max(_LEAST_ROWS, most))
    size = max(1, most // max(1, second))
    for a in range(0, first, size):
        for b in range(0, second, rows):
            yield slice(a, a + size), slice(b, b + rows)
