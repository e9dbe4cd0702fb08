"""The cache of a forward under the name that the installed release of transformers gives it.

The option was `past_key_values` up to transformers 5.23, and is `cache` since; the outputs of
models changed with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import Cache

#: Names of the option and of the output, newest first.
_NAMES = ("cache", "past_key_values")


def cache_option(model: PreTrainedModel, cache: Cache) -> dict[str, Cache]:
    """Return the option of a forward that gives it a cache."""
    taken = inspect.signature(model.forward).parameters
    return {next((name for name in _NAMES if name in taken), _NAMES[-1]): cache}


def cache_of(container: Any) -> Any:
    """Return the cache in the output of a forward or in its named arguments, or None."""
    if isinstance(container, Mapping):
        return next((container[name] for name in _NAMES if name in container), None)
    return next((getattr(container, name) for name in _NAMES if hasattr(container, name)), None)
