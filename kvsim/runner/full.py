"""A recorded sequence on its model with the full cache, the reference of runs under policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvsim.core.trace import Trace
from kvsim.recorder.cache import full_cache
from kvsim.recorder.generation import evaluating
from kvsim.recorder.hooks import KernelCall, intercepting
from kvsim.recorder.layers import Residual
from kvsim.runner.model import RunningModel
from kvsim.runner.recorded import RecordedCheck

#: Numbers of predictions that are compared at once, which a processor's cache holds.
_COMPARED = 1 << 18


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

    def output(self, place: int) -> Tensor:
        """Attention output of a layer, [qhead, n, d] in float64."""
        return torch.cat(self.out[sorted(self.out)[place]], dim=1).double()

    def input(self, place: int) -> Tensor:
        """Residual stream before a layer, [n, D] in float64."""
        return torch.cat(self.stream[sorted(self.stream)[place]]).double()


class FullPass:
    """A pass of a model over the tokens of a trace, each row with all rows before it.

    logits [R, V] predict the R tokens of the response. keys, values [H, T, d] of each layer.
    rows: outputs and inputs of the rows after the prompt. begin: the first row to run, at most
    the last of the prompt, behind recorded keys and values. Raises CaptureError unless the model
    computes what was recorded of these rows (`RecordedCheck`).
    """

    def __init__(
        self, running: RunningModel, trace: Trace, residual: Residual, begin: int = 0
    ) -> None:
        self.rows = rows = FullRows(trace.prompt_len, residual)
        comparison, cache = RecordedCheck(trace, running.model.dtype), full_cache(running.model)

        entries: dict[int, tuple[Tensor, Tensor]] = {}
        tokens: list[int] = trace.read("tokens").tolist()
        chunk = running.chunk(tokens)

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
        with (
            torch.inference_mode(),
            evaluating(running.model),
            intercepting(running.model, receive),
            residual.following(),
        ):
            wanted = trace.n_pos - trace.prompt_len + 1
            self.logits = running.run(tokens[begin:], cache, wanted, chunk, begin)[:-1]
        comparison.check(self.logits)
        self.keys, self.values = ([entries[at][i] for at in sorted(entries)] for i in range(2))


def compared(logits: Tensor, full: Tensor, response: Sequence[int]) -> dict[str, Any]:
    """Compare predictions with those of the full cache, as `Forced` has them.

    logits: [R, V] or, of several runs, [B, R, V]. full: [R, V]. response: the R tokens.
    """
    at = torch.tensor(response, dtype=torch.long, device=logits.device)[:, None]
    step = max(1, _COMPARED // max(1, logits[..., :1, :].numel()))
    parts: dict[str, list[Tensor]] = {"nll": [], "full_nll": [], "kl": [], "agreement": []}
    for rows in (slice(i, i + step) for i in range(0, max(1, len(response)), step)):
        live, expected = (x[..., rows, :].double().log_softmax(-1) for x in (logits, full))
        token = at[rows]
        parts["nll"].append(-live.gather(-1, token.expand(*live.shape[:-1], 1))[..., 0])
        parts["full_nll"].append(-expected.gather(-1, token)[:, 0])
        parts["kl"].append((expected - live).mul_(expected.exp()).sum(-1).clamp(min=0))
        parts["agreement"].append((live.argmax(-1) == expected.argmax(-1)).double())
    return {name: torch.cat(each, dim=-1).cpu().numpy() for name, each in parts.items()}
