"""Logits of a few rows at a time, from the output of a model's decoder.

The logits of all rows of a long response would be the largest array of a small model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvsim.core.checks import DTYPES, tolerance
from kvsim.errors import CaptureError

#: Logits computed at once, and compared at once, which fit into a processor's cache.
LOGITS, FEW = 1 << 22, 1 << 18

# Rows that are checked at once.
_ROWS = 128

#: Models whose forwards compute only the logits of their last row inside the block.
APART: WeakSet[PreTrainedModel] = WeakSet()


def spans(n: int, step: int) -> list[slice]:
    """Return slices of at most `step` of n rows, and of one at least; an empty one for no rows."""
    step = max(1, step)
    return [slice(i, min(i + step, n)) for i in range(0, max(1, n), step)]


class Head:
    """The part of a model that computes logits of its decoder's output.

    kind: the class of that output; None where logits are no function of it, or this is unknown:
    then forwards compute all requested logits.
    """

    def __init__(self, model: PreTrainedModel, kind: type | None) -> None:
        self.model, self.kind = model, kind
        self.vocabulary = int(model.config.get_text_config().vocab_size)

    @staticmethod
    def kind_of(model: PreTrainedModel, outputs: Sequence[Any], logits: object) -> type | None:
        """Return the class of a decoder's outputs if the head computes the forward's logits."""
        if len(outputs) != 1 or not hasattr(outputs[0], "last_hidden_state"):
            return None
        head = Head(model, type(outputs[0]))
        if not isinstance(logits, Tensor) or logits.is_meta:
            return head.kind
        try:
            gap = (head.logits(outputs[0].last_hidden_state[0]) - logits[0]).abs().max()
        except Exception:  # noqa: BLE001 any error of an unknown model
            return None
        return head.kind if gap <= tolerance(DTYPES[logits.dtype]) * logits.abs().max() else None

    @contextmanager
    def apart(self) -> Iterator[list[Tensor]]:
        """Skip logits in the forwards of the block; provides the decoder's outputs [n, D].

        Without a `kind`, the requested logits [n, V].
        """
        outputs: list[Tensor] = []

        def take(_: object, __: object, output: Any) -> Any:
            if self.kind is None:
                outputs.append(output.logits[0])
            else:
                outputs.append(output.last_hidden_state[0])
                output.last_hidden_state = output.last_hidden_state[:, -1:]
            return output

        if self.kind is not None:
            APART.add(self.model)
        part = self.model if self.kind is None else self.model.base_model
        with part.register_forward_hook(take):
            try:
                yield outputs
            finally:
                APART.discard(self.model)

    def logits(self, outputs: Tensor) -> Tensor:
        """Return the logits [n, V] of rows of the decoder's output [n, D]."""
        decoder, kind = self.model.base_model, self.kind
        if kind is None:
            return outputs
        before = vars(decoder).get("forward")
        vars(decoder)["forward"] = lambda *_, **__: kind(last_hidden_state=outputs[None])
        ids = torch.zeros(1, len(outputs), dtype=torch.long, device=outputs.device)
        try:
            with torch.no_grad():  # not called: hooks of the model are those of its runs
                logits: Tensor = self.model.forward(ids, use_cache=False).logits[0]
        finally:
            del vars(decoder)["forward"]
            if before is not None:
                vars(decoder)["forward"] = before
        return logits


class Predictions:
    """Logits of consecutive rows of one or several runs, computed on access.

    outputs: of the decoder [..., R, D]; logits [..., R, V] where there is no head. start: the
    number of the first row. checked: whether these logits are known to be finite.
    """

    def __init__(
        self, outputs: Tensor, start: int, head: Head | None = None, *, checked: bool = False
    ) -> None:
        self._head = None if head is None or head.kind is None else head
        self.outputs, self.start, self._checked = outputs, start, checked
        self._width = outputs.shape[-1] if self._head is None else self._head.vocabulary

    def __len__(self) -> int:
        return self.outputs.shape[-2]

    def __getitem__(self, rows: slice) -> Predictions:
        start = self.start + rows.indices(len(self))[0]
        return Predictions(self.outputs[..., rows, :], start, self._head, checked=self._checked)

    @property
    def row(self) -> int:
        """Logits of a row, of all runs together."""
        return max(1, self.outputs.shape[:-2].numel() * self._width)

    def logits(self) -> Tensor:
        """Return the logits [..., R, V]. Raises CaptureError unless all are finite."""
        *runs, n, _ = self.outputs.shape
        logits = self.outputs
        if self._head is not None:
            rows = logits.flatten(0, -2)
            rows = self._head.logits(rows) if n else rows.new_empty(0, self._width)
            logits = rows.unflatten(0, (*runs, n))
        for of_run in () if self._checked else logits.flatten(0, -3) if runs else logits[None]:
            check_logits(of_run, self.start)
        return logits

    def parts(self, row: int = 0) -> Iterator[tuple[slice, Tensor]]:
        """Yield a few rows at a time, counted from the first, and their logits.

        row: logits of a row, by default `row`. Store results in a preallocated array: small arrays
        allocated between large ones would keep the memory of these.
        """
        row = row or self.row
        for many in spans(len(self), LOGITS // row):
            logits = self[many].logits()
            for few in spans(logits.shape[-2], FEW // row):
                yield slice(many.start + few.start, many.start + few.stop), logits[..., few, :]
            del logits  # before the next are computed


def check_logits(logits: Tensor, start: int) -> Tensor:
    """Return the logits [n, V] of rows from `start` on; CaptureError unless all are finite."""
    for at, part in enumerate(logits.split(_ROWS)):
        bad = (~part.isfinite()).sum(-1)
        if bad.any():
            row = int(bad.nonzero()[0])
            raise CaptureError(
                f"row {start + at * _ROWS + row} has NaN or infinity in its logits "
                f"({int(bad[row])} of {logits.shape[-1]}), expected finite numbers; check the "
                "model's weights, or load it in another precision than "
                f"{str(logits.dtype).removeprefix('torch.')}"
            )
    return logits
