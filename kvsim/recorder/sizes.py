"""Heads and dimensions of each layer that a capture records."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor
from transformers import PreTrainedModel

from kvsim.core.sources import Size, is_sized, padded
from kvsim.errors import CaptureError
from kvsim.recorder.hooks import KernelCall
from kvsim.recorder.latent import absorbed_size
from kvsim.recorder.modules import attention_modules, kernel_sizes


def size_of(call: KernelCall) -> Size:
    """Return the numbers of query heads, KV heads, dimensions, and dimensions of values."""
    return call.q.shape[0], call.k.shape[0], call.k.shape[2], call.v.shape[2]


def layer_size(model: PreTrainedModel, layer: int) -> Size:
    """Return the size of the kernel calls of a layer."""
    return absorbed_size(attention_modules(model)[layer], kernel_sizes(model)[layer])


def layer_sizes(
    model: PreTrainedModel, layers: Collection[int], *whole: object
) -> tuple[Size, ...]:
    """Return the size of each layer, in order; empty where all have the same.

    whole: rows that repeat the context and rows left out, as far as they are wanted; what is stored
    of them has one shape for all layers, so that CaptureError is raised where these differ.
    """
    found = [layer_size(model, layer) for layer in sorted(layers)]
    if len({*found}) == 1:
        return ()
    if any(whole):
        raise CaptureError(
            "rows that repeat the context, and sums over rows that are left out, are those of "
            "layers of one size, and layers of the model differ in heads or dimensions; choose "
            "layers (--layers), or do without them"
        )
    return tuple(found)


def largest(sizes: Sequence[Size]) -> Size:
    """Return the largest of each number."""
    qheads, heads, dim, value_dim = (max(of_layers) for of_layers in zip(*sizes, strict=True))
    return qheads, heads, dim, value_dim


def as_largest(name: str, part: Tensor, sizes: Sequence[Size]) -> Tensor:
    """Return an array of one layer, padded with zeros to the largest size; no sizes: as it is."""
    if not sizes or not is_sized(name):
        return part
    return padded(name, part[None], largest(sizes))[0]
