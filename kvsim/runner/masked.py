"""A model's logits under Records: in every layer each row sees only what the Record retains.

Unlike a replay, this recomputes hidden states through all layers, so the loss of one layer reaches
the next. The tokens are given, not generated, and evictions are read from the Record: a policy does
not see how its evictions change the model. As long as the most likely token is the given token,
this is greedy decoding with the entries deleted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

from kvsim.core.attention import Formula, attend
from kvsim.core.record import Record
from kvsim.errors import CaptureError, PolicyError
from kvsim.recorder.generation import evaluating
from kvsim.recorder.hooks import kernel_name

#: The name of this module's kernel in transformers' table of attention functions.
KERNEL = "kvsim_masked"

#: The most cells of a layer's mask (record, query head, row, position) in memory at once.
CELLS = 1 << 23


def masked_logits(
    model: PreTrainedModel, tokens: Tensor, records: Sequence[Record], *, cells: int = CELLS
) -> Tensor:
    """Compute the logits of the prompt's last row and of all later rows, under each of B records.

    tokens: prompt and response, int64 [N]. records: replays of a trace of these tokens, of all
    layers, with one prompt. cells: the most cells of a layer's mask in memory at once (at least
    those of one record).

    Returns [B, N - prompt_len + 1, V]; row i predicts token prompt_len + i.

    Raises:
        PolicyError: a record of another length, prompt or model; one whose prompt rows do not see
            the whole prompt before them; one with keys rotated to their slot in the cache.
        CaptureError: a model that does not call transformers' table of attention functions.
    """
    prompt_len = records[0].prompt_len
    evicted_at = torch.stack([_by_query_head(model, len(tokens), prompt_len, r) for r in records])
    ids = tokens.to(model.device)[None]
    with torch.inference_mode(), evaluating(model):
        prompt = DynamicCache(config=model.config)
        last: Tensor = model(ids[:, :prompt_len], past_key_values=prompt).logits[:, -1:]
        if prompt_len == len(tokens):
            return last.expand(len(records), -1, -1)
        parts = []
        mask = evicted_at[0, 0].numel() * (len(tokens) - prompt_len)
        with _masking(model):
            for batch in evicted_at.to(model.device).split(max(1, cells // mask)):
                size = len(batch)
                rest = model(
                    ids[:, prompt_len:].expand(size, -1),
                    past_key_values=_copies(prompt, size),
                    evicted_at=batch,
                ).logits
                parts.append(torch.cat([last.expand(size, -1, -1), rest], dim=1))
    return torch.cat(parts)


def _by_query_head(model: PreTrainedModel, n: int, prompt_len: int, record: Record) -> Tensor:
    """Return `evicted_at` by query head, int32 [L, qhead, N]; PolicyError for another model."""
    config = model.config
    layers, qheads = config.num_hidden_layers, config.num_attention_heads
    evicted_at = record.evicted_at
    if record.positions != "absolute":
        raise PolicyError(
            f"{record.policy}: positions are {record.positions!r}; expected keys that stay at "
            "their position in the sequence"
        )
    if record.reads is not None or record.codec is not None:
        raise PolicyError(
            f"{record.policy}: rows read a part of the cache, or rounded entries; expected a "
            "record of evictions alone, which a mask can show"
        )
    shape = (layers, qheads if record.per_query_head else config.num_key_value_heads, n)
    if evicted_at.shape != shape or record.layers != tuple(range(layers)):
        raise PolicyError(
            f"{record.policy}: the record is {list(evicted_at.shape)} (layer, head, pos) of layers "
            f"{list(record.layers)}; expected {list(shape)} of all {layers} layers of the model"
        )
    if record.prompt_len != prompt_len or (evicted_at < prompt_len - 1).any():
        raise PolicyError(
            f"{record.policy}: rows of the prompt miss earlier rows; expected each row up to "
            f"{prompt_len - 1} to see all rows before it"
        )
    return torch.from_numpy(evicted_at).repeat_interleave(qheads // shape[1], dim=1)


def _copies(prompt: DynamicCache, size: int) -> DynamicCache:
    cache = DynamicCache()
    for layer, (keys, values, _) in enumerate(prompt):
        cache.update(keys.expand(size, -1, -1, -1), values.expand(size, -1, -1, -1), layer)
    return cache


def _kernel(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    _dropout: float = 0.0,  # by position, as kvpress hands it on
    *,
    scaling: float,
    evicted_at: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention of query [B, qhead, w, d], the last rows of key, value [B, head, n, d].

    evicted_at: [B, L, qhead, n], passed down by the model. Returns [B, w, qhead, d], as kernels of
    the table do.
    """
    layer = getattr(module, "layer_idx", None)
    if evicted_at is None or not isinstance(layer, int):
        raise CaptureError(
            f"{type(module).__name__} did not get the keyword argument evicted_at, expected layers "
            "that pass keyword arguments to their attention; llama, qwen2 and qwen3 do"
        )
    n, heads = key.shape[2], key.shape[1]
    pos = torch.arange(n, device=key.device)
    row = pos[n - query.shape[2] :, None]
    visible = (pos <= row) & (row <= evicted_at[:, layer, :, None])  # [B, qhead, w, n]
    out, _lse = attend(
        query.unflatten(1, (heads, -1)).flatten(0, 1),  # [B * head, G, w, d]
        key.flatten(0, 1)[:, None],
        value.flatten(0, 1)[:, None],
        Formula(scaling),
        mask=visible.unflatten(1, (heads, -1)).flatten(0, 1),
    )
    return out.unflatten(0, (-1, heads)).flatten(1, 2).transpose(1, 2), None


@contextmanager
def _masking(model: PreTrainedModel) -> Iterator[None]:
    """Let the model attend by `_kernel` until the block ends, by an error too."""
    AttentionInterface.register(KERNEL, _kernel)
    before = kernel_name(model)
    try:
        model.set_attn_implementation(KERNEL)
        if kernel_name(model) != KERNEL:
            raise CaptureError(
                f"{type(model).__name__} has attention of its own, expected a model that calls "
                "transformers' table of attention functions; llama, qwen2 and qwen3 do"
            )
        yield
    finally:
        model.set_attn_implementation(before)
