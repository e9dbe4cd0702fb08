"""Small random models whose layers do not all have attention, and others of unusual shape."""

from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel, cache_utils

#: Releases of transformers without it have a class of caches for each hybrid, which is refused.
newer = pytest.mark.xfail(
    not hasattr(cache_utils, "LinearAttentionLayer"),
    reason="takes a class of caches of its own",
    run=False,
)

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_LINEAR = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MAMBA = {
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
_KINDS = ["linear_attention", "full_attention", "linear_attention", "full_attention"]

#: By name: prefix of transformers' classes, and the configuration beyond the sizes.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": (
        "Qwen3Next",
        {**_LINEAR, "layer_types": _KINDS, "num_experts": 4, "mlp_only_layers": [0, 1, 2, 3]},
    ),
    "olmo_hybrid": ("OlmoHybrid", {**_LINEAR, "layer_types": _KINDS}),
    "lfm2": (
        "Lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "block_multiple_of": 16,
        },
    ),
    "bamba": ("Bamba", {**_MAMBA, "attn_layer_indices": [1, 3]}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **_MAMBA,
            "layer_types": _KINDS,
            "position_embedding_type": "rope",
            "num_local_experts": 0,
            "shared_intermediate_size": 64,
        },
    ),
    "falcon_h1": ("FalconH1", {**_MAMBA, "mamba_d_ssm": 96}),
}


def hybrid(name: str, **changes: Any) -> PreTrainedModel:
    """A random model of four layers in float32, with attention far from uniform; or a qwen3."""
    prefix, own = HYBRIDS.get(name, ("Qwen3", {}))
    settings = {**_SIZES, "num_hidden_layers": 4, **own, **changes}
    config = getattr(transformers, f"{prefix}Config")(**settings)
    config._attn_implementation = "sdpa"
    torch.manual_seed(3)
    model: PreTrainedModel = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, weights in model.named_parameters():
            if key.endswith(("q_proj.weight", "k_proj.weight")):
                weights.mul_(8)
    return model
