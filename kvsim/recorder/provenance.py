"""The description of the recorded model and its tokenizer in a trace."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import tokenizers
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from kvsim.core.digest import document_digest
from kvsim.core.lazy import threads_for
from kvsim.core.trace import Trace
from kvsim.recorder.loading import ADAPTER, gguf_source, model_name
from kvsim.recorder.modules import attention_modules, kernel_name, other_layers
from kvsim.recorder.positions import context_length
from kvsim.schema import object_at

# Not in the configuration's digest: the path of a copy and its writer change no number.
_VOLATILE = ("_name_or_path", "transformers_version", "_attn_implementation", "torch_dtype")

#: In the configuration but not in its digest: the precision is compared separately.
_NOTED = ("architectures", "dtype")

#: Only for training, and with another default in another release of transformers.
_TRAINING = "router_aux_loss_coef"

#: Parts of a tokenizer's state from its last call.
_CALL = ("truncation", "padding")

#: Values of a matrix whose bits are added up at a time.
_BLOCK = 1 << 20


def weights_digest(model: PreTrainedModel) -> str | None:
    """Return ``sha256:`` and 64 hex digits of a model's weights, or None if they are not in memory.

    They are not where they are offloaded to disk, or are tensors of another class (quantised by
    torchao or quanto, or sharded).

    Every parameter, and every saved buffer of floating-point numbers, counts by its shape and its
    values rounded to bfloat16: their bits as integers, added up over the rows and over the columns
    of each matrix. So one changed value, two exchanged rows or a training step change the digest;
    file format, device, kernel, names, order and wider precision do not. Changes below the
    precision of bfloat16, and two exchanged matrices of one shape, are not detected.
    """
    saved = model.state_dict()
    tensors: list[Tensor] = list(model.parameters())  # tied ones once
    tensors += [x for name, x in model.named_buffers() if name in saved and x.is_floating_point()]
    if any(x.is_meta or hasattr(x, "__tensor_flatten__") for x in tensors):
        return None
    with threads_for(model):
        text = " ".join(sorted(map(_tensor_digest, tensors)))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _tensor_digest(x: Tensor) -> str:
    sha = hashlib.sha256(f"{list(x.shape)}".encode())
    matrix = torch.atleast_2d(x.detach()).flatten(0, -2)
    columns = torch.zeros(matrix.shape[1], dtype=torch.int32, device=x.device)
    for rows in matrix.split(max(1, _BLOCK // max(1, matrix.shape[1]))):
        bits = rows.to(torch.bfloat16).view(torch.int16).int()
        columns += bits.sum(0, dtype=torch.int32)  # modulo 2^32
        sha.update(bits.sum(1, dtype=torch.int32).cpu().numpy().astype("<i4").tobytes())
    sha.update(columns.cpu().numpy().astype("<i4").tobytes())
    return sha.hexdigest()


def describe_model(model: PreTrainedModel) -> dict[str, Any]:
    """Return the provenance of a model, ready for JSON; `weights_digest` reads all weights.

    With an adapter it is called `BASE+ADAPTER`, by the adapter's folder or PEFT's name for it.
    """
    by_peft = getattr(model, "peft_config", None) or ()
    adapters = [getattr(model, ADAPTER)] if hasattr(model, ADAPTER) else [*by_peft]
    weights, source, others = weights_digest(model), gguf_source(model), other_layers(model)
    config = json.loads(model.config.to_json_string(use_diff=False))
    config = {key: value for key, value in config.items() if key not in _VOLATILE}
    compared = {key: value for key, value in config.items() if key not in _NOTED}
    return {
        "name": "+".join([model_name(model), *adapters]),
        **({} if source is None else {"source": source[1]}),
        "type": model.config.model_type,
        "config": config,
        "config_digest": document_digest(compared),
        **({} if weights is None else {"weights": weights}),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": kernel_name(model),
        "device": model.device.type,
        "context": context_length(model),
        "layers": len(attention_modules(model)),
        **({"other_layers": others} if others else {}),
    }


def config_differences(meta: Mapping[str, Any], described: Mapping[str, Any]) -> list[str]:
    """Return the keys in which the configurations of a trace's model and another one differ.

    meta: of the trace. described: the other model, by `describe_model`. Releases of transformers
    add and drop keys, so of two releases only common keys are compared, at any depth.
    """
    config, other = object_at(object_at(meta, "model"), "config"), described["config"]
    keys = (config.keys() | other.keys()) - {*_NOTED, _TRAINING}
    if object_at(meta, "versions").get("transformers") == transformers.__version__:
        return sorted(key for key in keys if config.get(key) != other.get(key))
    both = keys & config.keys() & other.keys()
    return sorted(key for key in both if not _agree(config[key], other[key]))


def _agree(value: object, other: object) -> bool:
    """Whether two values are equal in all keys that both have."""
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return all(_agree(value[key], other[key]) for key in value.keys() & other.keys())
    return value == other


def describe_tokenizer(tokenizer: Any) -> dict[str, str]:
    """Return the class of a tokenizer and the digest of its vocabulary and rules, for a trace."""
    return {"class": type(tokenizer).__name__, "digest": _digest(tokenizer, len(tokenizer))}


@lru_cache(maxsize=1)  # prompts of one capture share a tokenizer, and a large one takes a second
def _digest(tokenizer: Any, _size: int) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # written in Python: its rules are those of its class
        rules = {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab()}
    else:
        rules = {k: part for k, part in json.loads(backend.to_str()).items() if k not in _CALL}
    ends = {name: getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "unk")}
    return document_digest({"rules": rules, "special": ends})


def tokenizer_difference(trace: Trace, tokenizer: Any) -> str | None:
    """Describe how a tokenizer differs from the trace's; None where either is missing."""
    recorded = object_at(trace.meta, "tokenizer")
    if tokenizer is None or "digest" not in recorded:
        return None
    other = describe_tokenizer(tokenizer)
    if other["digest"] == recorded["digest"]:
        return None
    names = [f"{each.get('class')} {str(each['digest'])[7:15]}" for each in (recorded, other)]
    return f"its tokenizer ({names[0]}) has another vocabulary or other rules than {names[1]}"


def versions() -> dict[str, str]:
    """Return the versions of kvsim and of the libraries that run the model."""
    return {
        "kvsim": str(sys.modules["kvsim"].__version__),  # a checkout is not installed
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "python": platform.python_version(),
    }
