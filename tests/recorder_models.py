"""Models that tests record."""

import functools
from dataclasses import replace

import torch
import transformers

from families import FAMILIES
from kvsim.recorder import load_model

NAMES = ("llama", "qwen2", "qwen3")


def build(family, attention="sdpa", **changes):
    """A random model whose attention is far from uniform."""
    return replace(FAMILIES[family], changes=changes).build(attention)


@functools.cache
def small(family, attention="sdpa", **changes):
    """A random model of the family, made once."""
    return build(family, attention, **changes)


def four_layers():
    """A random qwen2 model, made once."""
    return small("qwen2", num_hidden_layers=4)


@functools.cache
def tiny():
    """The shipped model and its tokenizer."""
    return load_model("tiny")


#: Families of latent attention, as far as the installed transformers has them: the classes, and
#: whether the configuration rotates neighbouring dimensions.
LATENT = {
    name: case
    for name, case in {
        "deepseek_v2": ("DeepseekV2", {"first_k_dense_replace": 2}),
        "deepseek_v3": ("DeepseekV3", {"first_k_dense_replace": 2, "rope_interleave": True}),
        "deepseek_v3, halves": (
            "DeepseekV3",
            {"first_k_dense_replace": 2, "rope_interleave": False, "q_lora_rank": None},
        ),
        "minicpm3": ("MiniCPM3", {}),
    }.items()
    if hasattr(transformers, f"{case[0]}Config")
}


#: Of their configurations.
LATENT_SIZES = {
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@functools.cache
def latent(name, attention="sdpa", dtype=torch.float32, **changes):
    """A random model of latent attention, far from uniform: 4 heads, latents of 24, 8 rotated."""
    prefix, more = LATENT[name]
    config = getattr(transformers, f"{prefix}Config")(**LATENT_SIZES | more | changes)
    config._attn_implementation = attention
    torch.manual_seed(1)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("q_proj.weight", "q_b_proj.weight", "kv_b_proj.weight")):
                parameter.mul_(15)
            elif "kv_a_layernorm" in key:
                parameter.copy_(1 + torch.rand_like(parameter))
    return model.to(dtype)


def several_axes():
    """A random ERNIE-VL, whose positions have three axes."""
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16}
    experts = {"moe_num_experts": 2, "moe_k": 1, "moe_intermediate_size": [16, 16]}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}
    text = {**sizes, **heads, **experts, "rope_parameters": rope, "vocab_size": 64}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    # the name had one underscore more until transformers 5.3
    prefix = f"Ernie4_5_VL{'' if hasattr(transformers, 'Ernie4_5_VLMoeConfig') else '_'}Moe"
    config = getattr(transformers, f"{prefix}Config")(
        text_config={**text, "pad_token_id": 0}, vision_config=vision
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()


def exact_attention(trace, layer):
    """Attention output [qhead, n, d] in float64 from a trace's q, k, v, by the definition."""
    q, k, v = (trace.read(name, slice(layer, layer + 1))[0].double() for name in "qkv")
    k, v = (x.repeat_interleave(trace.group, 0) for x in (k, v))
    logits = trace.formulas[0].scale * q @ k.mT
    future = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    return logits.masked_fill(future, -torch.inf).softmax(-1) @ v
