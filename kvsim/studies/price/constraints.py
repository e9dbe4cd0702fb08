"""The kept sets that retain most attention under what an engine imposes.

All but one are the flow of `kvsim.policies.optimum` on other items, so their optima are exact. An
item is an entry of a head; a token, where heads share a set; or a page of tokens, which takes one
place once it is full. Until then it is being written and stays. Pools of items share places. Kept
once and for all (`once`), the items of most mass in all are the optimum. The value of a fixed
number of places (`plan`) is concave in the number, with prices as slopes: their planes bound it
from above, and a search of the best plan under these bounds ends where it attains them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from kvsim.analysis.output.optimum import as_optimum
from kvsim.core.lazy import torch
from kvsim.core.policy import Policy, Schedule
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.engine.layers import runs
from kvsim.engine.replay import replay
from kvsim.engine.source import TraceSource
from kvsim.errors import PolicyError
from kvsim.policies.future import future_mass
from kvsim.policies.optimum import Floats, Ints, Optimum, solve
from kvsim.policies.oracle import Oracle
from kvsim.policies.random_sets import Random
from kvsim.schema import NEVER

Level = Literal["head", "layer", "model"]

#: Rounds of the search for a plan, and the share of the mass by which it may miss its bound.
_ROUNDS, _GAP = 100, 1e-6


@dataclass(frozen=True)
class Constraint:
    """What kept sets obey, beside their budget.

    summary: in words. sets: each head has its own, or all heads of a layer or of the model have one
    set. pool: whose sets share their places. page: tokens that leave together. once: what is kept
    at the first event after its row is kept for good. plan: places of a pool do not change, but
    pools may have different numbers. single: the only event is after the prompt. policy: the name
    of a policy around any scorer that obeys it, and its parameters; empty where none does.
    """

    summary: str
    sets: Level = "head"
    pool: Level = "model"
    page: int = 1
    once: bool = False
    plan: bool = False
    single: bool = False
    policy: str = ""
    params: tuple[tuple[str, object], ...] = ()


_MEAN, _PAGES = ("reduction", "mean"), ("prompt", "pages")
_ALL = ("across", "layers")

#: Constraints by name. All but the first two are of kept sets that the first one allows.
CONSTRAINTS = {
    "free": Constraint("all heads of all layers share their places"),
    "layer_budgets": Constraint(
        "each layer has its budget, which its heads share", pool="layer", policy="adakv+{}"
    ),
    "head_plan": Constraint(
        "each head has its number of places, the best for this text", pool="head", plan=True
    ),
    "head_budgets": Constraint("each head has the budget", pool="head", policy="{}"),
    "layer_sets": Constraint(
        "one set for all heads of a layer",
        *("layer", "layer"),
        policy="union+{}",
        params=(_MEAN,),
    ),
    "layer_pages": Constraint(
        "the same in pages of 16",
        *("layer", "layer", 16),
        policy="paged+{}",
        params=(_PAGES,),
    ),
    "model_sets": Constraint(
        "one set for all layers",
        *("model", "model"),
        policy="union+{}",
        params=(_ALL, _MEAN),
    ),
    "model_pages": Constraint(
        "the same in pages of 16",
        *("model", "model", 16),
        policy="paged+union+{}",
        params=(_PAGES, ("scorer__across", "layers"), ("scorer__reduction", "mean")),
    ),
    "admission": Constraint(
        "kept or dropped once, at the first event", once=True, policy="dms+{}", params=()
    ),
    "one_event": Constraint(
        "the prompt is cut once, the response stays", pool="head", single=True, policy="{}"
    ),
}


class Solved(NamedTuple):
    """Stops [L, H, T] of the optimum, the mass that they retain and what no others exceed."""

    stop: Ints
    retained: float
    bound: float


def optimum_under(
    trace: Trace, constraint: Constraint, budget: int, interval: int
) -> tuple[Record, float]:
    """Return the kept sets that retain most attention under a constraint.

    Args:
        trace: the trace.
        constraint: one of `CONSTRAINTS`.
        budget: entries of a head on average, after each event; under `single` those that stay of
            the prompt (`prompt_budget`).
        interval: rows between events, one of them after the prompt.

    Returns:
        The record, and the share of attention that other kept sets could still gain as far as the
        proof leaves that open.

    Raises:
        PolicyError: a trace without a response, or a budget of less than a page.
    """
    if trace.n_pos == trace.prompt_len:
        raise PolicyError(f"{trace.name} has no rows after its prompt; expected a response")
    interval = trace.n_pos if constraint.single else interval
    events = Schedule(interval).rows(trace.prompt_len, trace.n_pos - 1)  # that a row follows
    base = replay(trace, Policy("optimum", Random()), budget, interval=interval, prefill=True)
    mass = attended(trace, base.layers, events)
    solved = solved_under(constraint, mass, events, budget)
    evicted_at = np.array([*events, NEVER], np.int32)[solved.stop]
    attention = trace.n_qheads * len(base.layers) * max(1, trace.n_pos - trace.prompt_len)
    return as_optimum(base, evicted_at), (solved.bound - solved.retained) / attention


def prompt_budget(trace: Trace, budget: int, interval: int) -> int:
    """Entries of the prompt beside which rows see as many on average as with a budget.

    Of the response they see all tokens so far, else those since the last event. Raises PolicyError
    where the response alone takes more.
    """
    rows = np.arange(trace.n_pos - trace.prompt_len)
    rest = int(budget - (rows - rows % interval).mean())
    if rest < 1:
        raise PolicyError(f"budget {budget} is less than rows see of the response alone")
    return rest


def attended(trace: Trace, layers: Sequence[int], events: Sequence[int]) -> Floats:
    """Attention that entries get between an event and the next (`future_mass`), [L, H, T, M]."""
    parts = []
    with torch.inference_mode():
        for run in runs(trace, tuple(layers), Policy("optimum", Oracle("optimum"))):
            source = TraceSource(trace, run.layers, torch.device("cpu"))
            parts.append(future_mass(source, events, trace.prompt_len).numpy())
    return np.concatenate(parts)


def solved_under(
    constraint: Constraint, mass: Floats, events: Sequence[int], budget: int
) -> Solved:
    """Return the optimum of mass [L, H, T, M] between events (rows, ascending)."""
    rows, count = mass.shape[2:]
    at, page = np.asarray(events), constraint.page
    one = {"head": (), "layer": (1,), "model": (0, 1)}[constraint.sets]
    sets = mass.sum(one, keepdims=True) if one else mass
    if page > 1:
        padded = np.pad(sets, ((0, 0), (0, 0), (0, -rows % page), (0, 0)))
        sets = padded.reshape(*sets.shape[:2], -1, page, count).sum(3)
    # the first event at which an item can be evicted, when all of its rows are there
    first = np.searchsorted(at, (np.arange(sets.shape[2]) + 1) * page - 1)
    if budget < page:
        raise PolicyError(f"budget {budget} has no place for a page of {page} tokens")
    places = (budget - (at + 1) % page) // page  # beside the page that is being written
    pools = {"head": sets.shape[0] * sets.shape[1], "layer": sets.shape[0], "model": 1}
    items = sets.reshape(pools[constraint.pool], -1, count)
    of_pool = items.shape[1] // sets.shape[2]
    first, capacity = np.tile(first, of_pool), np.tile(of_pool * places, (len(items), 1))
    if constraint.once:
        best = _admitted(items, first, capacity)
    elif constraint.plan:
        best = _planned(items, first, int(capacity[:, 0].sum()))
    else:
        best = solve(items, first, capacity)
    stop = best.stop.reshape(sets.shape[:3]).repeat(page, 2)[..., :rows]
    return Solved(
        np.broadcast_to(stop, mass.shape[:3]), best.retained.sum(), float(best.bound.sum())
    )


def _admitted(mass: Floats, first: Ints, capacity: Ints) -> Optimum:
    """The optimum [P, E] of what stays for good, with as many places at all events.

    The number of what was kept only grows, so that the last event alone limits it.
    """
    entries, events = mass.shape[1:]
    worth = np.where(np.arange(events) < first[:, None], 0.0, mass).sum(2)
    order = np.where(first < events, worth, -np.inf).argsort(1, kind="stable")[:, ::-1]
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.broadcast_to(np.arange(entries), order.shape), 1)
    kept = (rank < capacity[:, -1:]) | (first == events)
    retained = np.where(kept, worth, 0.0).sum(1)
    return Optimum(
        np.where(kept, events, first), np.zeros(capacity.shape), retained, retained, retained
    )


def _planned(mass: Floats, first: Ints, total: int) -> Optimum:
    """The optimum where each pool has its own number of places at all events, `total` in all."""
    pools, entries, events = mass.shape
    sizes, bound = np.arange(entries + 1), np.inf
    above = np.full((pools, entries + 1), np.inf)  # what a pool retains at most with so many places
    places = np.full(pools, total // pools)
    best = here = solve(mass, first, np.broadcast_to(places[:, None], (pools, events)))
    for _ in range(_ROUNDS):
        slope = here.price.sum(1, keepdims=True)
        above = np.minimum(above, here.bound[:, None] + slope * (sizes - places[:, None]))
        gains = np.diff(above, axis=1)  # descending in each pool
        won = np.argsort(-gains, axis=None, kind="stable")[:total]
        places = np.bincount(won // entries, minlength=pools)
        bound = min(bound, np.take_along_axis(above, places[:, None], 1).sum())
        if bound - best.retained.sum() <= _GAP * bound:
            break
        here = solve(mass, first, np.broadcast_to(places[:, None], (pools, events)))
        best = max(best, here, key=lambda each: each.retained.sum())
    return replace(best, bound=best.retained + (bound - best.retained.sum()) / pools)
