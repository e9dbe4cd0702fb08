"""Cost of a policy on a model at a context: memory, time and FLOPs, with all assumptions.

Prefill time is proportional to FLOPs, time per output token to the bytes that are read: ratios to
the full cache (docs/cost.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from kvsim.core.arguments import in_entries
from kvsim.core.pieces import ACROSS_LAYERS, BOUNDED, Run
from kvsim.core.policy import Policy
from kvsim.core.propagation import Forecast
from kvsim.core.record import binds
from kvsim.core.trace import Trace
from kvsim.engine.checks import check_budget
from kvsim.engine.replay import replay
from kvsim.errors import PolicyError
from kvsim.policies.kvzip import chunk_lengths
from kvsim.schema import plural
from kvsim.studies.cost.flops import Event, flops_of, pieces_of
from kvsim.studies.cost.model import Model

#: Bytes of a number that a policy carries with each entry.
COLUMN_BYTES = 4


@dataclass(frozen=True)
class Cost:
    """Cost of a policy; sequences have one value per layer, entries are of one KV head.

    Counts (rows, entries, bytes, FLOPs) are `exact`: they follow from sizes, and from a selection
    layer, whose source is in `selection` and `assumptions`. The ratios of times are a model, FLOPs
    or bytes relative to the full cache, and not measured.

    rows: of the prompt that each layer computes, over both passes where there are two. entries:
    after an event. peak: before the next one, or at the end of the context without one. mean: reads
    of a generated token, on average between two events, or at the end of the context. bounded:
    whether the budget has an effect. selection_layer: None where there is none, or where a trace
    never selects; selection: its source, None for policies and prompts without one. Bytes and FLOPs
    have these units in their names; scoring is in FLOPs of products, None where a piece of the
    policy is unknown. assumptions: sentences.
    """

    model: Model = field(repr=False)
    policy: Policy
    budget: int
    context: int
    prompt: int
    bounded: bool
    selection_layer: float | None
    selection: str | None
    rows: tuple[float, ...] = field(repr=False)
    entries: tuple[float, ...] = field(repr=False)
    peak: tuple[float, ...] = field(repr=False)
    mean: tuple[float, ...] = field(repr=False)
    prefill_ratio: float
    decode_ratio: float
    position_bytes: float  # of one position in all KV heads of a layer
    kv_bytes: float
    kv_peak_bytes: float
    kv_full_bytes: float
    score_bytes: float
    decode_flops: float
    scoring_prompt: float | None
    scoring_event: float | None
    assumptions: tuple[str, ...]

    fidelity: ClassVar[str] = "exact"

    @property
    def kv_ratio(self) -> float:
        """Cache after an event, as a share of the full one."""
        return self.kv_bytes / self.kv_full_bytes

    @property
    def scoring_prompt_share(self) -> float | None:
        """FLOPs of scoring the prompt, relative to a prefill without any policy."""
        if self.scoring_prompt is None:
            return None
        return self.scoring_prompt / self.model.prefill_flops(self.prompt)

    @property
    def scoring_token_share(self) -> float | None:
        """FLOPs of scoring per generated token, relative to the FLOPs of the token."""
        if self.scoring_event is None:
            return None
        return self.scoring_event / (self.policy.schedule.interval or 1) / self.decode_flops

    def as_dict(self) -> dict[str, Any]:
        """Return all fields but the model, ready for JSON."""
        plain, schedule = bool | int | float | dict | None, self.policy.schedule
        params = self.policy.params.items()
        out = {name: value for name, value in vars(self).items() if name != "model"} | {
            "policy": self.policy.name,
            "params": {key: x if isinstance(x, plain) else str(x) for key, x in params},
            "interval": schedule.interval,
            "prefill": schedule.prefill,
            "kv_bytes_per_layer": [n * self.position_bytes for n in self.entries],
        }
        shares = "kv_ratio", "scoring_prompt_share", "scoring_token_share"
        return out | {name: getattr(self, name) for name in ("fidelity", *shares)}


def estimate(
    model: Model,
    policy: Policy,
    budget: int,
    context: int,
    *,
    prompt: int | None = None,
    selection_layer: float | None = None,
    trace: Trace | None = None,
) -> Cost:
    """Return the cost of `policy` on `model` at `budget` entries per KV head and `context` tokens.

    prompt: tokens of the context that are its prompt, all by default. selection_layer: of a policy
    that drops rows between layers, also a mean such as 23.9, which interpolates between neighbours;
    by default fixed by the policy, measured on `trace`, or assumed. Raises BudgetError and
    PolicyError as a replay would.
    """
    prompt, budget = context if prompt is None else prompt, in_entries(budget)
    policy = policy.at(budget)
    _check(policy, model, budget, context, prompt)
    layer, source, remarks = _selection(policy, model, budget, prompt, selection_layer, trace)
    last = model.n_layers - 1 if layer is None else layer
    parts = [
        (weight, _case(model, policy, budget, context, prompt, at))
        for at, weight in ((math.floor(last), 1 - last % 1), (math.ceil(last), last % 1))
        if weight
    ]
    mixed: list[Any] = [sum(weight * case[i] for weight, case in parts) for i in range(4)]
    layers, time, *scoring = mixed
    n_heads = model.n_qheads if policy.per_query_head else model.n_heads
    position_bytes, full = n_heads * model.entry_bytes, model.kv_bytes(context)
    rows, entries, peak, mean = (tuple(column) for column in layers.T.tolist())
    pieces = [*pieces_of(policy), *filter(None, [policy.propagation])]
    event = Event(model, context, context, 1, budget)
    missing = {type(x).__name__: None for x in pieces if flops_of(x, event) is None}
    scoring_prompt, scoring_event = (None, None) if missing else scoring
    return Cost(
        model=model,
        policy=policy,
        budget=budget,
        context=context,
        prompt=prompt,
        bounded=binds(policy),
        selection_layer=layer,
        selection=source,
        rows=rows,
        entries=entries,
        peak=peak,
        mean=mean,
        prefill_ratio=time,
        decode_ratio=decode_ratio(model, sum(mean) * position_bytes, full),
        position_bytes=position_bytes,
        kv_bytes=sum(entries) * position_bytes,
        kv_peak_bytes=sum(peak) * position_bytes,
        kv_full_bytes=full,
        score_bytes=len(policy.columns) * n_heads * sum(peak) * COLUMN_BYTES,
        decode_flops=model.decode_flops(sum(mean) / model.n_layers),
        scoring_prompt=scoring_prompt,
        scoring_event=scoring_event,
        assumptions=(
            *model.remarks,
            *remarks,
            *(f"{policy.name}: {x}" for x in _remarks(policy, model, budget, prompt)),
            *(
                f"{policy.name}: FLOPs of scoring are unknown, because there is no formula for {x}"
                for x in missing
            ),
        ),
    )


def decode_ratio(model: Model, kv: float, full: float) -> float:
    """Time per output token: (weights + cache) / (weights + full cache), in bytes."""
    return (model.read_bytes + kv) / (model.read_bytes + full)


def _check(policy: Policy, model: Model, budget: int, context: int, prompt: int) -> None:
    """Raise the errors of a replay; a budget that never binds needs no rule."""
    if not 1 <= prompt <= context:
        raise PolicyError(
            f"prompt is {prompt} tokens of a context of {context}; expected 1 to {context}"
        )
    if policy.sparse is not None or policy.storage is not None:
        raise PolicyError(
            f"{policy.name}: the cost model counts entries that are stored as computed and read by "
            "every row; expected a plain eviction; `kvsim replay --metric bytes_held,bytes_read` "
            "measures other ways to read and store"
        )
    if policy.propagation is not None:
        policy.propagation.check(Run(model.n_layers))
    if budget < context:
        check_budget(policy, budget, prompt_len=prompt, n_pos=context, n_layers=model.n_layers)


def _selection(
    policy: Policy, model: Model, budget: int, prompt: int, given: float | None, trace: Trace | None
) -> tuple[float | None, str | None, list[str]]:
    """The selection layer (given, policy's, trace's or the literature's), source and remarks."""
    name, piece, last = policy.name, policy.propagation, model.n_layers - 1
    expected = Forecast(()) if piece is None else piece.forecast(budget, prompt, model.n_layers)
    layer = None if expected.whole else expected.layer
    if layer is None:
        why = f"on a prompt of {prompt} tokens at a budget of {budget}"
        idle = f"{name}: selection layer {given} is without effect {why}"
        return None, None, [] if given is None else [idle]
    if given is not None and not 0 <= given <= last:
        raise PolicyError(f"{name}: selection layer is {given:g}; expected 0..{last}")
    if given is not None:
        return given, "given", []
    if not expected.source:
        return layer, "the policy's", []
    if trace is not None and trace.n_layers != model.n_layers:
        raise PolicyError(
            f"{name}: trace {trace.name} has {trace.n_layers} layers and {model.name} has "
            f"{model.n_layers}; expected a trace of this model, to measure the selection layer on"
        )
    if trace is not None and trace.prompt_len > budget:
        found, remarks = replay(trace, policy, budget).selection, []
        measured = None if found is None else found.layer
        if measured is None:
            remarks.append(
                f"{name}: never selects on {trace.name}, so every layer computes the whole prompt"
            )
        return measured, f"measured on {trace.name}", remarks
    assumed = (
        f"{name}: selection layer {layer:.1f} of {model.n_layers} is assumed, {expected.source}; "
        "it depends on the text, measure it on a trace whose prompt is longer than the budget"
    )
    return layer, "assumed", [assumed]


def _case(
    model: Model, policy: Policy, budget: int, context: int, prompt: int, layer: int
) -> tuple[Any, float, float, float]:
    """A prefill and its decoding where rows are dropped after `layer`.

    Rows, entries, peak and mean of each layer, an array [L, 4]; the time of the prefill, relative
    to that of all layers over all rows; FLOPs of scoring the prompt, and an event in decoding.
    """
    piece, n_layers = policy.propagation, model.n_layers
    found = Forecast([prompt] * n_layers)
    if piece is not None:
        found = piece.forecast(budget, prompt, n_layers, layer)
    last, first = found.rows, found.first
    rows = [n + sum(first[at : at + 1]) for at, n in enumerate(last)]
    time = sum(map(model.layer_flops, [*first, *last])) / (n_layers * model.layer_flops(prompt))
    # layers whose caches are never cut
    alone, before = piece and piece.caches != "chosen", piece and piece.kv_before == "full"
    uncut = [bool(alone or (before and at <= layer)) for at in range(n_layers)]
    later = context - prompt
    budgets = _layer_budgets(policy, budget, context, prompt, n_layers)
    held = np.array(
        [_sizes(policy, later, *each) for each in zip(last, uncut, budgets, strict=True)]
    )
    if policy.allocator.effect == "some":  # the other heads hold everything
        bound = np.array(
            [_sizes(policy, later, *each, budget) for each in zip(last, uncut, strict=True)]
        )
        share = _bound_shares(policy.allocator, n_layers)
        held = share * bound + (1 - share) * held

    scoring = decoding = 0.0
    interval, always = policy.schedule.interval, policy.allocator.effect == "rule"
    at_events = model.per_query_head() if policy.per_query_head else model
    for at in found.scored:
        event = Event(model, (first or last)[at], prompt, prompt, budget, prompt=True)
        scoring += flops_of(piece, event) or 0
    for n, cut, size, (kept, _, mean) in zip(last, uncut, budgets, held.tolist(), strict=True):
        if policy.schedule.prefill and (n > size or always) and not cut:
            event = Event(at_events, n, n, n, size, prompt=True, later=later)
            scoring += _scoring(policy, event)
        full = kept == size < context
        if interval is not None and (full or always) and not cut:
            # half of the generated tokens are still to come, for the clairvoyant
            seen = kept + interval if full else mean
            event = Event(at_events, seen, context, interval, size, later=later / 2)
            decoding += _scoring(policy, event)
    return np.column_stack([rows, held]), time, scoring, decoding


def _scoring(policy: Policy, event: Event) -> float:
    """FLOPs of all pieces at an event; unknown pieces count 0."""
    return sum(flops_of(piece, event) or 0 for piece in pieces_of(policy))


def _bound_shares(allocator: Any, n_layers: int) -> Any:
    """The share of each layer's heads that the budget bounds by a plan, [L, 1]."""
    if (layers := len(allocator.retrieval)) != n_layers:
        raise PolicyError(
            f"duo: {allocator.file} is a plan of {plural(layers, 'layer')}, the model has "
            f"{n_layers}; give a plan of the same model"
        )
    return 1 - allocator.retrieval.double().mean(1, keepdim=True).numpy()


def _layer_budgets(
    policy: Policy, budget: int, context: int, prompt: int, n_layers: int
) -> Sequence[int]:
    """Entries that each layer is cut to; the context where nothing is evicted."""
    schedule, sizing = policy.schedule, policy.layer_budgets
    size = sizing.unbounded_size(prompt, context)
    never = schedule.interval is None and not schedule.prefill
    if size is None and (never or not {policy.allocator.effect, sizing.effect} <= {*BOUNDED}):
        size = context
    if size is not None:
        return [size] * n_layers
    planned = [*sizing.planned(budget, n_layers, schedule.longest(prompt, budget, context))]
    return planned if len(planned) == n_layers else planned * n_layers


def _sizes(policy: Policy, later: int, rows: int, uncut: bool, budget: int) -> tuple[float, ...]:
    """`entries`, `peak` and `mean` of a head in a layer whose heads are cut to a budget."""
    interval, end = policy.schedule.interval, rows + later  # if nothing is evicted
    if uncut or interval is None:
        after = rows if uncut else min(budget, rows)
        return after, after + later, after + later
    after = min(budget, end)
    return after, min(end, after + interval), min(end, after + (interval + 1) / 2)


def _remarks(policy: Policy, model: Model, budget: int, prompt: int) -> Iterator[str]:
    interval = policy.schedule.interval
    if not binds(policy):
        size = ""
        if policy.allocator.effect == "rule":
            size = "; its size depends on the text, so the full cache is counted"
        yield f"no budget binds{size}"
    elif interval is not None and not policy.schedule.prefill and prompt > budget:
        yield (
            f"the prompt stays whole until the first event, {interval} generated tokens later; "
            "sizes are those after that event"
        )
    near = "near" in (policy.allocator.effect, policy.layer_budgets.effect)
    if policy.bounded and near:
        yield "holds about as many entries as the budget, which is counted"
    if {policy.layer_budgets.shared, policy.allocator.shared} & {*ACROSS_LAYERS}:
        yield "layers share a budget; an equal share is counted"
    if policy.reads.context_again:
        pairs = sum(n * prompt + n * (n + 1) / 2 for n in chunk_lengths(prompt))
        again = model.n_layers * (2 * prompt * model.layer_matrices + model.attention_flops(pairs))
        yield (
            f"before it evicts, the model repeats the prompt; these {again:.3g} FLOPs are not "
            f"counted; the prefill takes {model.prefill_flops(prompt):.3g}"
        )
    if policy.per_query_head:
        yield "keeps a set for each query head, which a grouped cache cannot store"
