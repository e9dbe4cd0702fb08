"""A model's logits under Records: in every layer each row sees what the Record left it, no more.

Other than in a replay, hidden states are computed again through all layers, so what one layer loses
reaches the next. The tokens are given and not generated, and what leaves when is read from the
Record: a policy does not see what its evictions do to the model. As long as the most likely token
is the given one, this is greedy decoding with the entries deleted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

from kvsim.core.attention import attend
from kvsim.core.record import Record
from kvsim.errors import CaptureError, PolicyError
from kvsim.recorder.generation import evaluating
from kvsim.recorder.hooks import kernel_name

#: The name of this module's kernel in transformers' table of attention functions.
KERNEL = "kvsim_masked"

#: Cells of a layer's mask (record, query head, row, position) that are computed at once.
CELLS = 1 << 23


def masked_logits(
    model: PreTrainedModel, tokens: Tensor, records: Sequence[Record], *, cells: int = CELLS
) -> Tensor:
    """Logits of the last row of the prompt and of all rows behind it, under each of B records.

    tokens: prompt and response, int64 [N]. records: replays of a trace of these tokens, of all
    layers, with one prompt. cells: what of a layer's mask is held at once, at least one record's.

    Returns [B, N - prompt_len + 1, V]; row i predicts token prompt_len + i.

    Raises:
        PolicyError: a record of another length, prompt or model; one with rows of the prompt that
            see less than the prompt up to them; one with keys turned to their slot in the cache.
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
            for some in evicted_at.to(model.device).split(max(1, cells // mask)):
                size = len(some)
                rest = model(
                    ids[:, prompt_len:].expand(size, -1),
                    past_key_values=_copies(prompt, size),
                    evicted_at=some,
                ).logits
                parts.append(torch.cat([last.expand(size, -1, -1), rest], dim=1))
    return torch.cat(parts)


def _by_query_head(model: PreTrainedModel, n: int, prompt_len: int, record: Record) -> Tensor:
    """`evicted_at` by query head, int32 [L, qhead, N]; raises PolicyError for an unfit record."""
    config = model.config
    layers, qheads = config.num_hidden_layers, config.num_attention_heads
    found = record.evicted_at
    if record.positions != "absolute":
        raise PolicyError(
            f"{record.policy}: positions are {record.positions!r}; expected keys that stay at "
            "their position in the text"
        )
    shape = (layers, qheads if record.per_query_head else config.num_key_value_heads, n)
    if found.shape != shape or record.layers != tuple(range(layers)):
        raise PolicyError(
            f"{record.policy}: the record is {list(found.shape)} (layer, head, pos) of layers "
            f"{list(record.layers)}; expected {list(shape)} of all {layers} layers of the model"
        )
    if record.prompt_len != prompt_len or (found < prompt_len - 1).any():
        raise PolicyError(
            f"{record.policy}: expected records in which rows up to {prompt_len - 1}, the last one "
            "of the prompt, see all before them"
        )
    return torch.from_numpy(found).repeat_interleave(qheads // shape[1], dim=1)


def _copies(prompt: DynamicCache, size: int) -> DynamicCache:
    """A cache of so many sequences that all hold the prompt."""
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
    *,
    scaling: float,
    evicted_at: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of query [B, qhead, w, d], the last rows of key, value [B, head, n, d].

    evicted_at: [B, L, qhead, n], handed down by the model. Gives [B, w, qhead, d], as kernels of
    the table do.
    """
    layer = getattr(module, "layer_idx", None)
    if evicted_at is None or not isinstance(layer, int):
        raise CaptureError(
            f"{type(module).__name__} was not handed what the records say, expected a model whose "
            "layers pass keyword arguments on to their attention, as llama, qwen2 and qwen3 do"
        )
    n, heads = key.shape[2], key.shape[1]
    pos = torch.arange(n, device=key.device)
    row = pos[n - query.shape[2] :, None]
    seen = (pos <= row) & (row <= evicted_at[:, layer, :, None])  # [B, qhead, w, n]
    out, _lse = attend(
        query.unflatten(1, (heads, -1)).flatten(0, 1),  # [B * head, G, w, d]
        key.flatten(0, 1)[:, None],
        value.flatten(0, 1)[:, None],
        scaling,
        mask=seen.unflatten(1, (heads, -1)).flatten(0, 1),
    )
    return out.unflatten(0, (-1, heads)).flatten(1, 2).transpose(1, 2), None


@contextmanager
def _masking(model: PreTrainedModel) -> Iterator[None]:
    """The model attends by `_kernel` until the block is left, however it is left."""
    AttentionInterface.register(KERNEL, _kernel)
    before = kernel_name(model)
    try:
        model.set_attn_implementation(KERNEL)
        if kernel_name(model) != KERNEL:
            raise CaptureError(
                f"{type(model).__name__} has attention of its own, expected a model that calls "
                "transformers' table of attention functions; families known to work: llama, "
                "qwen2, qwen3"
            )
        yield
    finally:
        model.set_attn_implementation(before)
