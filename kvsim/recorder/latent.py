"""Latent attention: kernel calls in the form in which the cache holds their entries.

A model caches one latent vector and one rotated vector per position, and expands them to keys and
values of all heads: k_h = [W_k,h c, r], v_h = W_v,h c (DeepSeek-V2, arXiv 2405.04434, section 2.1).
The absorbed form attends to the entries themselves, with one KV head: k = [r, c], v = c, q_h =
[q_h's rotated part, W_k,h^T q_h's other part]; the kernel's output is W_v,h times this output. The
rotated part comes first, as `Rope` expects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvsim.core.checks import DTYPES, compute_dtype, relative_error, tolerance
from kvsim.core.sources import Size
from kvsim.errors import CaptureError
from kvsim.recorder.forward import evaluating, full_cache, run_chunks

#: The name in attention modules of the projection from the latent to keys and values of heads.
_UP = "kv_b_proj"


def caches_heads(model: PreTrainedModel) -> bool:
    """Return whether a model has latents, and caches keys and values of heads instead.

    So does transformers 5.2, whose cache lacks the latents of earlier rows.
    """
    latent = any(name.endswith(f".{_UP}") for name, _ in model.named_modules())
    if not latent or next(model.parameters()).is_meta:  # a plan has no numbers to run
        return False
    cache = full_cache(model)
    with torch.no_grad(), evaluating(model):
        deque(run_chunks(model, cache, [0], 0, 1, 1), 0)
    return any(getattr(layer, "keys", torch.empty(1, 1)).shape[1] > 1 for layer in cache.layers)


def absorbed_size(module: nn.Module, size: Size) -> Size:
    """Return the size of a kernel's call over latents, where an attention module has them."""
    up = dict(module.named_children()).get(_UP)
    if up is None:
        return size
    (expanded, rank), (qheads, heads, dim, value_dim) = cast("Tensor", up.weight).shape, size
    return qheads, 1, dim + value_dim - expanded // heads + rank, rank


@dataclass(frozen=True)
class Absorbed:
    """A kernel call over latents.

    Attributes:
        q: queries [1, qhead, w, dim], in the compute dtype.
        k: entries [1, 1, n, dim].
        v: latents [1, 1, n, rank]; a view of k.
        up: projection from the latent to the values of each query head [qhead, rank, value].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    up: Tensor

    def expanded(self, out: Tensor, like: Tensor) -> Tensor:
        """Return output over latents [1, w, qhead, rank] as the kernel's, in the dtype of like."""
        return torch.einsum("bwir,irv->bwiv", out.to(self.up), self.up).to(like)


class Latents:
    """Entries computed by the modules of latent attention, while they run.

    modules: attention modules by layer; those without the projection have no latent. stack: holds
    the hooks.
    """

    def __init__(self, modules: Mapping[int, nn.Module], stack: ExitStack) -> None:
        self._up: dict[int, nn.Module] = {}
        self._latent: dict[int, Tensor] = {}
        self._history: dict[int, Tensor] = {}  # of all entries at the last call
        for layer, module in modules.items():
            children = dict(module.named_children())
            if _UP in children:
                self._up[layer] = children[_UP]
                note = partial(self._note_latent, layer)
                stack.enter_context(children[_UP].register_forward_pre_hook(note))

    def _note_latent(self, layer: int, _: nn.Module, args: tuple[Any, ...]) -> None:
        self._latent[layer] = args[0].flatten(0, -2)

    def absorbed(
        self, layer: int | None, query: Tensor, key: Tensor, value: Tensor, *, keep: bool
    ) -> Absorbed | None:
        """Return a kernel call over the latents of its entries; None without latents.

        keep: entries of later calls follow these. Raises CaptureError where keys and values do not
        follow from the latents.
        """
        if layer is None or layer not in self._latent:
            return None
        latent = self._latent.pop(layer)
        rows, n, (_, heads, _, of_value) = query.shape[2], key.shape[2], value.shape
        if len(latent) < n and layer in self._history:  # the cache holds expanded heads
            latent = torch.cat([self._history[layer][: n - len(latent)], latent])
        if keep:
            self._history[layer] = latent
        weight = cast("Tensor", self._up[layer].weight).detach()
        rank, dtype = latent.shape[1], compute_dtype(query.dtype)
        plain = weight.dim() == 2 and str(weight.dtype) in DTYPES and weight.shape[1] == rank
        fits = plain and weight.shape[0] % heads == 0 and len(latent) == n
        both = weight.to(dtype).unflatten(0, (heads if fits else 1, -1))
        size = both.shape[1] - of_value  # both: [qhead, unrotated + value, rank]
        rotated, error = key[:, :1, :, size:], 0.0
        if fits and not weight.is_meta:  # a plan has only shapes
            new = torch.cat([key[0, :, -rows:, :size], value[0, :, -rows:]], dim=-1).to(dtype)
            error = float(relative_error(new, latent[-rows:].to(dtype) @ both.mT).max())
            fits = bool((key[..., size:] == rotated).all())
        if not fits or not error <= tolerance(DTYPES[key.dtype]):
            raise CaptureError(
                f"keys and values of layer {layer} do not follow from its latents: they differ by "
                f"{error:.3g} (relative), between heads or in shape; expected {_UP} of the latent, "
                "and one rotated part for all heads; this model cannot be recorded"
            )
        up = both[:, size:].mT
        absorbed = query[..., :size].to(dtype) @ both[:, :size]
        k = torch.cat([rotated, latent[None, None].to(key)], dim=-1)
        q = torch.cat([query[..., size:].to(dtype), absorbed], dim=-1)
        return Absorbed(q, k, k[..., -rank:], up)
