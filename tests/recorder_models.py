"""Models that tests record."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from families import FAMILIES
from kvsim.recorder import load_model

NAMES = ("llama", "qwen2", "qwen3")


def build(family, attention="sdpa", **changes):
    """A random model whose attention is far from uniform."""
    return replace(FAMILIES[family], changes=changes).build(attention)


@functools.cache
def small(family, attention="sdpa"):
    """A random model of the family, made once."""
    return build(family, attention)


@functools.cache
def tiny():
    """The shipped model and its tokenizer."""
    return load_model("tiny")


def exact_attention(trace, layer):
    """Attention output [qhead, n, d] in float64 from a trace's q, k, v, by the definition."""
    q, k, v = (trace.read(name, slice(layer, layer + 1))[0].double() for name in "qkv")
    k, v = (x.repeat_interleave(trace.group, 0) for x in (k, v))
    logits = trace.scale * q @ k.mT
    future = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    return logits.masked_fill(future, -torch.inf).softmax(-1) @ v
