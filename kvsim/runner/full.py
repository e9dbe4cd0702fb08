"""A recorded sequence on its model with the full cache: the reference for runs under policies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from kvsim.analysis.output.changed import prompt_parts
from kvsim.core.policy import Schedule
from kvsim.core.shared_results import DEFAULT_MEMORY
from kvsim.core.trace import Trace
from kvsim.recorder.forward import full_cache
from kvsim.recorder.head import Predictions
from kvsim.recorder.hooks import KernelCall
from kvsim.recorder.layers import Residual
from kvsim.runner.model import RunningModel
from kvsim.runner.recorded import RecordedCheck

#: Bytes that rows of a prompt may take which are compared with those of the full cache.
_KEPT = 1 << 30


@dataclass
class FullRows:
    """Attention output [qhead, n, d] and input [n, D] of each layer for rows from `first` on."""

    first: int
    residual: Residual
    out: dict[int, list[Tensor]] = field(default_factory=dict)
    stream: dict[int, list[Tensor]] = field(default_factory=dict)

    def add(self, call: KernelCall, start: int) -> None:
        """Keep the rows of a kernel call, the first of which is row `start`."""
        skip = max(0, self.first - start)
        if skip >= call.q.shape[1]:
            return
        # copies, because slices would hold the rows of the whole call
        self.out.setdefault(call.layer, []).append(call.out[:, skip:].clone())
        self.stream.setdefault(call.layer, []).append(self.residual.rows(call)[skip:].clone())

    def output(self, place: int, first: int) -> Tensor:
        """Attention output of a layer, of the rows from `first` on, [qhead, n, d] in float64."""
        return torch.cat(self.out[sorted(self.out)[place]], dim=1)[:, first - self.first :].double()

    def input(self, place: int, first: int) -> Tensor:
        """Residual stream before a layer, of the rows from `first` on, [n, D] in float64."""
        return torch.cat(self.stream[sorted(self.stream)[place]])[first - self.first :].double()


class FullPass:
    """A pass of a model over the tokens of a trace, each row with all rows before it.

    first: the first row that is compared; by default the one after the prompt. predictions: those
    of the R tokens after row `predicts`: of the response, and of the prompt after row `first`;
    their logits are kept if they take at most `keep` bytes. keys, values [H, T, d] of each layer.
    rows: outputs and inputs of the rows from `first` on. behind: run from row `predicts` on, behind
    recorded keys and values. Raises CaptureError unless the model computes what was recorded of
    these rows (`RecordedCheck`).
    """

    def __init__(
        self,
        running: RunningModel,
        trace: Trace,
        residual: Residual,
        first: int | None = None,
        *,
        behind: bool = False,
        keep: int = DEFAULT_MEMORY // 8,
    ) -> None:
        self.first = trace.prompt_len if first is None else first
        self.predicts = min(self.first, trace.prompt_len - 1)
        begin = self.predicts if behind else 0
        self.rows = rows = FullRows(self.first, residual)
        comparison, cache = RecordedCheck(trace, running.model.dtype), full_cache(running.model)

        entries: dict[int, tuple[Tensor, Tensor]] = {}
        tokens: list[int] = trace.read("tokens").tolist()

        def receive(call: KernelCall) -> None:
            comparison.receive(call)
            if call.k.shape[1] == trace.n_pos:  # earlier ones would live beside their successors
                entries[call.layer] = call.k, call.v
            rows.add(call, call.start)

        for place, layer in enumerate(trace.layer_ids if begin else ()):
            rows_before = slice(place, place + 1), slice(0, begin)
            recorded = (trace.read(name, *rows_before) for name in ("k", "v"))
            keys, values = (x.to(running.device, running.model.dtype) for x in recorded)
            cache.update(keys, values, layer)
        wanted = trace.n_pos - self.predicts
        with residual.following(), running.head.apart() as outputs:
            running.full(tokens, wanted, cache=cache, begin=begin, receive=receive)
        last = torch.cat(outputs)[-wanted:-1].clone()
        self.predictions = Predictions(last, self.predicts, running.head)
        if len(last) * self.predictions.row * last.itemsize <= keep:
            self.predictions = Predictions(self.predictions.logits(), self.predicts, checked=True)
        comparison.check(self.predictions[trace.prompt_len - 1 - self.predicts :])
        self.keys, self.values = ([entries[at][i] for at in sorted(entries)] for i in range(2))


def first_compared(running: RunningModel, trace: Trace, schedules: Iterable[Schedule]) -> int:
    """The first row whose prediction is compared under one of the schedules.

    The first behind an event in the prompt, or that of its question, as far as what is kept of the
    rows takes at most 1 GiB; else the one after the prompt.
    """
    most, end = _most_rows(running, trace), trace.prompt_len
    parts = (prompt_parts(schedule, trace, end).values() for schedule in schedules)
    return min((x.start for x in chain(*parts) if end - x.start <= most), default=end)


def uncompared(running: RunningModel, trace: Trace, schedule: Schedule) -> str:
    """Return a remark on rows of the prompt that are not compared; empty if all are."""
    most, end = _most_rows(running, trace), trace.prompt_len
    parts = prompt_parts(schedule, trace, end).items()
    variants = [variant for variant, rows in parts if end - rows.start > most]
    if not variants:
        return ""
    return (
        f"{trace.name}: left out of the model's metrics: {', '.join(variants)}, of more than 1 GiB;"
        f" the last {most} tokens of the prompt would fit"
    )


def _most_rows(running: RunningModel, trace: Trace) -> int:
    config = running.model.config.get_text_config()
    # predictions of the full cache, those of a run, and a copy of these
    numbers = 3 * config.vocab_size + trace.n_layers * config.hidden_size
    numbers += sum(qheads * value_dim for qheads, _, _, value_dim in trace.sizes)
    return int(_KEPT // (numbers * max(4, running.model.dtype.itemsize)))


def compared(
    runs: Sequence[Predictions], full: Predictions, response: Sequence[int]
) -> dict[str, Any]:
    """Compare predictions of R tokens with those of the full cache, as `Forced` has them.

    runs: of consecutive rows; values are [R], or [B, R] of B runs together, of which rows before
    may be those of one.
    """
    tokens = torch.tensor(response, dtype=torch.long, device=full.outputs.device)[:, None]
    shape, at = (*runs[-1].outputs.shape[:-2], len(tokens)), 0
    # allocated first: small arrays between large ones would keep the memory of these
    values = {x: tokens.new_empty(shape, dtype=torch.float64) for x in ("nll", "kl", "agreement")}
    values["full_nll"] = tokens.new_empty(len(tokens), dtype=torch.float64)
    for run in runs:
        expected_parts = full[at : at + len(run)].parts(run.row)
        for (rows, logits), (_, of_full) in zip(run.parts(), expected_parts, strict=True):
            here = slice(at + rows.start, at + rows.stop)
            live, expected = (x.double().log_softmax(-1) for x in (logits, of_full))
            token = tokens[here].expand(*live.shape[:-1], 1)
            values["nll"][..., here] = -live.gather(-1, token)[..., 0]
            values["full_nll"][here] = -expected.gather(-1, tokens[here])[:, 0]
            values["agreement"][..., here] = (live.argmax(-1) == expected.argmax(-1)).double()
            kl = (expected - live).mul_(expected.exp()).sum(-1)
            values["kl"][..., here] = kl.clamp(min=0)
        at += len(run)
    return {name: each.cpu().numpy() for name, each in values.items()}
