"""Policies that drop rows of the prompt on the way down: what the engine makes of them."""

import numpy as np
import pytest
import torch

import kvsim
from kvsim.analysis.kept.retention import entries_seen, wipeouts
from kvsim.analysis.output.error import output_error
from kvsim.core.policy import Policy, Schedule
from kvsim.core.propagation import Propagation, Step
from kvsim.core.record import Selection
from kvsim.engine.checks import Setup
from kvsim.errors import BudgetError, PolicyError
from kvsim.policies.asl import ASL
from kvsim.policies.full import Full
from kvsim.policies.pyramidinfer import PyramidInfer
from kvsim.schema import NEVER
from kvsim.store.records import read_records, write_records
from traces import changed

LAYERS, HEADS, GROUP, DIM = 7, 2, 2, 8


def make_trace(n=90, prompt_len=70, layers=LAYERS, seed=0):
    """Layers that resemble each other more and more, so that rankings settle with depth."""
    rng = np.random.default_rng(seed)
    q = 2 * rng.standard_normal((layers, HEADS * GROUP, n, DIM))
    k = 2 * rng.standard_normal((layers, HEADS, n, DIM))
    for layer in range(1, layers):
        same = min(0.95, 0.3 + 0.15 * layer)
        q[layer] = same * q[layer - 1] + (1 - same) * q[layer]
        k[layer] = same * k[layer - 1] + (1 - same) * k[layer]
    v = rng.standard_normal(k.shape)
    return kvsim.Trace.from_arrays(q, k, v, prompt_len=prompt_len, rope=kvsim.Rope.default(DIM))


@pytest.fixture(scope="module")
def trace():
    """One trace for all."""
    return make_trace()


class Fixed(Propagation):
    """A testing propagation: given places go on behind given layers."""

    def __init__(self, places, restarts=False, before="budget"):
        self.places, self.kv_before = places, before
        self.caches = "again" if restarts else "chosen"

    def after(self, view, memory):
        """What was given for this layer."""
        seen = (memory or ()) + ((int(view.layers[0]), view.row + 1, view.is_prompt),)
        places = self.places.get(int(view.layers[0]))
        rows = None if places is None else torch.tensor(places)
        return Step(rows, memory=seen, notes={"rows": view.row + 1})

    def forecast(self, budget, prompt_len, n_layers, layer=None):
        """Not used."""
        raise NotImplementedError


def test_rows_that_do_not_go_on_are_visible_to_no_row(trace):
    """evicted_at is p - 1 for them in every head of deeper layers, and only there."""
    record = kvsim.replay(trace, kvsim.policy("fastkv", rows=30, layer=2), 20)
    last = record.evicted_at
    absent = last < np.arange(trace.n_pos)

    assert not absent[:3].any()
    assert (absent[3:, :, : trace.prompt_len].sum(-1) == trace.prompt_len - 30).all()
    assert not absent[:, :, trace.prompt_len :].any()
    assert (absent == absent[:, :1]).all()
    assert (last[absent] == absent.nonzero()[2] - 1).all()
    for row in range(trace.n_pos):
        assert not (record.kept(row) & absent).any()
        assert not (record.retained(row) & absent).any()


def test_the_end_of_the_prompt_is_an_event_where_rows_were_dropped(trace):
    """Also where nothing is evicted; sets and rates count them as gone from there on."""
    policy = kvsim.policy("asl", tau=1.01, window=4, kv_before="full")
    record = kvsim.replay(trace, policy, 20)
    first = record.selection.layer

    assert record.events == [trace.prompt_len - 1]
    assert (record.evicted_at[: first + 1] == NEVER).all()
    assert record.retained(trace.prompt_len - 1)[first + 1 :].sum(-1).tolist() == [[20] * HEADS] * (
        LAYERS - first - 1
    )
    rows, _ = wipeouts(record.gone_after[first + 1], [8])
    assert rows.tolist() == [trace.prompt_len - 1]
    seen = entries_seen(record.gone_after[-1], trace.prompt_len)
    new = np.arange(trace.prompt_len, trace.n_pos) - trace.prompt_len + 1
    assert seen == pytest.approx(20 + new.mean())


def test_a_record_with_a_selection_is_stored_and_read(trace, tmp_path):
    """Layers, counts and notes come back, and records without one have none."""
    records = [
        kvsim.replay(trace, kvsim.policy("asl", tau=0.9, window=4), 20),
        kvsim.replay(trace, kvsim.policy("gemfilter"), 20),
        kvsim.replay(trace, kvsim.policy("snapkv", window=4), 20),
    ]
    write_records(tmp_path / "records.zarr", records)
    found = read_records(tmp_path / "records.zarr")

    assert [one.selection for one in found] == [one.selection for one in records]
    assert [one.selection is None for one in found] == [False, False, True]
    assert found[0].events == records[0].events
    assert found[1].positions == "slot"


def test_a_propagation_is_asked_in_depth_order_over_the_rows_that_are_left(trace):
    """Each layer but the last, with as many rows as went on, at the end of the prompt."""
    asked = []

    def watched(view, memory):
        step = Fixed.after(piece, view, memory)
        asked.append(step.memory[-1])
        return step

    piece = Fixed({1: list(range(0, 70, 2)), 4: [0, 3, 9]})
    piece.after = watched
    policy = Policy("fixed", Full(), schedule=Schedule(interval=None), propagation=piece)
    record = kvsim.replay(trace, policy, 200)

    assert asked == [(0, 70, True), (1, 70, True), (2, 35, True), (3, 35, True), (4, 35, True),
                     (5, 3, True)]  # fmt: skip
    assert record.selection == Selection(
        (1, 4), (70, 70, 35, 35, 35, 3, 3), notes={"rows": [70, 70, 35, 35, 35, 3, None]}
    )
    assert np.flatnonzero(record.kept(69)[5, 0]).tolist() == [0, 6, 18]


def test_output_error_leaves_out_rows_that_were_not_computed(trace):
    """NaN there; for the other rows of the prompt attention among themselves."""
    record = kvsim.replay(trace, kvsim.policy("fastkv", rows=30, layer=1, window=4), 200)
    assert record.selection.layer is None  # a prompt below the budget goes on whole
    record = kvsim.replay(trace, kvsim.policy("fastkv", rows=30, layer=1, window=4), 25)
    (found,) = output_error(trace, [record])
    absent = record.evicted_at[:, 0] < np.arange(trace.n_pos)

    assert (
        np.isnan(found.error) == absent.repeat(HEADS * GROUP, 0).reshape(found.error.shape)
    ).all()
    assert (np.isnan(found.mass) == np.isnan(found.error)).all()
    layer, qhead = 4, 3
    q, k, v = (
        trace.read("q")[layer, qhead].numpy(),
        trace.read("k")[layer, 1].numpy(),
        trace.read("v")[layer, 1].numpy(),
    )
    for row in (*np.flatnonzero(~absent[layer, :70])[[3, 17]], 80):
        weights = np.exp(k[: row + 1] @ q[row] / np.sqrt(DIM))
        seen = record.kept(int(row))[layer, 1][: row + 1]
        full = weights @ v[: row + 1] / weights.sum()
        part = (weights * seen) @ v[: row + 1] / (weights * seen).sum()
        error = np.linalg.norm(full - part) / np.linalg.norm(full)
        assert found.error[layer, qhead, row] == pytest.approx(error, abs=1e-5)
        mass = (weights * seen).sum() / weights.sum()
        assert found.mass[layer, qhead, row] == pytest.approx(mass, abs=1e-5)


def test_output_of_a_second_pass_is_that_of_new_positions(trace):
    """Queries and keys are turned to where the second pass has them."""
    record = kvsim.replay(trace, kvsim.policy("gemfilter", layer=2), 20)
    (found,) = output_error(trace, [record])
    rows = np.flatnonzero(record.evicted_at[0, 0, :70] >= np.arange(70))
    at = torch.from_numpy(np.concatenate([rows, np.arange(70, 90)]))
    q, k = (
        trace.ropes[0].rotate(trace.ropes[0].unrotate(x[0][:, at], at), torch.arange(40))
        for x in map(trace.read, "qk")
    )
    out = kvsim.core.attention.causal_attention(q, k, trace.read("v")[0][:, at], trace.formulas[0])[
        0
    ]
    full = trace.full()[0][0][:, at]
    error = ((out - full).norm(dim=-1) / full.norm(dim=-1)).numpy()

    assert found.error[0][:, at.numpy()] == pytest.approx(error, abs=1e-5)


@pytest.mark.parametrize(("layers", "expected"), [(32, 0.766), (28, 0.789)])
def test_pyramidinfer_keeps_the_known_share_of_the_cache(layers, expected):
    """Mean share of the cache at 8,192 tokens, as ASL's configuration of it has."""
    counts = PyramidInfer().forecast(2048, 8192, layers).rows

    assert np.mean(counts) / 8192 == pytest.approx(expected, abs=5e-4)
    assert counts[0] == counts[1] == 8192


@pytest.mark.parametrize("name", ["asl", "asl_2pass", "fastkv", "gemfilter", "pyramidinfer"])
def test_rows_are_known_beforehand(trace, name):
    """The rows of layers in a forecast are those of a replay."""
    params = {"window": 4} if name in ("asl", "asl_2pass", "fastkv") else {}
    params |= {"fastkv": {"rows": 30}, "pyramidinfer": {"least": 5}}.get(name, {})
    policy = kvsim.policy(name, **params, **({"tau": 1.01} if name == "asl" else {}))
    found = kvsim.replay(trace, policy, 20).selection
    layer = found.layer if name == "asl" else None
    forecast = policy.propagation.forecast(20, 70, LAYERS, layer)

    assert tuple(forecast.rows) == found.counts
    if name == "asl":
        assert policy.propagation.forecast(20, 70, LAYERS).rows == [70] * LAYERS


@pytest.mark.parametrize(
    ("layers", "fastkv", "gemfilter"),
    [(32, 15, 13), (28, 14, 14), (3, 1, 0), (24, 11, 9), (1, 0, 0)],
)
def test_selection_layers_are_the_published_ones_or_as_deep(layers, fastkv, gemfilter):
    """Appendix C.2 of ASL for 32 and 28 layers, the same depth otherwise."""
    assert kvsim.policy("fastkv").propagation.at(layers) == fastkv
    assert kvsim.policy("gemfilter").propagation.at(layers) == gemfilter
    assert kvsim.policy("fastkv", layer=0).propagation.at(layers) == 0


@pytest.mark.parametrize(
    ("layers", "rule"), [(32, (10, 8)), (28, (9, 8)), (24, (8, 8)), (21, (7, 8)), (20, (6, 7)),
                         (12, (4, 5)), (3, (1, 2)), (1, (0, 1))]
)  # fmt: skip
def test_the_rule_for_small_models(layers, rule):
    """L_min = L // 3, and as many layers of look-back as there are, eight at most."""
    piece = ASL()

    assert piece.rule(layers) == rule
    assert piece.facts(layers) == {"first_layer": rule[0], "look_back": rule[1]}


def test_remarks_tell_what_had_no_effect(trace):
    """A budget that holds everything; not one below which rows were dropped."""
    everything = kvsim.replay(trace, kvsim.policy("asl", window=4), 100).remark
    assert everything.startswith("budget 100 holds all 90 tokens")
    fits = kvsim.replay(trace, kvsim.policy("fastkv", rows=20), 70)
    assert fits.selection.dropped
    assert "nothing is evicted" not in fits.remark


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("gemfilter+snapkv", {}, "expected at most one of each, in this order"),
        ("snapkv+asl", {}, r"snapkv \(scorer\) \+ asl \(propagation\)"),
        ("adakv+asl", {}, r"adakv \(allocator\) \+ asl \(propagation\)"),
        ("asl+fastkv", {}, r"asl \(propagation\) \+ fastkv \(propagation\)"),
        ("asl+cake", {}, "drops rows of the prompt"),
        (
            "asl",
            {"protect": {"sink": 4}},
            "are to be protected",
        ),
        ("fastkv", {"rows": 0}, "rows is 0; expected an integer of at least 1, a number above 0"),
        ("fastkv", {"rows": 1.5}, "rows is 1.5; .* a number above 0 and at most 1, or None"),
    ],
)
def test_what_does_not_go_together_is_refused(name, params, message):
    """One line says what was found and what is possible."""
    with pytest.raises(PolicyError, match=message):
        kvsim.policy(name, **params)


def test_what_a_trace_does_not_allow_is_refused(trace):
    """Layers that do not exist, budgets below the window, traces without the first layers."""
    with pytest.raises(PolicyError, match=r"fastkv: layer is 7, the model has layers 0\.\.6"):
        kvsim.replay(trace, kvsim.policy("fastkv", layer=7), 20)
    with pytest.raises(PolicyError, match=r"first_layer\): layer is 9"):
        kvsim.replay(trace, kvsim.policy("asl", first_layer=9, window=4), 20)
    with pytest.raises(BudgetError, match="the smallest budget that works is 33"):
        kvsim.replay(trace, kvsim.policy("asl_2pass"), 20)
    with pytest.raises(PolicyError, match=r"7 rows propagate \(rows=0.1 of a prompt of 70 t"):
        kvsim.replay(trace, kvsim.policy("fastkv", rows=0.1), 20)
    deep = changed(trace, layer_ids=range(3, 10))
    with pytest.raises(PolicyError, match="not all of a model"):
        Setup(deep, kvsim.policy("gemfilter"), 20).checked()
    with pytest.raises(PolicyError, match="propagation is 3; expected a Propagation"):
        Policy("odd", Full(), propagation=3)
