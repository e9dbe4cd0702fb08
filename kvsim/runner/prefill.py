"""A prefill that drops rows, computed behind its first selection from the recorded residual stream.

Up to the first layer after which rows are dropped a recorded full prefill is that prefill. Behind
it the recorded q, k, v have seen the dropped rows, so the layers are computed again: from the
residual stream at the rows that go on, with the model's weights, each row at its own position (at
new ones where a propagation restarts). What is decided there, further drops and what caches keep,
is decided from what is computed. The outcome is that of a live prefill; decoding is not part of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import polars as pl
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvsim.analysis.table import COLUMNS
from kvsim.core.policy import Policy
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.core.view import Setting, View
from kvsim.engine import replay
from kvsim.engine.block import Block
from kvsim.engine.depth import Look, descend, prompt_view, recorded
from kvsim.engine.replay import placed, setting_of
from kvsim.errors import CaptureError, PolicyError
from kvsim.recorder.models import describe_model
from kvsim.runner.decoder import Computed, Decoder
from kvsim.store.checks import DTYPES, relative_error, tolerance


@dataclass(frozen=True, eq=False)
class Recomputed:
    """A prefill behind its first selection, beside the full one.

    record: what the caches hold after the prefill. layers: the computed ones by number.
    residual_error: by layer, |h' - h| / |h| of its output h for each of its rows, [k].
    output_error: by layer, |o' - o| / |o| of the attention output o, [qhead, k].
    logits, full_logits: of the first token, [V], after this prefill and after the full one.
    check: largest relative error of what must equal the recording: each computed layer on the
    first rows of the prompt, which see no row that was dropped, and the first one on all its rows.
    """

    record: Record
    layers: Mapping[int, Computed]
    residual_error: Mapping[int, Tensor]
    output_error: Mapping[int, Tensor]
    logits: Tensor
    full_logits: Tensor
    check: float

    @property
    def kl(self) -> float:
        """Kullback-Leibler divergence of the first token's distribution from the full one, nats."""
        full, mine = (x.double().log_softmax(-1) for x in (self.full_logits, self.logits))
        return max(0.0, float((full.exp() * (full - mine)).sum()))

    @property
    def same_token(self) -> bool:
        """Whether the most likely first token is that of the full prefill."""
        return int(self.logits.argmax()) == int(self.full_logits.argmax())

    def table(self) -> pl.DataFrame:
        """The numbers as a Table (see `kvsim.measure`), fidelity `semi`; means over rows."""
        rows: list[dict[str, Any]] = []
        for layer, error in self.residual_error.items():
            rows.append({"metric": "residual_error", "layer": layer, "value": float(error.mean())})
        for layer, errors in self.output_error.items():
            rows += [
                {"metric": "prompt_output_error", "layer": layer, "qhead": head, "value": value}
                for head, value in enumerate(errors.mean(-1).tolist())
            ]
        for one in rows:
            one["unit"] = "relative"
        rows.append({"metric": "first_token_kl", "value": self.kl, "unit": "nats"})
        rows.append(
            {"metric": "first_token_same", "value": float(self.same_token), "unit": "share"}
        )
        record = self.record
        origin = {
            "trace": record.trace,
            "policy": record.policy,
            "params": json.dumps(dict(record.params)),
            "budget": record.budget,
            "share": record.share,
            "interval": record.interval,
            "prefill": record.prefill,
            "variant": "",
            "fidelity": "semi",
        }
        return pl.DataFrame([{**origin, **one} for one in rows], schema=COLUMNS)


def recompute(
    trace: Trace, policy: Policy, budget: int, model: PreTrainedModel, *, memory: int | None = None
) -> Recomputed:
    """The prefill of `policy` at `budget`, with the layers behind its first selection computed.

    The trace must hold the residual stream (`kvsim capture --residual`), and `model` must be the
    one that was recorded. Memory: queries, keys, values and outputs of the rows that go on.

    Raises:
        PolicyError: a policy that drops no rows on the way down, or keeps sets per query head.
        NeedsError: a trace without the residual stream.
        CaptureError: another model than the recorded one, or a family whose layers cannot be run.
        BudgetError, MemoryLimitError: as `kvsim.replay`.
    """
    if policy.propagation is None or policy.per_query_head:
        raise PolicyError(
            f"{policy.name}: expected a policy that drops rows of the prompt on the way down, such "
            "as asl or fastkv, with one set per KV head; all layers of another see the whole prompt"
        )
    trace.read("residual", slice(0, 0))  # says how it is recorded if it is missing
    _check_model(trace, model)
    schedule = replace(policy.schedule, interval=None)
    base = replay(trace, replace(policy, schedule=schedule), budget, memory=memory)
    setting = setting_of(trace, policy, base.budget, schedule)
    down = _Descending(trace, Decoder(model), setting)
    remark = base.remark
    if down.narrow:
        said = "the residual stream is stored in float16, so a live prefill may choose otherwise"
        remark = f"{remark}; {said}" if remark else said
    with torch.inference_mode():
        descent = descend(policy.propagation, trace.n_layers, trace.prompt_len, down.look)
        for layer, rows in enumerate(descent.rows):
            if rows is not None:
                down.layer(layer, rows, restarted=policy.propagation.restarts)
                down.verify_weights(layer)
        evicted_at = base.evicted_at.copy()
        for layer, computed in down.computed.items():
            at = computed.rows.numpy()
            found = _cached(computed, policy, setting, layer, prefill=schedule.prefill)
            evicted_at[layer, :, : trace.prompt_len] = placed(found, at, trace.prompt_len)
        record = replace(
            base,
            evicted_at=evicted_at,
            selection=descent.selection,
            recomputed=True,
            remark=remark,
        )
        return _beside_full(trace, down, record)


# Of a configuration: what says how a copy was made and not what it computes; the precision is
# compared by itself.
_ASIDE = ("dtype", "architectures")

#: Rows of the prompt on which every computed layer is compared with the recording.
_CHECKED = 64


def _check_model(trace: Trace, model: PreTrainedModel) -> None:
    """Raise CaptureError unless configuration and precision are those of the recorded model."""
    known = trace.meta.get("model", {})
    found, expected = describe_model(model), known.get("config")
    if expected is None:
        return
    mine = found["config"]
    keys = sorted((set(mine) | set(expected)) - set(_ASIDE))
    other = [key for key in keys if mine.get(key) != expected.get(key)]
    if other:
        raise CaptureError(
            f"the model {found['name']} differs from the recorded {known.get('name')} in "
            f"{', '.join(other)} of its configuration; give the model that {trace.name} was "
            "recorded from"
        )
    if found["dtype"] != known.get("dtype", found["dtype"]):
        raise CaptureError(
            f"the model {found['name']} computes in {found['dtype']}, {trace.name} was recorded "
            f"in {known['dtype']}; load it in that precision"
        )


class _Descending:
    """Recorded layers until rows are dropped, and computed ones behind."""

    def __init__(self, trace: Trace, decoder: Decoder, setting: Setting) -> None:
        self.trace, self.decoder, self.setting = trace, decoder, setting
        self.computed: dict[int, Computed] = {}
        self.check = 0.0
        self._recorded: Look = recorded(trace, setting, torch.device("cpu"))

    def look(self, layer: int, rows: Tensor | None) -> View:
        """What a propagation sees."""
        if rows is None:
            return self._recorded(layer, None)
        return prompt_view(self.layer(layer, rows), self.setting, layer, len(rows))

    def layer(self, layer: int, rows: Tensor, *, restarted: bool = False) -> Computed:
        """A layer on some rows, computed on top of those above; each layer once, in order."""
        if layer not in self.computed:
            above = self.computed.get(layer - 1)
            if above is None:
                hidden = self.residual(layer)[rows]
            else:
                hidden = above.out[torch.searchsorted(above.rows, rows)]
            positions = torch.arange(len(rows)) if restarted else rows
            one = self._run(layer, hidden, rows, positions)
            if above is None:
                self._verify(layer, one, restarted=restarted)
            self.computed[layer] = one
        return self.computed[layer]

    def residual(self, layer: int) -> Tensor:
        """The recorded input of a layer for the rows of the prompt, [P, D]."""
        prompt = slice(0, self.trace.prompt_len)
        return self.trace.read("residual", slice(layer, layer + 1), prompt)[0]

    def _run(self, layer: int, hidden: Tensor, rows: Tensor, positions: Tensor) -> Computed:
        call, out = self.decoder.run(layer, hidden, positions)
        q, k, v, attn = (x.to("cpu", self.trace.dtype) for x in (call.q, call.k, call.v, call.out))
        return Computed(
            rows=rows,
            positions=positions,
            q=q,
            k=k,
            v=v,
            attn_out=attn,
            out=out.to("cpu", self.trace.dtype),
            rope=self.trace.rope,
            formula=self.trace.formulas[layer],
            projection=partial(self.trace.read, "o_proj", slice(layer, layer + 1)),
        )

    def _verify(self, layer: int, found: Computed, *, restarted: bool) -> None:
        """The first computed layer has the recorded input, so q, k and v are the recorded ones."""
        for name in ("v",) if restarted else ("q", "k", "v"):
            stored = self.trace.read(name, slice(layer, layer + 1))[0][:, found.rows]
            self._compare(f"{name} of layer {layer}", getattr(found, name), stored)

    def verify_weights(self, layer: int) -> None:
        """A layer on the first rows of the prompt gives what was recorded: these weights made it.

        Of the last layer the output is not recorded; its q, k, v and attention are compared.
        """
        at = torch.arange(min(self.trace.prompt_len, _CHECKED))
        one = self._run(layer, self.residual(layer)[at], at, at)
        here = slice(layer, layer + 1), slice(0, len(at))
        for name in ("q", "k", "v", "attn_out"):
            if self.trace.has(name):
                stored = self.trace.read(name, *here)[0]
                self._compare(f"{name} of layer {layer}", getattr(one, name), stored)
        if layer + 1 < self.trace.n_layers:
            stored = self.residual(layer + 1)[at]
            self._compare(f"the output of layer {layer}", one.out[None], stored[None])

    def _compare(self, what: str, found: Tensor, stored: Tensor) -> None:
        error = float(relative_error(found, stored).max())
        self.check = max(self.check, error)
        allowed = self._allowed
        if not error <= allowed:
            raise CaptureError(
                f"{what}, computed from the recorded residual stream, differs by {error:.3g} "
                f"(relative) from the recorded one, expected at most {allowed:g}; give the model "
                f"that {self.trace.name} was recorded from"
            )

    @cached_property
    def _allowed(self) -> float:
        """What rounding explains, of the model and of what was stored."""
        names = [name for name in ("q", "v", "residual") if self.trace.has(name)]
        one = slice(0, 1)
        stored = [DTYPES[self.trace.source.read(name, one, one).dtype] for name in names]
        made = [self.trace.source_dtypes.get(name, "float32") for name in names]
        return tolerance(*stored, *made)

    @property
    def narrow(self) -> bool:
        """Whether the residual stream was stored in less than the precision of the model."""
        one = slice(0, 1)
        stored = DTYPES[self.trace.source.read("residual", one, one).dtype]
        return tolerance(stored) > tolerance(self.trace.source_dtypes.get("residual", stored))


def _cached(
    computed: Computed, policy: Policy, setting: Setting, layer: int, *, prefill: bool
) -> Any:
    """evicted_at [1, H, k] of the event that ends the prefill, by row of the layer."""
    block = Block(
        computed,
        policy,
        replace(setting, prompt_len=computed.n_rows),
        torch.tensor([layer]),
    )
    if prefill:
        block.event(computed.n_rows - 1)
    return block.evicted_at.numpy()


def _beside_full(trace: Trace, down: _Descending, record: Record) -> Recomputed:
    """The computed layers compared with the recorded ones."""
    last = trace.n_layers - 1
    everything = torch.arange(trace.prompt_len)
    _, full_out = down.decoder.run(last, down.residual(last), everything)
    full_logits = down.decoder.logits(full_out[-1])
    _check_token(trace, full_logits)
    full_out = full_out.to("cpu", trace.dtype)
    moved, attended = {}, {}
    for layer, one in down.computed.items():
        full = full_out if layer == last else down.residual(layer + 1)
        moved[layer] = _relative(one.out, full[one.rows])
        stored = trace.full(slice(layer, layer + 1))[0][0][:, one.rows]
        attended[layer] = _relative(one.attn_out, stored)
    logits = full_logits
    if last in down.computed:
        model = down.decoder.model
        logits = down.decoder.logits(down.computed[last].out[-1].to(model.device, model.dtype))
    return Recomputed(
        record=record,
        layers=down.computed,
        residual_error=moved,
        output_error=attended,
        logits=logits.cpu(),
        full_logits=full_logits.cpu(),
        check=down.check,
    )


def _check_token(trace: Trace, logits: Tensor) -> None:
    """Raise CaptureError where a greedy response begins otherwise than the full prefill does."""
    greedy = trace.meta.get("generation", {}).get("temperature") == 0
    if not greedy or not trace.has("tokens") or trace.n_pos == trace.prompt_len:
        return
    recorded_token = int(trace.read("tokens")[trace.prompt_len])
    # a near-tie may go either way
    behind = float(logits.max() - logits[recorded_token]) / float(logits.abs().max())
    if behind > tolerance(DTYPES[trace.dtype]) + tolerance(trace.source_dtypes.get("q", "float32")):
        raise CaptureError(
            f"the first token of the recorded response is {recorded_token}, the model at hand "
            f"gives {int(logits.argmax())}; give the model that {trace.name} was recorded from"
        )


def _relative(found: Tensor, full: Tensor) -> Tensor:
    """|found - full| / |full| over the last axis."""
    gap, size = (torch.linalg.vector_norm(x, dim=-1) for x in (found - full, full))
    out: Tensor = gap / size
    return out
