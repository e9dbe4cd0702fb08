"""Dense attention of a capture, recomputed from what is stored."""

from __future__ import annotations

import torch

from kvsim.core.attention import attention_weights
from kvsim.core.header import Header
from kvsim.schema import CHUNK
from kvsim.store.writer import TraceWriter


def write_attention(writer: TraceWriter, name: str, header: Header, rows: int) -> None:
    """Write the last `rows` rows of dense attention into the array `name`, a block at a time."""
    first, at = writer.n_pos - rows, torch.arange(writer.n_pos)
    for layer, formula in enumerate(header.formulas):
        q, k, lse = (writer.read_back(each, layer) for each in ("q", "k", "lse"))
        q, k = q.to(lse.dtype), k.to(lse.dtype)
        for start in range(first, writer.n_pos, CHUNK):
            part = slice(start, min(start + CHUNK, writer.n_pos))
            block = attention_weights(q[:, part], k, lse[:, part], formula, at[part], at)
            writer.write_attention(name, layer, start - first, block)
