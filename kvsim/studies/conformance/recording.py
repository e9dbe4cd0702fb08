"""Dumps for `kvsim conform` of the entries that a running model's cache keeps.

    from kvsim.studies.conformance.recording import recording

    with press(model), recording(model) as tape:  # a press of kvpress, or a cache of your own
        model(ids, past_key_values=cache)
        ...
    tape.dump(budget=512, interval=128, prefill=False).save("dump.npz")

The keys in the cache are compared with those that the model computed, byte by byte. So it serves
any cache of transformers whose keys are moved and not changed: DynamicCache under kvpress, a class
of your own, and the cache of kvsim's live runs. Presses of kvpress that mask are read from their
masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvsim.core.policy import Schedule
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.errors import CaptureError
from kvsim.recorder.forward import cache_of
from kvsim.recorder.hooks import KernelCall, intercepting
from kvsim.recorder.loading import model_name
from kvsim.recorder.modules import attention_modules
from kvsim.runner.model import RunningModel
from kvsim.runner.sketches import captured
from kvsim.studies.conformance.dump import Dump


class Tape:
    """The queries, keys and values of one sequence, and its cache after each forward."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._modules = attention_modules(model)
        self._parts: dict[str, dict[int, list[Tensor]]] = {name: {} for name in "qkv"}
        self._positions: list[list[dict[bytes, list[int]]]] = []  # by layer and head
        self._slots: list[list[list[int]]] = []
        self._kept: dict[int, dict[int, list[list[int]]]] = {}  # by row and layer
        self._rows = 0
        # those of an earlier press stay on the modules
        self._masks = {
            layer: getattr(module, "masked_key_indices", None)
            for layer, module in self._modules.items()
        }

    def receive(self, call: KernelCall) -> None:
        """Add the new rows of a layer, and record which entries have left its cache."""
        layer, rows = call.layer, call.q.shape[1]
        if layer == len(self._slots):
            self._slots.append([[] for _ in call.k])
            self._positions.append([{} for _ in call.k])
        earlier = call.k[:, : call.start]
        self._notice(layer, earlier, self._rows - 1)
        new = {"q": call.q, "k": call.k[:, call.start :], "v": call.v[:, call.start :]}
        for name, part in new.items():
            self._parts[name].setdefault(layer, []).append(part.detach().cpu().clone())
        for head, keys in enumerate(_bytes(new["k"])):
            for row, key in enumerate(keys, start=self._rows):
                self._positions[layer][head].setdefault(key, []).append(row)
            self._slots[layer][head] += range(self._rows, self._rows + rows)

    def forwarded(self, module: nn.Module, arguments: Any, options: Any, output: Any) -> None:
        """Record the entries that a forward has left in the cache."""
        self._rows = sum(part.shape[1] for part in self._parts["q"][0])
        cache = cache_of(output)
        for layer, part in enumerate(getattr(cache, "layers", [])):
            masked = getattr(self._modules[layer], "masked_key_indices", None)
            keys = getattr(part, "keys", None)
            if masked is not None:
                self._without(layer, masked)
            elif isinstance(keys, Tensor) and keys.dim() == 4 and keys.shape[2]:
                self._notice(layer, keys[0], self._rows - 1)

    def _notice(self, layer: int, keys: Tensor, row: int) -> None:
        """Compare the keys [head, n, dim] in a cache with those that it held after row `row`."""
        slots = self._slots[layer]
        if all(len(slot) == keys.shape[1] for slot in slots):
            return
        for head, cached in enumerate(_bytes(keys)):
            if len(cached) != len(slots[head]):
                slots[head] = self._matched(layer, head, cached)
                self._kept.setdefault(row, {})[layer] = [*map(list, slots)]

    def _matched(self, layer: int, head: int, cached: list[bytes]) -> list[int]:
        """Positions of cached keys; those of equal keys in the order of the text."""
        unused: dict[bytes, Iterator[int]] = {}
        out = []
        for key in cached:
            places = unused.setdefault(key, iter(self._positions[layer][head].get(key, ())))
            if (position := next(places, None)) is None:
                raise CaptureError(
                    f"layer {layer}, head {head}: the cache holds a key that the model did not "
                    "compute; expected keys that are moved and not changed, by rotation, merging "
                    "or rounding; write the dump yourself, see docs/conform.md"
                )
            out.append(position)
        return out

    def _without(self, layer: int, masked: Any) -> None:
        """Note a mask of kvpress: entries that stay in memory and are hidden."""
        if masked is self._masks[layer]:
            return
        self._masks[layer] = masked
        kept = [set(range(self._rows)) for _ in self._slots[layer]]
        for head, slot in zip(*(index.tolist() for index in masked[1:]), strict=True):
            kept[head].discard(slot)
        self._kept.setdefault(self._rows - 1, {})[layer] = [sorted(each) for each in kept]

    def dump(
        self,
        record: Record | None = None,
        *,
        budget: int | None = None,
        interval: int | None = None,
        prefill: bool | None = None,
    ) -> Dump:
        """Return the kept sets of the cache, and the model's queries, keys and values.

        record: that of kvsim's live run or press (`Decoding.record`), which has its last event
        too. Without it, budget, interval and prefill are those of the implementation, if they are
        known: interval 0 for no events in decoding, prefill None for an implementation whose
        schedule is not known.
        """
        if not self._rows:
            raise CaptureError("no forward was recorded; run the model inside the `with` block")
        layers = sorted(self._parts["q"])
        arrays = (
            torch.stack([torch.cat(part[x], 1) for x in layers]) for part in self._parts.values()
        )
        sketch = captured(RunningModel(self._model))
        trace = Trace.from_arrays(
            *arrays,
            prompt_len=self._parts["q"][0][0].shape[1],
            rope=sketch.ropes,
            formulas=sketch.formulas,
            name=model_name(self._model),
        )
        if record is not None:
            return Dump.of_record(record, trace)
        schedule = None if prefill is None else Schedule(interval or None, prefill)
        return Dump(self._sets(len(layers)), tuple(layers), trace.name, trace, budget, schedule)

    def _sets(self, n_layers: int) -> dict[int, NDArray[np.bool_]]:
        """Kept entries after each row at which entries left, bool [layer, head, row + 1]."""
        out: dict[int, NDArray[np.bool_]] = {}
        before = np.ones((n_layers, len(self._slots[0]), 0), bool)
        for row in sorted(self._kept):
            sets = np.ones((*before.shape[:2], row + 1), bool)
            sets[..., : before.shape[-1]] = before
            for layer, heads in self._kept[row].items():
                sets[layer] = False
                for head, positions in enumerate(heads):
                    sets[layer, head, positions] = True
            out[row] = before = sets
        return out


@contextmanager
def recording(model: PreTrainedModel) -> Iterator[Tape]:
    """Record one sequence of a model, of which the first forward is the prompt.

    Inside the block of a press, and on an empty cache. Raises CaptureError for a model that cannot
    be recorded, or a cache whose keys are not those that the model computed.
    """
    tape, hooked = Tape(model), model.base_model.register_forward_hook
    with intercepting(model, tape.receive), hooked(tape.forwarded, with_kwargs=True):
        yield tape


def _bytes(keys: Tensor) -> list[list[bytes]]:
    """The bytes of keys [head, n, dim], for each head; pads, which are 0, are left out."""
    raw = keys.detach().cpu().contiguous().view(torch.uint8).numpy()
    return [[key.tobytes() for key in head if key.any()] for head in raw]
