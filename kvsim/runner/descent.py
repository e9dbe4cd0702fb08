"""The prefill of a running model in depth order, for policies that drop rows between layers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvsim.core.checks import compute_dtype
from kvsim.core.policy import Policy
from kvsim.core.sources import InMemory
from kvsim.core.trace import Trace
from kvsim.core.view import Setting, View
from kvsim.engine.depth import Descent, descend, prompt_view
from kvsim.engine.source import TraceSource, of_layer
from kvsim.errors import CaptureError
from kvsim.recorder.head import check_logits
from kvsim.recorder.hooks import KernelCall, hidden_states, intercepting
from kvsim.recorder.modules import decoder_layers, kernel_name

# What some families do to logits after the output embedding; a model that does it is refused.
_NEUTRAL = {"logits_scaling": 1.0, "logit_scale": 1.0, "final_logit_softcapping": None}


def prefill_in_depth(
    decoder: Decoder, sketch: Trace, policy: Policy, setting: Setting, ids: Sequence[int]
) -> tuple[Descent, list[KernelCall], Tensor]:
    """Run the prompt layer by layer, each on the rows that reach it.

    Returns which rows those are, the kernel call of each layer, and the logits of the last row of
    the prompt, [1, V].
    """
    down = _Down(decoder, sketch, setting, ids)
    descent = cast("Descent", descend(policy, sketch.n_layers, len(ids), down.look))
    if descent.selection.restarted:
        rows = descent.rows[0]
        down = _Down(decoder, sketch, setting, ids if rows is None else [ids[i] for i in rows])
    for layer, rows in enumerate(descent.rows):
        down.run(layer, None if descent.selection.restarted else rows)
    logits = decoder.logits(down.hidden[-1], len(ids) - 1)
    return descent, down.calls, logits[None]


class _Down:
    """The layers of a model, run one after the other."""

    def __init__(
        self, decoder: Decoder, sketch: Trace, setting: Setting, ids: Sequence[int]
    ) -> None:
        self._decoder, self._sketch, self._setting = decoder, sketch, setting
        self.rows = torch.arange(len(ids), device=decoder.model.device)
        self.hidden = decoder.embed(ids)  # [k, D], the output of the last layer that ran
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
        header = replace(header, questions=(), sizes=())
        source = TraceSource(Trace(computed, header, dtype=dtype), [0], call.q.device)
        return prompt_view(source, self._setting, layer, n)


class _FirstLayerReachedError(Exception):
    """Ends a forward once its first layer is reached."""


class Decoder:
    """The layers of a model (llama, qwen2, qwen3 and their like), one at a time, on any rows.

    Raises CaptureError if the model has no rotary module, final norm or output embedding under the
    names that these families share, or changes its logits after the output embedding.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        values = {name: getattr(model.config, name, _NEUTRAL[name]) for name in _NEUTRAL}
        other = {x: y for x, y in values.items() if y not in (None, _NEUTRAL[x])}
        base, head = model.base_model, model.get_output_embeddings()
        parts = getattr(base, "rotary_emb", None), getattr(base, "norm", None), head
        if other or not all(isinstance(part, nn.Module) for part in parts):
            has = f"has {other}" if other else "lacks rotary_emb, norm or an output embedding"
            raise CaptureError(
                f"{type(model).__name__} {has}; expected a model such as llama, qwen2 or qwen3, "
                "whose layers run one by one"
            )
        self._layers = decoder_layers(model)
        self._rotary, self._norm, self._head = (cast("nn.Module", part) for part in parts)

    def embed(self, ids: Sequence[int]) -> Tensor:
        """Return the input of the first layer, [n, D]: embeddings as the model scales them."""
        inputs: list[Tensor] = []

        def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs.append(hidden_states("layer 0", args, kwargs, ": one sequence at a time")[0])
            raise _FirstLayerReachedError

        handle = self._layers[0].register_forward_pre_hook(stop, with_kwargs=True)
        try:
            with suppress(_FirstLayerReachedError):
                self.model(torch.tensor([list(ids)], device=self.model.device), use_cache=False)
        finally:
            handle.remove()
        return inputs[0]

    def run(self, layer: int, hidden: Tensor, positions: Tensor) -> tuple[KernelCall, Tensor]:
        """Run a layer on rows hidden [k, D] at ascending positions [k], with causal attention.

        Returns the call of the attention kernel, and the layer's output [k, D].
        """
        calls: list[KernelCall] = []
        x = hidden.to(self.model.device, self.model.dtype).unsqueeze(0)
        at, n = positions.to(x.device).unsqueeze(0), x.shape[1]
        kind: dict[str, str] = {}  # for families with a rotary embedding for each kind (Gemma 3)
        if "layer_type" in inspect.signature(self._rotary.forward).parameters:
            kind = {"layer_type": self.model.config.get_text_config().layer_types[layer]}
        mask = None
        if kernel_name(self.model) == "eager":  # which adds it to logits
            least = torch.finfo(x.dtype).min
            mask = torch.full((1, 1, n, n), least, dtype=x.dtype, device=x.device).triu(1)
        with torch.no_grad(), intercepting(self.model, calls.append):
            out: Any = self._layers[layer](
                x,
                attention_mask=mask,
                position_ids=at,
                use_cache=False,
                position_embeddings=self._rotary(x, at, **kind),
            )
        return calls[0], (out[0] if isinstance(out, tuple) else out)[0]

    def logits(self, hidden: Tensor, row: int) -> Tensor:
        """Compute the logits of the next token, [V], from the last layer's output for a row [D]."""
        with torch.no_grad():
            out: Tensor = check_logits(self._head(self._norm(hidden.unsqueeze(0))), row)[0]
        return out.float()
