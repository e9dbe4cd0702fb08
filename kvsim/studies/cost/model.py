"""The shape of a decoder model, and its parameters, bytes and FLOPs.

A multiplication and an addition are 2 FLOPs, and a softmax 3 per weight (Hoffmann et al. 2022,
arXiv 2203.15556, appendix F). Layers are counted with grouped queries and
causal attention: row i of a prefill sees i + 1 entries. Normalisation, activations and rotary
embedding are left out; they are linear in the hidden size where the rest is quadratic.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from kvsim.core.parameters import Between, check_fields
from kvsim.core.trace import Trace
from kvsim.errors import KvsimError
from kvsim.files import read_input
from kvsim.schema import object_at

GIB = 1 << 30

_Size = Annotated[int, Between(1, 1e6)]

#: Keys of architectures whose layers this arithmetic does not describe.
_FOREIGN = {
    "num_kv_shared_layers": "layers that read the keys and values of others",
    "kv_lora_rank": "latent attention, which caches no keys and values of heads",
}

_SAY = "expected the config.json of a decoder model such as Llama, Mistral, Qwen2, Qwen3 or Gemma"


class ModelError(KvsimError, ValueError):
    """A configuration that lacks a size, or is of another kind of model."""


@dataclass(frozen=True)
class Model:
    """A decoder model's shape. Query head `i` shares KV head `i // (n_qheads / n_heads)`.

    n_layers: that hold keys and values. hidden: width of the residual stream. parameters: all.
    matrices: numbers in the matrices of all layers that a token is multiplied by. read: parameters
    that a token reads, by default all; of a mixture of experts those of the chosen ones.
    number_bytes: of a weight and of a number in the KV cache. remarks: parts of this model that the
    arithmetic leaves out. value_dim: dimensions of a value, those of a key by default.
    """

    name: str
    n_layers: _Size
    n_qheads: _Size
    n_heads: _Size
    dim: _Size
    hidden: _Size
    vocab: _Size
    parameters: Annotated[int, Between(1, 1e16)]
    matrices: Annotated[float, Between(1, 1e16)]
    number_bytes: Annotated[float, Between(1, 8)] = 2
    remarks: tuple[str, ...] = ()
    value_dim: _Size | None = None
    read: float | None = None

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
    def layer_matrices(self) -> float:
        """Numbers in the matrices of a layer, on average over those that hold keys and values."""
        return self.matrices / self.n_layers

    @property
    def weight_bytes(self) -> float:
        """Bytes of the parameters."""
        return self.parameters * self.number_bytes

    @property
    def read_bytes(self) -> float:
        """Bytes of the parameters that a token reads."""
        return (self.read or self.parameters) * self.number_bytes

    @property
    def entry_size(self) -> int:
        """Numbers of the key and value of one position in one KV head."""
        return self.dim + (self.value_dim or self.dim)

    @property
    def entry_bytes(self) -> float:
        """Bytes of the key and value of one position in one KV head."""
        return self.entry_size * self.number_bytes

    def kv_bytes(self, entries: float) -> float:
        """Bytes of the cache of all layers with so many entries in every KV head."""
        return self.n_layers * self.n_heads * entries * self.entry_bytes

    def per_query_head(self) -> Model:
        """Return the model with separate keys and values for every query head."""
        return replace(self, n_heads=self.n_qheads)

    def as_dict(self) -> dict[str, Any]:
        """The shape and its parameters, bytes and FLOPs, ready for JSON."""
        return vars(self) | {"remarks": [*self.remarks], "weight_bytes": self.weight_bytes}

    def attention_flops(self, pairs: float) -> float:
        """FLOPs of one layer's attention over so many pairs of a row and an entry.

        Per query head and pair: 2 d for the logit, 3 for the softmax, 2 d of the value for it.
        """
        return pairs * self.n_qheads * (2 * self.entry_size + 3)

    def layer_flops(self, rows: float) -> float:
        """FLOPs of one layer over the rows of a prefill, of which row i sees i + 1."""
        return 2 * rows * self.layer_matrices + self.attention_flops(rows * (rows + 1) / 2)

    def prefill_flops(self, rows: float) -> float:
        """FLOPs of a prefill: all layers over all rows, and the logits of the last row."""
        return self.n_layers * self.layer_flops(rows) + 2 * self.hidden * self.vocab

    def decode_flops(self, entries: float) -> float:
        """FLOPs of one generated token that sees so many entries per head, its own included."""
        layer = 2 * self.layer_matrices + self.attention_flops(entries)
        return self.n_layers * layer + 2 * self.hidden * self.vocab

    @classmethod
    def from_config(cls, config: str | Path | Mapping[str, Any]) -> Model:
        """The model that a Hugging Face configuration describes, in bfloat16 if it names no type.

        config: its keys, the path of a config.json, or that of a folder with one.
        """
        if isinstance(config, Mapping):
            return _model(config, "config")
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        try:
            keys = {**json.loads(read_input(path))}
        except (OSError, TypeError, ValueError, RecursionError) as error:
            raise ModelError(f"{path} is no configuration ({error}); {_SAY}") from error
        return _model(keys, path.parent.name if path.name == "config.json" else path.stem)

    @classmethod
    def from_trace(cls, trace: Trace) -> Model:
        """The model of a trace: its cache as it was recorded, its weights as by `from_config`."""
        model: Mapping[str, Any] = object_at(trace.meta, "model")
        config, name = model.get("config"), str(model.get("name") or "model")
        if not isinstance(config, Mapping):
            raise ModelError(
                f"trace {trace.name!r} does not say which model it comes from: its provenance has "
                "no model.config; give the model's configuration instead"
            )
        if trace.header.sizes or trace.header.latent is not None:
            raise ModelError(
                f"{name}: its layers differ in heads or dimensions, or hold latents; {_SAY}"
            )
        typed = {"dtype": model.get("dtype")} if model.get("dtype") else {}
        layers = model.get("layers")
        return replace(
            _model({**config, **typed}, name),
            n_layers=max(layers if type(layers) is int else 0, trace.n_layers),
            n_qheads=trace.n_qheads,
            n_heads=trace.n_heads,
            dim=trace.dim,
            value_dim=trace.value_dim,
        )


def _model(config: Mapping[str, Any], name: str) -> Model:
    """The configuration as a Model; that of the text where the model sees more than text."""
    import torch  # noqa: PLC0415  takes a while

    from kvsim.recorder.counting import count_model  # noqa: PLC0415  transformers

    text = config["text_config"] if isinstance(config.get("text_config"), Mapping) else config
    for key, what in _FOREIGN.items():
        if text.get(key):
            raise ModelError(f"{name}: {key} is {text[key]!r}, {what}; {_SAY}")
    dtypes = (x.get(key) for x in (config, text) for key in ("dtype", "torch_dtype"))
    dtype = str(next(filter(None, dtypes), "bfloat16")).removeprefix("torch.")
    if (size := getattr(getattr(torch, dtype, None), "itemsize", None)) is None:
        raise ModelError(f"{name}: dtype is {dtype!r}; expected one of torch's")
    try:
        counts = {**count_model(config if "model_type" in config else text)}
    except KvsimError as error:
        raise ModelError(f"{name}: {error}; {_SAY}") from error
    others, config = counts.pop("others"), counts.pop("config")
    remarks = _remarks(config, others, shared=counts["read"] < counts["parameters"])
    return Model(name=name, **counts, number_bytes=size, remarks=remarks)


def _remarks(config: Mapping[str, Any], others: Sequence[str], *, shared: bool) -> tuple[str, ...]:
    """Return the parts of a model that the arithmetic leaves out.

    others: kinds of layers without keys and values. shared: whether a token reads some experts.
    """
    kinds = config.get("layer_types")
    kinds = kinds if isinstance(kinds, list) else []
    window, chunk = config.get("sliding_window"), config.get("attention_chunk_size")
    sizes = {"sliding window": config.get("use_sliding_window", True) and window, "chunk": chunk}
    remarks = [
        f"layers with a {name} ({size} tokens) are counted as full attention over the whole context"
        for name, size in sizes.items()
        if size and (not kinds or any(str(kind).startswith(name[:5]) for kind in kinds))
    ]
    if others:
        remarks.append(
            f"{len(others)} layers without keys and values ({', '.join(dict.fromkeys(others))}) "
            "are counted with their weights, and without their states and the FLOPs of these"
        )
    if shared:
        remarks.append("FLOPs and bytes read count the experts that a token passes")
    if config.get("quantization_config"):
        remarks.append("quantised weights are counted at the size of the data type")
    return tuple(remarks)
