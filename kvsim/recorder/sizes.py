"""Heads and dimensions of each layer that a capture records."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvsim.core.sources import Size, is_sized, padded
from kvsim.errors import CaptureError
from kvsim.recorder.cache import cache_option, full_cache
from kvsim.recorder.generation import device_of, evaluating, run_model
from kvsim.recorder.hooks import KernelCall, intercepting
from kvsim.recorder.modules import kernel_sizes


def size_of(call: KernelCall) -> Size:
    """Return the numbers of query heads, KV heads, dimensions, and dimensions of values."""
    return call.q.shape[0], call.k.shape[0], call.k.shape[2], call.v.shape[2]


def calls_of_two(
    model: PreTrainedModel, layers: Collection[int] | None = None
) -> dict[int, KernelCall]:
    """Return the kernel calls of layers in a run of two tokens.

    Of all layers by default, as far as the run gets: what fails behind the first call is told where
    it is recorded.
    """
    calls: dict[int, KernelCall] = {}

    def receive(call: KernelCall) -> None:
        calls[call.layer] = call

    ids, cache = torch.tensor([[1, 2]], device=device_of(model)), full_cache(model)
    try:
        with torch.no_grad(), evaluating(model), intercepting(model, receive, layers=layers):
            run_model(model, ids, use_cache=True, **cache_option(model, cache))
    except CaptureError:
        if layers is not None or not calls:
            raise
    return calls


def layer_sizes(
    model: PreTrainedModel, layers: Collection[int], *whole: object
) -> tuple[Size, ...]:
    """Return the size of each layer, in order; empty where all have the same.

    whole: rows that repeat the context and rows left out, as far as they are wanted; what is stored
    of them has one shape for all layers, so that CaptureError is raised where these differ.

    Measured by a run of two tokens, of models whose kernels get different ones or whose entries are
    no keys and values (latent attention).
    """
    latent = getattr(model.config.get_text_config(), "kv_lora_rank", None) is not None
    if len(kernel_sizes(model)) == 1 and not latent:
        return ()
    sizes = {layer: size_of(call) for layer, call in calls_of_two(model, layers).items()}
    if len({*sizes.values()}) == 1:
        return ()
    if any(whole):
        raise CaptureError(
            "rows that repeat the context, and sums over rows that are left out, are those of "
            "layers of one size, and layers of the model differ in heads or dimensions; choose "
            "layers (--layers), or do without them"
        )
    return tuple(sizes[layer] for layer in sorted(sizes))


def largest(sizes: Sequence[Size]) -> Size:
    """Return the largest of each number."""
    qheads, heads, dim, value_dim = (max(of_layers) for of_layers in zip(*sizes, strict=True))
    return qheads, heads, dim, value_dim


def as_largest(name: str, part: Tensor, sizes: Sequence[Size]) -> Tensor:
    """Return an array of one layer, padded with zeros to the largest size; no sizes: as it is."""
    if not sizes or not is_sized(name):
        return part
    return padded(name, part[None], largest(sizes))[0]
