"""A policy on a running model: the model runs rows, and events evict from its cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from kvsim.core.policy import Policy
from kvsim.core.record import Record
from kvsim.engine import checks
from kvsim.engine.block import Block
from kvsim.engine.checks import DROPS, Setup, does, refuse
from kvsim.engine.depth import Descent
from kvsim.engine.layers import layers_to_replay, runs
from kvsim.engine.replay import as_record, at_all_positions
from kvsim.engine.source import ended
from kvsim.errors import PolicyError
from kvsim.recorder.forward import evaluating, run_chunks
from kvsim.recorder.hooks import KernelCall, intercepting
from kvsim.recorder.repetition import repeat_context
from kvsim.runner.cache import LiveLayer, LiveSource
from kvsim.runner.descent import Decoder, prefill_in_depth
from kvsim.runner.model import Prefix, RunningModel, prefill
from kvsim.runner.paged import PagedSource, Paging
from kvsim.runner.reading import LiveReads
from kvsim.runner.sketches import sketch
from kvsim.schema import Spans

__all__ = ["Decoding", "Prefix", "RunningModel", "prefill"]


class Decoding:
    """One sequence while a policy evicts from the cache of a running model, in a `with` block.

    prompt_len, n_pos: tokens of the prompt, and of the whole sequence at most. interval, prefill:
    of the policy by default. layers: those that evict, by number; all that see the whole text by
    default. observe: called with each kernel call (`KernelCall`), whose keys
    and values are those that the cache holds, in its slots, with pads. paging: hold the entries in
    blocks (`kvsim.runner.paged`), and attend through block tables; keys and values that `observe`
    receives are then those of new rows alone. repeated: what `repeat_context` returns, for policies
    that score by it; by default of the repetition alone. questions: where later ones are, at the
    latest (`ask`).

    Several can be open on one model, each in the `with` block of the one before.

    Raises:
        PolicyError: a policy that a running model cannot follow, with rows of the future or sets
            per query head; one that rotates keys to their slots, or drops rows of the prompt on the
            way down, where some layers do not evict.
        CaptureError: a sequence longer than the model's context; a family whose layers cannot run
            one by one, under a policy that drops rows.
        BudgetError, NeedsError: as `kvsim.replay`.
    """

    def __init__(
        self,
        running: RunningModel,
        policy: Policy,
        budget: int | str,
        *,
        prompt_len: int,
        n_pos: int,
        context_len: int | None = None,
        interval: int | None = None,
        prefill: bool | None = None,
        layers: Sequence[int] | None = None,
        name: str = "live",
        observe: Callable[[KernelCall], None] | None = None,
        paging: Paging | None = None,
        repeated: Mapping[str, Tensor] | None = None,
        questions: Spans = (),
    ) -> None:
        check_live(policy, paged=paging is not None)
        sizes: dict[str, Any] = {"context_len": context_len, "questions": questions, "name": name}
        sequence = sketch(running, policy, prompt_len, n_pos, **sizes)
        self.setup = Setup(sequence, policy, budget, None, interval, prefill).checked()
        self.running, self.sketch = running, self.setup.trace
        self.policy = policy = self.setup.policy
        parts = [sequence.part([x]) for x in {*sequence.owners}]
        self._row_size = sum(part.n_heads * part.entry_size for part in parts)
        chosen, owners = layers_to_replay(self.sketch, layers), self.sketch.owners
        # what leaves a layer leaves all that read its entries
        more = {i for layer in chosen for i in self.sketch.header.readers(owners[layer])}
        self.layers = (*chosen, *sorted(more - {*chosen}))
        self._events = deque(self.setup.events)  # that have not fired
        self._questions, self._asked = [*questions], 0
        self.tokens: list[int] = []
        self.peak_bytes = 0
        self.decode_peak_bytes = 0  #: from the end of the prompt on, after the event there
        self._observe, self._paging = observe, paging
        self._repeats, self._repeated = policy.reads.context_again, repeated
        # the first row that may read a part, or see rounded entries
        self._first, sparse = self.setup.ends[0], policy.sparse
        first = ended(self.sketch, self._first)
        given = self.setup.budget, self.layers
        self._reads = None if sparse is None else LiveReads(first, sparse, *given)
        #: after which row entries are first rounded
        self._stores = self._first - 1 if policy.rounds else None
        self._prunes = self._first if policy.storage and policy.storage.reads.last else 0
        #: in its `with` block; while its rows are in the model, or an error stopped them there
        self._open = self._busy = False
        self._stack = ExitStack()
        self._blocks: list[tuple[Block, LiveSource]] = []
        self._uncut: set[int] = set()  # layers of which nothing is ever evicted
        #: by the number of each layer that reads entries of a block
        self._evicting: dict[int, LiveLayer] = {}
        self._descent: Descent | None = None
        self._single = not running.continues  # rows after the first go one by one
        _check_layers(policy, self.layers, self.sketch.n_layers)
        # windows bound the caches of their layers by themselves
        self._parts: list[Any] = DynamicCache(config=running.model.config).layers
        self.cache = Cache(self._parts)
        self._decoder = Decoder(running.model) if does(policy, DROPS) else None
        if self._decoder is None:
            self._make_blocks()

    def _make_blocks(self) -> None:
        sketch, policy = self.sketch, self.policy
        like = torch.empty(0, device=self.running.device, dtype=self.running.model.dtype)
        rotated = self._positions == "slot"
        owners = [*dict.fromkeys(sketch.owners[layer] for layer in self.layers)]
        for run in runs(sketch, owners, policy, descent=self._descent):
            part, dropped = run.trace, sketch.prompt_len - run.trace.prompt_len
            how: dict[str, Any] = {"rotated": rotated, "dropped": dropped}
            if self._paging is None:
                source = LiveSource(part, run.layers, like, **how, exact=policy.rounds)
            else:
                source = PagedSource(part, run.layers, like, self._paging, **how)
            block = Block(source, policy, self.setup.setting(part), run.layers)
            self._blocks.append((block, source))
            self._uncut.update(run.layers if run.uncut else ())
            for index, layer in enumerate(source.readers):
                number = sketch.layer_ids[layer]
                held = self._parts[number] if layer in source.layers else None
                self._evicting[number] = LiveLayer.of(held, source, index)
            for layer in source.layers:
                number = sketch.layer_ids[layer]
                self.cache.layers[number] = self._evicting[number]

    @property
    def _positions(self) -> Literal["absolute", "slot"]:
        """Where keys are rotated to: rows that run through all layers again get new positions."""
        restarted = self._descent is not None and self._descent.selection.restarted
        return "slot" if restarted else self.policy.positions

    def __enter__(self) -> Self:
        model = self.running.model
        with ExitStack() as stack:  # an error on the way in leaves nothing behind
            stack.enter_context(torch.inference_mode())
            stack.enter_context(evaluating(model))
            attending = None if self._paging is None else self._attend
            stack.enter_context(
                intercepting(model, self._receive, masking=self._mask, attending=attending)
            )
            self._stack = stack.pop_all()
        self._open = True
        return self

    def __exit__(self, *_: object) -> None:
        self._open = False
        self._stack.close()

    def begin(self, prefix: Prefix) -> None:
        """Take over the first rows of the sequence, which no event precedes."""
        n = len(prefix.tokens)
        late = (self._reads is not None or self._stores is not None) and n > self._first
        early = late or any(row < n - 1 for row in self.setup.events)
        shared = not (self.tokens or self._decoder or early or self.running.has_states)
        self._require(shared, "a prefix is no part of this run; feed the tokens")
        self.take(prefix.tokens, prefix.keys, prefix.values, dict(enumerate(prefix.queries)))

    def take(
        self,
        tokens: Sequence[int],
        keys: Sequence[Tensor | None],
        values: Sequence[Tensor | None],
        queries: Mapping[int, Tensor],
    ) -> None:
        """Take over rows that ran elsewhere, none behind the next event.

        keys, values: as in Prefix. queries: by the number of each layer that evicts, [qhead, n, d].
        """
        with self.receiving(tokens, forwards=False):
            for part, of_keys, of_values in zip(self._parts, keys, values, strict=True):
                if of_keys is None or of_values is None:
                    continue
                if isinstance(part, LiveLayer) and isinstance(part.source, PagedSource):
                    part.source.begin(part.index, (*tokens,), of_keys, of_values)
                else:
                    part.update(of_keys[None], of_values[None])
            for layer, reader in self._evicting.items():
                reader.source.note_queries(reader.index, queries[layer])

    def feed(self, ids: Sequence[int], logits: int = 1) -> Tensor:
        """Run the next tokens; returns the logits of the last `logits` of their rows, [n, V].

        Rows between two events go through the model together; under rounding, rows after the prompt
        one by one. Of a policy that drops rows of the prompt, the first tokens are the whole
        prompt, and there are no logits before its last row.
        """
        self._check(len(ids))
        parts, rest = list[Tensor](), list(ids)
        while rest:
            start, room = len(self.tokens), self.room
            descends = self._decoder is not None and not start
            if descends:
                room = self.sketch.prompt_len
            elif start and self._single:
                room = 1
            elif self._stores is not None:  # entries may be rounded after every row
                room = min(room, max(1, self._stores + 1 - start))
            piece, rest = rest[:room], rest[room:]
            wanted = min(len(piece), max(0, logits - len(rest)))
            with self.receiving(piece):
                if descends:
                    parts.append(self._descend(piece)[:wanted])
                else:
                    at, model = start - self._back(start), self.running.model
                    forwards = run_chunks(model, self.cache, piece, at, wanted, len(piece))
                    parts += [part for _, part in forwards]
        return torch.cat(parts)

    def ask(self, stop: int) -> None:
        """Say that the next question ends before row `stop`, earlier than it might have."""
        self._questions[self._asked] = len(self.tokens), stop
        self._asked += 1
        rows = self.setup.schedule.rows(*self.sketch.extent[:3], self._questions)
        self._events = deque(row for row in rows if row >= len(self.tokens))

    def _descend(self, prompt: Sequence[int]) -> Tensor:
        """Run the prompt in depth order; returns the logits of its last row, [1, V]."""
        decoder = cast("Decoder", self._decoder)
        self._descent, calls, logits = prefill_in_depth(
            decoder, self.sketch, self.policy, self.setup.setting(), prompt
        )
        self._make_blocks()
        self._make_room()
        for part, call in zip(self._parts, calls, strict=True):
            part.update(*(x[None] for x in call.cached))
            if isinstance(part, LiveLayer):
                part.source.note_queries(part.index, call.q)
        return logits

    def _check(self, n: int) -> None:
        start, least, most = len(self.tokens), 1, self.sketch.n_pos
        if self._decoder is not None and not start:  # which drops rows of the prompt
            least = self.sketch.prompt_len
        expected = f"expected at least {least}, and at most {most} (n_pos) together"
        fits = least <= n <= most - start
        self._require(fits, f"{n} tokens are given after {start}; {expected}")

    def _require(self, condition: bool, problem: str) -> None:
        if not condition:
            raise ValueError(f"{self.policy.name}: {problem}")

    @contextmanager
    def receiving(self, ids: Sequence[int], *, forwards: bool = True) -> Iterator[None]:
        """Take over the rows that a forward of the caller adds to `cache` in the block.

        All of `ids` go through the model at once: events that fall within them fire after the last,
        as one. Not for a policy that rotates or rounds keys, or drops rows of the prompt. An error
        leaves caches that are of no use. forwards: by the model, in the `with` block.
        """
        usable = (self._open or not forwards) and not self._busy
        self._require(usable, "outside the `with` block, or after an error; expected a new one")
        self._check(len(ids))
        self._busy = True
        self._make_room()
        yield
        self.tokens += ids
        self._end()
        self._busy = False
        for _, source in self._blocks:
            source.room = 0

    def _back(self, start: int) -> int:
        """Return how far row `start` is behind its position; keys may rotate to their slot."""
        slots = {source.n_slots for _, source in self._blocks}
        if self._positions == "absolute":
            return 0
        if len(slots) > 1 or any(source.padded for _, source in self._blocks):
            raise PolicyError(
                f"{self.policy.name}: layers or heads hold different numbers of entries, and keys "
                "are rotated to their slots; expected as many in all, or positions='absolute'"
            )
        return start - slots.pop()

    @property
    def room(self) -> int:
        """Rows up to the next event, or to the end."""
        stop = self._events[0] + 1 if self._events else self.sketch.n_pos
        return stop - len(self.tokens)

    @property
    def position(self) -> int:
        """The position of the next row."""
        return len(self.tokens) - self._back(len(self.tokens))

    def _make_room(self) -> None:
        reads = bool(self._events) or len(self.tokens) < self._prunes
        for _, source in self._blocks:
            source.expect(self.room, reads_queries=reads)

    def _end(self) -> None:
        row, prompt_len = len(self.tokens) - 1, self.sketch.prompt_len
        self.peak_bytes = max(self.peak_bytes, self.cache_bytes)
        if row >= prompt_len:
            self.decode_peak_bytes = max(self.decode_peak_bytes, self.cache_bytes)
        before = len(self._events)
        while self._events and self._events[0] <= row:
            self._events.popleft()
        if len(self._events) < before:
            self._fire(row)
        if self._stores is not None and row >= self._stores:
            for block, source in self._blocks:
                block.store.before(row - source.dropped + 1, block.in_source)
        if row >= prompt_len - 1:
            self.decode_peak_bytes = max(self.decode_peak_bytes, self.cache_bytes)

    def _fire(self, row: int) -> None:
        """Fire the event after row `row`, and free the queries that no later one reads."""
        reads = self.policy.reads
        last = max(reads.last, reads.rows)
        if self._repeats:
            context = self.tokens[: self.sketch.header.context_len or self.sketch.prompt_len]
            self._busy = self._repeats = False  # these rows are not part of the sequence
            rows = self._repeated or repeat_context(self.running.model, context)
            self._busy = True
            for _, source in self._blocks:
                source.note_arrays(rows)
        for block, source in self._blocks:
            if source.layers[0] in self._uncut:
                continue
            at = row - source.dropped
            block.event(at)
            if row >= self.sketch.prompt_len - 1:  # an event at its end may read all of it
                source.drop_queries(min(at + 1 - last, int(block.since.min()) + 1), reads.first)

    def _receive(self, call: KernelCall) -> None:
        if not self._busy:  # another forward of this model
            return
        part = self._evicting.get(call.layer)
        if part is not None:
            part.source.note_queries(part.index, call.q)
        if self._observe is not None:
            self._observe(call)

    def _mask(self, layer: int, query: Tensor, given: Tensor | None) -> Tensor | None:
        part = self._evicting.get(layer)
        if not self._busy or part is None or self._paging is not None:
            return given
        added, reads = self.running.added, self._reads
        return part.source.mask(part.index, query, given, added=added, reads=reads)

    def _attend(self, layer: int, query: Tensor, *_: object) -> Tensor | None:
        part = self._evicting.get(layer)
        if not self._busy or part is None:
            return None
        return cast("PagedSource", part.source).attend(part.index, query)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of live entries, without pads."""
        others = [part for part in self._parts if not isinstance(part, LiveLayer)]
        arrays = [getattr(part, name, None) for part in others for name in ("keys", "values")]
        held: int = sum(array.nbytes for array in arrays if array is not None)
        return held + sum(source.live_bytes for _, source in self._blocks)

    @property
    def full_bytes(self) -> int:
        """Bytes that the full cache of the rows so far takes."""
        return self._row_size * len(self.tokens) * self.running.model.dtype.itemsize

    def record(self) -> Record:
        """When each entry left, as a replay would say it."""
        n = len(self.tokens)
        by_layer: dict[int, NDArray[np.int32]] = {}
        for block, source in self._blocks:
            last = block.evicted_at[..., : n - source.dropped].cpu().numpy()
            last = at_all_positions(last, source.positions[: n - source.dropped].cpu().numpy(), n)
            by_layer.update(zip(source.layers, last, strict=True))
        evicted_at = np.stack([by_layer[self.sketch.owners[layer]] for layer in self.layers])
        reads = None if self._reads is None else self._reads.record(n)
        how: dict[str, Any] = {"reads": reads, "positions": self._positions, "closed": True}
        return as_record(self.setup, evicted_at, self.layers, descent=self._descent, **how)


def check_live(policy: Policy, *, paged: bool = False) -> None:
    """Raise PolicyError for a policy that a running model cannot follow.

    paged: with a cache in blocks (`kvsim.runner.paged`).
    """
    advice = "which a running model cannot follow; replay it, or take another"
    refuse(policy, checks.FUTURE, checks.QUERY_HEADS, checks.TRACE, advice=advice)
    if paged:
        advice = "and block tables are read whole, as they are; run it without --paged"
        refuse(policy, checks.PART, checks.ROUNDS, checks.MERGES, advice=advice)


def _check_layers(policy: Policy, layers: Sequence[int], n_layers: int) -> None:
    if tuple(layers) != tuple(range(n_layers)):
        advice = f"and layers {list(layers)} of {n_layers} evict; expected all; replay these layers"
        refuse(policy, checks.SLOTS, DROPS, advice=advice)
