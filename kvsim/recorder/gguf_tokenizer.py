"""The tokenizer in the metadata of a GGUF file, as llama.cpp reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as InOrder
from tokenizers.processors import TemplateProcessing

from kvsim.recorder.gguf_file import SPECIAL, field
from kvsim.schema import visible

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

#: Of these, a word that is a token is not merged from its parts.
_WHOLE = ("llama-bpe", "tekken")

#: Types of tokens that are matched as a whole before text is split; the last one is no control.
_UNKNOWN, _CONTROL, _USER = 2, 3, 4

_SPACE = "▁"

#: Most characters of a token: merges of a token with a score take the square of its length.
_LONGEST = 1000


def tokenizer(fields: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer of a file, and the settings that transformers has next to it.

    Raises ValueError for a file without one or with one of another kind.
    """
    if "tokenizer.ggml.tokens" not in fields:
        raise ValueError("it has no tokenizer")
    tokens = _strings(fields, "tokenizer.ggml.tokens")
    ids = {token: at for at, token in enumerate(tokens)}
    if len(ids) < len(tokens) or max(map(len, tokens), default=0) > _LONGEST:
        raise ValueError(
            f"its tokenizer has a token twice, or one of more than {_LONGEST} characters"
        )
    special = {}
    for ours, theirs in SPECIAL.items():
        at = field(fields, f"tokenizer.ggml.{theirs}_token_id", int, -1)
        special[ours] = tokens[at] if 0 <= at < len(tokens) else None
    kind = field(fields, "tokenizer.ggml.model", str)
    words = field(fields, "tokenizer.ggml.pre", str, "")
    if kind == "gpt2" and words in _WORDS:
        backend = _byte_level(fields, ids, words, special["unk"])
    elif kind == "llama":
        backend = _sentencepiece(fields, ids, special["unk"])
    else:
        raise ValueError(
            f"its tokenizer is {kind!r} with words as in {words!r}, expected 'llama', or 'gpt2' "
            f"with words as in {', '.join(_WORDS)}"
        )
    types = field(fields, "tokenizer.ggml.token_type", list, [])
    for token, number in zip(tokens, types, strict=False):
        if number in (_UNKNOWN, _CONTROL):
            backend.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif number == _USER:
            backend.add_tokens([AddedToken(token, normalized=False, special=False)])
    begins = kind == "llama" or words == "llama-bpe"  # llama.cpp's defaults
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


def _byte_level(
    fields: Mapping[str, Any], ids: dict[str, int], words: str, unknown: str | None
) -> Tokenizer:
    merges = []
    for merge in _strings(fields, "tokenizer.ggml.merges"):
        pair = merge.split(" ")
        if len(pair) != 2 or not ids.keys() >= {*pair, "".join(pair)}:
            raise ValueError(f"its tokenizer merges {visible(merge)!r}, no two tokens of it")
        merges.append((pair[0], pair[1]))
    backend = Tokenizer(BPE(ids, merges, unk_token=unknown, ignore_merges=words in _WHOLE))
    splits: list[Any] = [Split(Regex(each), "isolated") for each in _WORDS[words]]
    backend.pre_tokenizer = InOrder([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    fields: Mapping[str, Any], ids: dict[str, int], unknown: str | None
) -> Tokenizer:
    """Return a tokenizer that merges to the token of the highest score first."""
    scores = field(fields, "tokenizer.ggml.scores", list)
    order = sorted(zip(scores, ids, strict=True), key=lambda pair: -pair[0])
    merges = [
        (token[:at], token[at:])
        for _, token in order
        for at in range(1, len(token))
        if token[:at] in ids and token[at:] in ids
    ]
    backend = Tokenizer(BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = field(fields, "tokenizer.ggml.add_space_prefix", bool, True)  # noqa: FBT003  the default
    begin: list[Any] = [normalizers.Prepend(_SPACE)] if prefix else []
    backend.normalizer = normalizers.Sequence([*begin, normalizers.Replace(" ", _SPACE)])
    end: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *end]
    )
    return backend


def _strings(fields: Mapping[str, Any], key: str) -> Sequence[str]:
    values = field(fields, key, list)
    if not all(isinstance(value, str) for value in values):
        raise ValueError(f"{key} has other values than text")
    return values
