"""Live runs in one batch of a model: policies, budgets, events and lengths are each sequence's own.

    lane = Decoding(running, policy, budget, prompt_len=len(ids), n_pos=len(ids) + 64)
    with lane:
        logits = run_prompt(lane, ids, partial(prefill, running))
    responses = respond([lane, ...], [logits, ...], [64, ...], stop={eos})

Prompts run one by one. Each `Decoding` holds its sequence, and fires its events, as it does alone;
between them its entries and new rows are in the tensors of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvsim.core.policy import Policy
from kvsim.engine.checks import DROPS, PART, ROUNDS, does
from kvsim.recorder.batching import Batch, Held, Written, write
from kvsim.runner.cache import LiveLayer
from kvsim.runner.decoding import Decoding
from kvsim.runner.model import Prefix

#: Rows after which a sequence takes its new ones over, if no event comes first.
_ROWS = 64


def run_prompt(
    lane: Decoding,
    ids: Sequence[int],
    prefix_of: Callable[[Sequence[int]], Prefix],
    first: int | None = None,
) -> Tensor:
    """Run a prompt, and its events; returns the logits of its last row, [V].

    prefix_of: returns the first rows, those before any event, with the full cache: they are the
    same for all policies. first: return the logits of the rows from this one on, [n, V].
    """
    begin = len(ids) if first is None else first
    wanted = max(1, len(ids) - begin)
    if does(lane.policy, DROPS) or lane.running.has_states:
        logits = lane.feed(ids, logits=wanted)
    else:
        n = min([begin, *(row + 1 for row in lane.setup.events)])
        if lane.policy.rounds or lane.policy.sparse:  # rows behind the context are affected
            n = min(n, *lane.setup.schedule.ends(len(ids), lane.sketch.header.context_len))
        prefix = prefix_of(ids[:n])
        lane.begin(prefix)
        logits = lane.feed(ids[n:], logits=wanted) if ids[n:] else prefix.logits[None]
    return logits[-1] if first is None else logits


def unbatched(policy: Policy) -> str | None:
    """Return why sequences under a policy run one by one, as in `separate`; None for a batch."""
    return f"it {words}" if (words := does(policy, PART, ROUNDS)) else None


def respond(
    lanes: Sequence[Decoding], logits: Sequence[Tensor], limits: Sequence[int], **options: Any
) -> list[Written]:
    """Write responses to prompts that have run; every lane then holds all rows that have run.

    logits: of the last row of each prompt. limits, options: as for `kvsim.recorder.batching.write`.
    Not for what `unbatched` or `kvsim.recorder.batching.separate` names. Raises as `Decoding.feed`.
    """
    with torch.inference_mode():
        prompts = [[*lane.tokens] for lane in lanes]
        return write(LiveBatch(lanes), torch.stack([*logits]), limits, prompts=prompts, **options)


class LiveBatch(Batch):
    """Sequences whose prompts have run, and from whose caches policies evict."""

    def __init__(self, lanes: Sequence[Decoding]) -> None:
        self.lanes = [*lanes]
        self._new: list[list[int]] = [[] for _ in lanes]  # tokens that lanes have not taken over
        self._queries: dict[int, Tensor] = {}  # of them, by layer [lane, qhead, _ROWS, dim]
        positions = [lane.position for lane in lanes]
        super().__init__(lanes[0].running.model, [*map(_held, lanes)], positions)
        self._at = torch.zeros(len(lanes), dtype=torch.int64, device=lanes[0].running.device)
        self._places = torch.arange(len(lanes), device=self._at.device)

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Run the next token of each sequence and fire events; returns logits [lane, V]."""
        logits = super().step(tokens)
        self._at += 1
        for place, (lane, token) in enumerate(zip(self.lanes, tokens, strict=True)):
            self._new[place].append(token)
            if len(self._new[place]) == min(lane.room, _ROWS):
                self._take(place)
        return logits

    def mask(self, layer: int, query: Tensor, given: Tensor | None) -> Tensor:
        """Keep the queries, which events read, and return the mask."""
        if layer not in self._queries:
            heads, dim = query.shape[1::2]
            self._queries[layer] = query.new_zeros(len(query), heads, _ROWS, dim)
        self._queries[layer][self._places, :, self._at] = query[:, :, 0]
        return super().mask(layer, query, given)

    def keep(self, places: Sequence[int]) -> None:
        """Let the other sequences leave, with all of their rows."""
        for place in {*range(len(self.lanes))} - {*places}:
            self._take(place)
        super().keep(places)
        self.lanes = [self.lanes[place] for place in places]
        self._new = [self._new[place] for place in places]
        at = torch.tensor(places, dtype=torch.int64, device=self._at.device)
        self._at, self._places = self._at[at], self._places[: len(places)]
        self._queries = {layer: x.index_select(0, at) for layer, x in self._queries.items()}

    def _take(self, place: int) -> None:
        """Let a lane take its new rows over, fire the event behind them, and go on from there."""
        lane, tokens = self.lanes[place], self._new[place]
        if not tokens:
            return
        n, changes = len(tokens), len(tokens) == lane.room
        keys, values = zip(*(layer.last(place, n) for layer in self.layers), strict=True)
        lane.take(tokens, keys, values, {at: x[place, :, :n] for at, x in self._queries.items()})
        if changes:
            for layer, held in zip(self.layers, _held(lane), strict=True):
                layer.put(place, *held)
            self.positions[place] = lane.position
        self._new[place] = []
        self._at[place].fill_(0)


def _held(lane: Decoding) -> list[Held]:
    parts: list[Any] = lane.cache.layers
    return [
        part.source.entries(part.index)
        if isinstance(part, LiveLayer)
        else (part.keys[0], part.values[0], None)
        for part in parts
    ]
