"""A model's logits under Records: in every layer each row sees only what the Record retains.

Unlike a replay, this recomputes hidden states through all layers, so the loss of one layer reaches
the next. The tokens are given, not generated, and evictions are read from the Record: a policy does
not see how its evictions change the model. As long as the most likely token is the given token,
this is greedy decoding with the entries deleted.
"""

from collections.abc import Sequence
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvsim.core.reading import visible
from kvsim.core.record import Record
from kvsim.recorder.forward import cache_option, evaluating
from kvsim.recorder.head import check_logits
from kvsim.recorder.hooks import intercepting, kernel_mask
from kvsim.recorder.modules import kernel_name


def masked_logits(model: PreTrainedModel, tokens: Tensor, records: Sequence[Record]) -> Tensor:
    """Compute the logits of the prompt's last row and of all later rows, under each of B records.

    tokens: prompt and response, int64 [N]. records: replays of a trace of these tokens, of all
    layers, with one prompt.

    Returns [B, N - prompt_len + 1, V]; row i predicts token prompt_len + i.
    """
    prompt_len, n, added = records[0].prompt_len, len(tokens), kernel_name(model) == "eager"
    evicted_at = torch.stack([_by_query_head(model, n, prompt_len, record) for record in records])
    ids = tokens.to(model.device)[None]
    with torch.inference_mode(), evaluating(model):
        prompt = DynamicCache(config=model.config)
        logits = model(ids[:, :prompt_len], **cache_option(model, prompt)).logits[0, -1:]
        last = check_logits(logits, prompt_len - 1)[None]
        if prompt_len == n:
            return last.expand(len(records), -1, -1)
        parts = []
        for last_row in evicted_at.to(model.device):
            mask, cache = partial(_mask, last_row, added), deepcopy(prompt)
            with intercepting(model, lambda _: None, masking=mask):
                rest = model(ids[:, prompt_len:], **cache_option(model, cache)).logits[0]
            parts.append(torch.cat([last, check_logits(rest, prompt_len)[None]], dim=1))
    return torch.cat(parts)


def _by_query_head(model: PreTrainedModel, n: int, prompt_len: int, record: Record) -> Tensor:
    """Return `evicted_at` by query head, int32 [L, qhead, N]."""
    config = model.config
    layers, qheads = config.num_hidden_layers, config.num_attention_heads
    evicted_at = record.evicted_at
    shape = (layers, qheads if record.per_query_head else config.num_key_value_heads, n)
    assert record.positions == "absolute"
    assert record.reads is record.storage is None
    assert (evicted_at.shape, record.layers) == (shape, tuple(range(layers)))
    assert record.prompt_len == prompt_len
    assert (evicted_at >= prompt_len - 1).all()
    return torch.from_numpy(evicted_at).repeat_interleave(qheads // shape[1], dim=1)


def _mask(last_row: Tensor, added: bool, layer: int, query: Tensor, _: Tensor | None) -> Tensor:
    """Return the mask of a layer's last rows; last_row int32 [L, qhead, N]: that sees a position.

    added: to the logits.
    """
    n = last_row.shape[-1]
    seen = visible(last_row[layer], slice(n - query.shape[2], n))  # [qhead, w, n]
    return kernel_mask(seen[None], query, added=added)
