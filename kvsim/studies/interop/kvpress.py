"""kvpress: a policy of kvsim as a press.

    from kvsim.studies.interop.kvpress import PolicyPress

    press = PolicyPress(kvsim.policy("ams+tova"), 512, interval=64)
    pipeline(context, question=question, press=press)

Written for kvpress 0.5.5 (https://github.com/NVIDIA/kvpress); `pip install 'kvsim[kvpress]'`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvsim.core.arguments import in_entries
from kvsim.core.policy import Policy
from kvsim.core.record import Record
from kvsim.engine.checks import DROPS, MERGES, REPEATS, ROUNDS, SLOTS, refuse
from kvsim.errors import CaptureError, missing_extra
from kvsim.recorder.forward import cache_of
from kvsim.recorder.positions import steady_length
from kvsim.runner.cache import LiveLayer
from kvsim.runner.decoding import Decoding, RunningModel, check_live
from kvsim.runner.sketches import sketch

try:
    from kvpress import PrefillDecodingPress
except ModuleNotFoundError as error:
    raise missing_extra(error) or error from error

__all__ = ["PolicyPress"]


class PolicyPress(PrefillDecodingPress):  # type: ignore[misc]  # kvpress has no types
    """A policy of kvsim as a press, for kvpress's pipeline or a `with` block of your own.

    budget: entries per KV head. interval, prefill: the schedule, the policy's own by default: rows
    between events in decoding, and whether one fires at the end of the first forward. new_tokens:
    the most tokens after that forward, those of a question included.

    The first forward on an empty cache is the prompt; later ones are decoding, a question included.
    A forward of several tokens is one step: events that fall within it fire after its last row.
    The layers of the cache are replaced by kvsim's, so that heads can hold different numbers of
    entries; they serve only inside `with press(model)`. One sequence at a time, of which the last
    one is held until the next begins.

    A PrefillDecodingPress, because kvpress's pipeline has only those compress both the context and
    the answer; as with each of them, it takes a single question.

    Raises:
        PolicyError: a policy that a running model cannot follow, rotates keys to their slots, or
            drops rows of the prompt between layers.
        BudgetError: a budget that is no whole number.
    """

    def __init__(
        self,
        policy: Policy,
        budget: int,
        *,
        interval: int | None = None,
        prefill: bool | None = None,
        new_tokens: int = 1024,
    ) -> None:
        super().__init__()
        check_live(policy)
        advice = "for which a press has no place; run it with kvsim live"
        refuse(policy, SLOTS, DROPS, ROUNDS, MERGES, REPEATS, advice=advice)
        self.policy = replace(policy, schedule=policy.schedule.override(interval, prefill))
        self.budget, self.new_tokens = in_entries(budget), new_tokens
        self._running: RunningModel | None = None
        self._decoding: Decoding | None = None

    @contextmanager
    def __call__(self, model: PreTrainedModel) -> Iterator[None]:
        """Compress the cache of the model's forwards as long as the block lasts.

        Raises CaptureError for a model that cannot be recorded, more than one sequence, padding, or
        a cache that is no DynamicCache or was filled without the press.
        """
        if self._running is None or self._running.model is not model:
            self._running = RunningModel(model)
            # the model runs for it before forwards belong to the press
            sketch(self._running, self.policy, 1, 1)
        base, running = model.base_model, self._running
        forward, before = base.forward, vars(base).get("forward")  # another library's, or none
        signature = inspect.signature(forward)

        @functools.wraps(forward)
        def pressed(*args: Any, **options: Any) -> Any:
            with self._evicting(running, signature.bind(*args, **options).arguments):
                return forward(*args, **options)

        vars(base)["forward"] = pressed
        try:
            yield
        finally:
            del base.forward
            if before is not None:
                vars(base)["forward"] = before

    @contextmanager
    def _evicting(self, running: RunningModel, given: Mapping[str, Any]) -> Iterator[None]:
        """Let the policy evict after a forward with the arguments `given`."""
        ids: Any = given.get("input_ids")
        cache, decoding = cache_of(given), self._decoding
        shape = list(ids.shape) if isinstance(ids, Tensor) else []
        _refuse(shape[:1] != [1], f"input_ids are {shape}; expected [1, n]: one sequence at a time")
        _refuse(not isinstance(cache, DynamicCache), "the cache is no DynamicCache")
        if decoding is None or cache.layers is not decoding.cache.layers:
            held = cache.get_seq_length()
            _refuse(held, f"{held} rows are cached; run the prompt inside `with press(model)` too")
            decoding = self._decoding = self._begun(running, shape[1])
            cache.layers = decoding.cache.layers
        start, most = len(decoding.tokens), decoding.sketch.n_pos
        end = start + shape[1]
        _refuse(end > most, f"{end} tokens, expected {most}; give the press a larger new_tokens")
        mask, positions = given.get("attention_mask"), given.get("position_ids")
        padded = isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.all())
        _refuse(padded, "attention_mask hides tokens; expected a sequence without padding")
        first = start if positions is None else int(positions.flatten()[0])
        once = "a press evicts for good: run the context again for the next question"
        _refuse(first != start, f"the next token has position {first}; expected {start}; {once}")
        with decoding, decoding.receiving(ids[0].tolist()):
            yield

    def _begun(self, running: RunningModel, prompt_len: int) -> Decoding:
        """Return a new sequence with a prompt of that length."""
        most = prompt_len + self.new_tokens
        decoding = Decoding(
            running,
            self.policy,
            self.budget,
            prompt_len=prompt_len,
            n_pos=max(prompt_len, min(most, steady_length(running.model) or most)),
            name="kvpress",
        )
        for layer in decoding.cache.layers:
            if isinstance(layer, LiveLayer):  # kvpress's pipeline cuts the answer off at the end
                layer.keys = layer.values = torch.empty(1, 1, 0, 1)
        return decoding

    def record(self) -> Record:
        """Return the row after which each entry of the last sequence left, as in a replay."""
        if self._decoding is None:
            raise CaptureError("no model has run under the press; expected a forward before")
        return self._decoding.record()


def _refuse(problem: object, text: str) -> None:
    if problem:
        raise CaptureError(text)
