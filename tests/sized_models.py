"""Small random models whose layers have different heads or dimensions."""

import copy
import functools

import torch
import transformers
from shared_models import ROPE

from families import Family

#: Query heads, KV heads, dimensions of keys and of values of each layer.
SIZES = {
    "llama": ((6, 2, 16, 16), (6, 3, 16, 16), (6, 2, 16, 16)),
    "Gemma4": ((6, 2, 16, 16), (6, 2, 16, 16), (6, 1, 32, 32)),
    "MiMoV2Flash": ((6, 3, 24, 16), (6, 6, 24, 16), (6, 3, 24, 16)),
}
_CHANGES = {
    "Gemma4": {
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
        "per_layer_config": {"02": {"head_dim": 32, "num_key_value_heads": 1}},
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
        "rope_parameters": dict.fromkeys(["sliding_attention", "full_attention"], ROPE),
    },
    "MiMoV2Flash": {
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense"] * 3,
        "head_dim": 24,
        "v_head_dim": 16,
        "num_key_value_heads": 3,  # twice as many in a layer with a window
    },
}
MODELS = [x for x in SIZES if x == "llama" or hasattr(transformers, f"{x}ForCausalLM")]


@functools.cache
def sized(name, window=1024):
    """A random model of three layers, the first and the last of which see all of a short text."""
    if name == "llama":  # of which one layer has more KV heads
        model = Family("Llama", "", changes={"num_hidden_layers": 3}).build("sdpa")
        config = copy.copy(model.config)
        config.num_key_value_heads = 3
        own = type(model.model.layers[1].self_attn)(config, 1)
        with torch.no_grad():
            for weights in own.parameters():
                weights.normal_(0, 0.2)
        model.model.layers[1].self_attn = own
        return model.eval()
    kind = "Gemma4Text" if name == "Gemma4" else name
    changes = {"num_hidden_layers": 3, "sliding_window": window, **_CHANGES[name]}
    return Family(name, "", config=f"{kind}Config", changes=changes).build(
        "eager" if name == "MiMoV2Flash" else "sdpa"
    )
