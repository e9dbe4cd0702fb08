"""Checks of the arrays of a trace: dtypes, shapes, finite values, tolerances."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvsim.core.lazy import Tensor, torch
from kvsim.errors import PolicyError, PositionError, TraceError, error_line
from kvsim.schema import AXES, OF_VALUES, ON_REQUEST, projections_folder

ArrayLike = Tensor | np.ndarray[Any, Any]
Positions = Sequence[int] | slice | Tensor


class _Names(dict[Any, str]):
    """Names by dtype or its text, without loading torch."""

    def __missing__(self, dtype: object) -> str:
        return dict(self)[str(dtype)]


#: Names of the dtypes that an array of a trace may have in the model.
DTYPES = _Names({f"torch.{name}": name for name in ("float16", "bfloat16", "float32", "float64")})

#: Largest magnitude that float16 holds.
FLOAT16_MAX = 65504.0


def stored_dtype(source: str) -> torch.dtype:
    """Return the dtype for hashes and stored projections; float32 for bfloat16."""
    return {"float16": torch.float16, "float64": torch.float64}.get(source, torch.float32)


def compute_dtype(stored: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in: float64 for float64 arrays, else float32."""
    return torch.float64 if stored == torch.float64 else torch.float32


def as_tensor(name: str, array: ArrayLike, where: str) -> Tensor:
    """Return an array of real numbers as a tensor on the CPU; numpy's memory is copied.

    Raises:
        TraceError: not an array, an array without plain numbers (masked, sparse, quantized, nested,
            meta), or another dtype.
    """
    problem = f"is {type(array).__name__}"
    if isinstance(array, np.ndarray) and not isinstance(array, np.ma.MaskedArray):
        dtype = array.dtype.newbyteorder("=")
        problem = f"has dtype {dtype.name}"
        if dtype in (np.float16, np.float32, np.float64):
            return torch.from_numpy(np.array(array, dtype, order="C"))
    elif isinstance(array, Tensor):
        plain = array.layout == torch.strided and not (array.is_meta or array.is_nested)
        if plain and str(array.dtype) in DTYPES:
            return array.detach().cpu().resolve_neg()
        problem = f"has dtype {array.dtype}" if plain else "is a tensor that is not dense"
    raise TraceError(
        f"{where}: {name} {problem}, expected one of {', '.join(DTYPES.values())} in a dense "
        "tensor or numpy array"
    )


def in_memory(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor in C order and in a dtype, with a version counter; no copy if possible."""
    with torch.inference_mode(mode=False):
        tensor = tensor.to(dtype).contiguous()
        return torch.from_numpy(tensor.numpy()) if tensor.is_inference() else tensor


def as_tokens(tokens: ArrayLike | Sequence[int], n_pos: int, where: str) -> Tensor:
    """Return token ids [pos] as int64."""
    try:
        ids = np.asarray(tokens.cpu() if isinstance(tokens, Tensor) else tokens)
    except (TypeError, ValueError, RuntimeError):  # lists of lists of different lengths, sparse
        ids = np.empty((), object)
    integers = ids.dtype.kind in "iu" and not np.ma.isMaskedArray(tokens)
    fits = ids.shape == (n_pos,) and integers
    if not fits or not 0 <= int(ids.min()) <= int(ids.max()) < 1 << 31:
        raise TraceError(
            f"{where}: tokens are {reprlib.repr(tokens)} of shape {ids.shape}; expected {n_pos} "
            "token ids, integers of 0 or more"
        )
    return torch.from_numpy(ids.astype(np.int64))


def check_texts(texts: Any, n_pos: int, where: str) -> None:
    """Raise TraceError unless there is a text for each token."""
    listed = isinstance(texts, Sequence) and all(isinstance(text, str) for text in texts)
    if not listed or len(texts) != n_pos:
        raise TraceError(
            f"{where}: token_text is {reprlib.repr(texts)}; expected a list of {n_pos} texts, one "
            "per token"
        )


def check_meta(meta: Any, where: str) -> None:
    """Raise TraceError unless provenance is a dict that JSON can hold."""
    try:
        json.dumps(dict(meta))
    except (TypeError, ValueError, RecursionError) as error:  # other objects, cycles, depth
        raise TraceError(
            f"{where}: meta cannot be written as JSON ({error_line(error)}), expected a dict of "
            "numbers, texts, lists and dicts"
        ) from error


def resolve_device(device: Any, *, here: bool = True) -> str:
    """Return the name of a device; `auto` is cuda where PyTorch finds a GPU, else cpu.

    here: require a device of this machine, else PolicyError. `auto` is never mps, which has no
    float64.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        named = torch.device(device)
        kind = torch.empty(0, device=named).device.type if here else named.type
    except (RuntimeError, TypeError, AssertionError):  # unknown, another kind, not on this machine
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise PolicyError(
            f"device is {device!r}; expected cpu, cuda where PyTorch finds a GPU "
            f"({torch.cuda.device_count()} here), or auto"
        )
    return str(device)


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors on the CPU, with one synchronisation for all tensors of a GPU."""
    if not any(each.is_cuda for each in tensors.values()):
        return {name: each.to("cpu") for name, each in tensors.items()}
    host = {}
    for name, each in tensors.items():
        pinned = torch.empty(each.shape, dtype=each.dtype, pin_memory=True)
        host[name] = pinned.copy_(each, non_blocking=True)
    for device in {each.device for each in tensors.values() if each.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return host


def check_shapes(shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raise TraceError for inconsistent shapes of arrays."""
    for name, shape in shapes.items():
        axes = AXES[name]
        if len(shape) != len(axes) or 0 in shape:
            raise TraceError(
                f"{where}: {name} has shape {shape}, expected [{', '.join(axes)}], none of them 0"
            )
    heads = shapes["k"][1]
    sizes = {"moment": 1 + shapes["k"][3]}
    for name in filter(shapes.get, AXES):  # the first array with an axis sets its size
        sizes = dict(zip(AXES[name], shapes[name], strict=True)) | sizes
    for name, shape in shapes.items():
        sizes["dim"] = (shapes["v"] if name in OF_VALUES else shapes["q"])[-1]
        expected = tuple(sizes[axis] for axis in AXES[name])
        if shape != expected:
            raise TraceError(
                f"{where}: {name} has shape {shape}, expected {expected} "
                f"[{', '.join(AXES[name])}] to fit q {shapes['q']} and {heads} KV heads"
            )


def check_steps(*parts: slice) -> None:
    """Raise ValueError unless every slice has step 1."""
    for part in parts:
        if part.step not in (None, 1):
            raise ValueError(f"step is {part.step}, expected 1")


def as_stored(
    name: str, values: Tensor, dtype: torch.dtype, where: str, *, layer: int, pos: int = 0
) -> Tensor:
    """Return part of a layer from `pos` on as stored; TraceError for NaN, infinity and overflow."""
    stored = values.to("cpu", dtype)
    if dtype == torch.float16 and values.dtype != torch.float16:
        largest = float(_largest(values))
        if largest > FLOAT16_MAX:
            raise TraceError(
                f"{where}: {name} reaches {largest:.6g} in layer {layer}, float16 holds at "
                f"most {FLOAT16_MAX:.0f}; store it without store_dtype"
            )
    check_finite(name, stored.unsqueeze(0), where, layer=layer, pos=pos)
    if dtype == torch.bfloat16 and not torch.equal(stored.to(values.dtype), values.cpu()):
        raise TraceError(
            f"{where}: {name} of layer {layer} is {DTYPES[values.dtype]}, expected bfloat16 as its "
            "source_dtype says; load the model in float32"
        )
    return stored


def as_array(values: Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor as a numpy array; of bfloat16, which numpy lacks, the bits."""
    return (values.view(torch.uint16) if values.dtype == torch.bfloat16 else values).numpy()


def missing_array(name: str, shapes: Iterable[str], meta: Mapping[str, Any], where: str) -> str:
    """Return the message on a missing array: the arrays that exist, and the remedy."""
    projections = meta.get("projections")
    if name == "o_proj" and isinstance(projections, dict):
        folder = projections_folder(str(projections.get("digest")))
        return (
            f"{where}: its output projections are not next to it, expected the folder {folder}; "
            "copy it there too, or record the trace again with --o-proj"
        )
    return (
        f"{where}: the trace has no array {name!r}, it has {', '.join(shapes)}; record it again "
        f"with {ON_REQUEST.get(name, 'what is missing')}"
    )


def check_finite(name: str, array: Tensor, where: str, layer: int = 0, pos: int = 0) -> None:
    """Raise TraceError at the first NaN or infinity of an array with the axes of `AXES`.

    layer, pos: offset of the array in the whole one, along these axes.
    """
    # A NaN or infinity survives in the sum, which takes one pass and no mask; the sum may also
    # overflow, so only the mask decides.
    if math.isfinite(float(array.sum())):
        return
    bad = ~torch.isfinite(array)
    if not bad.any():
        return
    place = bad.nonzero()[0].tolist()
    axes = ["head" if axis == "qhead" else axis for axis in AXES[name][:3]]
    first = {"layer": layer, "pos": pos}
    at = ", ".join(
        f"{axis} {index + first.get(axis, 0)}" for axis, index in zip(axes, place, strict=False)
    )
    raise TraceError(
        f"{where}: {name} is {float(array[tuple(place)])} at {at}, expected finite numbers; "
        "record the trace again"
    )


#: Largest relative error allowed between a model's attention output and the one recomputed from
#: q, k, v, by the coarsest dtype involved. Rounding stays well below (on random models: 1e-6 in
#: float32, 5e-4 in float16, 4e-3 in bfloat16), a wrong formula far above. transformers' eager
#: kernel computes the softmax of float64 models in float32.
TOLERANCE = {"float64": 1e-5, "float32": 1e-4, "float16": 5e-3, "bfloat16": 2e-2}


def tolerance(*dtypes: str) -> float:
    """Return the largest tolerance among these dtypes."""
    return max(TOLERANCE[dtype] for dtype in dtypes)


def logit_rounding(lse: Tensor) -> float:
    """Return the effect on weights of rounding these log-sum-exps in their dtype, at most 0.01.

    Two computations differ by four last bits of logits; relevant logits are close to the
    log-sum-exp of their row. Only logits of hundreds round by more than `TOLERANCE`: layer 0 of
    Qwen2.5-Coder-0.5B has 1,458, that of the 1.5B differed by 3.5e-4 on a GPU.
    """
    return min(0.01, 4 * torch.finfo(lse.dtype).eps * float(lse.abs().max()))


def _largest(values: Tensor, *axes: int) -> Tensor:
    return torch.maximum(values.amax(axes), -values.amin(axes))


def relative_error(actual: Tensor, expected: Tensor) -> Tensor:
    """Largest |actual - expected| over largest |expected| of each head [head]; [head, row, dim]."""
    size, difference = (_largest(x, -2, -1) for x in (expected, actual - expected))
    # where a head's output is 0 everywhere, any difference is infinite
    return torch.where(difference == 0, difference, difference / size)


def as_positions(at: Positions, n_pos: int) -> Tensor:
    """Return positions as int64; negative ones count from the end.

    Raises PositionError for anything but a list of integers, and for positions out of range.
    """
    if isinstance(at, slice):
        return torch.arange(n_pos)[at]
    try:
        places = torch.as_tensor(at).tolist()
        return torch.tensor([range(n_pos)[place] for place in places], dtype=torch.int64)
    except (IndexError, TypeError, ValueError, RuntimeError) as error:
        raise PositionError(
            f"positions are {reprlib.repr(at)}; expected a slice or integers in 0..{n_pos - 1}"
        ) from error
