"""A census: what kvsim records of every decoder family of the installed transformers.

python -m tests.recorder.census RESULTS            one child for each family; results are kept
python -m tests.recorder.census RESULTS --only llama,mamba --redo
python -m tests.recorder.census RESULTS --page docs/families-census.json    updates the page's

Small random models in float32, of sizes in census.json, are recorded with 120 tokens of prompt and
20 of response, verified deep, and compared with a forward without a cache. The result is
`recorded`, `refused` (one line), `foreign` (any other exception), `wrong` or `not built`. Families
ending in #vl are multimodal models given text alone; others with # are variants of a family.
"""

import argparse
import copy
import functools
import importlib
import inspect
import json
import os
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import kvsim
from kvsim.errors import KvsimError
from kvsim.store.verification import verify

PROMPT, NEW, SECONDS = 120, 20, 60.0

TABLE = json.loads(Path(__file__).with_name("census.json").read_text(encoding="utf-8"))

#: Names of the number of layers, and of lists with one value for each layer.
_LAYERS = ["num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_blocks"]
_KINDS = ["layer_types", "layers_block_type", "no_rope_layers", "attention_layers", "indexer_types"]
_PER_LAYER = [
    *_KINDS,
    *["mlp_layer_types", "num_attention_heads_per_layer", "layer_rope_theta", "attn_layers"],
    *["activation_sparsity_pattern", "attention_types"],
]

#: Encoders that attend both ways unless their configuration calls them decoders.
_ENCODERS = "Bert Roberta Camembert Electra XLM Data2 Ernie RoC RoF Rem Xmod BigBirdF Megatron"

#: Ends of the names of weights that make queries and keys.
_SHARP = tuple(
    f"{name}.weight"
    for names in (
        "q_proj k_proj query_key_value qkv_proj q_b_proj kv_b_proj Wqkv query key q_up_proj",
        "qkv query_proj wqkv q_attn wq wk",
    )
    for name in names.split()
)


def families() -> dict[str, str]:
    """The class of each family, by its name in the census."""
    listed = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    names = {name: each if isinstance(each, str) else each[0] for name, each in listed}
    names |= {f"{name}#vl": each for name, each in TABLE["multimodal"].items()}
    return names | {name: each["class"] for name, each in TABLE["variants"].items()}


def build(name: str) -> PreTrainedModel:
    """A small random model of a family, with attention far from uniform."""
    kind, class_name = name.partition("#")[0], families()[name]
    if kind in TABLE["skipped"]:
        raise NotImplementedError(TABLE["skipped"][kind])
    changes = TABLE["variants"].get(name, {}).get("changes", TABLE["fixes"].get(kind, {}))
    config = _small(CONFIG_MAPPING[kind], kind, changes)
    if class_name.startswith(tuple(_ENCODERS.split())) and hasattr(config, "is_decoder"):
        config.is_decoder = True
    home = f"transformers.models.{config.model_type.replace('-', '_')}"
    own = getattr(transformers, class_name, None)
    own = own or getattr(importlib.import_module(home), class_name)
    wanted = getattr(own, "config_class", None)
    if wanted is not None and not isinstance(config, wanted):
        text = config.get_text_config()
        config = text if isinstance(text, wanted) else config
    torch.manual_seed(1)
    model: PreTrainedModel = own(config).eval().float()
    _sharpen(model)
    return model


def _small(kind: Any, name: str, changes: dict[str, Any]) -> Any:
    """A small configuration of a class, and of those inside it."""
    default = kind()
    values = default.to_dict()
    inside = {
        part: _small(type(getattr(default, part)), name, TABLE["fixes"].get(part, {})).to_dict()
        for part in getattr(kind, "sub_configs", None) or {}
        if getattr(default, part, None) is not None
    }
    fields = {*inspect.signature(kind.__init__).parameters, *values}
    fields |= {*getattr(kind, "__dataclass_fields__", {})}
    own = TABLE["fixes"].get(default.model_type, {}) if default.model_type != name else changes
    settings = dict(inside)
    for field, value in TABLE["sizes"].items():
        token = field.endswith("token_id")
        present = field in fields and field not in settings and (field in values or token)
        optional = (token and field != "image_token_id") or field in (
            "head_dim",
            "num_key_value_heads",
        )
        unset = values.get(field) is None and not optional
        other = isinstance(values.get(field), list | dict) and not isinstance(value, list | dict)
        if present and not unset and not other:
            settings[field] = copy.deepcopy(value)
    if "text_config" not in inside:
        settings |= _layered(values, fields, settings)
    settings |= copy.deepcopy(own)
    return kind(**{field: value for field, value in settings.items() if value != "DROP"})


def _layered(values: dict[str, Any], fields: set[str], settings: dict[str, Any]) -> dict[str, Any]:
    """Settings for as many layers as show every kind, 2 to 14."""
    count = 2
    for kinds in (values.get(name) for name in _KINDS):
        if isinstance(kinds, list | tuple) and len(kinds) > 1:
            words = list(map(str, kinds))
            n = next(n for n in range(1, len(words) + 1) if {*words[:n]} == {*words})
            count = max(count, min(n, 14))
    out: dict[str, Any] = {name: count for name in _LAYERS if name in fields and name in values}
    for name in _PER_LAYER:
        of_layers = values.get(name)
        if isinstance(of_layers, list | tuple) and name in fields and len(of_layers) >= count:
            out[name] = list(of_layers[:count])
    mixed = out.get("mlp_layer_types")
    if mixed and len({*values["mlp_layer_types"]}) > 1 and len({*mixed}) < 2:
        others = [x for x in dict.fromkeys(values["mlp_layer_types"]) if x != mixed[0]]
        mixed[-len(others) :] = others
    if "num_attention_heads_per_layer" in out:
        out["num_attention_heads_per_layer"] = [4] * count
    if "kv_lora_rank" in settings and "num_key_value_heads" in settings:
        out["num_key_value_heads"] = settings["num_attention_heads"]
    return out


def _sharpen(model: PreTrainedModel) -> None:
    """Make queries and keys large, in decoders alone."""
    with torch.no_grad():
        for key, weights in model.named_parameters():
            tower = any(x in key for x in ("vision", "visual", "audio", "encoder."))
            if tower and "text" not in key and "language" not in key:
                continue
            if key.endswith("c_attn.weight"):
                packed = weights.shape[1] == 3 * weights.shape[0]
                part = weights[:, : 2 * len(weights)] if packed else weights
                part.mul_(15 if packed else 5)
            elif key.endswith(_SHARP):
                weights.mul_(15)
            elif key.endswith("sinks") or ("_proj.bias" in key and "attn" in key):
                weights.copy_(torch.randn_like(weights))
            elif ("q_norm" in key or "k_norm" in key) and weights.dim() == 1:
                weights.add_(1 - float(weights.abs().max() > 0)).mul_(2)


def examine(name: str) -> dict[str, Any]:
    """Build and record a family; returns the result and what was seen."""
    tokens = torch.randint(1, 280, (PROMPT,), generator=torch.Generator().manual_seed(0))
    try:
        model = build(name)
        with torch.no_grad():
            model(tokens[None, :40])
    except NotImplementedError as error:  # `build` raises it
        return {"result": "not built", "reason": str(error)}
    except Exception as error:  # noqa: BLE001  whatever a configuration or a model raises
        reason = TABLE["not_built"].get(name) or f"transformers raises {_line(error)}"
        return {"result": "not built", "reason": reason}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "a.zarr"
        try:
            trace = kvsim.capture(model, None, tokens.tolist(), max_new_tokens=NEW, out=out)
            found = {
                "result": "recorded",
                "layers": list(trace.layer_ids),
                "others": trace.header.other_layers,
                "notes": list(trace.meta["notes"]),
                "error": max(trace.meta["capture_check"]["max_relative_error"]),
                "forward": _forward(model, trace),
            }
            verified = verify(out, deep=True).ok
            exact = verified and (found["forward"] or 0.0) < 1e-3
            return found if exact else found | {"result": "wrong"}
        except KvsimError as error:
            kept = [path.name for path in Path(folder).iterdir()]
            line = "\n" not in str(error) and not kept
            return {"result": "refused" if line else "foreign", "reason": str(error)}
        except Exception as error:  # noqa: BLE001  the census looks for any
            return {"result": "foreign", "reason": _line(error)}


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {shorten(str(error), 200)}"


def _forward(model: PreTrainedModel, trace: kvsim.Trace) -> float | None:
    """The largest relative gap to what kernels get and return; None where it has another form."""
    calls: list[tuple[Tensor, ...]] = []
    name = str(model.config._attn_implementation)
    library = ALL_ATTENTION_FUNCTIONS.get(name)
    if library is None:  # eager: each file of models has its own
        return None

    @functools.wraps(library)
    def kernel(module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Any:
        out = library(module, q, k, v, *args, **options)
        calls.append((q[0], k[0], v[0], out[0][0].transpose(0, 1)))
        return out

    ALL_ATTENTION_FUNCTIONS[name] = kernel
    try:
        with torch.no_grad():
            model(trace.tokens[None], use_cache=False)
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]
    if len(calls) != trace.n_layers:
        return None
    gaps = []
    for place, call in enumerate(calls):
        for array, actual in zip(("q", "k", "v", "attn_out"), call, strict=True):
            stored = trace.read(array, slice(place, place + 1))[0]
            if stored.shape != actual.shape:
                return None
            gaps.append(float((stored - actual).abs().max() / actual.abs().max()))
    return max(gaps)


def survey(folder: Path, names: list[str], *, redo: bool) -> None:
    """Examine families in children of this process, at most `SECONDS` each; results stay."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for name in names:
        path = folder / f"{name.replace('#', '+')}.json"
        if path.exists() and not redo:
            continue
        started, child = time.monotonic(), os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            warnings.simplefilter("ignore")
            try:
                _write(path, examine(name))
            finally:
                os._exit(0)
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() - started > SECONDS:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                _write(path, {"result": "foreign", "reason": f"no result within {SECONDS:.0f} s"})
                break
            time.sleep(0.05)
        if not path.exists():
            _write(path, {"result": "foreign", "reason": "the process died"})
        print(name, json.loads(path.read_text(encoding="utf-8"))["result"], flush=True)


def _write(path: Path, found: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found, indent=1, default=str), encoding="utf-8")
    part.replace(path)


def main() -> None:
    """Examine families, count results, and write what docs/families.md shows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", help="families, separated by commas")
    parser.add_argument("--redo", action="store_true")
    parser.add_argument("--page", type=Path, help="where to write the results of all families")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(families())
    survey(options.results, names, redo=options.redo)
    found = {
        path.stem.replace("+", "#"): json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(options.results.glob("*.json"))
    }
    counts = Counter(each["result"] for each in found.values())
    print(", ".join(f"{count} {result}" for result, count in counts.most_common()))
    if options.page:
        short = {
            name: {
                key: each[key] for key in ("result", "reason", "others", "notes") if each.get(key)
            }
            for name, each in found.items()
        }
        last = json.loads(options.page.read_text(encoding="utf-8"))["families"]
        page = {"transformers": transformers.__version__, "families": last | short}
        options.page.write_text(json.dumps(page, indent=0) + "\n", encoding="utf-8")
    sys.exit(1 if counts["foreign"] or counts["wrong"] else 0)


if __name__ == "__main__":
    main()
