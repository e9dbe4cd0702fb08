"""The tokenizer in the metadata of a GGUF file, as llama.cpp reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as InOrder
from tokenizers.processors import TemplateProcessing

from kvsim.recorder.gguf_file import SPECIAL, field

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

#: Expressions that split text into words, one after another, by the file's name for them.
_WORDS = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "tekken": (_TEKKEN,),
}

#: Types of tokens that are matched as a whole before text is split; the last one is no control.
_UNKNOWN, _CONTROL, _USER = 2, 3, 4


def tokenizer(fields: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer of a file, and the settings that transformers has next to it.

    Raises ValueError for a file without one or with one of another kind.
    """
    if "tokenizer.ggml.tokens" not in fields:
        raise ValueError("it has no tokenizer")
    tokens = _strings(fields, "tokenizer.ggml.tokens")
    ids = {token: at for at, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        raise ValueError("its tokenizer has a token twice")
    special = {}
    for ours, theirs in SPECIAL.items():
        at = field(fields, f"tokenizer.ggml.{theirs}_token_id", int, -1)
        special[ours] = tokens[at] if 0 <= at < len(tokens) else None
    kind = field(fields, "tokenizer.ggml.model", str)
    words = field(fields, "tokenizer.ggml.pre", str, "")
    if kind != "gpt2" or words not in _WORDS:
        raise ValueError(
            f"its tokenizer is {kind!r} with words as in {words!r}, expected 'gpt2' with words as "
            f"in {', '.join(_WORDS)}"
        )
    merges = [each.partition(" ")[::2] for each in _strings(fields, "tokenizer.ggml.merges")]
    for pair in merges:
        if not ids.keys() >= {*pair, "".join(pair)}:  # tokenizers would end the process
            raise ValueError(f"its tokenizer merges {pair}, which are no tokens of it")
    whole = words in ("llama-bpe", "tekken")  # a word that is a token is not merged from its parts
    backend = Tokenizer(BPE(ids, merges, unk_token=special["unk"], ignore_merges=whole))
    splits: list[Any] = [Split(Regex(each), "isolated") for each in _WORDS[words]]
    backend.pre_tokenizer = InOrder([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    types = field(fields, "tokenizer.ggml.token_type", list, [])
    for token, number in zip(tokens, types, strict=False):
        if number in (_UNKNOWN, _CONTROL):
            backend.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif number == _USER:
            backend.add_tokens([AddedToken(token, normalized=False, special=False)])
    begins = words == "llama-bpe"  # llama.cpp's default
    bos = field(fields, "tokenizer.ggml.add_bos_token", bool, begins) and special["bos"]
    eos = field(fields, "tokenizer.ggml.add_eos_token", bool, False) and special["eos"]  # noqa: FBT003  the default
    around = [token for token in (bos, eos) if token]
    backend.post_processor = TemplateProcessing(
        single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
        special_tokens=[(token, ids[token]) for token in dict.fromkeys(around)],
    )
    template = field(fields, "tokenizer.chat_template", str, "")
    settings = {f"{ours}_token": token for ours, token in special.items() if token is not None}
    return backend, settings | ({"chat_template": template} if template else {})


def _strings(fields: Mapping[str, Any], key: str) -> Sequence[str]:
    values = field(fields, key, list)
    if not all(isinstance(value, str) for value in values):
        raise ValueError(f"{key} has other values than text")
    return values
