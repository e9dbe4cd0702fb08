"""A policy on a running model: rows go through it, and events evict from its cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from types import TracebackType
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from kvsim.core.policy import Policy, Schedule
from kvsim.core.record import Record
from kvsim.core.sources import Memory
from kvsim.core.trace import Trace
from kvsim.engine.block import Block
from kvsim.engine.checks import check_cell, remark, whole
from kvsim.engine.layers import check_together, replayed, runs
from kvsim.engine.replay import setting_of
from kvsim.errors import CaptureError, PolicyError
from kvsim.recorder import capture
from kvsim.recorder.generation import device_of, evaluating
from kvsim.recorder.hooks import KernelCall, intercepting, kernel_name
from kvsim.recorder.models import model_name
from kvsim.runner.cache import LiveLayer, LiveSource

#: Kernels whose masks are known: added to the logits, or true where a row sees an entry.
_KERNELS = ("eager", "sdpa")

#: Tokens by which a model is tried.
_TRIED = 32


class RunningModel:
    """A model of transformers, and what a capture of a few tokens says of its attention.

    Raises CaptureError for a model that cannot be recorded, or whose kernel takes unknown masks.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        kernel = kernel_name(model)
        if kernel not in _KERNELS:
            raise CaptureError(
                f"{model_name(model)} attends by {kernel!r}; expected one of "
                f"{', '.join(_KERNELS)}: load it with attn_implementation='sdpa'"
            )
        self.model = model
        self.device = device_of(model)
        self._last = "logits_to_keep" in inspect.signature(model.forward).parameters

    @cached_property
    def _plain(self) -> Trace:
        return self._tried()

    @cached_property
    def _projected(self) -> Trace:
        return self._tried(o_proj=True)

    def _tried(self, **options: Any) -> Trace:
        """A trace of a few tokens, in memory."""
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        ids = [token % vocabulary for token in range(1, _TRIED + 1)]
        name = model_name(self.model)
        return capture(self.model, None, ids, name=name, max_new_tokens=0, **options)

    @cached_property
    def projections(self) -> Tensor | None:
        """Output projection of each query head [layer, qhead, d, D]; None without such matrices."""
        try:
            return self._projected.o_proj.to(self.device)
        except CaptureError:
            return None

    def sketch(
        self, policy: Policy, prompt_len: int, n_pos: int, context_len: int | None, name: str
    ) -> Trace:
        """A sequence that is to be run as a Trace: sizes and formulas, all q, k and v zero."""
        tried = self._projected if "o_proj" in policy.scorer.needs else self._plain
        zero = torch.zeros((), dtype=tried.dtype)
        shapes = tried.source.shapes
        arrays = {
            key: zero.expand(*shapes[key][:2], n_pos, shapes[key][3]) for key in ("q", "k", "v")
        }
        if tried.has("o_proj"):
            arrays["o_proj"] = tried.o_proj
        header = replace(
            tried.header, prompt_len=prompt_len, context_len=context_len, name=name, meta={}
        )
        return Trace(Memory(arrays), header, dtype=tried.dtype)

    def forward(self, ids: Sequence[int], start: int, cache: Cache, logits: int) -> Tensor:
        """Run tokens at positions start, start + 1, ...; returns the logits of the last, [n, V]."""
        at = torch.arange(start, start + len(ids), device=self.device)
        keep: dict[str, Any] = {"logits_to_keep": max(1, logits)} if self._last else {}
        out: Tensor = self.model(
            torch.tensor([list(ids)], device=self.device),
            past_key_values=cache,
            position_ids=at[None],
            cache_position=at,
            use_cache=True,
            **keep,
        ).logits[0]
        return out[len(out) - logits :]


@dataclass(frozen=True)
class Prefix:
    """The first rows of a sequence, with the full cache: shared by runs that differ later.

    For each layer keys and values [H, n, d] and queries [qhead, n, d]. logits: of the last row, [V].
    """

    tokens: tuple[int, ...]
    keys: list[Tensor]
    values: list[Tensor]
    queries: list[Tensor]
    logits: Tensor


class Decoding:
    """One sequence while a policy evicts from the cache of a running model.

    Use it in a `with` block, in which the model's kernel is intercepted. prompt_len, n_pos: tokens
    of the prompt, and of the whole sequence at most. schedule: instead of the policy's own. layers:
    those that evict, by number; all that see the whole text by default. observe: called with each kernel call (`KernelCall`).

    Raises:
        PolicyError: a policy that a running model cannot follow: with rows of the future, sets per
            query head, keys at other positions, or rows dropped on the way down.
        BudgetError, NeedsError: as `kvsim.replay`.
    """

    def __init__(
        self,
        running: RunningModel,
        policy: Policy,
        budget: int,
        *,
        prompt_len: int,
        n_pos: int,
        context_len: int | None = None,
        schedule: Schedule | None = None,
        layers: Sequence[int] | None = None,
        name: str = "live",
        observe: Callable[[KernelCall], None] | None = None,
    ) -> None:
        check_live(policy)
        self.running, self.policy, self.budget = running, policy, whole(budget)
        self.schedule = schedule or policy.schedule
        self.sketch = running.sketch(policy, prompt_len, n_pos, context_len, name)
        check_cell(self.sketch, policy, self.budget, None, self.schedule)
        self.layers = replayed(self.sketch, layers)
        self.events = self.schedule.rows(prompt_len, n_pos, context_len)
        self.tokens: list[int] = []
        self.peak_bytes = 0
        self._observe = observe
        self._stack = ExitStack()
        self._blocks = self._make_blocks()
        cached: dict[int, CacheLayerMixin] = {
            layer: LiveLayer(block.source, index)
            for block, source in self._blocks
            for index, layer in enumerate(source.layers)
        }
        self.cache = Cache([cached.get(at, DynamicLayer()) for at in range(self.sketch.n_layers)])

    def _make_blocks(self) -> list[tuple[Block, LiveSource]]:
        """The layers that evict, in blocks of those that compute alike."""
        sketch, policy = self.sketch, self.policy
        if policy.layer_budgets.across_layers:
            check_together(sketch, policy, self.layers)
        device, dtype = self.running.device, self.running.model.dtype
        first, *later = (
            setting_of(sketch, policy, self.budget, self.schedule, end)
            for end in self.schedule.ends(sketch.prompt_len, sketch.context_len)
        )
        setting, context = (later[0], first) if later else (first, None)
        blocks = []
        for run in runs(sketch, self.layers, len(self.layers), policy, None):
            source = LiveSource(sketch, run.layers, torch.empty(0, device=device, dtype=dtype))
            numbers = torch.tensor(run.layers, device=device)
            block = Block(
                source, policy, setting, numbers, context=context, compacted=source.compact
            )
            source.entries = block.entries
            blocks.append((block, source))
        return blocks

    def __enter__(self) -> Self:
        self._stack.enter_context(torch.inference_mode())
        self._stack.enter_context(evaluating(self.running.model))
        self._stack.enter_context(
            intercepting(self.running.model, self._receive, masking=self._mask)
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        self._stack.__exit__(kind, error, cast("TracebackType | None", trace))

    def begin(self, prefix: Prefix) -> None:
        """Take over the first rows of the sequence, which no event precedes."""
        if self.tokens or any(row < len(prefix.tokens) - 1 for row in self.events):
            raise ValueError(f"an event precedes row {len(prefix.tokens) - 1}")
        self._make_room(len(prefix.tokens))
        for layer, part in enumerate(self.cache.layers):
            part.update(prefix.keys[layer][None], prefix.values[layer][None])
            if isinstance(part, LiveLayer):
                part.source.note_queries(part.index, prefix.queries[layer])
        self.tokens += prefix.tokens
        self._end()

    def feed(self, ids: Sequence[int], logits: int = 1) -> Tensor:
        """Run the next tokens; returns the logits of the last `logits` of their rows, [n, V].

        Rows between two events go through the model together.
        """
        parts: list[Tensor] = []
        left = len(ids)
        while left:
            start = len(self.tokens)
            piece = ids[len(ids) - left :][: self._make_room(start)]
            left -= len(piece)
            wanted = min(len(piece), max(0, logits - left))
            out = self.running.forward(piece, start, self.cache, wanted)
            parts.append(out)
            self.tokens += piece
            self._end()
        return torch.cat(parts)

    def _make_room(self, start: int) -> int:
        """Rows from row `start` up to the next event, or to the end."""
        stop = next((row + 1 for row in self.events if row >= start), self.sketch.n_pos)
        for _, source in self._blocks:
            source.room = stop - start
        return max(1, stop - start)

    def _end(self) -> None:
        """Fire the event after the last row, if there is one, and count what the cache holds."""
        row = len(self.tokens) - 1
        if row >= self.sketch.prompt_len:
            self.peak_bytes = max(self.peak_bytes, self.cache_bytes)
        if row in self.events:
            for block, source in self._blocks:
                block.event(row)
                source.settle()
        if row >= self.sketch.prompt_len - 1:
            self.peak_bytes = max(self.peak_bytes, self.cache_bytes)

    def _receive(self, call: KernelCall) -> None:
        """Keep the queries of new rows of a layer that evicts."""
        part = self.cache.layers[call.layer]
        if isinstance(part, LiveLayer):
            part.source.note_queries(part.index, call.q)
        if self._observe is not None:
            self._observe(call)

    def _mask(self, layer: int, query: Tensor, given: Tensor | None) -> Tensor | None:
        """The mask of a layer's kernel: entries of the block, and rows up to each new one."""
        part = self.cache.layers[layer]
        if not isinstance(part, LiveLayer):
            return given
        return part.source.mask(part.index, query, added=kernel_name(self.running.model) == "eager")

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of live entries: what they would take without pads."""
        return sum(source.live_bytes for _, source in self._blocks) + sum(
            part.keys.nbytes + part.values.nbytes
            for part in self.cache.layers
            if isinstance(part, DynamicLayer) and part.is_initialized
        )

    @property
    def full_bytes(self) -> int:
        """Bytes that the full cache of the rows so far takes."""
        sketch, itemsize = self.sketch, self.running.model.dtype.itemsize
        heads = sketch.n_layers * sketch.n_heads
        return 2 * heads * sketch.dim * len(self.tokens) * itemsize

    @property
    def allocated_bytes(self) -> int:
        """Bytes of keys and values in memory: pads and room for rows to come included."""
        return self.cache_bytes + sum(
            source.nbytes - source.live_bytes for _, source in self._blocks
        )

    def record(self) -> Record:
        """When each entry left, as a replay would say it."""
        n, policy, schedule = len(self.tokens), self.policy, self.schedule
        by_layer = {
            layer: block.evicted_at[index, :, :n].cpu().numpy()
            for block, source in self._blocks
            for index, layer in enumerate(source.layers)
        }
        return Record(
            evicted_at=np.stack([by_layer[layer] for layer in self.layers]),
            policy=policy.name,
            params=policy.params,
            budget=self.budget,
            interval=schedule.interval,
            prefill=schedule.prefill,
            prompt_len=self.sketch.prompt_len,
            compress=schedule.compress,
            layers=self.layers,
            trace=self.sketch.name,
            own_schedule=schedule == policy.schedule,
            remark=remark(self.sketch, policy, self.budget, schedule, None),
            closed=True,
        )


def check_live(policy: Policy) -> None:
    """Raise PolicyError for a policy that a running model cannot follow."""
    reasons = {
        "reads rows of the future": policy.scorer.clairvoyant,
        "keeps sets per query head, which a grouped cache cannot hold": policy.per_query_head,
        "drops rows of the prompt on the way down": policy.propagation is not None,
        "rotates keys to their slot in the cache": policy.positions != "absolute",
    }
    reason = next((text for text, applies in reasons.items() if applies), None)
    if reason is not None:
        raise PolicyError(
            f"{policy.name}: {reason}; a running model cannot follow it: replay it, or take another"
        )


def prefill(running: RunningModel, ids: Sequence[int]) -> Prefix:
    """Run the first rows of a sequence with the full cache."""
    queries: dict[int, Tensor] = {}

    def receive(call: KernelCall) -> None:
        queries[call.layer] = call.q

    cache = DynamicCache()
    model = running.model
    with torch.inference_mode(), evaluating(model), intercepting(model, receive):
        logits = running.forward(ids, 0, cache, 1)[0]
    keys, values = (
        [getattr(layer, name)[0] for layer in cache.layers] for name in ("keys", "values")
    )
    return Prefix(tuple(ids), keys, values, [queries[at] for at in sorted(queries)], logits)
