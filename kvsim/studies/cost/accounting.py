"""Cost of a policy on a model at a context: memory, time and FLOPs, with all assumptions.

Prefill time is proportional to FLOPs, or to the paper's n^2 d + n d^2; time per output token to the
bytes that are read, or to entries: ratios to the full cache (docs/cost.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from kvsim.core.parameters import integer
from kvsim.core.policy import Policy
from kvsim.core.trace import Trace
from kvsim.engine.checks import whole
from kvsim.errors import BudgetError, PolicyError
from kvsim.policies.kvzip import chunk_lengths
from kvsim.studies.cost.cases import CostCase, find_selection
from kvsim.studies.cost.flops import Event, Flops, unknown
from kvsim.studies.cost.model import Model

#: Bytes of a number that a policy carries with each entry, of an eviction time, and of a rank.
COLUMN_BYTES = TIME_BYTES = RANK_BYTES = 4


@dataclass(frozen=True)
class Cost:
    """Cost of a policy; sequences have one value per layer, entries are of one KV head.

    What counts (rows, entries, bytes, FLOPs) is `exact` accounting: it follows from sizes, and from
    a selection layer, of which `selection` and `assumptions` say where it comes from. The ratios of
    times are a model, FLOPs or bytes relative to the full cache, and no measurement.

    rows: of the prompt that each layer computes, over both passes where there are two. entries:
    after an event. peak: before the next one, or at the end of the context where there is none.
    mean: reads of a generated token, on average between two events, or at the end of the context.
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

    fidelity: ClassVar[str] = "exact"  # under the assumptions that are listed

    @property
    def kv_ratio(self) -> float:
        """Cache after an event, as a share of the full one."""
        return self.kv_bytes / self.kv_full_bytes

    @property
    def scoring_per_token(self) -> float | None:
        """FLOPs of scoring per generated token: of an event, over the rows between events."""
        if self.scoring_event is None:
            return None
        return self.scoring_event.total / (self.interval or 1)

    @property
    def scoring_prompt_share(self) -> float | None:
        """FLOPs of scoring the prompt, relative to a prefill without any policy."""
        if self.scoring_prompt is None:
            return None
        return self.scoring_prompt.total / self.model.prefill_flops(self.prompt)

    @property
    def scoring_token_share(self) -> float | None:
        """FLOPs of scoring per generated token, relative to the FLOPs of the token."""
        per_token = self.scoring_per_token
        return None if per_token is None else per_token / self.decode_flops

    def as_dict(self) -> dict[str, Any]:
        """Return all fields but the model, ready for JSON."""
        out: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Flops):
                out[name] = {**vars(value), "total": value.total}
            elif name != "model":
                out[name] = list(value) if isinstance(value, tuple) else value
        plain = (bool, int, float, str, dict, type(None))
        out["params"] = {
            key: value if type(value) in plain else str(value) for key, value in self.params.items()
        }
        out["kv_bytes_per_layer"] = [n * self.position_bytes for n in self.entries]
        out["kv_peak_bytes_per_layer"] = [n * self.position_bytes for n in self.peak]
        names = ["fidelity", "kv_ratio", "scoring_per_token"]
        names += ["scoring_prompt_share", "scoring_token_share"]
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
    """Return the cost of `policy` on `model` at `budget` entries per KV head and `context` tokens.

    prompt: tokens of the context that are its prompt, all by default. selection_layer: of a policy
    that drops rows on the way down, also a mean such as 23.9, between whose neighbours everything
    is interpolated; without one it is fixed by the policy, measured on `trace`, or assumed. Raises
    BudgetError and PolicyError as a replay would.
    """
    prompt = context if prompt is None else prompt
    for name, tokens in {"context": context, "prompt": prompt}.items():
        if integer(tokens) is None:
            raise PolicyError(f"{name} is {tokens!r}; expected a whole number of tokens")
    budget = whole(budget)
    policy = policy.at(budget)
    _check(policy, model, budget, context, prompt)
    selection = find_selection(policy, model, budget, prompt, selection_layer, trace)
    cases = [
        CostCase(model, policy, budget, context, prompt, layer, weight)
        for layer, weight in selection.weights(model.n_layers)
    ]
    n_heads = model.n_qheads if policy.per_query_head else model.n_heads
    position_bytes = n_heads * model.entry_bytes
    layers = np.sum([c.weight * np.column_stack([c.rows, c.sizes]) for c in cases], axis=0)
    rows, entries, peak, mean = (tuple(column) for column in layers.T.tolist())
    full = model.kv_bytes(context)
    events = [Event(model, context, context, 1, budget, prompt=at) for at in (True, False)]
    missing = dict.fromkeys(name for event in events for name in unknown(policy, event))
    scoring_prompt = scoring_event = None
    if not missing:
        scoring_prompt = sum((c.prompt_scoring * c.weight for c in cases), Flops())
        scoring_event = sum((c.event_scoring * c.weight for c in cases), Flops())
    return Cost(
        model=model,
        policy=policy.name,
        params=policy.params,
        budget=budget,
        context=context,
        prompt=prompt,
        interval=policy.schedule.interval,
        prefill=policy.schedule.prefill,
        bounded="held" in policy.bounds,
        selection_layer=selection.layer,
        selection=selection.source,
        rows=rows,
        entries=entries,
        peak=peak,
        mean=mean,
        prefill_ratio=sum(c.weight * c.time(model.layer_flops) for c in cases),
        prefill_ratio_paper=sum(
            c.weight * c.time(lambda n: n**2 * model.dim + n * model.dim**2) for c in cases
        ),
        decode_ratio=decode_ratio(model, sum(mean) * position_bytes, full),
        decode_ratio_paper=sum(mean) / (model.n_layers * context),
        position_bytes=position_bytes,
        kv_bytes=sum(entries) * position_bytes,
        kv_peak_bytes=sum(peak) * position_bytes,
        kv_full_bytes=full,
        score_bytes=len(policy.columns) * n_heads * sum(peak) * COLUMN_BYTES,
        rank_bytes=_rank_bytes(policy, model, budget, prompt, selection.layer),
        mask_bytes=model.n_layers * n_heads * context**2,
        evicted_at_bytes=model.n_layers * n_heads * context * TIME_BYTES,
        prefill_flops=sum(c.weight * c.prefill_flops for c in cases),
        decode_flops=model.decode_flops(sum(mean) / model.n_layers),
        scoring_prompt=scoring_prompt,
        scoring_event=scoring_event,
        assumptions=(
            *model.remarks,
            *selection.remarks,
            *_remarks(policy, model, budget, prompt),
            *(
                f"{policy.name}: FLOPs of scoring are unknown, because there is no formula for {x}"
                for x in missing
            ),
        ),
    )


def decode_ratio(model: Model, kv: float, full: float, *, passes: float = 1) -> float:
    """Time per output token: (weights + passes of cache) / (weights + full cache), in bytes."""
    return (model.read_bytes + passes * kv) / (model.read_bytes + passes * full)


def _rank_bytes(
    policy: Policy, model: Model, budget: int, prompt: int, layer: float | None
) -> float:
    """Return the bytes carried up to the selection, such as ASL's ranks; of all layers for none."""
    piece = policy.propagation
    if piece is None or piece.keeps_whole(budget, prompt):
        return 0.0
    return piece.carried(prompt, model.n_layers - 1 if layer is None else layer) * RANK_BYTES


def _check(policy: Policy, model: Model, budget: int, context: int, prompt: int) -> None:
    """Raise the errors of a replay; a budget that never binds needs no rule."""
    if not 1 <= prompt <= context:
        raise PolicyError(
            f"prompt is {prompt} tokens of a context of {context}; expected 1 to {context}"
        )
    if policy.reader is not None or policy.codec is not None:
        raise PolicyError(
            f"{policy.name}: the cost model counts entries that are stored as computed and read by "
            "every row; expected an eviction alone; `kvsim replay --metric bytes_held,bytes_read` "
            "measures readers, codecs and mergers"
        )
    if policy.propagation is not None:
        policy.propagation.check(model.n_layers)
    if budget >= context:
        return
    try:
        policy.check_budget(budget, prompt_len=prompt, n_pos=context, n_layers=model.n_layers)
    except BudgetError as error:
        if not policy.at(budget).requested(budget).prompt:
            raise
        raise BudgetError(
            f"{error}; the prompt counts as {prompt} of {context} tokens, say if it is shorter "
            "(prompt=N, --prompt N)"
        ) from error


def _remarks(policy: Policy, model: Model, budget: int, prompt: int) -> Iterator[str]:
    """Yield the assumptions about the policy."""
    name, interval, piece = policy.name, policy.schedule.interval, policy.propagation
    if piece is not None and (remark := piece.remark(model.n_layers, prompt, budget)):
        yield f"{name}: {remark}"
    if policy.layer_budgets.remark:
        yield f"{name}: {policy.layer_budgets.remark}"
    elif "held" not in policy.bounds:
        whole = "; its size follows the text, and counted is a cache from which nothing leaves"
        yield f"{name}: no budget binds{whole * policy.allocator.always_acts}"
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
    if policy.allocator.across_layers:
        yield f"{name}: heads and layers share a budget by their scores; counted is an equal share"
    if "probe_q" in policy.scorer.needs:
        pairs = sum(n * prompt + n * (n + 1) / 2 for n in chunk_lengths(prompt))
        again = model.n_layers * (2 * prompt * model.layer_matrices + model.attention_flops(pairs))
        yield (
            f"{name}: before it evicts, the model repeats the prompt; these {again:.3g} FLOPs are "
            f"not counted, those of the prefill are {model.prefill_flops(prompt):.3g}"
        )
    if policy.scorer.clairvoyant:
        yield f"{name}: looks at later rows, so its FLOPs are those of an analysis"
    if policy.per_query_head:
        yield f"{name}: keeps a set for each query head, which a grouped cache cannot store"
