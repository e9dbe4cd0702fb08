"""The content of GGUF files: metadata, tensors, and the decoder model that they describe.

Lengths and shapes are compared with the file before anything is allocated for them. Names of
tensors, sizes of blocks and the values of quantised weights are as in the package `gguf`.
"""

from __future__ import annotations

import math
import reprlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM

from kvsim.schema import first_of

T = TypeVar("T")

#: The first bytes of every file.
MAGIC = b"GGUF"
_VERSIONS = (2, 3)

#: Formats of `struct` for the types of single values; a string and an array have none.
_FORMATS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")

#: Architectures of files, which are also those of transformers.
ARCHITECTURES = ("llama", "qwen2", "qwen3")

#: Keys of the configuration by those of the file, which follow the name of the architecture.
_KEYS = {
    "attention.head_count": ("num_attention_heads", int),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", float),
    "block_count": ("num_hidden_layers", int),
    "context_length": ("max_position_embeddings", int),
    "embedding_length": ("hidden_size", int),
    "feed_forward_length": ("intermediate_size", int),
}

#: Keys of the file for the size of a head. All of a head is rotated.
_HEAD = ("attention.key_length", "attention.value_length", "rope.dimension_count")

#: Keys with defaults, which are llama.cpp's.
_OPTIONAL = ("attention.head_count_kv", "rope.freq_base", "vocab_size")

#: Special tokens: names in configurations of transformers, and in the file.
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor as stored: the name of its type, its shape, its rows as bytes [rows, m]."""

    kind: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    def values(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return rows, all in this order, as float32 of the shape, dequantized by `gguf`."""
        from gguf import GGMLQuantizationType, dequantize  # noqa: PLC0415  an extra

        with np.errstate(all="ignore"):  # a scale of a damaged file may be infinite
            values = dequantize(self.data[rows], GGMLQuantizationType[self.kind])
        return np.asarray(values, "<f4").reshape(self.shape)


#: A parameter of the model: a tensor, and its rows in the order of transformers.
Weight = tuple[StoredTensor, NDArray[np.int64]]


class _Bytes:
    """Values of a file in sequence; ValueError at its end."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> memoryview:
        if size > len(self.data) - self.at:
            raise ValueError(f"it ends after {len(self.data)} bytes, within its content")
        self.at += size
        return self.data[self.at - size : self.at]

    def numbers(self, form: str, count: int = 1) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{form}") * count
        return struct.unpack(f"<{count}{form}", self.take(size))

    def string(self) -> str:
        (size,) = _LENGTH.unpack(self.take(_LENGTH.size))
        return str(self.take(size), "utf-8")

    def value(self) -> Any:
        (kind,) = self.numbers("I")
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.numbers(_FORMATS[kind])[0]
        (kind,), (count,) = self.numbers("I"), self.numbers("Q")
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        return list(self.numbers(_FORMATS[kind], count))


def read(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Return the metadata and the tensors of a file, by name.

    Raises ValueError, LookupError or OSError for a file that is damaged or of another version.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # noqa: PLC0415  an extra

    source = _Bytes(np.memmap(path, np.uint8, "r").data)
    magic, (version,) = bytes(source.take(len(MAGIC))), source.numbers("I")
    if magic != MAGIC or version not in _VERSIONS:
        raise ValueError(f"it begins with {magic!r} and version {version}, no known GGUF file")
    n_tensors, n_fields = source.numbers("Q", 2)
    fields: dict[str, Any] = {}
    for _ in range(n_fields):
        key = source.string()
        if key in fields:
            raise ValueError(f"{key} is there twice")
        fields[key] = source.value()
    places = []
    for _ in range(n_tensors):
        name = source.string()
        shape = source.numbers("Q", *source.numbers("I"))[::-1]
        places.append((name, shape, *source.numbers("I"), *source.numbers("Q")))
    align = field(fields, "general.alignment", int, 32)
    begin = -(-source.at // align) * align
    tensors, end = {}, begin
    for name, shape, number, offset in sorted(places, key=lambda place: place[-1]):
        kind = GGMLQuantizationType(number)
        block, size = GGML_QUANT_SIZES[kind]
        rows, row = math.prod(shape[:-1]), shape[-1] // block * size
        if name in tensors or not rows * row or shape[-1] % block or begin + offset < end:
            raise ValueError(f"{name} {list(shape)} is there twice, or is not where it can be")
        source.at = begin + offset
        tensors[name] = StoredTensor(
            kind.name, shape, np.frombuffer(source.take(rows * row), np.uint8).reshape(rows, row)
        )
        end = source.at
    return fields, tensors


def field(fields: Mapping[str, Any], key: str, kind: type[T], default: T | None = None) -> T:
    """Return a value of the metadata; TypeError for a missing one or another type than `kind`."""
    value = fields.get(key, default)
    if not isinstance(value, kind):
        raise TypeError(f"{key} is {reprlib.repr(value)}, expected {kind.__name__}")
    return value


def configuration(fields: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Return the configuration of transformers for a file.

    Raises ValueError for an unknown architecture, and for metadata that would have no effect.
    """
    name = field(fields, "general.architecture", str)
    if name not in ARCHITECTURES:
        raise ValueError(f"its architecture is {name}")
    own = {
        key.removeprefix(f"{name}."): x for key, x in fields.items() if key.startswith(f"{name}.")
    }
    others = {
        key: value
        for key, value in own.items()
        if key not in (*_KEYS, *_HEAD, *_OPTIONAL) and value not in (0, "none")
    }
    sizes = {field(own, key, int) for key in _HEAD if key in own}
    if others or len(sizes) > 1:
        shown = ", ".join(f"{name}.{key}" for key in others) or "heads of several sizes"
        raise ValueError(f"it has {shown}, expected a plain {name} model")
    config: dict[str, Any] = {
        "model_type": name,
        "dtype": "float32",
        **{ours: field(own, key, kind) for key, (ours, kind) in _KEYS.items()},
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": field(own, "rope.freq_base", float, 10000.0),
        },
        "tie_word_embeddings": "output.weight" not in tensors,
        "vocab_size": field(
            own, "vocab_size", int, len(field(fields, "tokenizer.ggml.tokens", list))
        ),
    }
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = field(own, "attention.head_count_kv", int, heads)
    config["head_dim"] = sizes.pop() if sizes else config["hidden_size"] // heads
    if "general.name" in fields:  # as in the configurations that transformers reads from GGUF
        config["_model_name_or_path"] = field(fields, "general.name", str)
    for ours, theirs in SPECIAL.items():
        if (key := f"tokenizer.ggml.{theirs}_token_id") in fields:
            config[f"{ours}_token_id"] = field(fields, key, int)
    return config


def weights(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> dict[str, Weight]:
    """Return the parameters of the model by their names in transformers.

    Raises ValueError unless the file has exactly these, in the shapes of the configuration.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map  # noqa: PLC0415  an extra

    name, layers = config["model_type"], config["num_hidden_layers"]
    blocks = {part[1] for each in tensors if (part := each.split("."))[0] == "blk"}
    if len(blocks) != layers:
        raise ValueError(f"block_count is {layers}, expected the {len(blocks)} of its tensors")
    with torch.device("meta"):  # layers of these architectures have equal shapes
        config_of_one = AutoConfig.for_model(**{**config, "num_hidden_layers": 1})
        model = AutoModelForCausalLM.from_config(config_of_one)
    (architecture,) = (key for key, value in MODEL_ARCH_NAMES.items() if value == name)
    names = get_tensor_name_map(architecture, 1)
    expected = {}
    for ours, value in model.state_dict().items():
        stem, _, end = ours.rpartition(".")
        theirs = f"{names.get_name(stem)}.{end}"
        for layer in range(layers if theirs.startswith("blk.0.") else 1):
            each = theirs.replace("blk.0.", f"blk.{layer}.")
            expected[each] = ours.replace(".0.", f".{layer}."), tuple(value.shape)
    if config["tie_word_embeddings"]:
        del expected["output.weight"]
    stored = {each: tensor.shape for each, tensor in tensors.items()}
    wrong = {each: shape for each, (_, shape) in expected.items()}.items() ^ stored.items()
    if differing := sorted({each for each, _ in wrong}):
        raise ValueError(
            f"{len(differing)} of its weights are missing, more, or of other shapes "
            f"({first_of(differing)})"
        )
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    parts: dict[str, Weight] = {}
    for each, (ours, _) in expected.items():
        rows = np.arange(len(tensors[each].data))
        count = heads.get(each.split(".")[-2]) if name == "llama" else None
        if count:  # the two halves of a head are interleaved, as llama.cpp rotates them
            rows = rows.reshape(count, -1, 2).swapaxes(1, 2).ravel()
        parts[ours] = tensors[each], rows
    return parts
