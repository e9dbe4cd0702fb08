"""Caches of transformers, and the name under which the installed release takes one.

The option was `past_key_values` up to transformers 5.23, and is `cache` since; the outputs of
models changed with it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicSlidingWindowLayer,
)

from kvsim.errors import CaptureError

#: Names of the option and of the output, newest first.
_NAMES = ("cache", "past_key_values")

#: A sliding window that no sequence reaches.
_NO_WINDOW = 1 << 31


def full_cache(model: PreTrainedModel) -> DynamicCache:
    """Return an empty cache with the kinds of layers of the model, which keeps every entry.

    Also of layers with a sliding window, whose entries are recorded and checked like any other.
    Raises CaptureError for a model that takes only a class of caches of its own.
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
            layer.sliding_window = _NO_WINDOW
    return cache


def cache_option(model: PreTrainedModel, cache: Cache) -> dict[str, Cache]:
    """Return the option of a forward that gives it a cache."""
    taken = inspect.signature(model.forward).parameters
    return {next((name for name in _NAMES if name in taken), _NAMES[-1]): cache}


def cache_of(container: Any) -> Any:
    """Return the cache in the output of a forward or in its named arguments, or None."""
    if isinstance(container, Mapping):
        return next((container[name] for name in _NAMES if name in container), None)
    return next((getattr(container, name) for name in _NAMES if hasattr(container, name)), None)
