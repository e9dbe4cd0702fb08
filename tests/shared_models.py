"""Models whose last layers read the entries of earlier ones."""

import functools

import transformers

from families import Family

ROPE = {"rope_type": "default", "rope_theta": 1e4}
KINDS = ["sliding_attention", "full_attention"] * 3
LAYERS = len(KINDS)
#: The last two layers read those of the last layer of their kind before them.
OWNERS = (0, 1, 2, 3, 2, 3)

_CHANGES = {
    "num_hidden_layers": LAYERS,
    "num_kv_shared_layers": 2,
    "layer_types": KINDS,
    "sliding_window": 1024,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
    "rope_parameters": {"full_attention": ROPE, "sliding_attention": {**ROPE, "rope_theta": 1e3}},
}
MODELS = {
    "Gemma3n": {
        "intermediate_size": [64] * LAYERS,
        "activation_sparsity_pattern": [0.0] * LAYERS,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
    },
    "Gemma4": {"per_layer_config": {}},
}
MODELS = {name: x for name, x in MODELS.items() if hasattr(transformers, f"{name}ForCausalLM")}


@functools.cache
def shared(name, kernel="sdpa"):
    """A random model of a family, with attention that is far from uniform."""
    changes = {**_CHANGES, **MODELS[name]}
    return Family(name, "", config=f"{name}TextConfig", changes=changes).build(kernel)
