"""A model's decoder layers, one at a time, on rows of a sequence at any positions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvsim.core.attention import Formula, Rope, causal_attention
from kvsim.core.probe import ProbeRows
from kvsim.errors import CaptureError
from kvsim.recorder.generation import check_logits
from kvsim.recorder.hooks import KernelCall, intercepting
from kvsim.recorder.modules import decoder_layers, kernel_name

T = TypeVar("T")


@dataclass(frozen=True)
class ComputedLayer:
    """One layer on k rows, as a source of a View; its methods return [L=1, ...].

    rows: the index of each row in the prompt, int64 [k]; positions: its position for RoPE.
    q [qhead, k, d], k, v [head, k, d]: inputs of the kernel; attn_out [qhead, k, d]; out [k, D].
    """

    rows: Tensor
    positions: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    attn_out: Tensor
    out: Tensor
    rope: Rope
    formula: Formula
    projection: Callable[[], Tensor]
    memo: dict[Hashable, Any] = field(default_factory=dict)
    #: `kvsim.core.setting.Source`
    compacted: ClassVar[bool] = False

    @property
    def n_rows(self) -> int:
        """The number of rows of the layer."""
        return len(self.rows)

    def lasting(self, key: tuple[Hashable, ...], compute: Callable[[], T]) -> T:
        """Return `compute()`: no later replay reads these rows."""
        return compute()

    def summed(self, name: str) -> None:
        """Return None: all queries are held."""

    @property
    def keys(self) -> Tensor:
        """Keys, [1, H, k, d]."""
        return self.k.unsqueeze(0)

    @property
    def values(self) -> Tensor:
        """Values, [1, H, k, d]."""
        return self.v.unsqueeze(0)

    @property
    def exact_keys(self) -> Tensor:
        """Keys, [1, H, k, d]."""
        return self.keys

    @property
    def o_proj(self) -> Tensor:
        """The output projection of each query head, [1, H, G, d, D]."""
        out: Tensor = self.projection().unflatten(1, (len(self.k), -1))
        return out

    @property
    def probe(self) -> ProbeRows:
        """Nothing: a policy that drops rows and scores by a probe is refused when it is built."""
        raise NotImplementedError("a probe of a layer with some rows of the prompt")

    def queries(self, start: int, stop: int) -> Tensor:
        """Return the queries of some rows, [1, H, G, stop - start, d]."""
        rows: Tensor = self.q[:, start:stop].unflatten(0, (len(self.k), -1))
        return rows.unsqueeze(0)

    def full(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return output [1, H, G, w, d] and log-sum-exp [1, H, G, w] of full attention."""
        out, lse = causal_attention(self.q, self.k, self.v, self.formula)
        heads = (len(self.k), -1)
        out, lse = (part[:, start:stop].unflatten(0, heads).unsqueeze(0) for part in (out, lse))
        return out, lse

    def writable(self, which: int) -> Tensor:
        """Nothing: no codec rounds anything before the end of the prompt."""
        raise NotImplementedError("a codec in the prefill")

    def evict(self, slots: Tensor, live: Tensor, evicted_at: Tensor) -> None:
        """Nothing moves: only the prefill event fires."""


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
