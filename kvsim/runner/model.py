"""A model of transformers that runs live, and a shared prefill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvsim.core.checks import compute_dtype
from kvsim.core.trace import Trace
from kvsim.errors import CaptureError
from kvsim.recorder.forward import (
    chunk_rows,
    continues,
    device_of,
    evaluating,
    full_cache,
    run_chunks,
)
from kvsim.recorder.head import Head
from kvsim.recorder.hooks import KERNELS, KernelCall, intercepting
from kvsim.recorder.loading import model_name, unwrapped
from kvsim.recorder.modules import head_of, kernel_name
from kvsim.recorder.positions import indexed, steady_length
from kvsim.recorder.provenance import describe_model


class RunningModel:
    """A model of transformers, whose rows run behind those of a cache.

    captures: of a few tokens, with and without output projections (`kvsim.runner.sketches`).

    Raises CaptureError for a model that cannot be recorded, whose kernel takes masks of an unknown
    kind, or whose layers are on several devices.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        model = unwrapped(model)
        kernel, devices = kernel_name(model), sorted({str(x.device) for x in model.parameters()})
        problems = {
            f"attends by {kernel!r}; expected one of {', '.join(KERNELS)}: load it with "
            "attn_implementation='sdpa'": kernel not in KERNELS,
            "has an indexer that chooses entries for each row, with a cache of its own; expected a "
            "model without: its traces can be replayed, no more": indexed(model) is not None,
            f"is on {', '.join(devices)}; expected one device, which the layers of a cache share; "
            "load it without a device map": len(devices) > 1,
        }
        for problem, applies in problems.items():
            if applies:
                raise CaptureError(f"{model_name(model)} {problem}")
        self.model = model
        self.device = device_of(model)
        self.captures: dict[bool, Trace] = {}
        self.added = kernel == "eager"  # masks are added to logits
        #: whether some layers keep a state, which depends on all rows before, instead of entries
        self.has_states = any(hasattr(part, "conv_states") for part in full_cache(model).layers)

    @cached_property
    def head(self) -> Head:
        """The part of the model that computes logits of its decoder's output."""
        return head_of(self.model)

    @cached_property
    def continues(self) -> bool:
        """Whether a forward of several rows goes on from the states of the rows before."""
        return not self.has_states or continues(self.model, range(1, 7))

    @cached_property
    def described(self) -> dict[str, Any]:
        """The model as traces describe it, with the digest of its weights."""
        return describe_model(self.model)

    def check_length(self, n_pos: int) -> None:
        """Raise CaptureError beyond the context of the model, or a change of its frequencies."""
        limit = steady_length(self.model)
        if limit is not None and n_pos > limit:
            raise CaptureError(
                f"the sequence may have {n_pos} tokens; expected at most {limit}, up to which "
                f"{model_name(self.model)} rotates keys and queries alike; give a shorter prompt "
                "or fewer new tokens"
            )

    def full(
        self,
        ids: Sequence[int],
        logits: int = 1,
        *,
        cache: Cache | None = None,
        begin: int = 0,
        receive: Callable[[KernelCall], None] | None = None,
    ) -> tuple[Tensor, Cache]:
        """Run tokens from row `begin` on with the full cache; returns the last logits, [n, V].

        receive: called with each call of the attention kernel.
        """
        cache = full_cache(self.model) if cache is None else cache
        chunk = chunk_rows(self.model, ids)[0] if ids else 1
        hooks = nullcontext() if receive is None else intercepting(self.model, receive)
        with torch.inference_mode(), evaluating(self.model), hooks:
            forwards = run_chunks(self.model, cache, ids[begin:], begin, logits, chunk)
            parts = [part for _, part in forwards]
        return torch.cat(parts) if parts else torch.empty(0, 0), cache


@dataclass(frozen=True)
class Prefix:
    """The first rows of a sequence, with the full cache: shared by runs that differ later.

    For each layer keys and values [H, n, d], None where it holds none, and queries [qhead, n, d];
    logits of the last row, [V].
    """

    tokens: tuple[int, ...]
    keys: list[Tensor | None]
    values: list[Tensor | None]
    queries: list[Tensor]
    logits: Tensor


def prefill(running: RunningModel, ids: Sequence[int]) -> Prefix:
    """Run the first rows of a sequence with the full cache."""
    queries: dict[int, list[Tensor]] = {}

    def receive(call: KernelCall) -> None:
        queries.setdefault(call.layer, []).append(call.q)

    logits, cache = running.full(ids, receive=receive)
    parts: list[Any] = cache.layers
    keys, values = (
        [None if x is None else x[0] for x in each]
        for each in ([part.keys for part in parts], [part.values for part in parts])
    )
    of_layers = [torch.cat(queries[at], dim=1) for at in sorted(queries)]
    return Prefix(tuple(ids), keys, values, of_layers, logits[0])


def computable(x: Tensor) -> Tensor:
    """A tensor of the model in the dtype that policies compute in."""
    return x.to(compute_dtype(x.dtype))
