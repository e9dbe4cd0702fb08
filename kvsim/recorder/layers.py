"""The residual stream of a model's layers, checked while the model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvsim.errors import CaptureError
from kvsim.recorder.hooks import KernelCall, hidden_states
from kvsim.recorder.modules import decoder_layers

#: Returns a context in which a check runs, and which may catch its CaptureError.
Guard = Callable[[], AbstractContextManager[None]]


class Residual:
    """The inputs of a model's decoder layers, for one capture.

    The stream begins with the input of the first layer: some models scale the embedding before it,
    some add positions. In every row the input of layer l + 1 must be, bit for bit, the output of
    layer l, also of layers without attention: so nothing acts between two layers. The output of the
    last layer is not checked.

    Raises:
        CaptureError: attention modules that are not in decoder layers of their own.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers = decoder_layers(model)
        # the layer that ran last, its output and how often that was written to until then; and the
        # running layer and its input
        self._returned: tuple[int, Tensor, int] | None = None
        self._running: tuple[int, Tensor] | None = None

    @contextmanager
    def following(self, guard: Guard = nullcontext) -> Iterator[None]:
        """Follow the stream until the block ends, also by an error; guard: a context per check."""

        def enter(layer: int, *call: Any) -> None:
            with guard():
                self._enter(layer, *call)

        with ExitStack() as stack:
            stack.callback(setattr, self, "_returned", None)
            stack.callback(setattr, self, "_running", None)
            for layer, module in enumerate(self.layers):
                before, after = partial(enter, layer), partial(self._leave, layer)
                stack.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
                stack.enter_context(module.register_forward_hook(after))
            yield

    def rows(self, call: KernelCall) -> Tensor:
        """Return the residual [w, hidden] from which the rows of a kernel call were computed."""
        running, hidden = self._running or (None, call.hidden)
        if running != call.layer or len(hidden) != call.q.shape[1]:
            raise CaptureError(
                f"attention of layer {call.layer} ran with {call.q.shape[1]} rows in layer "
                f"{running} with {len(hidden)}, expected the same layer and rows"
            )
        return hidden

    def _enter(
        self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        what = f"decoder layer {layer} ({type(module).__name__})"
        advice = ": one stream, which judged and live runs need; replay the trace instead"
        hidden = hidden_states(what, args, kwargs, advice)
        last, returned, writes = self._returned or (-1, hidden, _writes_to(hidden))
        self._returned = None
        chained = last == layer - 1 and writes == _writes_to(returned)
        if returned is not hidden:
            alike = (returned.shape, returned.dtype) == (hidden.shape, hidden.dtype)
            chained &= alike and torch.equal(returned.to(hidden.device), hidden)
        if not chained:
            raise CaptureError(
                f"the input of decoder layer {layer} is not the output of layer {layer - 1}"
            )
        self._running = layer, hidden[0]

    def _leave(self, layer: int, _: nn.Module, __: object, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        ended = layer == len(self.layers) - 1 or not isinstance(output, Tensor)
        self._running, self._returned = None, None if ended else (layer, output, _writes_to(output))


def _writes_to(tensor: Tensor) -> int:
    """Return how often a tensor was written to; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001  it has no other name
