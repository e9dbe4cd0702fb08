"""The optimum against all kept sets by trying, against scipy's solvers, and its own certificate."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

import kvsim
from kvsim.core.policy import Even, Policy, Protection, Schedule, Uniform
from kvsim.engine.checks import Setup
from kvsim.engine.replay import run
from kvsim.policies.adakv import AdaKV
from kvsim.policies.optimum import solve
from kvsim.policies.oracle import Oracle
from kvsim.policies.pyramidkv import Pyramid
from kvsim.schema import NEVER
from kvsim.testing import check_policy
from traces import random_trace

POOLS = 4
KINDS = ("spread", "few values", "equal", "zero", "one strong entry")


def draw(seed):
    """Four small pools: mass, first events and capacities, of a kind that the seed decides."""
    generator = np.random.default_rng(seed)
    entries, events = generator.integers(1, 7), generator.integers(1, 5)
    shape = POOLS, entries, events
    mass = {
        "spread": generator.random(shape) ** 4,
        "few values": generator.integers(0, 3, shape).astype(float),
        "equal": np.ones(shape),
        "zero": np.zeros(shape),
        "one strong entry": generator.random(shape) + 50 * (np.arange(entries) == 0)[:, None],
    }[KINDS[seed % len(KINDS)]]
    # entries of first event `events` never compete; events without births are frequent
    first = np.sort(generator.integers(0, events + 1, entries))
    capacity = generator.integers(0, entries + 2, (POOLS, events if seed % 2 else 1))
    return mass, first, np.broadcast_to(capacity, (POOLS, events)).copy()


def bound_of(mass, first, capacity, price):
    """The certificate's checker: what no kept sets of a pool exceed at these prices."""
    events = range(len(capacity))
    best = [
        max(
            sum(of[m] - price[m] for m in events if since <= m < stop)
            for stop in range(since, len(capacity) + 1)
        )
        for of, since in zip(mass, first, strict=True)
    ]
    return sum(c * p for c, p in zip(capacity, price, strict=True)) + sum(best)


def kept_at(stop, first, events):
    """Which entries stops [..., E] keep at each event, bool [..., E, events]."""
    return (first[:, None] <= np.arange(events)) & (np.arange(events) < stop[..., None])


def test_it_is_the_best_of_all_kept_sets():
    """Of 240 random pools: what is retained is what trying every stop of every entry retains."""
    for seed in range(60):
        mass, first, capacity = draw(seed)
        events = capacity.shape[1]
        optimum = solve(mass, first, capacity)
        stops = np.array(list(product(*(range(since, events + 1) for since in first))))
        kept = kept_at(stops, first, events)  # [choices, E, M]
        retained = np.einsum("cem,pem->pc", kept, mass)
        fits = (kept.sum(1) <= capacity[:, None]).all(-1)
        best = np.where(fits, retained, -1.0).max(1)

        assert optimum.retained == pytest.approx(best, rel=1e-9, abs=1e-12), seed


def test_its_certificate_holds():
    """A schedule that fits, prices of at least 0, and a bound at them that the schedule attains."""
    for seed in range(60):
        mass, first, capacity = draw(seed)
        optimum = solve(mass, first, capacity)
        kept = kept_at(optimum.stop, first, capacity.shape[1])

        alive = (first[:, None] <= np.arange(capacity.shape[1])) & (
            (np.arange(capacity.shape[1]) == first[:, None])
            | np.pad(kept, ((0, 0), (0, 0), (1, 0)))[..., :-1]
        )
        assert (kept.sum(1) == np.minimum(capacity, alive.sum(1))).all()
        assert (optimum.price >= 0).all()
        assert optimum.retained == pytest.approx((kept * mass).sum((1, 2)), rel=1e-9, abs=1e-12)
        for pool in range(POOLS):
            bound = bound_of(mass[pool], first, capacity[pool], optimum.price[pool])
            assert optimum.bound[pool] == pytest.approx(bound, rel=1e-9, abs=1e-12)
            assert bound == pytest.approx(optimum.retained[pool], rel=1e-9, abs=1e-12)


N, PROMPT, CONTEXT = 9, 5, 4


def short_trace(seed):
    """Two layers, two KV heads, groups of two, nine tokens; attention far from uniform."""
    lengths = {"n": N, "prompt_len": PROMPT, "context_len": CONTEXT}
    return random_trace(seed=seed, dtype=torch.float64, **lengths)


def attended(trace):
    """Attention of every row after the prompt, summed over the group; [layer, head, row, pos]."""
    layers = [trace.attention(layer, range(N)).double() for layer in range(trace.n_layers)]
    attention = torch.stack(layers).unflatten(1, (trace.n_heads, -1)).sum(2).numpy()
    attention[:, :, :PROMPT] = 0.0
    return attention


def retained_by(attention, evicted_at):
    """Attention on what rows see, [..., head]; evicted_at [..., head, pos]."""
    seen = np.arange(N)[:, None] <= evicted_at[..., None, :]
    return (attention * seen).sum((-1, -2))


def best_by_trying(attention, events, places, spared, *, pooled):
    """The most mass of two heads by any stops; spared: whether (position, event) is protected."""
    entries = range(events[-1] + 1)
    since = np.searchsorted(events, entries)
    choices = [
        range(
            max([begin, *(m + 1 for m, row in enumerate(events) if spared(pos, row))]),
            len(events) + 1,
        )
        for pos, begin in zip(entries, since, strict=True)
    ]
    stops = np.array(list(product(*choices)))
    counts = kept_at(stops, since, len(events)).sum(1)  # [choices, events]
    gone = np.array([*events, NEVER])
    none = np.full((2, N), NEVER)
    mass = np.array(  # what an entry retains up to each stop
        [[attention[:, : row + 1, pos].sum(1) for row in gone] for pos in entries]
    )
    later = retained_by(attention, none) - mass[:, -1].sum(0)
    value = mass[np.arange(len(entries)), stops].sum(1) + later  # [choices, head]
    if not pooled:
        return value[(counts <= places).all(1)].max(0).sum()
    used, group = np.unique(counts, axis=0, return_inverse=True)
    best = np.full((2, len(used)), -np.inf)
    for head in range(2):
        np.maximum.at(best[head], group, value[:, head])
    fits = (used[:, None] + used <= 2 * places).all(-1)
    return (best[0][:, None] + best[1])[fits].max()


@pytest.mark.parametrize(
    ("schedule", "protect", "pooled", "budgets"),
    [
        (Schedule(2), Protection(), False, Even()),
        (Schedule(2), Protection(), True, Even()),
        (Schedule(2), Protection(sink=1, recent=1), False, Even()),
        (Schedule(2), Protection(sink=1, recent=2), True, Even()),
        (Schedule(2, prefill=False), Protection(), False, Even()),
        (Schedule(None), Protection(recent=1), False, Even()),
        (Schedule(2, compress="context"), Protection(recent=1), False, Even()),
        (Schedule(None, compress="both"), Protection(sink=1), True, Even()),
        (Schedule(2), Protection(), False, Pyramid(window=1, beta=2.0)),
    ],
)
def test_the_oracle_keeps_the_best_of_all_sets(schedule, protect, pooled, budgets):
    """Replayed through the engine, it retains what trying all kept sets of a layer retains."""
    allocator = AdaKV(floor=0.0) if pooled else Uniform()
    oracle = Policy(
        "best", Oracle("optimum", pooled), allocator, schedule, protect, layer_budgets=budgets
    )
    events = schedule.rows(PROMPT, N, CONTEXT)
    of_layer = budgets.planned(3, 2, schedule.longest(PROMPT, 3, N))

    def spared(pos, row):
        return pos <= row and (pos < protect.sink or pos > row - protect.recent)

    for seed in range(1):
        trace = short_trace(seed)
        attention = attended(trace)
        record = run(Setup(trace, oracle, 3))
        retained = retained_by(attention, record.evicted_at).sum(-1)
        best = [
            best_by_trying(of, events, places, spared, pooled=pooled)
            for of, places in zip(attention, np.broadcast_to(of_layer, 2), strict=True)
        ]

        assert retained == pytest.approx(best, rel=1e-9)
        mass = run(Setup(trace, replace(oracle, scorer=Oracle()), 3))
        assert (retained_by(attention, mass.evicted_at).sum(-1) <= retained + 1e-9).all()


def test_the_oracle_obeys_the_invariants_of_policies():
    """As any policy, except that its sets belong to one budget and not to each head's quota."""
    oracle = kvsim.policy("oracle", by="optimum")

    check_policy(oracle, max_examples=3, exempt={"ragged"}, shrink=False)
