"""Batches of sequences of any lengths on a model, one row of each at a time.

Prompts run one by one. Then their entries are in one cache, each sequence from column 0 on, and a
mask hides the columns after its end: each row sees the same entries as without a batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from kvsim.core.checks import DTYPES, tolerance
from kvsim.errors import CaptureError
from kvsim.recorder.choice import Choice
from kvsim.recorder.forward import (
    cache_option,
    device_of,
    evaluating,
    full_cache,
    last_logits,
    run_chunks,
    run_model,
)
from kvsim.recorder.head import check_logits
from kvsim.recorder.hooks import KERNELS, intercepting, kernel_mask
from kvsim.recorder.modules import kernel_name

#: Columns by which a cache grows.
_GROWTH = 64

#: Keys and values [head, n, dim] of a sequence in a layer, and which of them are entries, bool
#: [head, n]; None for all.
Held = tuple[Tensor, Tensor, Tensor | None]


class SharedLayer(DynamicLayer):
    """The entries of several sequences in one layer of a transformers cache.

    Attributes:
        keys, values: [sequence, head, n, dim].
        live: visible columns of the next row, bool [sequence, head, n].
        ends: columns of each sequence.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, held: Sequence[Held]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        columns = max(keys.shape[1] for keys, _, _ in held) + _GROWTH
        keys, values = held[0][:2]
        self.keys = keys.new_zeros(len(held), len(keys), columns, keys.shape[2])
        self.values = values.new_zeros(len(held), len(values), columns, values.shape[2])
        self.live = torch.zeros(self.keys.shape[:3], dtype=torch.bool, device=self.keys.device)
        self.ends = [0] * len(held)
        self._ends = torch.zeros(len(held), dtype=torch.int64, device=self.keys.device)
        self._places = torch.arange(len(held), device=self.keys.device)
        self.is_initialized = True
        for place, each in enumerate(held):
            self.put(place, *each)

    def put(self, place: int, keys: Tensor, values: Tensor, live: Tensor | None) -> None:
        """Replace the entries of a sequence."""
        n = self.ends[place] = keys.shape[1]
        self._ends[place].fill_(n)
        self.keys[place, :, :n], self.values[place, :, :n] = keys, values
        self.live[place] = False
        self.live[place, :, :n] = True if live is None else live

    def last(self, place: int, n: int) -> tuple[Tensor, Tensor]:
        """Return the last n keys and values [head, n, dim] of a sequence."""
        rows = slice(self.ends[place] - n, self.ends[place])
        return self.keys[place, :, rows], self.values[place, :, rows]

    def keep(self, places: Sequence[int]) -> None:
        """Drop the other sequences."""
        at = torch.tensor(places, dtype=torch.int64, device=self._ends.device)
        self.keys, self.values, self.live, self._ends = (
            x.index_select(0, at) for x in (self.keys, self.values, self.live, self._ends)
        )
        self._places = self._places[: len(places)]
        self.ends = [self.ends[place] for place in places]

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Add an entry [sequence, head, 1, dim] to each; return all used columns."""
        if max(self.ends) == self.keys.shape[2]:
            room = (0, 0, 0, _GROWTH)
            self.keys, self.values = (
                torch.nn.functional.pad(x, room) for x in (self.keys, self.values)
            )
            self.live = torch.nn.functional.pad(self.live, room[2:])
        self.keys[self._places, :, self._ends] = key_states[:, :, 0]
        self.values[self._places, :, self._ends] = value_states[:, :, 0]
        self.live[self._places, :, self._ends] = True
        self._ends += 1
        self.ends = [end + 1 for end in self.ends]
        n = max(self.ends)
        return self.keys[:, :, :n], self.values[:, :, :n]

    def get_seq_length(self) -> int:
        """Used columns."""
        return max(self.ends)


class Batch:
    """Sequences after their prompts: entries by layer (`held`), and positions of the next row."""

    def __init__(
        self, model: PreTrainedModel, held: Sequence[Sequence[Held]], positions: Sequence[int]
    ) -> None:
        self.model, self.positions = model, [*positions]
        self.layers = [SharedLayer(of_layer) for of_layer in zip(*held, strict=True)]
        self._cache = Cache([*self.layers])

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let rows run in the block."""
        with (
            torch.inference_mode(),
            evaluating(self.model),
            intercepting(self.model, None, masking=self.mask),
        ):
            yield

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Run the next token of each sequence; returns the logits of its row [sequence, V]."""
        inputs = torch.tensor([tokens, self.positions], device=device_of(self.model)).unsqueeze(-1)
        out = run_model(
            self.model,
            inputs[0],
            position_ids=inputs[1],
            use_cache=True,
            **cache_option(self.model, self._cache),
            **last_logits(self.model, 1),
        )
        self.positions = [at + 1 for at in self.positions]
        logits: Tensor = out.logits[:, -1]
        return logits

    def mask(self, layer: int, query: Tensor, _: Tensor | None) -> Tensor:
        """Return the mask of a layer's kernel, for the new row of each sequence."""
        part = self.layers[layer]
        visible = part.live[:, :, None, : part.get_seq_length()]
        visible = visible.repeat_interleave(query.shape[1] // visible.shape[1], dim=1)
        return kernel_mask(visible, query, added=kernel_name(self.model) == "eager")

    def keep(self, places: Sequence[int]) -> None:
        """Remove the other sequences."""
        self.positions = [self.positions[place] for place in places]
        for layer in self.layers if places else ():
            layer.keep(places)


#: The end reason of a given response (`generation.stopped`).
GIVEN = "given"


class Written(NamedTuple):
    """A response, its end reason, None for its length, and the seconds until its end."""

    tokens: list[int]
    ended: str | None
    seconds: float


def write(
    batch: Batch,
    logits: Tensor,
    limits: Sequence[int],
    *,
    stop: Collection[int],
    choice: Choice | None = None,
    prompts: Sequence[Sequence[int]] = (),
    completed: Callable[[int, Sequence[int]], bool] = lambda *_: False,
) -> list[Written]:
    """Write the response of each sequence; finished sequences leave the batch.

    logits: of the first token of each [sequence, V]. limits: most tokens of each, above 0; the last
    token is not run. choice: of each token, by default the most likely one; prompts: all tokens
    before each response, for the choice. completed: whether the response of a sequence, by its
    number, ends here. stop: as for `kvsim.recorder.generation.generate`. Raises CaptureError for
    logits that are not finite.
    """
    begun = zip(prompts, limits, strict=True) if choice else ()
    choose = [choice.begin(len(ids), count) for ids, count in begun if choice]

    def drawn(logits: Tensor, writing: Sequence[int]) -> Sequence[int]:
        if choice is None or choice.likeliest:
            # waits for the device once
            tokens: list[int] = logits.argmax(-1).where(logits.isfinite().all(-1), -1).tolist()
            if -1 not in tokens:
                return tokens
        logits = logits.cpu()
        for each, row in zip(logits, batch.positions, strict=True):
            check_logits(each[None], row - 1)
        pairs = zip(logits, writing, strict=True)
        return [choose[n](each, [*prompts[n], *responses[n]]) for each, n in pairs]

    out: list[Written | None] = [None] * len(limits)
    responses: list[list[int]] = [[] for _ in limits]
    writing, began = list(range(len(limits))), time.perf_counter()
    with batch.running():
        while True:
            going: list[int] = []
            tokens = drawn(logits, writing)
            for place, (number, token) in enumerate(zip(writing, tokens, strict=True)):
                response = responses[number]
                response.append(token)
                ended = "eos" if token in stop else None
                if ended is None and completed(number, response):
                    ended = "stop"
                if ended or len(response) == limits[number]:
                    out[number] = Written(response, ended, time.perf_counter() - began)
                else:
                    going.append(place)
            if len(going) < len(writing):
                batch.keep(going)
                writing = [writing[place] for place in going]
            if not writing:
                return [each for each in out if each is not None]
            logits = batch.step([responses[number][-1] for number in writing])


def prefilled(model: PreTrainedModel, ids: Sequence[int], chunk: int) -> tuple[list[Held], Tensor]:
    """Run a prompt; return its entries by layer, and the logits [V] of its last row."""
    cache, last = full_cache(model), Tensor()
    with torch.inference_mode(), evaluating(model):
        for _, logits in run_chunks(model, cache, ids, 0, 1, chunk):
            last = logits
    parts: list[Any] = cache.layers
    return [(part.keys[0], part.values[0], None) for part in parts], last[-1]


def separate(model: PreTrainedModel, n: int) -> str | None:
    """Return why sequences of up to n tokens run one by one; None where they can share a batch.

    They can where layers hold a key and a value of every token, and a few tokens have the same
    logits with and without a batch, up to rounding.
    """
    parts: list[Any] = DynamicCache(config=model.config).layers
    config = model.config.get_text_config()
    shared = getattr(config, "kv_lora_rank", None) or getattr(config, "num_kv_shared_layers", None)
    plain = all(type(part) in (DynamicLayer, DynamicSlidingWindowLayer) for part in parts)
    if kernel_name(model) not in KERNELS or shared or not (parts and plain):
        return "its layers do not hold keys and values of every token apart"
    window = min(getattr(part, "sliding_window", n) for part in parts)
    if window < n:
        return f"a window of {window} tokens masks out some of {n}"
    if next(model.parameters()).is_meta:
        return None
    prompts = [1, 2, 3], [4, 5, 6, 7, 8]
    try:
        alone = torch.stack([prefilled(model, [*ids, 9], len(ids) + 1)[1] for ids in prompts])
        held = [prefilled(model, ids, len(ids))[0] for ids in prompts]
        batch = Batch(model, held, [len(ids) for ids in prompts])
        with batch.running():
            error = float((batch.step([9, 9]) - alone).abs().max())
    except CaptureError:
        return "it runs one sequence at a time"
    if not error <= 8 * tolerance(DTYPES[alone.dtype]) * float(alone.abs().max()):
        return "it computes something else in a batch"
    return None
