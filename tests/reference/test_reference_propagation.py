"""ASL and its relatives against a naive float64 propagation that shares no code with them."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvsim
import reference
from kvsim.errors import BudgetError, PolicyError
from kvsim.samples import sample_trace
from kvsim.testing.strategies import Case
from reference import NEVER, propagation
from reference.strategies import Setup, naive

NAMES = ("asl", "asl_2pass", "fastkv", "fastkv@proportional", "gemfilter", "pyramidinfer")
CROSSES = (
    "asl+expected_attention",
    "asl+adakv+snapkv",
    "fastkv+h2o",
    "fastkv+tova",
    "fastkv+ams+tova",
)


def rows(outcome: reference.Outcome, row: int = NEVER - 1) -> list[list[int]]:
    """What head 0 of each layer holds after `row`."""
    return [np.flatnonzero(of_layer[0] > row).tolist() for of_layer in outcome.evicted_at]


# ------------------------------------------------------------------- the reference, worked by hand


def by_hand(*layers: list[float], later: int = 0) -> dict[str, Any]:
    """One head whose last prompt row has attention proportional to the layer's numbers.

    Earlier rows attend to all alike, `later` rows behind the prompt as well.
    """
    n = len(layers[0]) + later
    q = np.zeros((len(layers), 1, n, n))
    for i, of_layer in enumerate(layers):
        q[i, 0, len(of_layer) - 1, : len(of_layer)] = np.log(of_layer)
    k = np.broadcast_to(np.eye(n), q.shape).copy()
    return {"q": q, "k": k, "v": np.ones_like(k), "scale": 1.0, "prompt_len": len(layers[0])}


FALLING, RISING = [5.0, 4.0, 3.0, 2.0, 1.0, 1.0], [1.0, 2.0, 3.0, 4.0, 5.0, 1.0]
PLAIN = {"window": 1, "pool_kernel": 1}


def test_reference_asl_by_hand():
    """Ranks 1 to 5 turn round once, so the layer behind the turn is the first that is still."""
    trace = by_hand(FALLING, RISING, RISING, RISING, later=1)
    params = {**PLAIN, "first_layer": 1, "look_back": 2}
    out = reference.replay(**trace, policy="asl", params=params, budget=3)
    found = out.selection
    # the best two of either layer are 0, 1, 3, 4, with ranks (1, 5), (2, 4), (4, 2), (5, 1)
    assert found.variance == {1: 2.5, 2: 0.0, 3: 0.0}
    assert found.rho == {1: 1.0, 2: 0.0, 3: 0.0}
    assert (found.selected, found.dropped, found.counts) == (2, (2,), (6, 6, 6, 3))
    # layer 2 still works on all six and then keeps its best two; 3 never saw 0, 1 and 2
    assert rows(out) == [[0, 1, 5, 6], *[[3, 4, 5, 6]] * 3]
    assert out.evicted_at[2, 0].tolist() == [5, 5, 5, NEVER, NEVER, NEVER, NEVER]
    assert out.evicted_at[3, 0].tolist() == [-1, 0, 1, NEVER, NEVER, NEVER, NEVER]
    params["kv_before"] = "full"
    out = reference.replay(**trace, policy="asl", params=params, budget=3)
    assert rows(out) == [*[[0, 1, 2, 3, 4, 5, 6]] * 3, [3, 4, 5, 6]]


def test_reference_asl_selects_nothing_at_a_threshold_of_nothing():
    """No rho is below 0; all layers then hold what SnapKV keeps, or everything."""
    trace = by_hand(FALLING, RISING, RISING, RISING)
    params = {**PLAIN, "first_layer": 1, "look_back": 2, "tau": 0.0}
    out = reference.replay(**trace, policy="asl", params=params, budget=3)
    assert (out.selection.selected, out.selection.counts) == (None, (6,) * 4)
    assert rows(out) == [[0, 1, 5], *[[3, 4, 5]] * 3]
    out = reference.replay(**trace, policy="asl", params={**params, "kv_before": "full"}, budget=3)
    assert (out.evicted_at == NEVER).all()


def test_reference_two_passes_by_hand():
    """Every layer holds what the selected one chose, or the last one where none was selected."""
    trace = by_hand(RISING, FALLING, FALLING, RISING, later=1)
    params = {**PLAIN, "first_layer": 1, "look_back": 2}
    out = reference.replay(**trace, policy="asl_2pass", params=params, budget=3)
    assert (out.selection.selected, out.selection.restarted) == (2, True)
    assert rows(out) == [[0, 1, 5, 6]] * 4
    assert out.selection.counts == (3,) * 4
    params["tau"] = 0.0
    out = reference.replay(**trace, policy="asl_2pass", params=params, budget=3)
    assert out.selection.selected is None
    assert rows(out) == [[3, 4, 5, 6]] * 4


def test_reference_curve_by_hand():
    """Two candidates swap at every layer and a third stays: among the best one, or two."""
    swapping = [[1, 2, 3], [2, 1, 3]] * 2
    variance, rho = propagation.curve(swapping, 1, 2, 1)
    assert variance == {1: 0.25, 2: 0.25, 3: 0.25}
    assert rho == {1: 1.0, 2: 1.0, 3: 1.0}
    # three layers: ranks 1, 2, 1 vary by 2/9; and the first has fewer than three to look at
    variance, _ = propagation.curve([*swapping, swapping[0]], 2, 3, 3)
    assert variance == pytest.approx({2: 4 / 27, 3: 4 / 27, 4: 4 / 27})
    assert [*propagation.looked_back(5, 1, 8)] == [4, 5]
    assert [*propagation.looked_back(10, 10, 8)] == [*range(3, 11)]
    # nothing moves at first, so there is nothing to fall below
    still = [[1, 2, 3], [1, 2, 3], [2, 1, 3]]
    assert propagation.curve(still, 1, 2, 1)[1] == {1: 0.0, 2: 0.0}


def test_reference_ranks_are_of_the_sum_over_all_heads():
    """A sum of 5, 5 and 4; the first of two equals is the best."""
    scores = propagation.total([[4.0, 1.0, 2.0], [1.0, 4.0, 2.0]])
    assert scores == [5.0, 5.0, 4.0]
    assert propagation.ranks(scores) == [1, 2, 3]
    assert propagation.ranks([1.0, 3.0, 2.0, 3.0]) == [4, 1, 3, 2]


def test_reference_votes_by_hand():
    """Attention of rows 2 and 3 on 0 and 1, summed; edges count a zero in an average."""
    q = np.zeros((2, 4, 4))
    q[0, 2, :3], q[0, 3] = np.log([0.5, 0.25, 0.25]), np.log([0.1, 0.2, 0.3, 0.4])
    k = np.eye(4)[None]
    found = propagation.votes(q, k, 4, 1.0, 2, None, 1)
    assert found[0] == pytest.approx([0.6, 0.45])
    assert found[1] == pytest.approx([1 / 3 + 1 / 4] * 2)
    assert propagation.votes(q, k, 4, 1.0, 2, "avg", 3)[0] == pytest.approx([0.35, 0.35])
    assert propagation.votes(q, k, 4, 1.0, 2, "max", 3)[0] == pytest.approx([0.6, 0.6])


def test_reference_fastkv_by_hand():
    """Four rows go on, of which the deeper layer keeps its best; short prompts go through."""
    trace = by_hand(FALLING, RISING, later=1)
    params = {**PLAIN, "layer": 0, "rows": 4}
    out = reference.replay(**trace, policy="fastkv", params=params, budget=3)
    assert (out.selection.dropped, out.selection.counts) == ((0,), (6, 4))
    assert out.evicted_at[1, 0].tolist() == [5, NEVER, NEVER, 2, 3, NEVER, NEVER]
    assert rows(out) == [[0, 1, 5, 6], [1, 2, 5, 6]]
    # as a share, as the budget; and what is not more than there is room for
    for more, counts in [
        ({"rows": 0.7}, (6, 4)),
        ({"rows": None}, (6, 3)),
        ({"rows": 6}, (6, 6)),
        ({"rows": 1.0}, (6, 6)),
    ]:
        out = reference.replay(**trace, policy="fastkv", params={**params, **more}, budget=3)
        assert out.selection.counts == counts, more
    out = reference.replay(**trace, policy="fastkv", params=params, budget=7)
    assert out.selection.counts == (6, 6)
    assert (out.evicted_at == NEVER).all()
    full = {**params, "kv_before": "full"}
    assert rows(reference.replay(**trace, policy="fastkv", params=full, budget=3)) == [
        [*range(7)],
        [1, 2, 5, 6],
    ]


@pytest.mark.parametrize(
    ("known", "share", "layers"),
    [
        ({32: 15, 28: 14}, 0.5, {32: 15, 28: 14, 1: 0, 2: 0, 4: 1, 6: 2, 24: 11, 36: 17}),
        ({32: 13, 28: 14}, 14 / 32, {32: 13, 28: 14, 1: 0, 2: 0, 4: 1, 6: 2, 24: 9, 36: 15}),
    ],
)
def test_reference_fixed_layers(known, share, layers):
    """The published layers of the models that have 32 and 28, and the same share of others."""
    assert {n: propagation.fixed(None, n, known, share) for n in layers} == layers
    assert propagation.fixed(5, 32, known, share) == 5


def test_reference_gemfilter_by_hand():
    """The last query's products, however small; nothing is kept because it is last."""
    last = [math.exp(x) for x in (1.0, -2.0, 3.0, 0.0, -4.0, -9.0)]
    trace = by_hand([1.0] * 6, last, later=1)
    params = {"layer": 1, "pool_kernel": 1}
    out = reference.replay(**trace, policy="gemfilter", params=params, budget=2)
    assert rows(out) == [[0, 2, 6]] * 2
    assert (out.selection.restarted, out.selection.counts) == (True, (2, 2))
    # sums of three neighbours with zeros beyond the ends: -1, 2, 1, -1, -13, -13
    params["pool_kernel"] = 3
    out = reference.replay(**trace, policy="gemfilter", params=params, budget=2)
    assert rows(out) == [[1, 2, 6]] * 2
    out = reference.replay(**trace, policy="gemfilter", params=params, budget=3)
    assert rows(out) == [[0, 1, 2, 6]] * 2


def test_reference_pyramidinfer_by_hand():
    """Of 10 rows the last 3 stay; of 7, 7/8 go on after layer 1 of 3; of 6, 3/4 after 2 of 4."""
    weak = [0.1, 1.0, 0.3, 0.2, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    trace = by_hand(weak, weak, weak, weak, later=1)
    params = {"ratio": 0.5, "sink": 1, "least": 3}
    assert propagation.remaining(1, 3, 0.5) == pytest.approx(7 / 8)
    assert propagation.remaining(0, 3, 0.3) == 1.0
    for layers, gone in [(3, [set(), set(), {3}]), (4, [set(), set(), {3}, {2, 3, 6}])]:
        arrays = {name: trace[name][:layers] for name in "qkv"}
        out = reference.replay(
            **{**trace, **arrays}, policy="pyramidinfer", params=params, budget=1
        )
        held = [sorted(set(range(11)) - of_layer) for of_layer in gone]
        assert rows(out) == held
        assert out.selection.counts == tuple(len(of_layer) - 1 for of_layer in held)
        assert out.selection.dropped == tuple(range(1, layers - 1))
    # without a sink the weakest goes; with as many as must stay at least, none
    out = reference.replay(**trace, policy="pyramidinfer", params={**params, "sink": 0}, budget=1)
    assert out.selection.alive[2] == tuple(range(1, 10))
    out = reference.replay(**trace, policy="pyramidinfer", params={**params, "least": 6}, budget=1)
    assert out.selection.counts == (10,) * 4


def test_reference_pyramidinfer_weighs_newer_rows_more():
    """Two rows that look at one entry each: what the newer one looks at has more."""
    q = np.zeros((1, 4, 4))
    q[0, 2, 0] = q[0, 3, 1] = 3.0
    received = propagation._received(q, np.eye(4)[None], [0, 1, 2, 3], 2, 4, 1.0)
    peak = math.exp(3.0)
    assert received[0] == pytest.approx((peak / (peak + 2) + 1.2 / (peak + 3)) / 2)
    assert received[1] == pytest.approx((1 / (peak + 2) + 1.2 * peak / (peak + 3)) / 2)
    # among the rows alive: without 2, which then cannot look either
    received = propagation._received(q, np.eye(4)[None], [0, 1, 3], 3, 4, 1.0)
    assert received[1] == pytest.approx(peak / (peak + 2))


def test_reference_gives_keywords_to_the_propagation_first():
    """SnapKV behind it looks at the same window, unless it is given one of its own."""
    chain = reference.parse("asl", {"window": 4, "pool": "max"})
    assert chain.params[-1] == {"window": 4, "pool": "max", "pool_kernel": 7}
    chain = reference.parse("asl+adakv+snapkv", {"scorer__window": 3, "window": 5, "floor": 0.5})
    assert (chain.across["window"], chain.params[-1]["window"]) == (5, 3)
    assert (chain.allocator, chain.params[0]) == ("adakv", {"floor": 0.5})
    assert reference.parse("asl+snapkv@kvpress").params[-1]["window"] == 64
    assert reference.parse("fastkv@proportional").across["rows"] == 0.2
    for name in (*NAMES, *CROSSES):
        own = reference.defaults(name)
        assert reference.parse(name, own) == reference.parse(name)
    for name in ("gemfilter+snapkv", "asl+full+snapkv", "snapkv+asl", "asl+x"):
        with pytest.raises(PolicyError):
            reference.parse(name)
    with pytest.raises(PolicyError, match="tau"):
        reference.parse("fastkv", {"tau": 0.1})


def test_reference_refuses_a_budget_below_the_window():
    """There is no room for anything but the window."""
    trace = by_hand(FALLING, RISING)
    for name in ("asl", "asl+tova", "asl_2pass"):
        least = reference.smallest_budget(name, {"window": 3, "pool_kernel": 1}, 5)
        assert least == 3
        with pytest.raises(BudgetError):
            reference.replay(**trace, policy=name, params={"window": 3, "pool_kernel": 1}, budget=2)


# ------------------------------------------------------------------------------- generated traces

#: Cases of a policy that the engine must agree on, where they are not the usual number.
CASES = {"asl": 80, "pyramidinfer": 50}
USUAL = 40


def make_case(
    rng: np.random.Generator, heads: int, group: int, layers: int, n: int, later: int, seed: int = 0
) -> Case:
    """Layers that attend to the same tokens the more, the deeper they are.

    Each token has a weight of its own in every layer, which settles on one that all share: from
    some layer on, over some layers, up to some part.
    """
    dim = 4
    length = n + later
    start = rng.uniform(-0.2, 0.9) * layers
    depth = np.clip((np.arange(layers) - start) / rng.uniform(0.5, 0.7 * layers + 1), 0, 1)
    settled = (rng.choice([0.5, 0.9, 0.99, 1.0]) * depth)[:, None, None]
    shared = rng.standard_normal((1, 1, length))
    own = rng.standard_normal((layers, 1, length))
    weight = settled * shared + np.sqrt(1 - settled**2) * own
    k = 0.5 * (1 - 0.8 * settled[..., None]) * rng.standard_normal((layers, heads, length, dim))
    q = 0.5 * rng.standard_normal((layers, heads * group, length, dim))
    k[..., 0] += weight
    q[..., 0] += rng.uniform(2.0, 5.0)
    v = rng.standard_normal(k.shape)
    o_proj = rng.standard_normal((layers, heads * group, dim, 5))
    probe = q[:, :, :2], k[:, :, :2]
    return Case("settling", seed, n, dim**-0.5, q, k, v, o_proj, *probe)


def parameters(name: str, rng: np.random.Generator, layers: int, n: int) -> dict[str, Any]:
    """Parameters of a propagation, small enough to bind."""
    pooling = {
        "window": int(rng.integers(1, 7 if "@" in name else 17)),
        "pool": str(rng.choice(["avg", "max"])),
        "pool_kernel": int(rng.choice([1, 3, 5, 7])),
    }
    before = {"kv_before": str(rng.choice(["budget", "full"]))}
    layer = None if rng.random() < 0.3 else int(rng.integers(layers))
    if name.startswith("asl"):
        adaptive = {
            **pooling,
            "tau": float(rng.choice([0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0, 1.0, 1.5])),
            "first_layer": None if rng.random() < 0.4 else int(rng.integers(layers)),
            "look_back": int(rng.integers(1, 11)),
        }
        return adaptive if name.startswith("asl_2pass") else {**adaptive, **before}
    if name.startswith("fastkv"):
        reach: list[Any] = [
            int(rng.integers(pooling["window"], n + 3)),
            float(rng.uniform(pooling["window"] / n, 1.0)),
            None,
        ]
        given = {**pooling, **before, "layer": layer}
        rows = reach[rng.integers(3)]
        return given if "@" in name else {**given, "rows": rows}
    if name == "gemfilter":
        return {"layer": layer, "pool_kernel": pooling["pool_kernel"]}
    return {
        "recent": float(rng.choice([0.0, 0.1, 0.2, 0.5])),
        "ratio": float(rng.choice([0.5, 0.8, 0.9, 1.0])),
        "sink": int(rng.integers(6)),
        "least": int(rng.choice([0, 8, 16, 32])),
    }


#: Parameters of what stands behind a propagation.
INNER: dict[str, Callable[[np.random.Generator], dict[str, Any]]] = {
    "expected_attention": lambda rng: {
        "sink": int(rng.integers(4)),
        "n_future": int(rng.integers(1, 9)),
        "query_buffer": int(rng.integers(8, 30)),
    },
    "adakv": lambda rng: {"floor": float(rng.choice([0.0, 0.2, 0.5]))},
    "h2o": lambda rng: {"recent": [None, 3][rng.integers(2)]},
    "tova": lambda _: {},
    "snapkv": lambda rng: [{}, {"scorer__window": int(rng.integers(1, 12))}][rng.integers(2)],
    "ams": lambda rng: {
        "sink": int(rng.integers(4)),
        "recent": int(rng.integers(8)),
        "scorer__window": int(rng.integers(1, 12)),
        "min_segment": 3,
        "max_segment": 9,
    },
}


def draw(name: str, seed: int) -> tuple[Case, Setup]:
    """A case and a setup from a seed."""
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(2, 31))
    n = int(rng.integers(30, 65 if layers < 12 else 45))
    later = int(rng.integers(1, 25)) if rng.random() < 0.7 else 0
    if "+" in name:
        n, layers = min(n, 50), min(layers, 12)
    params = parameters(name, rng, layers, n)
    heads, group = int(rng.integers(1, 3)), int(rng.integers(1, 5))
    case = make_case(rng, heads, group, layers, n, later, seed)
    for inner in name.split("+")[1:]:
        params |= INNER[inner](rng)
    least = max([x for key, x in params.items() if key.endswith("window")], default=1)
    least = max(least, int(params.get("sink") or 0) + int(params.get("recent") or 0)) + 1
    budget = int(rng.integers(least, min(2 * least + 10, n)))
    if seed % 10 == 9:
        budget = int(rng.integers(n, n + 3))
    interval = int(rng.integers(1, 10)) if rng.random() < 0.5 else None
    prefill = [None, True, False][rng.choice(3, p=[0.6, 0.2, 0.2])]
    return case, Setup(name, params, budget, interval, prefill)


def replay(case: Case, setup: Setup) -> kvsim.Record:
    """The engine's."""
    return kvsim.replay(
        case.trace(),
        kvsim.policy(setup.policy, **setup.params),
        setup.budget,
        interval=setup.interval,
        prefill=setup.prefill,
    )


@functools.cache
def drawn_record(name: str, seed: int) -> kvsim.Record:
    """The engine's, of the case and the setup from a seed."""
    return replay(*draw(name, seed))


def disagreement(
    outcome: reference.Outcome,
    record: kvsim.Record,
    tolerance: float = 1e-9,
    of_curve: float = 1e-9,
    *,
    ties: bool = True,
) -> str | None:
    """What the engine does otherwise than the reference; None for nothing."""
    found, selection = outcome.selection, record.selection
    for name in ("counts", "dropped", "restarted"):
        if getattr(selection, name) != getattr(found, name):
            return f"{name}: naive {getattr(found, name)}, engine {getattr(selection, name)}"
    if not outcome.agrees(record.evicted_at, tolerance, ties=ties):
        where = np.argwhere(record.evicted_at != outcome.evicted_at)
        return f"evicted_at differs at {where[:5].tolist()} and {len(where)} places in all"
    # the last layer need not be tested where nothing is behind it, nor a layer behind the selected
    last = len(outcome.evicted_at) - 2 if found.selected is None else found.selected
    last = min(last, len(outcome.evicted_at) - (1 if found.restarted else 2))
    for name, curve in (("relative_variance", found.rho), ("variance", found.variance)):
        given = dict(enumerate(selection.notes.get(name, [])))
        for layer in given.keys() | curve.keys():
            expected, value = curve.get(layer), given.get(layer)
            if value is None and (layer > last or expected is None):
                continue
            if value is None or expected is None or abs(value - expected) > of_curve * (1 + value):
                return f"{name} of layer {layer}: naive {expected}, engine {value}"
    return None


@pytest.mark.parametrize("name", [*NAMES, *CROSSES])
def test_replay_equals_the_naive_replay(name):
    """Which rows reach a layer, what its cache keeps of them, and ASL's curve, case by case.

    Among the cases are selections at many different layers and at none, prompts that are short
    enough to go through, and events behind the prompt.
    """
    seen: Counter[str] = Counter()
    selected: Counter[int | None] = Counter()
    for seed in range(CASES.get(name, USUAL)):
        case, setup = draw(name, seed)
        outcome = naive(case, setup)
        assert disagreement(outcome, drawn_record(name, seed)) is None, (seed, case, setup)
        found, n = outcome.selection, case.prompt_len
        sure = all(doubt.margin > 1e-9 or doubt.margin == 0 for doubt in found.doubts)
        seen["cases"] += 1
        seen["sure"] += sure
        seen["dropped"] += bool(found.dropped)
        seen["through"] += min(found.counts) == n
        seen["short"] += setup.budget >= n
        late = (outcome.evicted_at >= n) & (outcome.evicted_at != NEVER)
        seen["late"] += bool(late[list(found.counts).index(min(found.counts)) :].any())
        if setup.budget < n:
            selected[found.selected] += 1
    assert seen["sure"] >= 0.95 * seen["cases"], seen
    assert seen["dropped"] >= 20, seen
    if name != "pyramidinfer":
        assert seen["short"], seen
    if name.startswith(("asl", "fastkv")):
        assert len(selected) >= (15 if name == "asl" else 5), selected
        assert selected[None] >= 5 or not name.startswith("asl"), selected
    if "+" in name or name == "asl":
        assert seen["late"] >= 5, seen


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("asl+chunkkv+snapkv", {"chunk": 3}),
        ("asl+gkv", {"scorer__window": 5}),
        ("asl+lagkv", {"sink": 2, "lag": 3}),
        ("asl+global+tova", {}),
        ("asl+random", {}),
        ("asl+triattention", {"calibration": "oracle", "protect_prompt": False}),
        ("fastkv+criticalkv+snapkv", {}),
        ("fastkv+pyramidkv", {"scorer__window": 4, "beta": 3.0}),
    ],
)
def test_any_policy_works_on_the_rows_that_a_layer_has(name, params):
    """Positions, windows, sinks and lags count these rows; RoPE turns them from where they were."""
    for seed in range(8):
        case, setup = draw(f"{name.partition('+')[0]}+tova", seed)
        budget = max(setup.budget, 16)
        setup = replace(setup, policy=name, params={**setup.params, **params}, budget=budget)
        found = disagreement(naive(case, setup), replay(case, setup), ties=False)
        assert found is None, (seed, case, setup)


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 6, 24, 28, 31, 32, 36])
@pytest.mark.parametrize("name", ["fastkv", "gemfilter", "asl"])
def test_layers_that_nobody_gave(name, layers):
    """The layer of a model of this depth, or the first that is tested, is the reference's."""
    rng = np.random.default_rng(layers)
    case = make_case(rng, 1, 1, layers, 20, 2)
    params = {"asl": {"window": 4, "tau": 0.8}, "fastkv": {"rows": 10}}.get(name, {})
    setup = Setup(name, params, 9, None, None)
    outcome = naive(case, setup)
    record = replay(case, setup)
    assert disagreement(outcome, record) is None
    if name == "asl":
        found = record.selection.notes["first_layer"], record.selection.notes["look_back"]
        assert found == (layers // 3, min(8, layers // 3 + 1))
    else:
        assert record.selection.notes["layer"] == outcome.selection.selected


def test_replay_of_narrow_floats_equals_the_naive_replay():
    """In float32, too, outside near-ties; and most cases are outside."""
    seen: Counter[str] = Counter()
    for name in NAMES:
        for seed in range(1000, 1020):
            case, setup = draw(name, seed)
            case = replace(case, **{x: getattr(case, x).astype(np.float32) for x in "qkv"})
            outcome = naive(case, setup)
            found = disagreement(outcome, replay(case, setup), case.tolerance, 0.02)
            seen["sure"] += all(doubt.margin > case.tolerance for doubt in outcome.selection.doubts)
            sure = found is None or not found.startswith(("counts", "dropped"))
            assert found is None or not sure, (name, seed, found)
            seen["same rows"] += sure
    assert seen["sure"] >= 60, seen
    assert seen["same rows"] >= 115, seen


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("asl", {"tau": 1.5, "window": 4, "pool": "avg"}),
        ("asl", {"tau": 0.9, "window": 8}),
        ("asl", {"first_layer": 0, "kv_before": "full", "window": 8}),
        ("asl+adakv+snapkv", {"tau": 1.5, "window": 4, "pool": "avg", "scorer__window": 4}),
        ("asl+expected_attention", {"tau": 1.5, "window": 4, "pool": "avg", "n_future": 8}),
        ("asl_2pass", {"window": 8}),
        ("fastkv", {"rows": 60, "pool": "avg"}),
        ("fastkv@proportional", {"pool": "avg"}),
        ("fastkv+tova", {"rows": 50, "pool": "avg"}),
        ("fastkv+h2o", {"rows": 60, "layer": 1}),
        ("gemfilter", {}),
        ("pyramidinfer", {"least": 16}),
        ("pyramidinfer", {"ratio": 0.5}),
    ],
)
def test_replay_of_the_sample_equals_the_naive_replay(name, params):
    """A recorded trace of the shipped model, with events behind the prompt, outside near-ties."""
    trace = kvsim.open_trace(sample_trace())
    n = trace.prompt_len + 44  # as far as the naive replay goes
    q, k, v = (np.asarray(x)[:, :, :n] for x in (trace.q, trace.k, trace.v))
    rope = ([float(f) for f in trace.rope.inv_freq], float(trace.rope.attention_scaling))
    how = {"budget": 32, "interval": 16, "prefill": None}
    outcome = reference.replay(
        q,
        k,
        v,
        prompt_len=trace.prompt_len,
        policy=name,
        params=params,
        scale=trace.scale,
        rope=rope,
        **how,
    )
    record = kvsim.replay(trace, kvsim.policy(name, **params), **how)
    cut = np.where(record.evicted_at[..., :n] < n - 1, record.evicted_at[..., :n], NEVER)
    early = np.where(outcome.evicted_at < n - 1, outcome.evicted_at, NEVER)
    outcome = replace(outcome, evicted_at=early)
    assert disagreement(outcome, replace(record, evicted_at=cut), 1e-4, 0.02, ties=False) is None
    assert outcome.sure_until(1e-4).min() >= 0, "nothing to see: the rows that go on are unsure"


# ------------------------------------------------------------------------------ what must hold

QUIET = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
SEEDS = st.integers(0, 2**32 - 1)


def of_asl(seed: int, **params: Any) -> tuple[Case, Setup]:
    """A case for ASL: average pooling, so that no two scores are equal, a budget that binds."""
    case, setup = draw("asl", seed)
    given = {**setup.params, "pool": "avg", **params}
    budget = min(setup.budget, case.prompt_len - 1)
    return case, replace(setup, params=given, budget=budget)


def same(one: kvsim.Record, other: kvsim.Record) -> bool:
    """Whether two replays evict the same, and select the same."""
    mine, its = one.selection, other.selection
    return bool(
        (mine.dropped, mine.counts) == (its.dropped, its.counts)
        and (one.evicted_at == other.evicted_at).all()
    )


def curve_of(record: kvsim.Record) -> list[float]:
    """rho, of the layers that were tested: the last is not, where nothing is behind it."""
    return [x for x in record.selection.notes.get("relative_variance", []) if x is not None]


@settings(QUIET, max_examples=24)
@given(seed=SEEDS)
def test_asl_forced_to_a_layer_is_fastkv(seed):
    """With a threshold above 1 the first layer is selected; FastKV is given that layer."""
    case, setup = of_asl(seed, tau=1.5, first_layer=seed % draw("asl", seed)[0].q.shape[0])
    names = ("window", "pool", "pool_kernel", "kv_before")
    params = {name: setup.params[name] for name in names}
    params |= {"layer": setup.params["first_layer"], "rows": None}
    fixed = replace(setup, policy="fastkv", params=params)
    assert same(replay(case, setup), replay(case, fixed))
    assert (naive(case, setup).evicted_at == naive(case, fixed).evicted_at).all()


@settings(QUIET, max_examples=24)
@given(seed=SEEDS)
def test_selection_comes_no_later_at_a_higher_threshold(seed):
    """Never at 0; at the first layer above 1."""
    selected = []
    for tau in (0.0, 0.1, 0.3, 0.6, 0.9, 1.0, 1.1):
        case, setup = of_asl(seed, tau=tau)
        dropped = replay(case, setup).selection.dropped
        selected.append(dropped[0] if dropped else len(case.q) - 1)
    assert selected[0] == len(case.q) - 1
    assert selected == sorted(selected, reverse=True)
    first = setup.params["first_layer"]
    assert selected[-1] == (len(case.q) // 3 if first is None else first)


@settings(QUIET, max_examples=60)
@given(seed=SEEDS, factor=st.sampled_from([0.25, 0.5, 2.0, 4.0]))
def test_monotone_map_of_the_scores_changes_nothing(seed, factor):
    """Only ranks count: of one head and one row, a temperature maps all scores to others in order.

    Values count for nothing at all.
    """
    case, setup = of_asl(seed, window=1, pool_kernel=1)
    one_head = ("q", "k", "v", "probe_q", "probe_k")
    case = replace(case, **{x: getattr(case, x)[:, :1] for x in one_head}, o_proj=None)
    mapped = replace(case, q=case.q * factor, v=-case.v)
    one, other = replay(case, setup), replay(mapped, setup)
    assert one.selection == other.selection
    assert same(one, other) or setup.interval is not None


@settings(QUIET, max_examples=60)
@given(seed=SEEDS)
def test_permuted_heads_are_permuted_in_the_record(seed):
    """KV heads with their query heads, and query heads within their group."""
    case, setup = of_asl(seed)
    one = replay(case, setup)
    layers, heads, group, n, dim = case.shape
    q = case.q.reshape(layers, heads, group, n, dim)[:, ::-1, ::-1].reshape(case.q.shape).copy()
    k, v = case.k[:, ::-1].copy(), case.v[:, ::-1].copy()
    turned = replace(case, q=q, k=k, v=v, o_proj=None)
    other = replay(turned, setup)
    assert same(one, replace(other, evicted_at=other.evicted_at[:, ::-1]))
    assert curve_of(one) == pytest.approx(curve_of(other), rel=1e-9)


@settings(QUIET, max_examples=30)
@given(seed=SEEDS)
def test_bias_of_the_variance_cancels(seed):
    """Over one less than all, V grows by the same factor in every layer, and rho stays."""
    rng = np.random.default_rng(seed)
    layers, first = int(rng.integers(2, 20)), int(rng.integers(1, 6))
    ranking = [(rng.permutation(30) + 1).tolist() for _ in range(layers)]
    variance, rho = propagation.curve(ranking, first, 8, 9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(propagation, "spread", lambda x, *_: np.var(x, axis=0, ddof=1))
        unbiased, again = propagation.curve(ranking, first, 8, 9)
    count = min(8, first + 1)
    grown = {layer: x * count / (count - 1) for layer, x in variance.items()}
    assert unbiased == pytest.approx(grown)
    assert again == pytest.approx(rho)


# ------------------------------------------------------------------------------ it can fail


def one_layer_more(layer: int, first: int, look_back: int) -> range:
    """Nine layers instead of eight, as a formula of the paper has it."""
    return range(max(0, layer - min(look_back, first + 1)), layer + 1)


def union_as_the_chosen(
    ranking: list[list[int]], layer: int, look_back: int, many: int
) -> set[int]:
    """All that were among the best in one of the layers looked back at."""
    seen = ranking[max(0, layer - look_back + 1) : layer + 1]
    return {p for of_layer in seen for p in propagation.one_of_best(of_layer, many)}


def ranks_per_head(scores: list[list[float]]) -> list[float]:
    """Ranks of each head added up, instead of ranks of the sum."""
    return [-float(sum(column)) for column in zip(*map(propagation.ranks, scores), strict=True)]


def only_the_first_biased(of_tokens: np.ndarray, layer: int, first: int) -> np.ndarray:
    """Variance over one less than all, but in the layer that the others are compared with."""
    return np.var(of_tokens, axis=0, ddof=int(layer != first and len(of_tokens) > 1))


MUTANTS: list[tuple[str, str, Callable[..., Any]]] = [
    ("asl", "looked_back", one_layer_more),
    ("asl", "best", union_as_the_chosen),
    ("asl", "total", ranks_per_head),
    ("asl", "spread", only_the_first_biased),
    ("asl", "is_below", lambda rho, tau: rho <= tau),
    ("asl", "with_window", lambda chosen, *_: sorted(chosen)),
    ("asl", "first_without", lambda selected: selected),
    ("asl_2pass", "best", union_as_the_chosen),
    ("asl_2pass", "with_window", lambda chosen, *_: sorted(chosen)),
    ("fastkv", "total", ranks_per_head),
    ("fastkv", "total", lambda scores: list(scores[0])),
    ("fastkv", "first_without", lambda selected: selected),
    ("fastkv", "fixed", lambda given, n, *_: n // 2 if given is None else given),
    ("gemfilter", "ranks", lambda scores: [n + 1 for n in range(len(scores))]),
    ("pyramidinfer", "remaining", lambda i, n, r: (1 - r) * math.cos(math.pi * i / n) + r),
    ("pyramidinfer", "np.linspace", lambda low, high, n: np.linspace(high, low, n)),
]


@pytest.mark.parametrize(("name", "part", "wrong"), MUTANTS)
def test_comparison_catches_a_wrong_reference(name, part, wrong, monkeypatch):
    """With one small function exchanged, at least one of the first cases is another."""
    if part == "np.linspace":
        right = np.linspace
        wrong = lambda low, high, n: right(high, low, n)  # noqa: E731
    monkeypatch.setattr(f"reference.propagation.{part}", wrong)
    assert any(
        disagreement(naive(*draw(name, seed)), drawn_record(name, seed)) is not None
        for seed in range(240)
    )
