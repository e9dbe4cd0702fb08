"""A random model of two layers and a tokenizer of words, for tests of recording."""

from __future__ import annotations

import functools

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

UNKNOWN = "<unk>"


@functools.cache
def small(vocab_size=64, dtype=torch.float32, attention="sdpa"):
    """A random model of two layers with a context of 900 tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=900,
        attn_implementation=attention,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


@functools.cache
def words_tokenizer(template=None):
    """A tokenizer of the words w0 to w62."""
    vocab = {UNKNOWN: 63, **{f"w{i}": i for i in range(63)}}
    inner = Tokenizer(models.WordLevel(vocab=vocab, unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token=UNKNOWN,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
