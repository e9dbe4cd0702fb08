"""SmolLM2 as kvsim loads it, against the gguf package's reader and transformers' own loading."""

import functools
from itertools import pairwise

import gguf
import numpy as np
import pytest
import regex
import torch
from transformers import AutoModelForCausalLM

import kvsim
from kvsim.recorder.choice import stop_tokens
from kvsim.recorder.gguf import read_gguf

pytestmark = pytest.mark.real

#: Names in the file and in transformers.
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
INSIDE = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CHAT = [{"role": "user", "content": "Name three large cities of France."}]


@pytest.fixture(scope="module")
def reader(smollm2):
    """The gguf package's reader of the file."""
    return gguf.GGUFReader(read_gguf("smollm2").path)


def test_all_tensors_equal_those_of_the_gguf_reader(smollm2, reader):
    """Every weight is the dequantised tensor of the file; halves of q and k interleave."""
    weights = {name: value.numpy() for name, value in smollm2[0].state_dict().items()}
    compared = set()
    for tensor in reader.tensors:
        parts = tensor.name.removesuffix(".weight").split(".")
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{INSIDE[parts[2]]}.weight"
        else:
            name = f"{OUTSIDE[parts[0]]}.weight"
        values = weights[name]
        if parts[-1] in ("attn_q", "attn_k"):
            pairs = values.reshape(-1, 2, 32, values.shape[1])  # head, half, pair, in
            values = np.stack([pairs[:, 0], pairs[:, 1]], axis=2).reshape(values.shape)
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(values, expected.reshape(values.shape)), name
        compared.add(name)

    assert len(compared) == 272
    assert weights.keys() - compared == {"lm_head.weight"}
    assert np.array_equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])


def test_model_equals_a_direct_load(monkeypatch, smollm2, reader):
    """Weights, configuration, special tokens and greedy tokens are those of `gguf_file=`."""
    model, tokenizer = smollm2
    # transformers reads the fields of the file, 100,000 tokens and merges, once for each part
    monkeypatch.setattr(gguf, "GGUFReader", lambda _: reader)
    # and builds the same map of names for each module of the model
    monkeypatch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
    path = read_gguf("smollm2").path
    direct = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    trace = kvsim.capture(model, tokenizer, CHAT, max_new_tokens=8)
    greedy = direct.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)

    ours, theirs = model.state_dict(), direct.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    settings = [
        {
            key: x
            for key, x in each.to_dict().items()
            if key not in ("_name_or_path", "architectures", "quantization_config")
        }
        for each in (model.config, direct.config)
    ]
    assert settings[0] == settings[1]
    stops = ("bos_token_id", "eos_token_id", "pad_token_id")
    for key in stops:
        assert getattr(model.generation_config, key) == getattr(direct.generation_config, key)
    assert trace.tokens.tolist() == greedy[0].tolist()


def pieces(text):
    """The words of llama.cpp's pre-tokenizer `smollm`: digits one by one, then those of GPT-2."""
    words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    for part in regex.findall(r"\p{N}|\P{N}+", text):
        yield from regex.findall(words, part)


def alphabet():
    """The character that stands for each byte in a byte-level vocabulary."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


TEXTS = [
    "The capital of France is",
    "a  1 12\t\n 33 x , . don't  we'll   stop\n\n\n  end  ",
    "Straße, 漢字, привет: ½ and ٣, naïve café — “quoted” 🙂",
    "def f(x):\n    return x ** 2  # 1024\n",
]


@pytest.mark.parametrize("text", TEXTS, ids=["words", "spaces", "scripts", "code"])
def test_text_is_tokenised_as_the_file_says(smollm2, reader, text):
    """Tokens are those of plain byte-pair merges over the file's vocabulary, and decode exactly."""
    tokenizer = smollm2[1]
    tokens = reader.get_field("tokenizer.ggml.tokens").contents()
    merges = reader.get_field("tokenizer.ggml.merges").contents()
    rank = {tuple(merge.split(" ")): place for place, merge in enumerate(merges)}
    ids = {token: place for place, token in enumerate(tokens)}
    symbols = alphabet()
    expected = []
    for piece in pieces(text):
        word = [symbols[byte] for byte in piece.encode()]
        while True:
            pairs = [(rank.get(pair, len(rank)), i) for i, pair in enumerate(pairwise(word))]
            best, at = min(pairs, default=(len(rank), 0))
            if best == len(rank):
                break
            word[at : at + 2] = [word[at] + word[at + 1]]
        expected += [ids[symbol] for symbol in word]

    assert tokenizer(text)["input_ids"] == expected
    assert tokenizer.decode(expected) == text


def test_special_tokens_are_those_of_the_file(smollm2, reader):
    """A chat is the file's template in its special tokens, and ends with its end of a message."""
    model, tokenizer = smollm2
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    template = reader.get_field("tokenizer.chat_template").contents()

    assert tokenizer.chat_template == template
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 3, 2)
    assert len(tokenizer) == model.config.vocab_size == 49152
    assert stop_tokens(model, tokenizer) == {2}
