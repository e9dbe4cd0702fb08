"""The kept sets that retain most attention under what an engine imposes.

Most optima are the flow of `kvsim.policies.optimum` on other items, so they are exact. An item is
an entry of a head; a token, where heads share a set; or a page, which takes one place once it is
full, and stays while it is written. Items of a pool share places. What is kept for good only grows
in number, so that the last event alone limits it. What a fixed number of places retains is concave
in it, with prices as slopes: the search for the best plan attains the bound of these planes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from kvsim.core.lazy import torch
from kvsim.core.policy import Policy, Schedule
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.engine.layers import DEFAULT_MEMORY, runs
from kvsim.engine.replay import replay
from kvsim.engine.source import TraceSource
from kvsim.errors import MemoryLimitError, PolicyError
from kvsim.policies.future import future_mass
from kvsim.policies.optimum import Floats, Ints, Optimum, solve
from kvsim.policies.random_sets import Random
from kvsim.schema import NEVER

#: Rounds of the search for a plan, and the share of the mass by which it may miss its bound.
_ROUNDS, _GAP = 100, 1e-6


@dataclass(frozen=True)
class Constraint:
    """What kept sets obey, beside their budget.

    summary: in words. pool: whose entries share places. sets: whose heads have one set. page:
    tokens that leave together. rule: "once", what is kept at the first event after its row is kept
    for good; "plan", each pool has its number of places at all events; "single", the only event is
    after the prompt.
    """

    summary: str
    pool: Literal["head", "layer", "model"] = "head"
    sets: Literal["head", "layer", "model"] = "head"
    page: int = 1
    rule: Literal["", "once", "plan", "single"] = ""


#: Constraints by name. What obeys any of them obeys "free".
CONSTRAINTS = {
    "free": Constraint("all heads of all layers share their places", "model"),
    "layer_budgets": Constraint("heads of a layer share places", "layer"),
    "head_plan": Constraint("each head has its number, the best for this text", rule="plan"),
    "head_budgets": Constraint("each head has the budget"),
    "layer_sets": Constraint("one set for all heads of a layer", "layer", "layer"),
    "layer_pages": Constraint("such sets in pages of 16", "layer", "layer", 16),
    "model_sets": Constraint("one set for all layers", "model", "model"),
    "model_pages": Constraint("such sets in pages of 16", "model", "model", 16),
    "admission": Constraint("kept or dropped once, at the first event", "model", rule="once"),
    "one_event": Constraint("the prompt is cut once, the response stays", rule="single"),
}


def terms_of(trace: Trace, name: str, budget: int, interval: int) -> dict[str, int]:
    """Return the budget and the interval at which rows see as many entries under a constraint.

    With one event, rows see all of the response so far, else what came since the last event; so
    much less stays of the prompt. Raises PolicyError where nothing does.
    """
    if CONSTRAINTS[name].rule != "single":
        return {"budget": budget, "interval": interval}
    rows = np.arange(trace.n_pos - trace.prompt_len)
    rest = int(budget - (rows - rows % interval).mean())
    if rest < 1:
        raise PolicyError(f"budget {budget} is less than rows see of the response alone")
    return {"budget": rest, "interval": trace.n_pos}


def optimum_under(trace: Trace, name: str, budget: int, interval: int) -> tuple[Record, float]:
    """Return the kept sets that retain most attention, and the share that others could still gain.

    Args:
        trace: with a response.
        name: one of `CONSTRAINTS`.
        budget: entries of a head on average after each event.
        interval: rows between events, one of them after the prompt; see `terms_of`.

    Raises:
        PolicyError: a trace without a response, or a budget of less than a page.
        MemoryLimitError: so many events do not fit in 2 GiB.
    """
    if trace.n_pos == trace.prompt_len:
        raise PolicyError(f"{trace.name} has no rows after its prompt; expected a response")
    events = Schedule(interval).rows(trace.prompt_len, trace.n_pos - 1)  # that a row follows
    base = replay(trace, Policy("optimum", Random()), budget, interval=interval, prefill=True)
    if (need := 24 * base.evicted_at.size * (len(events) + 1)) > DEFAULT_MEMORY:
        size = f"{need >> 20} MiB for {len(events)} events"
        raise MemoryLimitError(f"the optimum needs {size}, at most 2048; give a longer interval")
    parts = []
    with torch.inference_mode():
        for run in runs(trace, base.layers, Policy("optimum", Random())):
            source = TraceSource(trace, run.layers, torch.device("cpu"))
            parts.append(future_mass(source, events, trace.prompt_len).numpy())
    stop, retained, bound = solved(CONSTRAINTS[name], np.concatenate(parts), events, budget)
    attention = trace.n_qheads * len(base.layers) * (trace.n_pos - trace.prompt_len)
    evicted_at = np.array([*events, NEVER], np.int32)[stop]
    best = replace(base, evicted_at=evicted_at, params={}, looks_ahead=True)
    return best, (bound - retained) / attention


def solved(
    constraint: Constraint, mass: Floats, events: Sequence[int], budget: int
) -> tuple[Ints, float, float]:
    """Return the stops [L, H, T] of the optimum, what they retain, and what no others exceed.

    mass [L, H, T, M] between events (rows, ascending), as `future_mass` has it.
    """
    shape, at, page = mass.shape[:3], np.asarray(events), constraint.page
    rows, count = mass.shape[2:]
    if budget < page:
        raise PolicyError(f"budget {budget} has no place for a page of {page} tokens")
    axes = {"head": (), "layer": (1,), "model": (0, 1)}[constraint.sets]
    sets = mass.sum(axes, keepdims=True) if axes else mass
    padded = np.pad(sets, ((0, 0), (0, 0), (0, -rows % page), (0, 0)))
    sets = padded.reshape(*sets.shape[:2], -1, page, count).sum(3)
    # the first event at which an item can be evicted, when all of its rows are there
    first = np.searchsorted(at, (np.arange(sets.shape[2]) + 1) * page - 1)
    places = (budget - (at + 1) % page) // page  # beside the page that is being written
    pools = {"head": sets.shape[0] * sets.shape[1], "layer": sets.shape[0], "model": 1}
    items = sets.reshape(pools[constraint.pool], -1, count)
    of_pool = items.shape[1] // sets.shape[2]
    first, capacity = np.tile(first, of_pool), np.tile(of_pool * places, (len(items), 1))
    if constraint.rule == "once":
        worth = np.where(np.arange(count) < first[:, None], 0.0, items).sum(2, keepdims=True)
        best = solve(worth, (first == count).astype(int), capacity[:, -1:])
        best = replace(best, stop=np.where(best.stop > 0, count, first))
    elif constraint.rule == "plan":
        best = _planned(items, first, int(capacity[:, 0].sum()))
    else:
        best = solve(items, first, capacity)
    stop = np.broadcast_to(best.stop.reshape(sets.shape[:3]).repeat(page, 2)[..., :rows], shape)
    return stop, best.retained.sum(), best.bound.sum()


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
