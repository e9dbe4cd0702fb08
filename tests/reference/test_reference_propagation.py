"""ASL and its relatives against a naive float64 propagation that shares no code with them."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kvsim
import reference
from kvsim.testing.strategies import Case
from reference import NEVER
from reference.strategies import Setup, naive

NAMES = ("asl", "asl_2pass", "fastkv", "fastkv@proportional", "gemfilter", "pyramidinfer")
CROSSES = (
    "asl+expected_attention",
    "asl+adakv+snapkv",
    "fastkv+h2o",
    "fastkv+tova",
    "fastkv+ams+tova",
)


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


def agreeing(name: str, seeds: range) -> tuple[Counter[str], Counter[int | None]]:
    """Count what cases have, all of which agree, and the layers that they select."""
    seen: Counter[str] = Counter()
    selected: Counter[int | None] = Counter()
    for seed in seeds:
        case, setup = draw(name, seed)
        outcome = naive(case, setup)
        assert disagreement(outcome, replay(case, setup)) is None, (seed, case, setup)
        found, n = outcome.selection, case.prompt_len
        seen["sure"] += all(doubt.margin > 1e-9 or doubt.margin == 0 for doubt in found.doubts)
        seen["dropped"] += bool(found.dropped)
        seen["short"] += setup.budget >= n
        late = (outcome.evicted_at >= n) & (outcome.evicted_at != NEVER)
        seen["late"] += bool(late[list(found.counts).index(min(found.counts)) :].any())
        if setup.budget < n:
            selected[found.selected] += 1
    return seen, selected


@pytest.mark.parametrize("name", [*NAMES, "asl+adakv+snapkv"])
def test_replay_equals_the_naive_replay(name):
    """Which rows reach a layer, what its cache keeps of them, and ASL's curve, case by case."""
    seen, _ = agreeing(name, range(16))
    assert seen["sure"] >= 14, seen
    assert seen["dropped"] >= 6, seen


@pytest.mark.deep
@pytest.mark.parametrize("name", [*NAMES, *CROSSES])
def test_more_replays_equal_the_naive_replay(name):
    """Short prompts, late events and all selected layers are among them."""
    seen, selected = agreeing(name, range(80 if name == "asl" else 50))
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
    for seed in range(4):
        case, setup = draw(f"{name.partition('+')[0]}+tova", seed)
        budget = max(setup.budget, 16)
        setup = replace(setup, policy=name, params={**setup.params, **params}, budget=budget)
        found = disagreement(naive(case, setup), replay(case, setup), ties=False)
        assert found is None, (seed, case, setup)


@pytest.mark.parametrize("layers", [1, 3, 28, 31, 32])
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
