"""Models whose costs are known or measured."""

from torch.utils.flop_counter import FlopCounterMode

from kvsim.studies.cost.model import Model

K = 1024

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LLAMA_70B = {
    **LLAMA,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "hidden_size": 8192,
    "intermediate_size": 28672,
}

#: Llama-3.1-8B, Qwen2.5-7B (and R1-Distill-Qwen-7B) and Llama-3.1-70B
LLAMA_8B, QWEN_7B, BIG = (Model.from_config(c) for c in (LLAMA, QWEN, LLAMA_70B))

#: The model of the small trace.
_LAYER = 24 * (4 + 2) * 2 * 8 + 3 * 24 * 48  # attention, and an MLP of three matrices
SMALL = Model(
    "small",
    *(3, 4, 2, 8),
    hidden=24,
    vocab=50,
    parameters=3 * _LAYER + 2 * 50 * 24 + 24,
    matrices=3 * _LAYER,
    number_bytes=4,
)
PROMPT, TOKENS, BUDGET, EVERY = 48, 96, 24, 16


def counted(run):
    """FLOPs of the matrix products that `run` computes."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()
