"""A policy on a running model: rows go through it, and events evict from its cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from types import TracebackType
from typing import Any, Literal, Self, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from kvsim.core.attention import Formula
from kvsim.core.policy import Policy, Schedule
from kvsim.core.record import Record
from kvsim.core.sources import Memory
from kvsim.core.trace import Trace
from kvsim.engine.block import Block
from kvsim.engine.checks import check_cell, remark, whole
from kvsim.engine.layers import check_together, layers_per_block, replayed, runs
from kvsim.engine.replay import setting_of
from kvsim.errors import CaptureError, PolicyError
from kvsim.recorder import capture
from kvsim.recorder.generation import device_of, evaluating
from kvsim.recorder.hooks import KernelCall, intercepting, kernel_name
from kvsim.recorder.models import context_length, model_name
from kvsim.runner.cache import LiveLayer, LiveSource

#: Kernels whose masks are known: added to the logits, or true where a row sees an entry.
_KERNELS = ("eager", "sdpa")

#: Tokens of the capture that shows what a model's attention computes.
_PROBE = 32


class RunningModel:
    """A model of transformers, and what a capture of a few tokens says of its attention.

    Raises CaptureError for a model that cannot be recorded, whose kernel takes masks of an unknown
    kind, or whose layers are on several devices.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        kernel = kernel_name(model)
        if kernel not in _KERNELS:
            raise CaptureError(
                f"{model_name(model)} attends by {kernel!r}; expected one of "
                f"{', '.join(_KERNELS)}: load it with attn_implementation='sdpa'"
            )
        devices = {str(parameter.device) for parameter in model.parameters()}
        if len(devices) > 1:
            raise CaptureError(
                f"{model_name(model)} is on {', '.join(sorted(devices))}; expected one device, "
                "which the layers of a cache share; load it without a device map"
            )
        self.model = model
        self.device = device_of(model)
        self.added = kernel == "eager"  # masks are added to logits
        self._last = "logits_to_keep" in inspect.signature(model.forward).parameters

    @cached_property
    def _plain(self) -> Trace:
        return self._probed()

    @cached_property
    def _projected(self) -> Trace:
        return self._probed(o_proj=True)

    def _probed(self, **options: Any) -> Trace:
        """Capture a few tokens, in memory."""
        vocabulary = cast("nn.Embedding", self.model.get_input_embeddings()).num_embeddings
        ids = [token % vocabulary for token in range(1, _PROBE + 1)]
        formulas: dict[int, Formula] = {}

        def receive(call: KernelCall) -> None:
            formulas[call.layer] = call.formula

        # a trace so short does not say how long the sliding windows are
        with intercepting(self.model, receive):
            trace = capture(
                self.model, None, ids, name=model_name(self.model), max_new_tokens=0, **options
            )
        header = replace(trace.header, formulas=tuple(formulas[at] for at in sorted(formulas)))
        return Trace(trace.source, header, dtype=trace.dtype)

    def _check_length(self, n_pos: int) -> None:
        """Raise CaptureError beyond the context of the model, or a change of its frequencies."""
        limit = context_length(self.model) or n_pos
        ropes = getattr(self.model.config.get_text_config(), "rope_parameters", None) or {}
        for rope in (ropes, *(part for part in ropes.values() if isinstance(part, dict))):
            if rope.get("rope_type") == "longrope":
                limit = min(limit, int(rope["original_max_position_embeddings"]))
        if n_pos > limit:
            raise CaptureError(
                f"the sequence may have {n_pos} tokens; expected at most {limit}, up to which "
                f"{model_name(self.model)} rotates keys and queries alike; give a shorter prompt "
                "or fewer new tokens"
            )

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
        """Return a sequence that is to be run as a Trace: sizes, formulas, and zeros as q, k, v."""
        self._check_length(n_pos)
        probe = self._projected if "o_proj" in policy.scorer.needs else self._plain
        zero = torch.zeros((), dtype=probe.dtype)
        shapes = probe.source.shapes
        arrays = {
            key: zero.expand(*shapes[key][:2], n_pos, shapes[key][3]) for key in ("q", "k", "v")
        }
        if probe.has("o_proj"):
            arrays["o_proj"] = probe.o_proj
        header = replace(
            probe.header, prompt_len=prompt_len, context_len=context_len, name=name, meta={}
        )
        layers, qheads, _, dim = arrays["q"].shape
        header.check(n_layers=layers, n_qheads=qheads, n_pos=n_pos, dim=dim, where=name)
        return Trace(Memory(arrays), header.within(n_pos), dtype=probe.dtype)

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

    For each layer keys and values [H, n, d] and queries [qhead, n, d]; logits of the last row, [V].
    """

    tokens: tuple[int, ...]
    keys: list[Tensor]
    values: list[Tensor]
    queries: list[Tensor]
    logits: Tensor


class Decoding:
    """One sequence while a policy evicts from the cache of a running model.

    Use it in a `with` block, in which the model's kernel is intercepted. prompt_len, n_pos: tokens
    of the prompt, and of the whole sequence at most. layers: those that evict, by number; all that
    see the whole text by default. observe: called with each kernel call (`KernelCall`), whose keys
    and values are those that the cache holds, in its slots, with pads.

    Several can be open on one model, each in the `with` block of the one before.

    Raises:
        PolicyError: a policy that a running model cannot follow: with rows of the future, sets per
            query head, keys at other positions, or rows dropped on the way down.
        CaptureError: a sequence longer than the model's context.
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
        interval: int | None = None,
        prefill: bool | None = None,
        compress: Literal["prompt", "context", "both"] | None = None,
        layers: Sequence[int] | None = None,
        name: str = "live",
        observe: Callable[[KernelCall], None] | None = None,
    ) -> None:
        check_live(policy)
        self.running, self.policy, self.budget = running, policy, whole(budget)
        self.schedule: Schedule = policy.schedule.override(interval, prefill, compress)
        self.sketch = running.sketch(policy, prompt_len, n_pos, context_len, name)
        check_cell(self.sketch, policy, self.budget, None, self.schedule)
        self.layers = replayed(self.sketch, layers)
        self.events = self.schedule.rows(prompt_len, n_pos, context_len)
        self.tokens: list[int] = []
        self.peak_bytes = 0
        #: from the end of the prompt on, after the event there
        self.decode_peak_bytes = 0
        self._observe = observe
        self._open = False
        self._busy = False  # this one's rows are in the model, or an error stopped them there
        self._stack = ExitStack()
        self._blocks = self._make_blocks()
        # windows bound the caches of their layers by themselves
        parts = DynamicCache(config=running.model.config).layers
        for _, source in self._blocks:
            for index, layer in enumerate(source.layers):
                parts[layer] = LiveLayer(source, index)
        self.cache = Cache(parts)

    def _make_blocks(self) -> list[tuple[Block, LiveSource]]:
        """Build the layers that evict, in blocks of those that compute alike."""
        sketch, policy = self.sketch, self.policy
        most = len(self.layers)
        if policy.layer_budgets.across_layers:
            check_together(sketch, policy, self.layers)
        else:
            most = layers_per_block(sketch, policy, None)
        first, *later = (
            setting_of(sketch, policy, self.budget, self.schedule, end)
            for end in self.schedule.ends(sketch.prompt_len, sketch.context_len)
        )
        setting, context = (later[0], first) if later else (first, None)
        like = torch.empty(0, device=self.running.device, dtype=self.running.model.dtype)
        blocks = []
        for run in runs(sketch, self.layers, most, policy, None):
            source = LiveSource(sketch, run.layers, like)
            numbers = torch.tensor(run.layers, device=like.device)
            block = Block(
                source, policy, setting, numbers, context=context, compacted=source.compact
            )
            blocks.append((block, source))
        return blocks

    def __enter__(self) -> Self:
        self._stack.enter_context(torch.inference_mode())
        self._stack.enter_context(evaluating(self.running.model))
        self._stack.enter_context(
            intercepting(self.running.model, self._receive, masking=self._mask)
        )
        self._open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        self._open = False
        self._stack.__exit__(kind, error, cast("TracebackType | None", trace))

    def begin(self, prefix: Prefix) -> None:
        """Take over the first rows of the sequence, which no event precedes."""
        n = len(prefix.tokens)
        if self.tokens or any(row < n - 1 for row in self.events):
            raise ValueError(f"an event precedes row {n - 1}")
        with self._adding(n):
            self._make_room(0)
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
        rest = list(ids)
        with self._adding(len(rest)):
            while rest:
                start = len(self.tokens)
                room = self._make_room(start)
                piece, rest = rest[:room], rest[room:]
                wanted = min(len(piece), max(0, logits - len(rest)))
                parts.append(self.running.forward(piece, start, self.cache, wanted))
                self.tokens += piece
                self._end()
        return torch.cat(parts)

    @contextmanager
    def _adding(self, n: int) -> Iterator[None]:
        """Add n rows; an error in between leaves caches that are of no use any more."""
        if not self._open or self._busy:
            raise ValueError(
                "rows are added outside the `with` block, or after an error; expected a new "
                "Decoding in its `with` block"
            )
        if not 0 < n <= self.sketch.n_pos - len(self.tokens):
            raise ValueError(
                f"{n} tokens are given after {len(self.tokens)}; expected at least one, and at "
                f"most {self.sketch.n_pos} (n_pos) together"
            )
        self._busy = True
        yield
        self._busy = False

    def _make_room(self, start: int) -> int:
        """Return the number of rows from row `start` up to the next event, or to the end."""
        event = next((row for row in self.events if row >= start), None)
        stop = self.sketch.n_pos if event is None else event + 1
        for _, source in self._blocks:
            source.room, source.reads_queries = stop - start, event is not None
        return stop - start

    def _end(self) -> None:
        """Count what the cache holds, and fire the event after the last row, if there is one."""
        row, prompt_len = len(self.tokens) - 1, self.sketch.prompt_len
        self.peak_bytes = max(self.peak_bytes, self.cache_bytes)
        if row >= prompt_len:
            self.decode_peak_bytes = max(self.decode_peak_bytes, self.cache_bytes)
        if row in self.events:
            first, last = self.policy.query_rows
            for block, source in self._blocks:
                block.event(row)
                source.settle(block.entries.live)
                if row >= prompt_len - 1:  # an event at its end may read all of it
                    source.drop_queries(min(row + 1 - last, int(block.since.min()) + 1), first)
        if row >= prompt_len - 1:
            self.decode_peak_bytes = max(self.decode_peak_bytes, self.cache_bytes)

    def _receive(self, call: KernelCall) -> None:
        """Keep the queries of new rows of a layer that evicts."""
        if not self._busy:  # another forward of this model
            return
        part = self.cache.layers[call.layer]
        if isinstance(part, LiveLayer):
            part.source.note_queries(part.index, call.q)
        if self._observe is not None:
            self._observe(call)

    def _mask(self, layer: int, query: Tensor, given: Tensor | None) -> Tensor | None:
        """Return the mask of a layer's kernel: of the block's entries, where it evicts."""
        part = self.cache.layers[layer]
        if not self._busy or not isinstance(part, LiveLayer):
            return given
        return part.source.mask(part.index, query, given, added=self.running.added)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of live entries: what they would take without pads."""
        return self._other_bytes + sum(source.live_bytes for _, source in self._blocks)

    @property
    def full_bytes(self) -> int:
        """Bytes that the full cache of the rows so far takes."""
        sketch, itemsize = self.sketch, self.running.model.dtype.itemsize
        heads = sketch.n_layers * sketch.n_heads
        return 2 * heads * sketch.dim * len(self.tokens) * itemsize

    @property
    def allocated_bytes(self) -> int:
        """Bytes of keys and values in memory: with pads, and with room for more rows."""
        return self._other_bytes + sum(source.nbytes for _, source in self._blocks)

    @property
    def query_bytes(self) -> int:
        """Bytes of the queries that the policy may still read; in no cache of transformers."""
        return sum(source.query_bytes for _, source in self._blocks)

    @property
    def _other_bytes(self) -> int:
        """Bytes of the layers that do not evict."""
        arrays = (
            array
            for part in self.cache.layers
            if not isinstance(part, LiveLayer)
            for array in (part.keys, part.values)
        )
        return sum(array.nbytes for array in arrays if array is not None)

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
