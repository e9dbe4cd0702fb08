"""Outputs of rows over a cache whose keys are rotated to their slots.

Shape letters: H KV heads, G query heads of a group, w rows, n entries, T tokens, d dimension of a
head.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from kvsim.analysis.output.layer import Layer, Rows, marked, take
from kvsim.schema import NEVER


def by_slot(layer: Layer, last: Tensor) -> Iterator[Rows]:
    """Rows after the first event, of keys and queries rotated to their slot in the cache.

    The log-sum-exp, and so the mass, is that of the model's own positions: how much full attention
    lies on what is seen. Slots change with every event and not between two of them. For presets
    that re-rotate only, so rows attend one by one.
    """
    queries, keys = layer.unrotated
    events = {int(e) for e in last.unique() if e != NEVER}
    for event, stop in pairwise(sorted({*events, last.shape[-1] - 1})):
        retained = last[:, : event + 1] > event
        old = marked(retained)
        new = torch.arange(event + 1, stop + 1, device=old.device).expand(len(old), -1)
        shown = torch.cat([retained.gather(1, old), new > event], dim=-1)
        k, v, moved = take((layer.k, layer.v, keys), torch.cat([old, new], dim=-1))
        rows = slice(event + 1, stop + 1)
        _, lse = _row_by_row(layer, layer.q[:, :, rows], k, v, shown)
        slot = (shown.cumsum(-1) - 1).clamp_(min=0)
        k = layer.rope.rotate(moved, slot)
        q = layer.rope.rotate(queries[:, :, rows], slot[:, None, old.shape[-1] :])
        out, _ = _row_by_row(layer, q, k, v, shown)
        yield Rows.of(layer, rows, out, (lse - layer.lse[:, :, rows]).exp_())


def _row_by_row(
    layer: Layer, q: Tensor, k: Tensor, v: Tensor, shown: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention of rows q [H, G, w, d] to entries k, v [H, n, d] where `shown` [H, n], with sinks.

    The last w entries are the rows' own; each row sees its own and what is before it.
    """
    before = k.shape[1] - q.shape[2]
    mask = None if bool(shown.all()) else shown[:, None, None]
    parts = []
    for row in range(q.shape[2]):
        entries = slice(before + row + 1)
        seen = None if mask is None else mask[..., entries]
        one = q[:, :, row : row + 1]
        parts.append(layer.attend(one, k[:, None, entries], v[:, None, entries], mask=seen))
    out, lse = (torch.cat(each, dim=2) for each in zip(*parts, strict=True))
    return layer.whole(out, lse)
