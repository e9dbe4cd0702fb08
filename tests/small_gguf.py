"""A small GGUF file with random weights."""

import itertools

import gguf
import numpy as np

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TOKENS = ["<unk>", "<s>", "</s>", *LETTERS, "Ġ", "1", "2", "ab", "ĠĠ"]
LAYERS, HIDDEN, HEADS, INNER = 2, 32, 2, 32


def write(
    path,
    *,
    architecture="llama",
    tokenizer=True,
    omit=(),
    extra=(),
    seed=0,
    add_bos=False,
    merges=("a b", "Ġ Ġ"),
    numbers=(),
    texts=(),
    kinds=("Q4_1",),
):
    """Write a random quantised model of two layers with more metadata; return tensors by name."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    sizes = {"block_count": LAYERS, "feed_forward_length": INNER, **dict(numbers)}
    for name, value in sizes.items():
        writer.add_uint32(f"{architecture}.{name}", value)
    for name, value in dict(texts).items():
        writer.add_string(f"{architecture}.{name}", value)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(TOKENS)
        writer.add_token_types([3, 3, 3, *[1] * (len(TOKENS) - 3)])
        writer.add_token_merges(list(merges))
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_bos_token(add_bos)
    shapes = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        inside = {
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (HIDDEN // HEADS, HIDDEN),
            "attn_v": (HIDDEN // HEADS, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }
        if architecture == "qwen3":
            inside |= dict.fromkeys(("attn_q_norm", "attn_k_norm"), (HIDDEN // HEADS,))
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in inside.items()}
        if architecture == "qwen2":
            sizes = {"attn_q": HIDDEN, "attn_k": HIDDEN // HEADS, "attn_v": HIDDEN // HEADS}
            shapes |= {f"blk.{layer}.{name}.bias": (size,) for name, size in sizes.items()}
    shapes |= dict.fromkeys(extra, (4,))
    tensors, turns = {}, itertools.cycle(kinds)
    for name, shape in shapes.items():
        if name in omit:
            continue
        values = rng.standard_normal(shape, dtype=np.float32)
        full = name if name.endswith(".bias") else f"{name}.weight"
        if len(shape) == 2 and name != "token_embd":
            kind = gguf.GGMLQuantizationType[next(turns)]
            packed = gguf.quants.quantize(values, kind)
            values = gguf.quants.dequantize(packed, kind)
            writer.add_tensor(full, packed, raw_dtype=kind)
        else:
            writer.add_tensor(full, values)
        tensors[name] = values
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors
