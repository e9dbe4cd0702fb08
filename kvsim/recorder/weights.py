"""Weights of a model's folder: as many as its configuration describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
)

from kvsim.errors import CaptureError

#: Most parameters, and layers, for a byte of weights, which have a bit at least.
_PER_BYTE, _LAYERS_PER_BYTE = 8, 1 / 64

#: Errors of a configuration that describes no model.
UNUSABLE = (
    *(ArithmeticError, AttributeError, ImportError, LookupError, OSError, RuntimeError),
    *(StrictDataclassError, TypeError, ValueError),
)


def check_weights(folder: Path, *, trust_remote_code: bool) -> None:
    """Raise CaptureError for a folder with far fewer weights than its configuration describes.

    transformers allocates what the configuration says before it compares shapes.
    """
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    trust = {"trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, **trust)
        layers = config.get_text_config().num_hidden_layers
        if layers <= size * _LAYERS_PER_BYTE:
            with torch.device("meta"):
                model = auto_class(config).from_config(config, **trust)
            if sum(each.numel() for each in model.parameters()) <= size * _PER_BYTE:
                return
    except UNUSABLE:
        return  # loading says what is wrong
    raise CaptureError(
        f"{folder} has {size:,} bytes of safetensors, expected those of the model in its "
        "config.json, which is far larger; copy or convert it again (save_pretrained)"
    )


def auto_class(config: PreTrainedConfig) -> Any:  # classes of transformers made by a factory
    """Return the class that loads a model: of causal language models, else of multimodal ones."""
    multimodal = type(config) in AutoModelForMultimodalLM._model_mapping  # noqa: SLF001  its only home
    causal = type(config) in AutoModelForCausalLM._model_mapping  # noqa: SLF001  as above
    return AutoModelForMultimodalLM if multimodal and not causal else AutoModelForCausalLM
