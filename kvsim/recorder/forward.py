"""Forward passes of a model: its inputs, rows and cache, and chunks of a long prompt."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicSlidingWindowLayer,
)

from kvsim.core.checks import DTYPES, tolerance
from kvsim.errors import CaptureError, KvsimError, error_line
from kvsim.recorder.head import APART, check_logits
from kvsim.recorder.positions import has_rope, reset_frequencies, steady_length
from kvsim.schema import CHUNK

#: Pairs of a row and an entry in one forward of a long prompt: 1 GiB of attention weights of 32
#: heads with eager attention.
PAIRS = 1 << 23

#: More rows than any prompt has, and a sliding window longer than any sequence.
WHOLE = 1 << 31

#: Names of a cache as option and output; the second up to transformers 5.23, the first since.
_NAMES = ("cache", "past_key_values")

# Rows of the check whether a model continues from its last forward.
_FEW = 16

_AUTOCAST = torch.is_autocast_enabled


def full_cache(model: PreTrainedModel) -> DynamicCache:
    """Return an empty cache with the kinds of layers of the model, which keeps every entry.

    Layers with a sliding window, too, keep and record every entry. Raises CaptureError for a model
    that needs its own class of caches.
    """
    home = model.__module__
    for name, part in vars(sys.modules[home]).items():
        own = isinstance(part, type) and part.__module__ == home
        if own and name.endswith("Cache") and not issubclass(part, CacheLayerMixin):
            raise CaptureError(
                f"{type(model).__name__} takes a {name} alone, expected a model that runs with the "
                "caches of transformers; this model cannot be recorded"
            )
    cache = DynamicCache(config=model.config)
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.sliding_window = WHOLE
    return cache


def cache_option(model: PreTrainedModel, cache: Cache) -> dict[str, Cache]:
    """Return the option of a forward that passes a cache."""
    taken = inspect.signature(model.forward).parameters
    return {next((name for name in _NAMES if name in taken), _NAMES[-1]): cache}


def cache_of(container: Any) -> Any:
    """Return the cache in the output of a forward or in its named arguments, or None."""
    if isinstance(container, Mapping):
        return next((container[name] for name in _NAMES if name in container), None)
    return next((getattr(container, name) for name in _NAMES if hasattr(container, name)), None)


def run_chunks(
    model: PreTrainedModel, cache: Cache, ids: Sequence[int], start: int, count: int, chunk: int
) -> Iterator[tuple[int, Tensor]]:
    """Run tokens from row `start` on, over a cache of all rows before, `chunk` in a forward.

    After each forward it yields its end, and the logits [n, V] of its rows among the last `count`.
    """
    device, options = device_of(model), cache_option(model, cache)
    # some models count from 0 in every forward; without RoPE a position may be counted otherwise
    states = "position_ids" in inspect.signature(model.forward).parameters and has_rope(model)
    for at in range(0, len(ids), chunk):
        part = ids[at : at + chunk]
        begin, end = start + at, start + at + len(part)
        wanted = max(0, min(len(part), end - (start + len(ids) - count)))
        rows = max(1, wanted)  # 0 asks for all
        pos = {"position_ids": torch.arange(begin, end, device=device)[None]} if states else {}
        inputs = torch.tensor([part], device=device)
        out = run_model(model, inputs, use_cache=True, **options, **pos, **last_logits(model, rows))
        logits = getattr(out, "logits", None)
        if logits is None:
            raise CaptureError(
                f"{type(model).__name__} returns no logits, expected a model for causal language "
                "modelling, as AutoModelForCausalLM loads it"
            )
        logits = logits[0, -rows:]
        yield end, check_logits(logits, end - len(logits))[rows - wanted :]


def chunk_rows(
    model: PreTrainedModel, ids: Sequence[int], requested: int | None = None
) -> tuple[int, list[str]]:
    """Return the most rows of a forward of a prefill of `ids`, and notes on it.

    `WHOLE` unless requested, up to `PAIRS` pairs of a row and an entry. Raises CaptureError where
    fewer are requested and chunks change the model's output.
    """
    n = len(ids)
    rows = requested or max(CHUNK, PAIRS // n // CHUNK * CHUNK)
    if rows >= n or (requested is None and n * n <= PAIRS):
        return WHOLE, []
    reason = one_piece(model, ids, rows)
    if reason is None:
        return rows, []
    if requested is not None:
        raise CaptureError(
            f"chunk is {requested} for a prompt of {n} tokens, and {reason}; expected one forward "
            "for all of them; leave --chunk out"
        )
    return WHOLE, [f"the prompt was run in one piece: {reason}"]


def one_piece(model: PreTrainedModel, ids: Sequence[int], rows: int) -> str | None:
    """Return why `ids` have to run in one forward, and not in one of `rows` and more after it."""
    if (steady_length(model, rows) or len(ids)) < len(ids):
        return "frequencies of its RoPE change with the length"
    if next(model.parameters()).is_meta or continues(model, ids):
        return None
    return f"{type(model).__name__} starts from empty states in a forward of several rows"


def continues(model: PreTrainedModel, ids: Sequence[int]) -> bool:
    """Return whether a forward of several rows continues from the states of earlier rows.

    In some families only a forward of one row does, and others start from empty states. Checked on
    the logits of the first few `ids`, up to the rounding of rows that run one by one.
    """
    ids = [*ids, *ids] if len(ids) == 1 else ids
    half = len(ids[:_FEW]) // 2
    first, rest = [*ids[:half]], [*ids[half:_FEW]]

    def last(*parts: Sequence[int]) -> Tensor:
        cache, start, logits = full_cache(model), 0, Tensor()
        for part in parts:
            ((start, logits),) = run_chunks(model, cache, part, start, 1, len(part))
        return logits

    with torch.no_grad(), evaluating(model):
        whole = last(first + rest)
        chunk, single = (
            float((last(first, *parts) - whole).abs().max())
            for parts in ([rest], [[token] for token in rest])
        )
    return chunk <= max(tolerance(DTYPES[whole.dtype]) * float(whole.abs().max()), 4 * single)


@contextmanager
def _on_meta(model: PreTrainedModel) -> Iterator[None]:
    """Let a model without weights run in this thread where torch has no autocast for it (2.8)."""
    if not next(model.parameters()).is_meta:
        yield
        return
    before = torch.is_autocast_enabled  # the same function inside of another such block
    torch.is_autocast_enabled = lambda *device: device != ("meta",) and _AUTOCAST(*device)
    try:
        yield
    finally:
        torch.is_autocast_enabled = before


def run_model(model: PreTrainedModel, ids: Tensor, **options: Any) -> Any:
    """Run a model on tokens [1, n]; its errors become CaptureErrors."""
    try:
        with _on_meta(model):
            return model(ids, **options)
    except (KvsimError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # any error of an unknown model
        raise CaptureError(
            f"{type(model).__name__} raised {type(error).__name__} in a forward of {ids.shape[1]} "
            f"tokens: {error_line(error)}; expected a decoder model that runs on token ids; "
            "this model cannot be recorded"
        ) from error


def last_logits(model: PreTrainedModel, count: int) -> dict[str, int | Tensor]:
    """Return the option of a forward that computes only the last logits, if there is one."""
    # a long prompt times the vocabulary would be large
    count = 1 if model in APART else count
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        return {}
    shares = getattr(model.config.get_text_config(), "num_kv_shared_layers", None)
    # a number would also cut the rows of layers that read another layer's entries (Gemma 4)
    return {"logits_to_keep": torch.arange(-count, 0) if shares else count}


def device_of(model: PreTrainedModel) -> torch.device:
    """Return the device of a model's input tokens."""
    device = cast("torch.nn.Embedding", model.get_input_embeddings()).weight.device
    # offloaded until it runs
    return torch.device("cpu") if device.type == "meta" else device


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Set evaluation mode inside the block: dropout would make q, k, v random.

    Dynamic RoPE has the frequencies of a new text inside and after it.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    reset_frequencies(model)
    try:
        yield
    finally:
        reset_frequencies(model)
        for module in training:
            module.training = True
