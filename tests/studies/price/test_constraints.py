"""Optima under constraints against all kept sets by trying, and against policies that obey them."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import kvsim
from kvsim.core.trace import Trace
from kvsim.errors import MemoryLimitError, PolicyError
from kvsim.studies.price import constraints
from kvsim.studies.price.constraints import CONSTRAINTS, optimum_under, solved, terms_of
from traces import random_trace

#: Layers, heads and tokens of what is tried, and the rows of its events.
L, H, T = 2, 2, 4
EVENTS = (1, 2)


def draw(seed):
    """Mass [L, H, T, M], 0 at events before an entry's row; even seeds have many ties."""
    generator = np.random.default_rng(seed)
    shape = L, H, T, len(EVENTS)
    mass = generator.random(shape) ** 3 if seed % 2 else generator.integers(0, 3, shape) * 1.0
    return np.where(np.arange(T)[:, None] <= EVENTS, mass, 0.0)


def choices(constraint):
    """Every way to evict, as the number of the event that evicts each entry [choice, L, H, T]."""
    last, groups = len(EVENTS), {}
    for layer, head, pos in product(range(L), range(H), range(T)):
        of = {"head": (layer, head), "layer": (layer,), "model": ()}[constraint.sets]
        groups.setdefault((*of, pos // constraint.page), []).append((layer, head, pos))
    options = []
    for *_, number in groups:
        full = (number + 1) * constraint.page - 1  # the row that fills the page
        since = next((m for m, row in enumerate(EVENTS) if row >= full), last)
        options.append({since, last} if constraint.rule == "once" else range(since, last + 1))
    stops = np.array(list(product(*options)))
    out = np.empty((len(stops), L, H, T), int)
    for at, places in enumerate(groups.values()):
        for place in places:
            out[(slice(None), *place)] = stops[:, at]
    return out


def fits(constraint, held, budget):
    """Which choices have places; held [choice, L, H, M]: entries of each head after each event."""
    if constraint.rule == "plan":  # any numbers of places that make up the budget
        return held.max(-1).sum((1, 2)) <= L * H * budget
    axes, size = {"head": ((), 1), "layer": ((2,), H), "model": ((1, 2), L * H)}[constraint.pool]
    of_pool = held.sum(axes, keepdims=True) if axes else held
    return (of_pool <= size * budget).all((1, 2, 3))


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_it_is_the_best_of_all_kept_sets(name):
    """Of random masses: no choice that fits retains more, and its own sets are such a choice."""
    constraint = CONSTRAINTS[name]
    constraint = replace(constraint, page=min(constraint.page, 2))
    stops = choices(constraint)
    exists = np.arange(T)[:, None] <= EVENTS
    kept = (stops[..., None] > range(len(EVENTS))) & exists
    for seed, budget in product(range(4), (1, 2, 3)):
        if budget < constraint.page:
            continue
        mass = draw(seed)
        allowed = fits(constraint, kept.sum(3), budget)
        value = np.where(allowed, np.einsum("clhtm,lhtm->c", kept, mass), -1.0)
        own, retained, bound = solved(constraint, mass, EVENTS, budget)
        chosen = (stops == own).all((1, 2, 3))

        # what is written to a page that is not full counts for all choices
        assert value[chosen] == pytest.approx(value.max(), rel=1e-5), (seed, budget)
        assert retained * (1 - 1e-9) <= bound <= retained * (1 + 1e-5)


def seen_mass(trace, record):
    """Full attention of rows after the prompt on what they see, share of a row's."""
    shown = [trace.attention(layer, range(trace.n_pos)).double() for layer in range(trace.n_layers)]
    seen = np.arange(trace.n_pos)[:, None] <= record.evicted_at[:, :, None]
    seen = seen.repeat(trace.group, 1)
    each = np.stack([of.numpy() for of in shown]) * seen
    return each[:, :, trace.prompt_len :].sum(-1).mean()


def test_the_record_retains_what_is_proven():
    """Attention on what rows see is by the definition what the metric says; no other set gains."""
    trace = random_trace(n=100, seed=4, dim=8)
    for name in CONSTRAINTS:
        record, gap = optimum_under(trace, name, **terms_of(trace, name, 36, 8))
        missing = kvsim.measure(trace, record, "missing_mass")["value"].mean()

        assert missing == pytest.approx(1 - seen_mass(trace, record), abs=1e-6)
        assert gap == pytest.approx(0, abs=1e-6)


def test_constraints_cost_in_the_order_in_which_they_contain_each_other():
    """Whatever is added to a constraint costs mass."""
    trace = random_trace(n=100, seed=4, dim=8)
    missing = {
        name: 1 - seen_mass(trace, optimum_under(trace, name, 36, 8)[0])
        for name, constraint in CONSTRAINTS.items()
        if constraint.rule != "single"
    }

    for chain in (
        "free layer_budgets head_budgets layer_sets layer_pages model_pages",
        "free head_plan head_budgets layer_sets model_sets model_pages",
        "free admission",
    ):
        values = [missing[name] for name in chain.split()]
        assert values == sorted(values)


def test_sizes_of_one_event_are_equal_on_average():
    """With the prompt cut once, rows see as many entries on average as with events throughout."""
    trace = random_trace(n=100, seed=4, dim=8, prompt_len=60)
    terms = terms_of(trace, "one_event", 40, 8)
    each = kvsim.replay(trace, "random", 40, interval=8, prefill=True)
    once = kvsim.replay(trace, "random", prefill=True, **terms)
    seen = [kvsim.measure(trace, x, "entries_seen")["value"].mean() for x in (each, once)]

    assert seen[1] == pytest.approx(seen[0], abs=1)


def test_errors_say_what_is_missing(monkeypatch):
    """A trace without a response, a budget of less than a page and too many events are refused."""
    trace = random_trace(n=40, seed=0, dim=8)
    with pytest.raises(PolicyError, match="page of 16"):
        optimum_under(trace, "layer_pages", 8, 8)
    monkeypatch.setattr(constraints, "DEFAULT_MEMORY", 1 << 10)
    with pytest.raises(MemoryLimitError, match="give a longer interval"):
        optimum_under(trace, "free", 8, 8)
    with pytest.raises(PolicyError, match="no rows after its prompt"):
        optimum_under(random_trace(n=40, prompt_len=40), "free", 8, 8)


def test_the_command_shows_every_constraint(run, tmp_path):
    """Means over traces of any turns and labels; what has no rule for the budget is a note."""
    each = [random_trace(n=80, dim=8, prompt_len=30, seed=x, name=f"p{x}") for x in range(2)]
    two_turns = replace(each[1].header, questions=((50, 55),), meta={"labels": {"depth": 0.5}})
    each[1] = Trace(each[1].source, two_turns, dtype=each[1].dtype)
    for trace in each:
        trace.save(tmp_path / f"{trace.name}.zarr")
    arguments = ["price", tmp_path, "--budget", "12", "--interval", "8"]
    status, text = run(*arguments)[:2]
    document = json.loads(run(*arguments, "--json")[1])

    assert status == 0
    assert any("one_event: budget 12 is less than rows see" in x for x in document["remarks"])
    assert "no place for a page of 16" in text
    rows = {row["constraint"]: row for row in document["constraints"]}
    assert rows.keys() == CONSTRAINTS.keys() - {"one_event", "layer_pages", "model_pages"}
    missing = [1 - seen_mass(x, optimum_under(x, "model_sets", 12, 8)[0]) for x in each]
    assert rows["model_sets"]["missing_mass"] == pytest.approx(np.mean(missing), abs=1e-6)
    cost = np.mean(missing) - rows["free"]["missing_mass"]
    assert rows["model_sets"]["cost"] == pytest.approx(cost, abs=1e-6)
    assert f"{cost:.4f}" in text
