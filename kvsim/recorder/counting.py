"""Sizes of a model, counted on transformers' model of its configuration, without weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from kvsim.errors import CaptureError, error_line
from kvsim.recorder.forward import cache_of, cache_option, full_cache, run_model
from kvsim.recorder.loading import outline_of

#: Most layers or experts of a configuration, each of which may be a module.
_MODULES = 4096

#: Kinds of layers that hold no keys and values, for models that do not run without weights.
_STATES = [["linear_attention"], ["conv"], ["mamba"], ["recurrent"], ["mlp"], ["moe"]]

#: Numbers of experts in configurations: all, and experts per token.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k")


class ModelSize:
    """Parameters of a model, and other sizes, with tied parameters counted once.

    read: parameters that a token reads (of experts the selected ones). matrices: those of matrices
    in layers that multiply a token. weights: bytes. widest: the most rows or columns of a matrix.
    text_alone: without the parts of a multimodal model that text does not reach.
    """

    def __init__(self, model: PreTrainedModel, *, text_alone: bool = False) -> None:
        parts = (model.get_input_embeddings(), model.get_output_embeddings())
        weights = [getattr(part, "weight", None) for part in parts]
        ends = {id(each) for each in weights if isinstance(each, Tensor)}
        config = model.config.get_text_config()
        experts, chosen = (
            next((n for name in names if isinstance(n := getattr(config, name, None), int)), 0)
            for names in (_EXPERTS, _CHOSEN)
        )
        named = {id(x): (name, x) for name, x in model.named_parameters()}
        if text_alone:
            inside = {*ends, *map(id, model.get_decoder().parameters())}
            named = {key: pair for key, pair in named.items() if key in inside}
        numbers = {
            key: x.numel() * (chosen / experts if _is_expert(name, x, experts) and chosen else 1)
            for key, (name, x) in named.items()
        }
        inner = [key for key, (_, x) in named.items() if x.dim() > 1 and key not in ends]
        self.parameters = sum(x.numel() for _, x in named.values())
        self.weights = sum(x.nbytes for _, x in named.values())
        self.read = sum(numbers.values())
        self.matrices = sum(numbers[key] for key in inner)
        self.widest = max((max(named[key][1].shape) for key in inner), default=1)
        self.vocabulary = int(config.vocab_size)


def _is_expert(name: str, x: Tensor, experts: int) -> bool:
    return experts > 0 and (".experts." in name or (x.dim() == 3 and len(x) == experts))


def count_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of the (text) model that a configuration describes.

    Returns:
        n_layers that hold keys and values, n_qheads, n_heads, dim, value_dim, hidden, vocab; of
        `ModelSize` parameters, matrices and read; `others`, the kinds of layers without keys and
        values; and the `config` of the text with all defaults.

    Raises:
        CaptureError: transformers builds no decoder of it, or one whose layers hold no keys and
            values, or differ in size.
    """
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        counts, sizes = _counted(json.dumps(config))
    except Exception as error:  # any error of transformers on a configuration
        raise CaptureError(error_line(error)) from error
    finally:
        logging.set_verbosity(level)
    if len(sizes) != 1:
        listed = ", ".join(map(str, sorted(sizes))) or "none"
        raise CaptureError(
            f"its layers hold keys and values of (heads, dimensions) {listed}, expected one size"
        )
    return counts


@lru_cache
def _counted(config: str) -> tuple[dict[str, Any], frozenset[tuple[int, int, int]]]:
    """Return the sizes of a model, and the distinct sizes of its layers' entries."""
    # numbers that JSON lacks, as transformers writes them
    keys = json.loads(config, object_hook=lambda x: float(y) if (y := x.get("__float__")) else x)
    whole = AutoConfig.for_model(**keys)
    text = whole.get_text_config(decoder=True)
    if (most := max(getattr(text, x, 0) or 0 for x in ("num_hidden_layers", *_EXPERTS))) > _MODULES:
        raise ValueError(f"it has {most:.4g} layers or experts, expected at most {_MODULES}")
    alone = type(text) in AutoModelForCausalLM._model_mapping  # noqa: SLF001  its only home
    model = outline_of(text if alone else whole)
    held, depth = _held(model), int(text.num_hidden_layers)
    heads = int(getattr(text, "num_attention_heads", 1))
    kinds = getattr(text, "layers_block_type", None) or getattr(text, "layer_types", None) or ()
    if held is None or (kinds and not held):
        of_heads = getattr(text, "num_key_value_heads", None) or heads
        dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        size = of_heads, dim, getattr(text, "v_head_dim", None) or dim
        held = {n: size for n in range(depth) if [*kinds[n : n + 1]] not in _STATES}
    sizes, size = ModelSize(model, text_alone=not alone), next(iter(held.values()), (1, 1, 1))
    counts = {
        **dict(zip(("n_heads", "dim", "value_dim"), size, strict=True)),
        "n_layers": len(held),
        "n_qheads": heads,
        "hidden": int(text.hidden_size),
        **{name: getattr(sizes, name) for name in ("parameters", "matrices", "read")},
        "vocab": sizes.vocabulary,
        "others": [str([*kinds, *["other"] * depth][n]) for n in range(depth) if n not in held],
        "config": text.to_dict(),
    }
    return counts, frozenset(held.values())


def _held(model: PreTrainedModel) -> dict[int, tuple[int, int, int]] | None:
    """Return KV heads and dimensions by layer, by a run; None where it needs weights."""
    try:
        options: Mapping[str, Any] = cache_option(model, full_cache(model))
    except CaptureError:
        options = {}  # it builds its own cache
    try:
        with torch.no_grad():
            out = run_model(model, torch.tensor([[1, 2]]), use_cache=True, **options)
    except CaptureError:
        return None
    cache = next(iter(options.values()), None) or cache_of(out)
    held = {}
    for number, layer in enumerate(getattr(cache, "layers", ())):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if isinstance(keys, Tensor) and keys.numel():
            held[number] = (keys.shape[1], keys.shape[-1], cast("Tensor", values).shape[-1])
    return held
