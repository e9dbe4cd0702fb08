"""A random model of two layers, and tokenizers of words and of bytes, for tests of recording."""

import functools

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

UNKNOWN = "<unk>"
#: A chat for the tokenizer of words.
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}w7 {% elif m['role'] == 'system' %}w8 "
    "{% else %}{{ raise_exception('no such role') }}{% endif %}{{ m['content'] }} {% endfor %}w9"
)


@functools.cache
def small(vocab_size=64, dtype=torch.float32, attention="sdpa", kind="Llama", **changes):
    """A random model, by default of two layers with a context of 900 tokens; no token ends it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 900}
    sizes |= {"vocab_size": vocab_size, "attn_implementation": attention, "eos_token_id": None}
    config = getattr(transformers, f"{kind}Config")(**sizes | changes)
    return getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype).eval()


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


def bytes_tokenizer(merges=(), template=None):
    """A tokenizer with a token for each byte, and merges that may cross words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, *map("".join, merges)])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=template)
