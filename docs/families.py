# ruff: noqa: INP001 - lies in docs/, which is no package
"""Families of models that capture is tested with: small random ones, and the traces expected.

`tests/recorder/test_families.py` tests each of them; other tests of capture take single ones.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor

import kvsim

#: Tokens of the prompt and of the response: more than a block of 256, and more than a window.
PROMPT, NEW = 270, 30

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}

# Which weights make queries and keys, and by how much they grow so that attention is not uniform.
_SHARPER = ("q_proj.weight", "k_proj.weight", "query_key_value.weight", "qkv_proj.weight")
_NORMS = ("q_norm", "k_norm")


# A layer of which the configuration says nothing.
_PLAIN = 16**-0.5, None, None, False


@dataclass(frozen=True)
class Family:
    """A family of transformers, small and random.

    model: the prefix of its classes. says: what its attention has beside causal softmax. kernels:
    those that transformers has for it. config: the configuration's class, where that is not the
    model's. changes: of the configuration. given: the response is given, and not generated.
    formulas, rotated: what traces must say of each layer: scale, softcap, window and whether there
    are sinks; layout and rotated dimensions.
    """

    model: str
    says: str
    kernels: tuple[str, ...] = ("sdpa", "eager")
    config: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    given: bool = False
    formulas: Sequence[tuple[float, float | None, int | None, bool]] = (_PLAIN,) * 2
    rotated: Sequence[tuple[str, int]] = (("half", 16),) * 2

    @property
    def response(self) -> dict[str, Any]:
        """The option of `capture` for a response of `NEW` tokens."""
        return {"response": ids(NEW)} if self.given else {"max_new_tokens": NEW}

    def random(self, kernel: str = "sdpa") -> Any:
        """A model with the weights that it starts with."""
        config = getattr(transformers, self.config or f"{self.model}Config")
        config = config(**copy.deepcopy({**_SIZES, **self.changes}))
        config._attn_implementation = kernel  # noqa: SLF001  its only home
        torch.manual_seed(1)
        name = {"GPT2": "GPT2LMHeadModel"}.get(self.model, f"{self.model}ForCausalLM")
        return getattr(transformers, name)(config).eval()

    def build(self, kernel: str = "eager", dtype: torch.dtype = torch.float32) -> Any:
        """A random model whose attention is far from uniform."""
        model = self.random(kernel)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                _sharpen(key, parameter)
        return model.to(dtype)


def _sharpen(name: str, parameter: Tensor) -> None:
    if name.endswith(_SHARPER):
        parameter.mul_(15)
    elif name.endswith("c_attn.weight"):  # GPT-2: queries, keys and values side by side
        parameter[:, : 2 * parameter.shape[0]].mul_(15)
    elif any(norm in name for norm in _NORMS):
        parameter.add_(1).mul_(1.5) if parameter.abs().max() == 0 else parameter.mul_(2)
    elif name.endswith("sinks") or "_proj.bias" in name:  # at 0 they would test nothing
        parameter.copy_(torch.randn_like(parameter))


def _scaled(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **more}}


_LONG = [1.0 + i for i in range(6)]

FAMILIES = {
    "llama": Family("Llama", "grouped queries"),
    "llama, llama3 scaling": Family(
        "Llama",
        "frequencies scaled by parts",
        changes=_scaled(
            "llama3",
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "llama, linear scaling": Family("Llama", "frequencies divided", changes=_scaled("linear")),
    "llama, dynamic scaling": Family(
        "Llama",
        "frequencies that change with the length, here beyond 256 tokens",
        changes={"max_position_embeddings": 256, **_scaled("dynamic")},
        given=True,
    ),
    "mistral": Family(
        "Mistral",
        "a sliding window",
        changes={"sliding_window": 100},
        formulas=[(16**-0.5, None, 100, False)] * 2,
    ),
    "qwen2": Family("Qwen2", "biases"),
    "qwen2, yarn": Family(
        "Qwen2",
        "frequencies scaled by parts, cosine and sine too",
        changes=_scaled("yarn", original_max_position_embeddings=256),
    ),
    "qwen3": Family("Qwen3", "norms of queries and keys"),
    "qwen3_moe": Family(
        "Qwen3Moe",
        "mixture of experts",
        changes={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "gemma2": Family(
        "Gemma2",
        "soft-capped logits, every other layer a sliding window, a scale of its own",
        kernels=("eager",),
        changes={
            "sliding_window": 100,
            "attn_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 40,
        },
        formulas=[(40**-0.5, 5.0, 100, False), (40**-0.5, 5.0, None, False)],
    ),
    "gemma3": Family(
        "Gemma3",
        "local layers with a window and frequencies of their own, a scale of its own",
        config="Gemma3TextConfig",
        changes={
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 100,
            "query_pre_attn_scalar": 40,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            },
        },
        formulas=[(40**-0.5, None, window, False) for window in (100, None, 100)],
        rotated=[("half", 16)] * 3,
    ),
    "phi3": Family("Phi3", "one projection for all", changes={"pad_token_id": 0}),
    "phi4-mini": Family(
        "Phi3",
        "RoPE on three quarters of the dimensions, longrope",
        changes={
            "pad_token_id": 0,
            "head_dim": 16,
            "hidden_size": 96,
            "max_position_embeddings": 1024,
            "original_max_position_embeddings": 512,
            "partial_rotary_factor": 0.75,
            "rope_theta": 1e4,
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": _LONG,
                "long_factor": [2 * factor for factor in _LONG],
            },
        },
        rotated=[("half", 12)] * 2,
    ),
    "olmo2": Family("Olmo2", "norms over all heads at once"),
    "cohere": Family(
        "Cohere",
        "RoPE on neighbouring dimensions",
        changes={"use_qk_norm": True},
        rotated=[("interleaved", 16)] * 2,
    ),
    "granite": Family(
        "Granite",
        "a scale of its own",
        changes={"attention_multiplier": 0.1},
        formulas=[(0.1, None, None, False)] * 2,
    ),
    "smollm3": Family(
        "SmolLM3",
        "layers without RoPE",
        changes={"no_rope_layers": [1, 0]},
        rotated=[("half", 16), ("half", 0)],
    ),
    "glm4": Family(
        "Glm4",
        "RoPE on half of the dimensions, in neighbouring pairs",
        changes={"partial_rotary_factor": 0.5, "pad_token_id": 0},
        rotated=[("interleaved", 8)] * 2,
    ),
    "gpt_oss": Family(
        "GptOss",
        "sinks, every other layer a sliding window, yarn",
        kernels=("eager",),
        changes={"sliding_window": 100, "num_local_experts": 4, "num_experts_per_tok": 2},
        formulas=[(16**-0.5, None, 100, True), (16**-0.5, None, None, True)],
    ),
    "gpt_neox": Family(
        "GPTNeoX",
        "no grouped queries, RoPE on a quarter of the dimensions",
        changes={"hidden_size": 96},
        rotated=[("half", 4)] * 2,
    ),
    "gpt2": Family(
        "GPT2",
        "no grouped queries, learned positions",
        changes={"n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 1024},
        formulas=[(8**-0.5, None, None, False)] * 2,
        rotated=[("half", 0)] * 2,
    ),
}


def ids(n: int) -> list[int]:
    """Random token ids."""
    return torch.randint(0, 64, (n,), generator=torch.Generator().manual_seed(0)).tolist()


def trace_of(name: str, kernel: str | None = None, **options: Any) -> kvsim.Trace:
    """A capture of a family's model, prompt and response."""
    family = FAMILIES[name]
    model = family.build(kernel or family.kernels[0])
    return kvsim.capture(model, None, ids(PROMPT), **family.response, **options)
