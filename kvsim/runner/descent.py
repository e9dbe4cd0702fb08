"""The prefill of a running model in depth order, for a policy that drops rows on the way down."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kvsim.core.checks import compute_dtype
from kvsim.core.policy import Policy
from kvsim.core.sources import InMemory
from kvsim.core.trace import Trace
from kvsim.core.view import Setting, View
from kvsim.engine.depth import Descent, descend, prompt_view
from kvsim.engine.source import TraceSource, of_layer
from kvsim.errors import PolicyError
from kvsim.recorder.hooks import KernelCall, hidden_states
from kvsim.runner.decoder import Decoder


@dataclass(frozen=True)
class Descended:
    """Result of a prefill in depth order: for each layer the call of its kernel, on its rows.

    descent: which rows those are. logits: of the last row of the prompt, [1, V].
    """

    descent: Descent
    calls: tuple[KernelCall, ...]
    logits: Tensor


def prefill_in_depth(
    decoder: Decoder, sketch: Trace, policy: Policy, setting: Setting, ids: Sequence[int]
) -> Descended:
    """Run the prompt layer by layer, each on the rows that the policy propagates to it."""
    if policy.propagation is None:
        raise PolicyError(f"{policy.name} propagates all rows; expected a policy that drops some")
    down = _Down(decoder, sketch, setting, ids)
    restarts = policy.propagation.restarts
    descent = descend(policy.propagation, sketch.n_layers, len(ids), down.look)
    if descent.selection.restarted:
        rows = descent.rows[0]
        down = _Down(decoder, sketch, setting, ids if rows is None else [ids[i] for i in rows])
    for layer, rows in enumerate(descent.rows):
        down.run(layer, None if restarts else rows)
    logits = decoder.logits(down.hidden[-1], len(ids) - 1)
    return Descended(descent, tuple(down.calls), logits[None])


class _Down:
    """The layers of a model, run one after the other."""

    def __init__(
        self, decoder: Decoder, sketch: Trace, setting: Setting, ids: Sequence[int]
    ) -> None:
        self._decoder, self._sketch, self._setting = decoder, sketch, setting
        self.rows = torch.arange(len(ids), device=decoder.model.device)
        self.hidden = _embedded(decoder, ids)  # [k, D], the output of the last layer that ran
        self.calls: list[KernelCall] = []

    def run(self, layer: int, rows: Tensor | None) -> KernelCall:
        """Run a layer on some rows of the last one, None for all; each layer once, in order."""
        if layer == len(self.calls):
            if rows is not None and len(rows) < len(self.rows):
                rows = rows.to(self.rows.device)
                self.hidden = self.hidden[torch.searchsorted(self.rows, rows)]
                self.rows = rows
            call, self.hidden = self._decoder.run(layer, self.hidden, self.rows)
            self.calls.append(call)
        return self.calls[layer]

    def look(self, layer: int, rows: Tensor | None) -> View:
        call, sketch = self.run(layer, rows), self._sketch
        dtype = compute_dtype(call.q.dtype)
        arrays = {name: getattr(call, name).to(dtype)[None] for name in "qkv"}
        if sketch.has("o_proj"):
            arrays["o_proj"] = sketch.read("o_proj", slice(layer, layer + 1))
        computed, n = InMemory(arrays), len(self.rows)
        computed.positions = self.rows
        header = replace(of_layer(sketch, layer), prompt_len=n, context_len=None)
        header = replace(header, questions=(), left_out=None, sizes=())
        source = TraceSource(Trace(computed, header, dtype=dtype), [0], call.q.device)
        return prompt_view(source, self._setting, layer, n)


class _FirstLayerReachedError(Exception):
    """Ends a forward once its first layer is reached."""


def _embedded(decoder: Decoder, ids: Sequence[int]) -> Tensor:
    """Return the input of the first layer, [n, D]: embeddings as the model scales them."""
    inputs: list[Tensor] = []

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.append(hidden_states("layer 0", args, kwargs, ": one sequence at a time")[0])
        raise _FirstLayerReachedError

    handle = decoder.layers[0].register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with suppress(_FirstLayerReachedError):
            decoder.model(torch.tensor([list(ids)], device=decoder.model.device), use_cache=False)
    finally:
        handle.remove()
    return inputs[0]
