"""A prefill that drops rows, recomputed after its first selection.

Up to the first layer after which rows are dropped, the recorded full prefill is that prefill. The
recorded q, k, v of later layers depend on the dropped rows, so these layers are recomputed: from
the residual stream at the propagated rows, with the model's weights, each row at its own position
(at new positions if a propagation restarts). Further drops and retained sets follow from the
recomputed layers. The outcome is that of a live prefill; decoding is not part of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import polars as pl
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvsim.analysis.table import COLUMNS
from kvsim.core.checks import DTYPES, relative_error, tolerance
from kvsim.core.policy import Policy, PolicyLike
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.core.view import Setting, View
from kvsim.engine import replay
from kvsim.engine.block import Block
from kvsim.engine.depth import Look, descend, prompt_view, recorded
from kvsim.engine.replay import placed, setting_of
from kvsim.engine.source import TraceSource, projections
from kvsim.errors import CaptureError, PolicyError
from kvsim.policies import as_policy
from kvsim.recorder.provenance import describe_model
from kvsim.runner.decoder import ComputedLayer, Decoder
from kvsim.runner.recorded import check_model, relative_change
from kvsim.schema import object_at
from kvsim.store.opening import TraceLike, as_trace


@dataclass(frozen=True, eq=False)
class Recomputed:
    """A prefill recomputed after its first selection, compared with the full prefill.

    record: the caches after the prefill. layers: the recomputed layers by number.
    residual_error: by layer, |h' - h| / |h| of its output h for each of its rows, [k].
    output_error: by layer, |o' - o| / |o| of the attention output o, [qhead, k].
    logits, full_logits: of the first token, [V], after this prefill and after the full prefill.
    check: the largest relative error of what must equal the recording: each recomputed layer on the
    first rows of the prompt, which see no dropped row, and the first such layer on all its rows.
    """

    record: Record
    layers: Mapping[int, ComputedLayer]
    residual_error: Mapping[int, Tensor]
    output_error: Mapping[int, Tensor]
    logits: Tensor
    full_logits: Tensor
    check: float

    @property
    def kl(self) -> float:
        """Kullback-Leibler divergence of the first token from the full prefill, in nats."""
        full, dropped = (x.double().log_softmax(-1) for x in (self.full_logits, self.logits))
        return max(0.0, float((full.exp() * (full - dropped)).sum()))

    @property
    def same_token(self) -> bool:
        """Whether the most likely first token is that of the full prefill."""
        return int(self.logits.argmax()) == int(self.full_logits.argmax())

    def table(self) -> pl.DataFrame:
        """Return the numbers as a Table (see `kvsim.measure`), fidelity `semi`; means over rows."""
        rows: list[dict[str, Any]] = [
            {"metric": "residual_error", "layer": layer, "value": float(error.mean())}
            for layer, error in self.residual_error.items()
        ]
        rows += [
            {"metric": "prompt_output_error", "layer": layer, "qhead": head, "value": value}
            for layer, errors in self.output_error.items()
            for head, value in enumerate(errors.mean(-1).tolist())
        ]
        rows = [{**row, "unit": "relative"} for row in rows]
        same = float(self.same_token)
        rows.append({"metric": "first_token_kl", "value": self.kl, "unit": "nats"})
        rows.append({"metric": "first_token_same", "value": same, "unit": "share"})
        names = ("trace", "policy", "budget", "share", "interval", "prefill")
        origin = {name: getattr(self.record, name) for name in names}
        params = json.dumps(dict(self.record.params))
        origin |= {"params": params, "variant": "", "fidelity": "semi"}
        return pl.DataFrame([{**origin, **row} for row in rows], schema=COLUMNS)


def recompute(
    trace: TraceLike,
    policy: PolicyLike,
    budget: int | str,
    model: PreTrainedModel,
    *,
    memory: int | None = None,
) -> Recomputed:
    """Recompute the prefill of `policy` at `budget` after its first selection.

    Args:
        trace: with the residual stream (`kvsim capture --residual`).
        policy: one that drops rows of the prompt.
        budget: entries per KV head, or a share such as `25%`.
        model: the recorded model.
        memory: bytes for queries, keys, values and outputs of the propagated rows.

    Raises:
        PolicyError: a policy that propagates all rows, or keeps sets per query head.
        NeedsError: a trace without the residual stream.
        CaptureError: another model than the recorded one, or a family whose layers cannot be run.
        BudgetError, MemoryLimitError: as `kvsim.replay`.
    """
    trace, policy = as_trace(trace), as_policy(policy)
    if policy.propagation is None or policy.per_query_head:
        raise PolicyError(
            f"{policy.name} propagates all rows or keeps sets per query head; expected a policy "
            "that drops rows of the prompt between layers, with sets per KV head; try asl or fastkv"
        )
    trace.read("residual", slice(0, 0))  # raises NeedsError if it is missing
    check_model(trace, describe_model(model))
    schedule = replace(policy.schedule, interval=None)
    base = replay(trace, replace(policy, schedule=schedule), budget, memory=memory)
    setting = setting_of(trace, policy, base.budget, schedule, trace.prompt_len)
    down = _Descending(trace, Decoder(model), setting)
    remark = base.remark
    if down.narrow:
        note = "the residual stream is stored in float16, so a live prefill may select other rows"
        remark = f"{remark}\n{note}" if remark else note
    with torch.inference_mode():
        descent = descend(policy.propagation, trace.n_layers, trace.prompt_len, down.look)
        for layer, rows in enumerate(descent.rows):
            if rows is not None:
                down.layer(layer, rows, restarted=policy.propagation.restarts)
                down.verify_weights(layer)
        evicted_at = base.evicted_at.copy()
        for layer, computed in down.computed.items():
            at = computed.rows.numpy()
            source = computed.source(trace, layer)
            cached = _cached(source, policy, setting, layer, prefill=schedule.prefill)
            evicted_at[layer, :, : trace.prompt_len] = placed(cached, at, trace.prompt_len)
        record = replace(
            base, evicted_at=evicted_at, selection=descent.selection, recomputed=True, remark=remark
        )
        return _compare_with_full(trace, down, record)


#: Rows of the prompt on which every recomputed layer is compared with the recording.
_CHECKED = 64


class _Descending:
    """Recorded layers until rows are dropped, and recomputed layers after that."""

    def __init__(self, trace: Trace, decoder: Decoder, setting: Setting) -> None:
        self.trace, self.decoder, self.setting = trace, decoder, setting
        self.computed: dict[int, ComputedLayer] = {}
        self.check = 0.0
        self._recorded: Look = recorded(trace, setting, torch.device("cpu"))

    def look(self, layer: int, rows: Tensor | None) -> View:
        if rows is None:
            return self._recorded(layer, None)
        source = self.layer(layer, rows).source(self.trace, layer)
        return prompt_view(source, self.setting, layer, len(rows))

    def layer(self, layer: int, rows: Tensor, *, restarted: bool = False) -> ComputedLayer:
        """Compute a layer on some rows from the previous layer; each layer once, in order."""
        if layer not in self.computed:
            previous = self.computed.get(layer - 1)
            if previous is None:
                hidden = self.residual(layer)[rows]
            else:
                hidden = previous.out[torch.searchsorted(previous.rows, rows)]
            positions = torch.arange(len(rows)) if restarted else rows
            computed = self._run(layer, hidden, rows, positions)
            if previous is None:
                self._verify(layer, computed, restarted=restarted)
            self.computed[layer] = computed
        return self.computed[layer]

    def residual(self, layer: int) -> Tensor:
        """Return the recorded input of a layer for the rows of the prompt, [P, D]."""
        prompt = slice(0, self.trace.prompt_len)
        return self.trace.read("residual", slice(layer, layer + 1), prompt)[0]

    def _run(self, layer: int, hidden: Tensor, rows: Tensor, positions: Tensor) -> ComputedLayer:
        call, output = self.decoder.run(layer, hidden, positions)
        tensors = (call.q, call.k, call.v, call.attn_out, output)
        q, k, v, attn_out, out = (x.to("cpu", self.trace.dtype) for x in tensors)
        projection = partial(projections, self.trace, slice(layer, layer + 1))
        return ComputedLayer(rows, positions, q, k, v, attn_out, out, projection)

    def _verify(self, layer: int, computed: ComputedLayer, *, restarted: bool) -> None:
        """Compare q, k and v of the first computed layer, whose input is the recorded one."""
        self._compare_arrays(("v",) if restarted else ("q", "k", "v"), layer, computed)

    def verify_weights(self, layer: int) -> None:
        """Compare a layer on the first rows of the prompt with the recording, to check its weights.

        The output of the last layer is not recorded; its q, k, v and attention are compared.
        """
        at = torch.arange(min(self.trace.prompt_len, _CHECKED))
        computed = self._run(layer, self.residual(layer)[at], at, at)
        self._compare_arrays(("q", "k", "v", "attn_out"), layer, computed)
        if layer + 1 < self.trace.n_layers:
            stored = self.residual(layer + 1)[at]
            self._compare(f"the output of layer {layer}", computed.out[None], stored[None])

    def _compare_arrays(self, names: Sequence[str], layer: int, computed: ComputedLayer) -> None:
        here = slice(layer, layer + 1), slice(0, int(computed.rows[-1]) + 1)
        for name in filter(self.trace.has, names):
            stored = self.trace.read(name, *here)[0][:, computed.rows]
            self._compare(f"{name} of layer {layer}", getattr(computed, name), stored)

    def _compare(self, label: str, computed: Tensor, stored: Tensor) -> None:
        error = float(relative_error(computed, stored).max())
        self.check = max(self.check, error)
        allowed = self._allowed
        if not error <= allowed:
            raise CaptureError(
                f"{label}, computed from the recorded residual stream, differs by {error:.3g} "
                f"(relative) from the recorded one, expected at most {allowed:g}; give the model "
                f"that {self.trace.name} was recorded from"
            )

    @cached_property
    def _allowed(self) -> float:
        """The tolerance for rounding by the model and by storage."""
        names = [name for name in ("q", "v", "residual") if self.trace.has(name)]
        source = [self.trace.source_dtypes.get(name, "float32") for name in names]
        return tolerance(*map(self._stored_dtype, names), *source)

    @property
    def narrow(self) -> bool:
        """Whether the residual stream is stored in less than the precision of the model."""
        stored = self._stored_dtype("residual")
        return tolerance(stored) > tolerance(self.trace.source_dtypes.get("residual", stored))

    def _stored_dtype(self, name: str) -> str:
        return DTYPES[self.trace.source.read(name, slice(0, 1), slice(0, 1)).dtype]


def _cached(
    source: TraceSource, policy: Policy, setting: Setting, layer: int, *, prefill: bool
) -> Any:
    """Return evicted_at [1, H, k] after the prefill event, by row of the layer."""
    setting = replace(setting, prompt_len=source.n_rows)
    block = Block(source, policy, setting, torch.tensor([layer]))
    if prefill:
        block.event(source.n_rows - 1)
    return block.evicted_at.numpy()


def _compare_with_full(trace: Trace, down: _Descending, record: Record) -> Recomputed:
    last = trace.n_layers - 1
    everything = torch.arange(trace.prompt_len)
    _, full_out = down.decoder.run(last, down.residual(last), everything)
    full_logits = down.decoder.logits(full_out[-1], trace.prompt_len - 1)
    _check_token(trace, full_logits)
    full_out = full_out.to("cpu", trace.dtype)
    residual_error, output_error = {}, {}
    for layer, computed in down.computed.items():
        full = full_out if layer == last else down.residual(layer + 1)
        residual_error[layer] = relative_change(computed.out, full[computed.rows])
        stored = trace.full(slice(layer, layer + 1))[0][0][:, computed.rows]
        output_error[layer] = relative_change(computed.attn_out, stored)
    logits = full_logits
    if last in down.computed:
        model = down.decoder.model
        hidden = down.computed[last].out[-1].to(model.device, model.dtype)
        logits = down.decoder.logits(hidden, trace.prompt_len - 1)
    return Recomputed(
        record=record,
        layers=down.computed,
        residual_error=residual_error,
        output_error=output_error,
        logits=logits.cpu(),
        full_logits=full_logits.cpu(),
        check=down.check,
    )


def _check_token(trace: Trace, logits: Tensor) -> None:
    """Raise CaptureError if a greedy response begins with another token than the full prefill."""
    greedy = object_at(trace.meta, "generation").get("temperature") == 0
    if not greedy or not trace.has("tokens") or trace.n_pos == trace.prompt_len:
        return
    recorded_token = int(trace.read("tokens")[trace.prompt_len])
    # a near-tie may go either way
    behind = float(logits.max() - logits[recorded_token]) / float(logits.abs().max())
    if behind > tolerance(DTYPES[trace.dtype]) + tolerance(trace.source_dtypes.get("q", "float32")):
        raise CaptureError(
            f"the first token of the model is {int(logits.argmax())}, expected {recorded_token} as "
            f"in the recorded response; give the model that {trace.name} was recorded from"
        )
