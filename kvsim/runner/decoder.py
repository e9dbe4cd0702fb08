"""A model's decoder layers, one at a time, on rows of a sequence at any positions."""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvsim.errors import CaptureError
from kvsim.recorder.head import check_logits
from kvsim.recorder.hooks import KernelCall, intercepting
from kvsim.recorder.modules import decoder_layers, kernel_name

# What some families do to logits after the output embedding; a model that does it is refused.
_NEUTRAL = {"logits_scaling": 1.0, "logit_scale": 1.0, "final_logit_softcapping": None}


class Decoder:
    """The decoder layers of a model of transformers (llama, qwen2, qwen3 and their like).

    Raises CaptureError if the model has no rotary module, final norm or output embedding under the
    names that these families share, or changes its logits after the output embedding.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        for name, neutral in _NEUTRAL.items():
            value = getattr(model.config, name, neutral)
            if value not in (None, neutral):
                raise CaptureError(
                    f"{type(model).__name__} has {name} {value}, expected {neutral}; its logits "
                    "cannot be computed from the output of its layers"
                )
        self.layers = decoder_layers(model)
        base = model.base_model
        rotary, norm = getattr(base, "rotary_emb", None), getattr(base, "norm", None)
        head = model.get_output_embeddings()
        if not all(isinstance(part, nn.Module) for part in (rotary, norm, head)):
            raise CaptureError(
                f"{type(model).__name__} has no rotary_emb, norm and output embedding where llama, "
                "qwen2 and qwen3 have them, expected one of these families; its layers cannot be "
                "run one by one"
            )
        self._rotary, self._norm, self._head = (
            cast("nn.Module", part) for part in (rotary, norm, head)
        )

    def run(self, layer: int, hidden: Tensor, positions: Tensor) -> tuple[KernelCall, Tensor]:
        """Run a layer on rows hidden [k, D] at ascending positions [k], with causal attention.

        Returns the call of the attention kernel, and the layer's output [k, D].
        """
        calls: list[KernelCall] = []
        x = hidden.to(self.model.device, self.model.dtype).unsqueeze(0)
        at = positions.to(x.device).unsqueeze(0)
        with torch.no_grad(), intercepting(self.model, calls.append):
            out: Any = self.layers[layer](
                x,
                attention_mask=self._mask(x),
                position_ids=at,
                use_cache=False,
                position_embeddings=self._rotary(x, at, **self._kind(layer)),
            )
        return calls[0], (out[0] if isinstance(out, tuple) else out)[0]

    def _kind(self, layer: int) -> dict[str, str]:
        """Return the layer's kind, for families with a rotary embedding for each kind (Gemma 3)."""
        if "layer_type" not in inspect.signature(self._rotary.forward).parameters:
            return {}
        return {"layer_type": self.model.config.get_text_config().layer_types[layer]}

    def logits(self, hidden: Tensor, row: int) -> Tensor:
        """Compute the logits of the next token, [V], from the last layer's output for a row [D]."""
        with torch.no_grad():
            out: Tensor = check_logits(self._head(self._norm(hidden.unsqueeze(0))), row)[0]
        return out.float()

    def _mask(self, x: Tensor) -> Tensor | None:
        """Return the mask that the eager kernel adds to logits; other kernels need none."""
        if kernel_name(self.model) != "eager":
            return None
        n = x.shape[1]
        least = torch.finfo(x.dtype).min
        return torch.full((1, 1, n, n), least, dtype=x.dtype, device=x.device).triu(1)
