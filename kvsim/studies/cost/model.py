"""The shape of a decoder model, and its parameters, bytes and FLOPs.

A multiplication and an addition are 2 FLOPs, and a softmax 3 per weight (Hoffmann et al. 2022,
arXiv 2203.15556, appendix F). Layers are counted with grouped queries and, unless said otherwise,
causal attention: row i of a prefill sees i + 1 entries. Normalisation, activations and rotary
embedding are left out; they are linear in the hidden size where the rest is quadratic.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from kvsim.core.flops import attention_flops, causal_pairs
from kvsim.core.parameters import Between, check_fields
from kvsim.core.trace import Trace
from kvsim.errors import KvsimError
from kvsim.files import read_input
from kvsim.schema import object_at

GIB = 1 << 30

_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8": 1}
_Size = Annotated[int, Between(1, 1e6)]

# The MLP of most decoders is gated and has three matrices; these types have two.
_TWO_MATRICES = ("gpt_neox", "nemotron", "phi", "starcoder2")

# Keys of architectures whose layers this arithmetic does not describe.
_FOREIGN = {
    "num_local_experts": "a mixture of experts",
    "num_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "num_kv_shared_layers": "layers that read the keys and values of others",
    "kv_lora_rank": "latent attention, which caches no keys and values of heads",
}

#: Kinds of layers that cache no keys and values.
_STATES = ("linear_attention", "conv", "mamba", "recurrent", "mlp", "moe")

_SAY = "expected the config.json of a decoder model such as Llama, Mistral, Qwen2, Qwen3 or Gemma"


class ModelError(KvsimError, ValueError):
    """A configuration that lacks a size, or is of another kind of model."""


@dataclass(frozen=True)
class Model:
    """A decoder model's shape. Query head `i` shares KV head `i // (n_qheads / n_heads)`.

    hidden, intermediate: width of the residual stream and of the MLP. tied: the output matrix is
    the embedding. mlp_matrices: 3 with a gate, else 2. extra: parameters of a layer beside its
    matrices (norms, biases). number_bytes: of a weight and of a number in the KV cache.
    remarks: parts of this model that the arithmetic leaves out. value_dim: dimensions of a value,
    those of a key by default.
    """

    name: str
    n_layers: _Size
    n_qheads: _Size
    n_heads: _Size
    dim: _Size
    hidden: _Size
    intermediate: _Size
    vocab: _Size
    tied: bool = False
    mlp_matrices: int = 3
    extra: int = 0
    number_bytes: Annotated[float, Between(1, max(_BYTES.values()))] = 2
    remarks: tuple[str, ...] = ()
    value_dim: _Size | None = None

    def __post_init__(self) -> None:
        check_fields(self, self.name, ModelError)
        if self.value_dim is None:
            object.__setattr__(self, "value_dim", self.dim)
        if self.n_qheads % self.n_heads:
            raise ModelError(
                f"{self.name}: {self.n_qheads} query heads cannot share {self.n_heads} KV heads; "
                "expected a multiple"
            )

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.n_qheads // self.n_heads

    @property
    def layer_matrices(self) -> int:
        """Numbers in the matrices of a layer: q, k, v and output projections, MLP."""
        attention = self.hidden * (self.n_qheads + self.n_heads) * self.entry_size
        return attention + self.mlp_matrices * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """All parameters."""
        embeddings = (1 if self.tied else 2) * self.vocab * self.hidden
        return embeddings + self.n_layers * (self.layer_matrices + self.extra) + self.hidden

    @property
    def weight_bytes(self) -> float:
        """Bytes of the parameters."""
        return self.parameters * self.number_bytes

    @property
    def entry_size(self) -> int:
        """Numbers of the key and value of one position in one KV head."""
        return self.dim + (self.value_dim or self.dim)

    @property
    def entry_bytes(self) -> float:
        """Bytes of the key and value of one position in one KV head."""
        return self.entry_size * self.number_bytes

    def kv_bytes(self, entries: float) -> float:
        """Bytes of the cache of all layers where every KV head holds so many entries."""
        return self.n_layers * self.n_heads * entries * self.entry_bytes

    def per_query_head(self) -> Model:
        """Return the model with keys and values of its own for every query head."""
        return replace(self, n_heads=self.n_qheads)

    def as_dict(self) -> dict[str, Any]:
        """The shape and its parameters, bytes and FLOPs, ready for JSON."""
        derived = {"parameters": self.parameters, "weight_bytes": self.weight_bytes}
        return {**vars(self), "remarks": list(self.remarks), **derived}

    def attention_flops(self, pairs: float) -> float:
        """FLOPs of one layer's attention over so many pairs of a row and an entry."""
        return attention_flops(pairs, self.n_qheads, self.entry_size)

    def layer_flops(self, rows: float, *, causal: bool = True) -> float:
        """FLOPs of one layer over the rows of a prefill; causal: row i sees i + 1 of them."""
        pairs = causal_pairs(rows) if causal else rows * rows
        return 2 * rows * self.layer_matrices + self.attention_flops(pairs)

    def prefill_flops(self, rows: float, *, causal: bool = True) -> float:
        """FLOPs of a prefill: all layers over all rows, and the logits of the last row."""
        head = 2 * self.hidden * self.vocab
        return self.n_layers * self.layer_flops(rows, causal=causal) + head

    def decode_flops(self, entries: float) -> float:
        """FLOPs of one generated token that sees so many entries per head, its own included."""
        layer = 2 * self.layer_matrices + self.attention_flops(entries)
        return self.n_layers * layer + 2 * self.hidden * self.vocab

    @classmethod
    def from_config(
        cls, config: str | Path | Mapping[str, Any], *, number_bytes: float | None = None
    ) -> Model:
        """The model that a Hugging Face configuration describes.

        config: its keys, the path of a config.json, or that of a folder with one. number_bytes: in
        place of what the data type of the configuration takes (2 where it names none).
        """
        if isinstance(config, Mapping):
            return _model(config, "config", number_bytes)
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        try:
            keys = json.loads(read_input(path))
        except FileNotFoundError as error:
            raise ModelError(f"no file {str(path)!r}; {_SAY}") from error
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{str(path)!r} is no JSON ({error}); {_SAY}") from error
        if not isinstance(keys, Mapping):
            raise ModelError(f"{str(path)!r} holds a {type(keys).__name__}; {_SAY}")
        name = path.parent.name if path.name == "config.json" else path.stem
        return _model(keys, name, number_bytes)

    @classmethod
    def from_trace(cls, trace: Trace, *, number_bytes: float | None = None) -> Model:
        """The model that a trace was recorded from, as its provenance has the configuration."""
        model: Mapping[str, Any] = object_at(trace.meta, "model")
        config = model.get("config")
        if not isinstance(config, Mapping):
            raise ModelError(
                f"trace {trace.name!r} does not say which model it comes from: its provenance has "
                "no model.config; give the model's configuration instead"
            )
        typed = {"dtype": model.get("dtype")} if model.get("dtype") else {}
        return _model({**config, **typed}, str(model.get("name") or "model"), number_bytes)


def _model(config: Mapping[str, Any], name: str, number_bytes: float | None) -> Model:
    """The configuration as a Model; that of the text where the model sees more than text."""
    if isinstance(config.get("text_config"), Mapping):
        dtype = _dtype(config)
        config = {**({"dtype": dtype} if dtype else {}), **config["text_config"]}
    for key, what in _FOREIGN.items():
        if config.get(key):
            raise ModelError(f"{name}: {key} is {config[key]!r}, {what}; {_SAY}")
    kind = str(config.get("model_type", ""))

    def size(key: str) -> int:
        value = config.get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            state = "is missing" if value is None else f"is {value!r}"
            raise ModelError(f"{name}: {key} {state}; {_SAY}")
        return value

    qheads, hidden = size("num_attention_heads"), size("hidden_size")
    heads = qheads if config.get("num_key_value_heads") is None else size("num_key_value_heads")
    dim = hidden // max(1, qheads) if config.get("head_dim") is None else size("head_dim")
    matrices = 2 if kind in _TWO_MATRICES else 3
    return Model(
        name=name,
        n_layers=size("num_hidden_layers") - len(_without_entries(config)),
        n_qheads=qheads,
        n_heads=heads,
        dim=dim,
        hidden=hidden,
        intermediate=size("intermediate_size"),
        vocab=size("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", kind.startswith("gemma"))),
        mlp_matrices=matrices,
        extra=_extra(config, kind, qheads, heads, dim, matrices),
        number_bytes=_number_bytes(config, name) if number_bytes is None else number_bytes,
        remarks=_remarks(config),
        value_dim=None if config.get("v_head_dim") is None else size("v_head_dim"),
    )


def _extra(
    config: Mapping[str, Any], kind: str, qheads: int, heads: int, dim: int, matrices: int
) -> int:
    """Norms and biases of a layer, as llama, mistral, qwen2, qwen3 and gemma have them."""
    hidden = config["hidden_size"]
    four = kind.startswith(("gemma2", "gemma3"))  # norms behind attention and MLP as well
    extra = (4 if four else 2) * hidden
    if kind.startswith(("qwen3", "gemma3")):
        extra += 2 * dim  # of queries and of keys
    if config.get("attention_bias") or kind == "qwen2":
        extra += (qheads + 2 * heads) * dim + (0 if kind == "qwen2" else hidden)
    if config.get("mlp_bias"):
        extra += (matrices - 1) * config["intermediate_size"] + hidden
    return int(extra)


def _dtype(config: Mapping[str, Any]) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")


def _number_bytes(config: Mapping[str, Any], name: str) -> float:
    """Bytes per number of the configuration's data type, 2 where it names none."""
    dtype = _dtype(config) or "bfloat16"
    for start, size in _BYTES.items():
        if dtype.startswith(start):
            return size
    raise ModelError(
        f"{name}: dtype is {dtype!r}; expected {', '.join(_BYTES)}, or give the bytes per number "
        "(--dtype-bytes)"
    )


def _without_entries(config: Mapping[str, Any]) -> list[str]:
    """Return the kinds of the layers that hold a state, a convolution or nothing."""
    kinds = config.get("layer_types") or config.get("layers_block_type")
    return [kind for kind in (kinds if isinstance(kinds, list) else ()) if kind in _STATES]


def _remarks(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the parts of a model that the arithmetic leaves out."""
    remarks = []
    kinds = config.get("layer_types")
    kinds = kinds if isinstance(kinds, list) else []
    window, chunk = config.get("sliding_window"), config.get("attention_chunk_size")
    sizes = {"sliding window": config.get("use_sliding_window", True) and window, "chunk": chunk}
    for name, size in sizes.items():
        if size and (not kinds or any(str(kind).startswith(name[:5]) for kind in kinds)):
            remarks.append(
                f"layers with a {name} ({size} tokens) are counted as full attention over the "
                "whole context"
            )
    if others := _without_entries(config):
        kinds = ", ".join(dict.fromkeys(others))
        remarks.append(
            f"{len(others)} layers without keys and values ({kinds}) are left out, with their "
            "weights, FLOPs and states"
        )
    if config.get("quantization_config"):
        remarks.append(
            "quantised weights are counted at the size of the data type; use --dtype-bytes"
        )
    return tuple(remarks)
