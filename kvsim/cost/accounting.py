"""What a policy costs on a model at a context: memory, time and FLOPs, with what was assumed.

Prefill time is proportional to FLOPs, or to the paper's n^2 d + n d^2; time per output token to the
bytes that are read, or to entries. Both are ratios to the full cache. What the machine and its
kernels do beside that is not in them: docs/cost.md compares with measured ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvsim.core.policy import Everything, Policy
from kvsim.core.propagation import Selection
from kvsim.core.trace import Trace
from kvsim.cost.model import Model
from kvsim.cost.papers import asl_layer_time, asl_rank_cache_numbers, mask_bytes
from kvsim.cost.scoring import Event, Flops, event_flops, propagation_flops, unknown
from kvsim.engine import replay
from kvsim.errors import BudgetError, PolicyError
from kvsim.policies.asl import Selecting
from kvsim.policies.fastkv import FastKV
from kvsim.policies.gemfilter import GemFilter
from kvsim.policies.rpc import Growing

#: Mean selection layer of ASL by number of layers: Llama-3.1-8B-UL and Qwen2.5-7B on RULER at 128k
#: (arXiv 2601.07667, appendix B.1).
PUBLISHED_LAYERS: Mapping[int, float] = {32: 23.9, 28: 21.6}

#: The same as a share of the depth, (L_sel + 1) / L, the mean of both.
PUBLISHED_DEPTH = sum((at + 1) / n for n, at in PUBLISHED_LAYERS.items()) / len(PUBLISHED_LAYERS)

#: Bytes of a number that a policy carries with each entry, of an eviction time, and of a rank.
COLUMN_BYTES = TIME_BYTES = RANK_BYTES = 4


@dataclass(frozen=True)
class Cost:
    """What a policy costs; sequences have one value per layer, entries are of one KV head.

    What counts (rows, entries, bytes, FLOPs) is `exact` accounting: it follows from sizes, and from
    a selection layer, of which `selection` and `assumptions` say where it comes from. The ratios of
    times are a model, FLOPs or bytes relative to the full cache, and no measurement.

    rows: of the prompt that each layer computes, over both passes where there are two. entries:
    after an event. peak: before the next one, or at the end of the context where there is none.
    mean: what a generated token reads on average between two events, or at the end of the context.
    bounded: whether the budget plays a part. selection_layer: None where there is none, or where a
    trace never selects; selection: where it comes from, None for policies and prompts without.
    *_paper: in the terms of ASL's appendix B. Bytes and FLOPs say so in their names, scoring is in
    FLOPs, None where a piece of the policy is unknown. assumptions: sentences.
    """

    model: Model = field(repr=False)
    policy: str
    params: Mapping[str, Any]
    budget: int
    context: int
    prompt: int
    interval: int | None
    prefill: bool
    bounded: bool
    selection_layer: float | None
    selection: str | None
    # --- per layer
    rows: tuple[float, ...] = field(repr=False)
    entries: tuple[float, ...] = field(repr=False)
    peak: tuple[float, ...] = field(repr=False)
    mean: tuple[float, ...] = field(repr=False)
    # --- ratios to the full cache
    prefill_ratio: float
    prefill_ratio_paper: float
    decode_ratio: float
    decode_ratio_paper: float
    # --- bytes; of one position in all KV heads of a layer first
    position_bytes: float
    kv_bytes: float
    kv_peak_bytes: float
    kv_full_bytes: float
    score_bytes: float
    rank_bytes: float
    mask_bytes: int
    evicted_at_bytes: int
    # --- FLOPs
    prefill_flops: float
    decode_flops: float
    scoring_prompt: Flops | None
    scoring_event: Flops | None
    assumptions: tuple[str, ...]

    @property
    def fidelity(self) -> str:
        """Always `exact`, under the assumptions that are listed."""
        return "exact"

    @property
    def kv_ratio(self) -> float:
        """Cache after an event, as a share of the full one."""
        return self.kv_bytes / self.kv_full_bytes

    @property
    def kv_peak_ratio(self) -> float:
        """Cache before an event, as a share of the full one."""
        return self.kv_peak_bytes / self.kv_full_bytes

    @property
    def scoring_per_token(self) -> float | None:
        """FLOPs of scoring per generated token: those of an event over the rows between events."""
        if self.scoring_event is None:
            return None
        return self.scoring_event.total / (self.interval or 1)

    @property
    def scoring_prompt_share(self) -> float | None:
        """FLOPs of scoring the prompt, relative to those of a prefill without any policy."""
        if self.scoring_prompt is None:
            return None
        return self.scoring_prompt.total / self.model.prefill_flops(self.prompt)

    @property
    def scoring_token_share(self) -> float | None:
        """FLOPs of scoring per generated token, relative to those of the token."""
        each = self.scoring_per_token
        return None if each is None else each / self.decode_flops

    def as_dict(self) -> dict[str, Any]:
        """Everything but the model, ready for JSON."""
        out: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Flops):
                out[name] = {**vars(value), "total": value.total}
            elif name != "model":
                out[name] = list(value) if isinstance(value, tuple) else value
        out["params"] = {key: _plain(value) for key, value in self.params.items()}
        out["kv_bytes_per_layer"] = [n * self.position_bytes for n in self.entries]
        out["kv_peak_bytes_per_layer"] = [n * self.position_bytes for n in self.peak]
        names = (
            "fidelity",
            "kv_ratio",
            "kv_peak_ratio",
            "scoring_per_token",
            "scoring_prompt_share",
            "scoring_token_share",
        )
        return {**out, **{name: getattr(self, name) for name in names}}


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
    """What `policy` costs on `model` at `budget` entries per KV head and `context` tokens.

    prompt: tokens of the context that are its prompt, all by default. selection_layer: of a policy
    that drops rows on the way down, also a mean such as 23.9, between whose neighbours everything
    is interpolated; without one it is fixed by the policy, measured on `trace`, or assumed. Raises
    BudgetError and PolicyError as a replay would.
    """
    prompt = context if prompt is None else prompt
    _check(policy, model, budget, context, prompt)
    at, source, said = _selection(policy, model, budget, prompt, selection_layer, trace)
    cases = [
        _Case.of(model, policy, budget, context, prompt, layer=layer, weight=weight)
        for layer, weight in _around(at, model.n_layers)
    ]
    held = model.per_query_head() if policy.per_query_head else model
    position_bytes = held.n_heads * held.entry_bytes
    entries, peak, mean = (
        _mean(cases, of) for of in (lambda c: c.entries, lambda c: c.peak, lambda c: c.mean)
    )
    full = model.kv_bytes(context)
    known = not unknown(policy)
    return Cost(
        model=model,
        policy=policy.name,
        params=policy.params,
        budget=budget,
        context=context,
        prompt=prompt,
        interval=policy.schedule.interval,
        prefill=policy.schedule.prefill,
        bounded=bounded(policy),
        selection_layer=at,
        selection=source,
        rows=_mean(cases, lambda c: c.rows),
        entries=entries,
        peak=peak,
        mean=mean,
        prefill_ratio=sum(c.weight * c.time(model.layer_flops) for c in cases),
        prefill_ratio_paper=sum(
            c.weight * c.time(lambda n: asl_layer_time(n, model.dim)) for c in cases
        ),
        decode_ratio=decode_ratio(model, sum(mean) * position_bytes, full),
        decode_ratio_paper=sum(mean) / (model.n_layers * context),
        position_bytes=position_bytes,
        kv_bytes=sum(entries) * position_bytes,
        kv_peak_bytes=sum(peak) * position_bytes,
        kv_full_bytes=full,
        score_bytes=len(policy.columns) * held.n_heads * sum(peak) * COLUMN_BYTES,
        rank_bytes=_rank_bytes(policy, model, budget, prompt, at),
        mask_bytes=mask_bytes(model.n_layers, held.n_heads, context),
        evicted_at_bytes=model.n_layers * held.n_heads * context * TIME_BYTES,
        prefill_flops=sum(c.weight * c.prefill_flops(model) for c in cases),
        decode_flops=model.decode_flops(sum(mean) / model.n_layers),
        scoring_prompt=_total(c.prompt_scoring(policy, model) * c.weight for c in cases)
        if known
        else None,
        scoring_event=_total(c.event_scoring(policy, model) * c.weight for c in cases)
        if known
        else None,
        assumptions=(*model.remarks, *said, *_remarks(policy, model, budget, prompt)),
    )


def bounded(policy: Policy) -> bool:
    """Whether the budget plays a part, be it in some layers."""
    piece = policy.propagation
    return policy.bounded or (piece is not None and not piece.alone)


def decode_ratio(model: Model, kv: float, full: float, *, passes: float = 1) -> float:
    """Time per output token as bytes that are read: (weights + cache) / (weights + full cache).

    passes: how often a token's step moves the cache; 1 where attention reads it once.
    """
    return (model.weight_bytes + passes * kv) / (model.weight_bytes + passes * full)


def _total(parts: Iterator[Flops]) -> Flops:
    return sum(parts, Flops())


def _rank_bytes(
    policy: Policy, model: Model, budget: int, prompt: int, layer: float | None
) -> float:
    """Ranks of all layers up to the selection, as ASL's released code keeps them; all for none."""
    piece = policy.propagation
    if not isinstance(piece, Selecting) or prompt <= budget:
        return 0.0
    at = model.n_layers - 1 if layer is None else layer
    return asl_rank_cache_numbers(at, prompt, piece.window) * RANK_BYTES


# ------------------------------------------------------------------------ where rows are dropped


def no_selection(policy: Policy, budget: int, prompt: int) -> str:
    """Why there is no one layer behind which rows are dropped; empty where there is."""
    piece = policy.propagation
    if not isinstance(piece, FastKV | GemFilter | Selecting):
        return f"{policy.name} has no such layer"
    # FastKV drops rows of a prompt that just fills the budget, if it has more than its rows
    if prompt < budget or (prompt == budget and not isinstance(piece, FastKV)):
        return f"{policy.name} keeps a prompt of {prompt} tokens whole at a budget of {budget}"
    return ""


def _selection(
    policy: Policy,
    model: Model,
    budget: int,
    prompt: int,
    given: float | None,
    trace: Trace | None,
) -> tuple[float | None, str | None, list[str]]:
    """The layer behind which rows are dropped, where it comes from, and what to say of it."""
    piece, last = policy.propagation, model.n_layers - 1
    why = no_selection(policy, budget, prompt)
    if why and given is None:
        return None, None, []
    if why:
        return None, None, [f"{policy.name}: selection layer {given:g} is without effect; {why}"]
    if given is not None:
        if not 0 <= given <= last:
            raise PolicyError(f"{policy.name}: selection layer is {given:g}; expected 0..{last}")
        return given, "given", []
    if isinstance(piece, FastKV | GemFilter):
        return piece.at(model.n_layers), "the policy's", []
    if trace is not None and trace.n_layers != model.n_layers:
        raise PolicyError(
            f"{policy.name}: trace {trace.name} has {trace.n_layers} layers and {model.name} has "
            f"{model.n_layers}; expected a trace of this model, to measure the selection layer on"
        )
    found = None
    if trace is not None and trace.prompt_len > budget:
        found = replay(trace, policy, budget).selection
    if trace is not None and found is not None:
        return found.layer, f"measured on {trace.name}", [*_measured(policy, trace, prompt, found)]
    notes = []
    if trace is not None:
        notes.append(
            f"{policy.name}: no selection layer can be measured on {trace.name}, whose prompt of "
            f"{trace.prompt_len} tokens is within the budget"
        )
    known = PUBLISHED_LAYERS.get(model.n_layers)
    at = max(0.0, PUBLISHED_DEPTH * model.n_layers - 1) if known is None else known
    where = "as deep as the means" if known is None else "the mean"
    notes.append(
        f"{policy.name}: selection layer {at:.1f} of {model.n_layers} is assumed, {where} in ASL's "
        "appendix B.1 (RULER at 128k); it depends on the text, measure it on a trace"
    )
    return at, "assumed", notes


def _measured(policy: Policy, trace: Trace, prompt: int, found: Selection) -> Iterator[str]:
    """What to say of a selection that was measured."""
    name, piece = policy.name, policy.propagation
    if found.layer is None:
        yield f"{name}: never selects on {trace.name}, so every layer computes the whole prompt"
    elif isinstance(piece, Selecting) and piece.restarts:
        at_last = found.notes["relative_variance"][found.layer]
        if not at_last < piece.tau:
            yield f"{name}: no layer is below tau on {trace.name}, so the last one selects"
    if trace.prompt_len != prompt:
        yield (
            f"{name}: the selection is that of a prompt of {trace.prompt_len} tokens, and counted "
            f"is one of {prompt}"
        )


def _around(layer: float | None, n_layers: int) -> list[tuple[int, float]]:
    """The layers around a fractional one and their weights; the last one for none."""
    if layer is None:
        return [(n_layers - 1, 1.0)]
    below, part = math.floor(layer), layer - math.floor(layer)
    return [(below, 1 - part), (below + 1, part)] if part else [(below, 1.0)]


# --------------------------------------------------------------------------- one selection layer


@dataclass(frozen=True)
class _Case:
    """What happens where rows are dropped behind one layer, and how much the case weighs.

    first, last: rows of each layer in the first pass and in the last, which is the first one where
    nothing restarts. whole: layers whose cache is never cut. budgets, entries, peak, mean: of each
    layer, as in Cost.
    """

    weight: float
    layer: int
    budget: int
    prompt: int
    context: int
    first: Sequence[int]
    last: Sequence[int]
    whole: Sequence[bool]
    budgets: Sequence[int]
    entries: Sequence[float]
    peak: Sequence[float]
    mean: Sequence[float]

    @staticmethod
    def of(
        model: Model,
        policy: Policy,
        budget: int,
        context: int,
        prompt: int,
        *,
        layer: int,
        weight: float,
    ) -> _Case:
        n_layers, piece, interval = model.n_layers, policy.propagation, policy.schedule.interval
        last = [prompt] * n_layers
        if piece is not None:
            last = piece.counts(budget, prompt, n_layers, layer)
        twice = piece is not None and piece.restarts and prompt > budget
        alone = piece is not None and piece.alone
        before = piece is not None and piece.kv_before == "full"
        whole = [alone or (before and at <= layer) for at in range(n_layers)]
        budgets = _budgets(policy, n_layers, budget, context, prompt)
        entries: list[float] = []
        peak: list[float] = []
        mean: list[float] = []
        for rows, kept_whole, own in zip(last, whole, budgets, strict=True):
            most: float
            average: float
            held = rows + context - prompt  # at the end of the context, if nothing is evicted
            if kept_whole or interval is None:
                after = rows if kept_whole else min(own, rows)
                most = average = after + context - prompt
            else:
                after = min(own, held)
                most, average = min(held, after + interval), min(held, after + (interval + 1) / 2)
            entries.append(after)
            peak.append(most)
            mean.append(average)
        return _Case(
            weight=weight,
            layer=layer,
            budget=budget,
            prompt=prompt,
            context=context,
            first=[prompt] * (layer + 1) if twice else last,
            last=last,
            whole=whole,
            budgets=budgets,
            entries=entries,
            peak=peak,
            mean=mean,
        )

    @property
    def passes(self) -> list[int]:
        """Rows of every layer that is computed, those of a first pass too."""
        return [*self.last] if self.first is self.last else [*self.first, *self.last]

    @property
    def rows(self) -> list[int]:
        """The same, added up for each layer."""
        again = [0] * len(self.last) if self.first is self.last else self.first
        return [n + (again[at] if at < len(again) else 0) for at, n in enumerate(self.last)]

    def time(self, layer_time: Callable[[float], float]) -> float:
        """Prefill time relative to that of all layers over all rows."""
        return sum(map(layer_time, self.passes)) / (len(self.last) * layer_time(self.prompt))

    def prefill_flops(self, model: Model) -> float:
        """FLOPs of the prefill, without those of the policy."""
        return sum(map(model.layer_flops, self.passes)) + 2 * model.hidden * model.vocab

    def prompt_scoring(self, policy: Policy, model: Model) -> Flops:
        """FLOPs of choosing rows, and of the event that ends the prefill in layers that act."""
        total = Flops()
        drops = min(self.last) < self.prompt
        if drops or (isinstance(policy.propagation, Selecting) and self.prompt > self.budget):
            total = propagation_flops(
                policy,
                model,
                prompt=self.prompt,
                budget=self.budget,
                rows=self.first,
                layer=self.layer,
            )
        if policy.schedule.prefill:
            for rows, whole, own in zip(self.last, self.whole, self.budgets, strict=True):
                if rows > own and not whole:
                    later = self.context - self.prompt
                    event = Event(model, rows, rows, rows, own, prompt=True, later=later)
                    total += event_flops(policy, event)
        return total

    def event_scoring(self, policy: Policy, model: Model) -> Flops:
        """FLOPs of an event while decoding, in layers that are full.

        Half of the generated tokens are still to come, for the clairvoyant.
        """
        interval, total = policy.schedule.interval, Flops()
        later = (self.context - self.prompt) / 2
        for kept, whole, own in zip(self.entries, self.whole, self.budgets, strict=True):
            if interval is not None and not whole and kept == own < self.context:
                event = Event(model, kept + interval, self.context, interval, own, later=later)
                total += event_flops(policy, event)
        return total


def _mean(cases: Sequence[_Case], of: Callable[[_Case], Sequence[float]]) -> tuple[float, ...]:
    """The weighted mean of the cases for each layer."""
    weights = [case.weight for case in cases]
    columns = zip(*map(of, cases), strict=True)
    return tuple(sum(w * n for w, n in zip(weights, column, strict=True)) for column in columns)


def _budgets(policy: Policy, n_layers: int, budget: int, context: int, prompt: int) -> list[int]:
    """What each layer is cut to; the context where nothing is."""
    if isinstance(policy.layer_budgets, Growing):
        kept = prompt + policy.layer_budgets.window
        return [kept + (context - prompt) // policy.layer_budgets.compression] * n_layers
    never = policy.schedule.interval is None and not policy.schedule.prefill
    if never or isinstance(policy.allocator, Everything) or not policy.layer_budgets.bounded:
        return [context] * n_layers
    longest = policy.schedule.longest(prompt, budget)
    planned = [*policy.layer_budgets.planned(budget, n_layers, longest)]
    return planned if len(planned) == n_layers else planned * n_layers


# ------------------------------------------------------------------------------------- what is said


def _check(policy: Policy, model: Model, budget: int, context: int, prompt: int) -> None:
    """Raise what a replay would; a budget that never binds needs no rule."""
    if not 1 <= prompt <= context:
        raise PolicyError(
            f"prompt is {prompt} tokens of a context of {context}; expected 1 to {context}"
        )
    if budget < 1:
        raise BudgetError(f"{policy.name}: budget is {budget}; expected at least 1 entry")
    if policy.propagation is not None:
        policy.propagation.check(model.n_layers)
    if budget >= context:
        return
    try:
        policy.check_budget(budget, prompt_len=prompt, n_layers=model.n_layers)
    except BudgetError as error:
        if not policy.asked(budget).prompt:
            raise
        raise BudgetError(
            f"{error}; the prompt counts as {prompt} of {context} tokens, say if it is shorter "
            "(prompt=N, --prompt N)"
        ) from error


def _remarks(policy: Policy, model: Model, budget: int, prompt: int) -> Iterator[str]:
    """What a reader of the numbers should know of the policy."""
    name, interval, piece = policy.name, policy.schedule.interval, policy.propagation
    if piece is not None and (said := piece.remark(model.n_layers, prompt, budget)):
        yield f"{name}: {said}"
    if isinstance(policy.layer_budgets, Growing):
        yield f"{name}: no budget binds; it holds prompt, window and a share of what is generated"
    elif not bounded(policy):
        yield f"{name}: no budget binds"
    elif not policy.bounded:
        yield f"{name}: the layers up to the selection hold the whole prompt"
    elif interval is None:
        yield f"{name}: evicts after the prompt alone; each generated token adds an entry"
    elif not policy.schedule.prefill and prompt > budget:
        yield (
            f"{name}: the prompt stays whole until the first event, {interval} generated tokens "
            "later; what is counted is held after that"
        )
    if policy.bounded and not (policy.allocator.exact and policy.layer_budgets.exact):
        yield f"{name}: holds near the budget and not exactly that; counted is the budget"
    if policy.layer_budgets.across_layers:
        yield f"{name}: layers share a budget by their attention; counted is an equal share"
    if policy.scorer.clairvoyant:
        yield f"{name}: looks at later rows, so its FLOPs are those of an analysis"
    if policy.per_query_head:
        yield f"{name}: keeps a set for each query head, which a grouped cache cannot store"
    for missing in unknown(policy):
        yield f"{name}: FLOPs of scoring are unknown, because there is no formula for {missing}"


def _plain(value: object) -> object:
    """A parameter as JSON takes it."""
    return value if value is None or type(value) in (bool, int, float, str, dict) else str(value)
