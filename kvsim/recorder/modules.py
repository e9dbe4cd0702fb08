"""The attention modules of a model, found by a run of two tokens, and its decoder layers.

Class and attribute names are not reliable, so modules are found by their calls of the kernel in
transformers' table.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvsim.core.sources import Size, is_sized, padded
from kvsim.errors import CaptureError
from kvsim.recorder.forward import cache_option, device_of, evaluating, full_cache, run_model
from kvsim.recorder.head import Head
from kvsim.recorder.latent import absorbed_size
from kvsim.schema import first_of

Kernel = Callable[..., tuple[Tensor, Tensor | None]]

# The table belongs to the process, so captures in several threads take turns.
_TABLE_LOCK = threading.RLock()

#: The list of decoder layers of a model, by name ("" without one), its attention modules, what
#: `kernel_sizes` returns, and the kind of its head.
_Measured = tuple[str, dict[int, str], dict[int, Size], type | None]

_MEASURED: WeakKeyDictionary[PreTrainedModel, _Measured] = WeakKeyDictionary()


def unrecordable(what: str) -> CaptureError:
    """Return the error of a model with unsupported behaviour; what: found and expected."""
    return CaptureError(f"{what}; this model cannot be recorded")


def kernel_name(model: PreTrainedModel) -> str:
    """Return the name of the model's attention kernel, such as ``sdpa`` or ``eager``."""
    return str(model.config._attn_implementation or "eager")  # noqa: SLF001  its only home


@contextmanager
def replacing_kernel(name: str, wrap: Callable[[Kernel], Kernel]) -> Iterator[None]:
    """Put `wrap` of the kernel `name` into transformers' table until the block ends."""
    with _TABLE_LOCK:
        listed = cast("Kernel | None", ALL_ATTENTION_FUNCTIONS.get(name))

        def original(module: nn.Module, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
            return (listed or _eager_kernel(module))(module, *args, **options)

        table = ALL_ATTENTION_FUNCTIONS._local_mapping  # noqa: SLF001  the library's entries stay
        before = {name: table[name]} if name in table else {}
        table[name] = wrap(original)
        try:
            yield
        finally:
            table.pop(name, None)
            table.update(before)


def _eager_kernel(module: nn.Module) -> Kernel:
    """Return the eager kernel, which is not in the table but in the model's own file."""
    home = sys.modules[type(module).__module__]
    kernel = getattr(home, "eager_attention_forward", None)
    if kernel is None:
        raise CaptureError(
            f"{home.__name__} has no eager_attention_forward, expected one as in the model files "
            "of transformers; load the model with attn_implementation='sdpa'"
        )
    return cast("Kernel", kernel)


def attention_modules(model: PreTrainedModel) -> dict[int, nn.Module]:
    """Return the modules that call the kernel, by the number of their decoder layer, in order.

    Measured once for each model. Raises CaptureError for a model that cannot run, that never calls
    the kernel or calls it twice in a layer, or that has keys and values in other layers too.
    """
    return {number: model.get_submodule(name) for number, name in _measured(model)[1].items()}


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return all decoder layers of a model, also those without attention.

    Raises CaptureError as `attention_modules`, or where attention is outside a list of layers.
    """
    name, modules, *_ = _measured(model)
    if not name:
        raise CaptureError(
            f"the attention of layer {min(modules)} is outside a list of decoder layers, expected "
            "it in a layer"
        )
    return [*cast("nn.ModuleList", model.get_submodule(name))]


def other_layers(model: PreTrainedModel) -> dict[str, list[int]]:
    """Return the numbers of the decoder layers without attention, by kind.

    Kinds are those of the configuration, such as ``linear_attention``, or classes of the layers.
    """
    name, modules, *_ = _measured(model)
    layers = decoder_layers(model) if name else []
    stated = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    kinds: dict[str, list[int]] = {}
    for number, layer in enumerate(layers):
        if number not in modules:
            kind = str(stated[number]) if len(stated) == len(layers) else type(layer).__name__
            kinds.setdefault(kind, []).append(number)
    return kinds


def kernel_sizes(model: PreTrainedModel) -> dict[int, Size]:
    """Return the query heads, KV heads and dimensions of keys and values that each kernel gets."""
    return _measured(model)[2]


def layer_size(model: PreTrainedModel, layer: int) -> Size:
    """Return the size of a layer's calls (`KernelCall.size`), of latents where it has them."""
    return absorbed_size(attention_modules(model)[layer], kernel_sizes(model)[layer])


def layer_sizes(
    model: PreTrainedModel, layers: Collection[int], *whole: object
) -> tuple[Size, ...]:
    """Return the size of each layer, in order; empty where all are equal.

    whole: requested rows that repeat the context, or left-out rows; their arrays have one shape for
    all layers, so CaptureError is raised where sizes differ.
    """
    found = [layer_size(model, layer) for layer in sorted(layers)]
    if len({*found}) == 1:
        return ()
    if any(whole):
        raise CaptureError(
            "rows that repeat the context, and sums over rows that are left out, need layers of "
            "one size, but layers of the model differ in heads or dimensions; choose "
            "layers (--layers), or do without them"
        )
    return tuple(found)


def largest(sizes: Sequence[Size]) -> Size:
    """Return the largest of each number."""
    qheads, heads, dim, value_dim = (max(of_layers) for of_layers in zip(*sizes, strict=True))
    return qheads, heads, dim, value_dim


def as_largest(name: str, part: Tensor, sizes: Sequence[Size]) -> Tensor:
    """Return an array of one layer, padded with zeros to the largest size; no sizes: as it is."""
    return padded(name, part[None], largest(sizes))[0] if sizes and is_sized(name) else part


def head_of(model: PreTrainedModel) -> Head:
    """Return the head of a model."""
    return Head(model, _measured(model)[3])


def _measured(model: PreTrainedModel) -> _Measured:
    with _TABLE_LOCK:
        if model not in _MEASURED:
            called, holding, kind = _called(model)
            home, modules = _placed(model, [module for module, _ in called], holding)
            of = {id(module): size for module, size in called}
            sizes = {x: of[id(model.get_submodule(name))] for x, name in modules.items()}
            _MEASURED[model] = home, modules, sizes, kind
        return _MEASURED[model]


def _called(model: PreTrainedModel) -> tuple[list[tuple[nn.Module, Size]], set[int], type | None]:
    """Return modules that call the kernel in a run of two tokens, layers with keys, and the head.

    A module is listed once per call, in order, with its sizes. The head is given by its kind.
    """
    called: list[tuple[nn.Module, Size]] = []
    outputs: list[object] = []

    def wrap(original: Kernel) -> Kernel:
        def kernel(module: nn.Module, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
            (_, qheads, _, dim), (_, heads, _, value_dim) = args[0].shape, args[2].shape
            called.append((module, (qheads, heads, dim, value_dim)))
            return original(module, *args, **options)

        return kernel

    ids, cache = torch.tensor([[1, 2]], device=device_of(model)), full_cache(model)
    with (
        torch.no_grad(),
        evaluating(model),
        replacing_kernel(kernel_name(model), wrap),
        model.base_model.register_forward_hook(lambda *call: outputs.append(call[-1])),
    ):
        out = run_model(model, ids, use_cache=True, **cache_option(model, cache))
        kind = Head.kind_of(model, outputs, getattr(out, "logits", None))
    keys = (getattr(layer, "keys", None) for layer in cache.layers)
    holding = {number for number, x in enumerate(keys) if x is not None and x.numel()}
    return called, holding, kind


def _placed(
    model: PreTrainedModel, called: list[nn.Module], holding: set[int]
) -> tuple[str, dict[int, str]]:
    """Return the name of the list of decoder layers, and the attention modules in it by name."""
    kind = type(model).__name__
    if not called:
        raise unrecordable(
            f"{kind} called the kernel of transformers' table 0 times in a run, expected once in "
            "each layer with attention: it has no attention, or a kernel of its own (ALiBi, "
            "relative positions)"
        )
    known = {id(module): name for name, module in model.named_modules()}
    names = [known.get(id(module), type(module).__name__) for module in called]
    places = [_place(model, name) for name in names if id(called[names.index(name)]) in known]
    homes = {home for home, _ in places}
    numbers = [place if home else order for order, (home, place) in enumerate(places)]
    stated = (getattr(module, "layer_idx", None) for module in called)
    same = all(
        x in (number, -1) or not isinstance(x, int)
        for x, number in zip(stated, numbers, strict=False)
    )
    if len(places) < len(names) or len(homes) > 1 or len({*numbers}) < len(names) or not same:
        raise unrecordable(
            f"the kernel of transformers' table was called by {first_of(names)}, expected one "
            f"module in each layer of one list of {kind}, which keeps its entries as that layer"
        )
    modules = dict(sorted(zip(numbers, names, strict=True)))
    if holding - modules.keys():
        raise unrecordable(
            f"layers {sorted(holding - modules.keys())} of {kind} hold keys and never called the "
            "kernel of transformers' table, expected one call each"
        )
    return homes.pop(), modules


def _place(model: PreTrainedModel, name: str) -> tuple[str, int]:
    """Return the outermost list of layers that contains a module, and its index; "" without one."""
    parts = name.split(".")
    for depth, part in enumerate(parts[:-1]):  # an attention module itself is no decoder layer
        home = ".".join(parts[:depth])
        if part.isdigit() and isinstance(model.get_submodule(home), nn.ModuleList):
            return home, int(part)
    return "", 0
