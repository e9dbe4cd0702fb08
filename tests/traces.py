"""Small traces for tests: random ones, ones whose layers settle, and changed copies."""

from typing import Any

import torch
from torch import Tensor

import kvsim
from kvsim import Trace
from kvsim.policies import has_parameter

#: Arguments that a changed trace takes over from the first one.
_KEPT = ("prompt_len", "context_len", "layer_ids", "name")

_SIZES = {"layers", "heads", "group", "n", "dim", "seed", "size", "dtype"}


def random_arrays(
    layers: int = 2,
    heads: int = 2,
    group: int = 2,
    n: int = 90,
    dim: int = 8,
    *,
    seed: int = 0,
    size: float = 2.0,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Normal queries times `size`, keys and values, as the arguments of `Trace.from_arrays`."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(layers, h, n, dim, generator=generator, dtype=dtype)
        for h in (heads * group, heads, heads)
    )
    return {"q": size * q, "k": k, "v": v}


def random_trace(*, computed: bool = False, **options: Any) -> Trace:
    """A trace of `random_arrays`, a third of it prompt.

    Args:
        computed: whether it holds attention output and log-sum-exp, like a recorded trace.
        options: arguments of `random_arrays`, and arguments of `Trace.from_arrays` that replace
            or join what follows from these.
    """
    sizes = {name: options.pop(name) for name in _SIZES & options.keys()}
    arrays = random_arrays(**sizes)
    _, _, n, dim = arrays["k"].shape
    given = arrays | {"prompt_len": n // 3, "rope": kvsim.Rope.default(dim)} | options
    trace = Trace.from_arrays(**given)
    if not computed:
        return trace
    return Trace.from_arrays(**{"attn_out": trace.full()[0], "lse": trace.full()[1]} | given)


def settling_trace(
    layers: int, n: int = 120, *, seed: int = 0, speed: float = 1.4, **options: Any
) -> Trace:
    """A trace whose layers settle, at `speed` 1 in the last one; all but 4 tokens are prompt."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    depth = torch.arange(layers) / max(1, layers - 1)
    near = torch.sin((depth * speed).clamp(max=1) * torch.pi / 2)[:, None, None, None]
    far = (1 - near**2).sqrt()
    q = near * normal(4, n, 8) + far * normal(layers, 4, n, 8)
    k = near * normal(2, n, 8) + far * normal(layers, 2, n, 8)
    v = normal(layers, 2, n, 8)
    given = {"prompt_len": n - 4, "rope": kvsim.Rope.default(8), "name": "settling"} | options
    return Trace.from_arrays(2 * q, k, v, **given)


def changed(trace: Trace, **changes: Any) -> Trace:
    """The trace in memory with some arguments of `Trace.from_arrays` replaced.

    Queries, keys, values, lengths, formulas, RoPE and name stay. What else the trace has, such as
    attention output, tokens or meta, is left out unless `changes` has it.
    """
    kept: dict[str, Any] = {name: getattr(trace.header, name) for name in _KEPT} | {
        "rope": trace.ropes
    }
    kept |= {name: trace.read(name) for name in "qkv"}
    if "scale" not in changes:
        kept["formulas"] = trace.formulas
    return Trace.from_arrays(**kept | changes)


def short_lengths(name: str) -> dict[str, Any]:
    """Short parameters of the policies of engines, whose own exceed the budgets of tests."""
    engines = ("@sparse_vllm", "@vllm", "@sglang", "@prompt", "@per_head", "@union")
    if not name.startswith("openvino") and not name.endswith(engines):
        return {}
    short = {"page": 4, "sink": 4, "recent": 4, "protect_prompt": False}
    return {key: value for key, value in short.items() if has_parameter(name, key)}
