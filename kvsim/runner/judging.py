"""Teacher-forced effect of replays on their model, in one forward pass over the response.

Records of one trace are applied together. All rows that an eviction can reach go through the model
at once, those of several records as one sequence; in every layer a row attends to the entries that
its record retains, with the keys and values that the layers below have made of the evictions. The
rows before are those of the full cache, once for all records: recorded (`holds_cache`) or computed.
Values do not depend on the records that are judged together: shapes of products are a record's own
but for the number of rows, which changes no row of a product of `_LEAST` rows or more.

A live run decides again on what its own evictions have changed; here the decisions are those of the
replay. Where none would change, both are equal.

Shape letters: B records, L layers, R tokens of the response, V of the vocabulary, w rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvsim.analysis.output.changed import first_moved
from kvsim.core.outcome import Forced, Outcome
from kvsim.core.policy import Schedule
from kvsim.core.record import Record
from kvsim.core.shared_results import DEFAULT_MEMORY
from kvsim.core.trace import Trace
from kvsim.errors import CaptureError, PolicyError
from kvsim.recorder.forward import cache_option, evaluating, last_logits
from kvsim.recorder.head import Predictions
from kvsim.recorder.hooks import KernelCall, intercepting
from kvsim.recorder.layers import Residual
from kvsim.recorder.positions import scales_by_cache
from kvsim.runner.full import FullPass, compared, first_compared
from kvsim.runner.judged_rows import JudgedRows
from kvsim.runner.model import RunningModel
from kvsim.runner.recorded import check_recorded, holds_cache, relative_change

#: Rows that a batch has at least: libraries compute the products of a few rows in another order.
_LEAST = 32


class Judge:
    """A recorded sequence on its model, to which records of replays are applied.

    memory: bytes that the full cache and a batch of records may take, 2 GiB by default. The pass
    with the full cache runs when the first record is judged, or at `check`.

    Raises:
        NeedsError: a trace without tokens, or of some layers of the model alone.
        CaptureError: another model than the recorded one.
    """

    def __init__(self, running: RunningModel, trace: Trace, memory: int | None = None) -> None:
        self._ids = check_recorded(trace, running.described)
        running.check_length(trace.n_pos)
        problem = "" if running.continues else "a forward of several rows starts from empty states"
        if scales_by_cache(running.model, trace.n_pos):
            problem = "queries have a factor of the length of the cache, and rows run without one"
        if problem:
            raise CaptureError(
                f"{trace.name}: the judge cannot run its model: {problem}; compare live runs"
            )
        self.running, self.trace = running, trace
        self._memory = DEFAULT_MEMORY if memory is None else memory
        self._residual, self._pass = Residual(running.model), cast("FullPass | None", None)

    def check(self, schedules: Iterable[Schedule] = ()) -> FullPass:
        """Raise CaptureError unless the model computes what was recorded, with the full cache.

        schedules: of the records that are compared with the pass, which is returned.
        """
        running, trace = self.running, self.trace
        first = first_compared(running, trace, schedules)
        if self._pass is None or first != self._pass.first:
            held = holds_cache(trace, running.described, running.model.dtype)
            behind = held and not running.has_states
            self._pass = FullPass(
                running, trace, self._residual, first, behind=behind, keep=self._memory // 8
            )
        return self._pass

    @property
    def _full(self) -> FullPass:
        return self._pass or self.check()

    @cached_property
    def _room(self) -> int:
        """Bytes of the memory beside the full cache and a layer's own copy, a quarter at least."""
        pairs = zip(self._full.keys, self._full.values, strict=True)
        entries = [keys.nbytes + values.nbytes for keys, values in pairs]
        kept = self._full.predictions.outputs.nbytes
        return max(self._memory // 4, self._memory - sum(entries) - max(entries) - kept)

    def outcomes(self, records: Sequence[Record]) -> list[Outcome]:
        """Judge replays of the trace; returns their outcomes in the same order.

        Raises PolicyError for a record that a forward pass cannot show (`unjudged`).
        """
        out: dict[int, Outcome] = {}
        end = self.trace.prompt_len
        for numbers, predictions, moved in self._batches(records):
            full, start = self._full.predictions, self._full.predicts
            same, tokens = len(full) - len(predictions), self._ids[start + 1 :]
            of_each = compared([full[:same], predictions], full, tokens)
            full_nll = of_each.pop("full_nll")
            for place, number in enumerate(numbers):
                values: Any = {name: each[place] for name, each in of_each.items()}
                forced = Forced(**values, full_nll=full_nll, stream_error=moved[place])
                out[number] = Outcome(forced.parted(end - self._full.first))
        return [out[number] for number in range(len(records))]

    def _batches(
        self, records: Sequence[Record]
    ) -> Iterator[tuple[list[int], Predictions, NDArray[np.float64]]]:
        """Yield the numbers of records that are judged together, and what `_judge` predicts."""
        kinds = []
        for record in records:
            if record.trace != self.trace.name or record.n_pos != self.trace.n_pos:
                raise PolicyError(
                    f"{record.policy}: the record is of {record.n_pos} tokens of {record.trace}; "
                    f"expected {self.trace.n_pos} of {self.trace.name}"
                )
            if reason := unjudged(record):
                raise PolicyError(reason)
            compared_from = first_compared(self.running, self.trace, [record.schedule])
            start = first_moved(record, self.trace, torch.from_numpy(record.evicted_at))
            kinds.append((compared_from, start))
        order = sorted(range(len(records)), key=kinds.__getitem__)
        for (_, start), group in groupby(order, kinds.__getitem__):
            numbers, rows = [*group], max(1, self.trace.n_pos - start)
            self.check([records[numbers[0]].schedule])
            size = self._together(rows)
            for part in (numbers[i : i + size] for i in range(0, len(numbers), size)):
                times = 1 if self.running.has_states else -(-_LEAST // (rows * len(part)))
                outputs, moved = self._judge([records[i] for i in part * times], start)
                before, outputs = self.trace.n_pos - 1 - outputs.shape[1], outputs[: len(part)]
                yield part, Predictions(outputs, before, self.running.head), moved[: len(part)]

    def _together(self, rows: int) -> int:
        """Records of a batch, each of so many rows; they may add half of the room."""
        if self.running.has_states:  # they go from row to row, also from one record to the next
            return 1
        model, config = self.running.model, self.running.model.config.get_text_config()
        # about twenty activations of the hidden size, and logits where all are computed at once
        of_row = 20 * config.hidden_size
        of_row += config.vocab_size if self.running.head.kind is None else 0
        return max(1, int(self._room // 2 // (rows * of_row * max(4, model.dtype.itemsize))))

    def _judge(self, records: Sequence[Record], start: int) -> tuple[Tensor, NDArray[np.float64]]:
        """Run records whose first rows, before row `start`, see everything.

        Returns the decoder's outputs of the last predictions [B, w, D], those before being as with
        the full cache, and |h' - h| / |h| of the input of each layer [B, L, w], of the same rows.
        """
        trace, full, running = self.trace, self._full, self.running
        n, count, first = trace.n_pos, len(records), max(start, full.first)
        moved = np.zeros((count, trace.n_layers, n - full.first))
        if start == n:
            return full.predictions.outputs[:0].expand(count, -1, -1), moved

        def receive(call: KernelCall) -> None:
            place = trace.layer_ids.index(call.layer)
            rows = self._residual.rows(call).unflatten(0, (count, -1))[:, first - start :]
            change = relative_change(rows.double(), full.rows.input(place, first))
            moved[:, place, first - full.first :] = change.cpu().numpy()

        entries = JudgedRows(trace, full, records, start, running)
        ids = torch.tensor(self._ids[start:], device=running.device)
        position = torch.arange(start, n, device=running.device)
        # a mask of four axes is taken as it is, so that none is made; `attend` makes its own
        any_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=running.device)
        options: dict[str, Any] = {"use_cache": False, "attention_mask": any_mask}
        if running.has_states:
            before = running.full(self._ids[:start], 0)[1]
            options = {"use_cache": True, **cache_option(running.model, before)}
        with (
            torch.inference_mode(),
            evaluating(running.model),
            intercepting(running.model, receive, attending=entries.attend),
            self._residual.following(),
            running.head.apart() as outputs,
        ):
            running.model(
                ids.repeat(count)[None],
                position_ids=position.repeat(count)[None],
                **options,
                **last_logits(running.model, count * len(position)),
            )
        of_records: Tensor = outputs[0].unflatten(0, (count, -1))
        return of_records[:, max(0, full.predicts - start) : -1], moved


def unjudged(record: Record) -> str:
    """Return why a forward pass over the recorded tokens cannot show a record; empty if it can."""
    reasons = {
        "keys are rotated to their slots, which depend on the other entries": (
            record.positions != "absolute"
        ),
        "rows of the prompt are dropped between layers, and have no deeper keys": (
            record.selection is not None and record.selection.layer is not None
        ),
        "keys and values are rounded, and each query head has a set": (
            record.storage is not None and record.per_query_head
        ),
        "it is a live run": record.closed,
    }
    advice = "so that no pass over the recorded tokens judges it; run it on the model (kvsim live)"
    found = (f"{record.policy}: {reason}, {advice}" for reason, is_so in reasons.items() if is_so)
    return next(found, "")
