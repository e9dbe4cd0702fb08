"""Heads and dimensions of a model's layers, which may differ (Gemma 4, MiMo-V2)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvsim.core.sources import Size, is_sized, padded
from kvsim.recorder.cache import cache_option, full_cache
from kvsim.recorder.generation import device_of, evaluating, run_model
from kvsim.recorder.hooks import KernelCall, intercepting
from kvsim.recorder.modules import kernel_sizes


def size_of(call: KernelCall) -> Size:
    """Return the numbers of query heads, KV heads, dimensions, and dimensions of values."""
    return call.q.shape[0], call.k.shape[0], call.k.shape[2], call.v.shape[2]


def layer_sizes(model: PreTrainedModel, layers: Collection[int]) -> tuple[Size, ...]:
    """Return the size of each layer, in order; empty where all have the same.

    Measured by a run of two tokens, of models whose kernels get different ones or whose entries are
    no keys and values (latent attention).
    """
    latent = getattr(model.config.get_text_config(), "kv_lora_rank", None) is not None
    if len(kernel_sizes(model)) == 1 and not latent:
        return ()
    sizes: dict[int, Size] = {}

    def receive(call: KernelCall) -> None:
        sizes[call.layer] = size_of(call)

    ids, cache = torch.tensor([[1, 2]], device=device_of(model)), full_cache(model)
    with torch.no_grad(), evaluating(model), intercepting(model, receive, layers=layers):
        run_model(model, ids, use_cache=True, **cache_option(model, cache))
    return tuple(sizes[layer] for layer in sorted(sizes)) if len({*sizes.values()}) > 1 else ()


def largest(sizes: Sequence[Size]) -> Size:
    """Return the largest of each number."""
    qheads, heads, dim, value_dim = (max(of_layers) for of_layers in zip(*sizes, strict=True))
    return qheads, heads, dim, value_dim


def as_largest(name: str, part: Tensor, sizes: Sequence[Size]) -> Tensor:
    """Return an array of one layer, padded with zeros to the largest size; no sizes: as it is."""
    if not sizes or not is_sized(name):
        return part
    return padded(name, part[None], largest(sizes))[0]
