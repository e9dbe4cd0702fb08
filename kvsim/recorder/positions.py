"""Positions of a model: how many it reads, and its rotary embeddings in effect."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvsim.core.attention import Layout, Rope
from kvsim.core.checks import DTYPES, compute_dtype, relative_error, tolerance
from kvsim.errors import CaptureError

#: The end of the names of buffers with frequencies; what precedes it distinguishes kinds of layers.
_INV_FREQ = "inv_freq"

#: Cached results of `has_rope`, which is called before every forward.
_ROTARY: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()

#: The end of the names of buffers with the frequencies that a model was loaded with.
_FIRST = f"original_{_INV_FREQ}"

#: Kinds of RoPE scaling by a factor of the length, and the one whose frequencies depend on it.
_DYNAMIC = "dynamic"
_STRETCHING = ("linear", _DYNAMIC, "yarn")

# Models take angles in float32: a position of this relative error times a frequency.
_ANGLE = 2.0**-22

#: The rotary embedding of a layer without RoPE, and of one that rotates in an unknown way.
NO_ROPE, UNKNOWN = Rope(()), Rope((), layout="unknown")


def context_length(model: PreTrainedModel) -> int | None:
    """Return the longest sequence of the model's configuration, in tokens, with its RoPE scaling.

    A factor (linear, dynamic, yarn) lengthens the sequences that the model was trained on; other
    kinds of scaling, and layers without any, leave the configuration's own limit.
    """
    limit, ropes = _positions(model)
    if not limit:
        return None
    stretched = [
        (rope.get("original_max_position_embeddings") or limit) * (rope.get("factor") or 1)
        if rope.get("rope_type") in _STRETCHING
        else limit
        for rope in ropes
    ]
    return max(limit, int(min(stretched)))


def steady_length(model: PreTrainedModel, start: int = 0) -> int | None:
    """Return how long a sequence may grow from `start` tokens on, with the same frequencies.

    Frequencies of dynamic RoPE change with every token beyond the configuration's positions, those
    of longrope once.
    """
    limits = [context_length(model) or 0]
    positions, ropes = _positions(model)
    for rope in ropes:
        if rope.get("rope_type") == _DYNAMIC:
            limits.append(max(start, positions))
        elif rope.get("rope_type") == "longrope":
            original = int(rope["original_max_position_embeddings"])
            limits += [original] if start <= original else []
    return min(limits) or None


def indexed(model: PreTrainedModel) -> int | None:
    """Return the entries or blocks that an indexer selects per row (DSA, MiniMax-M3), or None."""
    config = model.config.get_text_config()
    blocks = getattr(config, "index_topk_blocks", None)
    if blocks is not None:
        return int(blocks * config.index_block_size)
    return getattr(config, "index_topk", None) or getattr(config, "indexer_budget", None)


def indexer_notes(model: PreTrainedModel, n_pos: int) -> list[str]:
    """Return the note on an indexer; CaptureError where it may leave entries out of n_pos."""
    chosen = indexed(model)
    if chosen is not None and chosen < n_pos:
        raise CaptureError(
            f"an indexer chooses {chosen} entries for each row, and the text may have {n_pos} "
            f"tokens; expected at most {chosen}, up to which attention is dense; give a shorter "
            "text, or fewer new tokens"
        )
    note = (
        f"an indexer chooses {chosen} entries for each row, which are all in a text this short: "
        "attention is dense here, and in longer texts it is not"
    )
    return [] if chosen is None else [note]


def scales_by_cache(model: PreTrainedModel, n_pos: int) -> bool:
    """Return whether queries of so many rows have a factor of the length of the cache (Llama 4).

    Rows at given positions without a cache have another factor.
    """
    config = model.config.get_text_config()
    return bool(getattr(config, "attn_temperature_tuning", False)) and n_pos >= config.floor_scale


def fitting_tokens(model: PreTrainedModel, start: int, count: int) -> tuple[int, list[str]]:
    """Return how many of `count` new tokens fit after `start`; with a note if not all of them."""
    limit, context = steady_length(model, start), context_length(model)
    if limit is None or start + count <= limit:
        return count, []
    end = f"the model's context of {context} ends"
    if limit != context:
        end = f"frequencies of its RoPE change with the length, beyond {limit} tokens"
    return limit - start, [
        f"the response was cut to {limit - start} of {count} new tokens, where {end}"
    ]


def reset_frequencies(model: PreTrainedModel) -> None:
    """Give dynamic RoPE the frequencies of a short text; a longer one before leaves its own."""
    if all(rope.get("rope_type") != _DYNAMIC for rope in _positions(model)[1]):
        return
    for module in model.modules():
        for name, first in list(module.named_buffers(recurse=False)):
            if name.endswith(_FIRST):
                kind = name.removesuffix(_FIRST)
                setattr(module, f"{kind}{_INV_FREQ}", first.clone())
                setattr(module, f"{kind}max_seq_len_cached", module.original_max_seq_len)


def _positions(model: PreTrainedModel) -> tuple[int, list[Mapping[str, Any]]]:
    """Return the positions of a configuration, 0 without any, and RoPE by kind of layers."""
    config = model.config.get_text_config()
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = [rope for rope in ropes.values() if isinstance(rope, Mapping)]
    return int(getattr(config, "max_position_embeddings", None) or 0), kinds or [ropes]


def has_rope(model: PreTrainedModel) -> bool:
    """Return whether a model has frequencies of a rotary embedding."""
    if model not in _ROTARY:
        _ROTARY[model] = any(name.endswith(_INV_FREQ) for name, _ in model.named_buffers())
    return _ROTARY[model]


def read_ropes(model: PreTrainedModel) -> tuple[Rope, ...]:
    """Return the rotary embeddings in effect, each once; empty for a model without RoPE.

    Frequencies of some kinds (dynamic, longrope) change with the length of the sequence, and a
    model may have several embeddings, such as one for local and one for global layers. Modules do
    not name the layout; it is `half` here.
    """
    ropes: dict[Rope, None] = {}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith(_INV_FREQ) and not name.endswith(_FIRST):
                kind = name.removesuffix(_INV_FREQ)
                scaling = float(getattr(module, f"{kind}attention_scaling", 1.0))
                ropes[Rope(buffer.to("cpu", torch.float64).tolist(), scaling)] = None
    dim = getattr(model.config.get_text_config(), "rotary_dim", None)  # GPT-J has a table instead
    return tuple(ropes) if ropes or not isinstance(dim, int) else (Rope.default(dim),)


def rope_candidates(ropes: Sequence[Rope]) -> list[Rope]:
    """Return ropes of both layouts and directions; positions of several axes also descending."""
    orders: list[Callable[[list[float]], list[float]]] = [
        list,
        lambda frequencies: sorted(frequencies, reverse=True),
        lambda frequencies: [-x for x in frequencies],
    ]
    layouts: tuple[Layout, ...] = ("half", "interleaved")
    return [
        *dict.fromkeys(
            replace(rope, inv_freq=order([*map(float, rope.inv_freq)]), layout=layout)
            for order in orders
            for layout in layouts
            for rope in ropes
        )
    ]


def matching_ropes(
    first: Tensor, after: Tensor, start: int, ropes: Sequence[Rope]
) -> tuple[list[Rope], float]:
    """Return the `ropes` that rotate the key `first` [head, 1, d] to `after`, and the error."""
    dtype = compute_dtype(after.dtype)
    x, y = first.to(dtype), after.to(dtype)
    at = torch.arange(start, start + after.shape[1], device=after.device)
    fits, least = [], math.inf
    for rope in ropes:
        if 2 * len(rope.inv_freq) > x.shape[-1]:
            continue
        plain = rope.unrotate(x, at[:1] * 0).expand_as(y)
        error = float(relative_error(y, rope.rotate(plain, at)).max())
        least = min(least, error)
        if error <= rotation_tolerance(after.dtype, rope, start + len(at)):
            fits.append(rope)
    return fits, least


def rotation_tolerance(dtype: torch.dtype, rope: Rope, end: int) -> float:
    """Return the tolerance of rotated queries and keys up to a position, as a relative error."""
    # models take cosine and sine in float32, and round them to their own dtype
    base = max(tolerance("float32"), tolerance(DTYPES[dtype]))
    return base + _ANGLE * end * max(map(abs, rope.inv_freq), default=0.0)
