"""Diagnostics of layers against loops that share no code with them, and against replay."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvsim
from kvsim.policies.asl import ASL, TwoPass, ranks
from kvsim.studies.layers.ranking import Ranking, ranking
from kvsim.testing.strategies import cases
from reference import propagation
from traces import settling_trace

pytestmark = pytest.mark.usefixtures("no_layout")


def made(scores, window=4, **parameters):
    """A ranking of given scores [L, m]."""
    scores = torch.as_tensor(scores, dtype=torch.float32)
    return Ranking(
        "made", scores.shape[1] + window, ASL(window=window, **parameters), scores, ranks(scores)
    )


def naive_variance(ranked, layer, back, k):
    """(V, tokens) over the layers layer - back + 1 to layer; None where there are fewer."""
    if layer - back + 1 < 0:
        return None, 0
    rows = ranked[layer - back + 1 : layer + 1]
    spread = []
    for of_token in zip(*rows, strict=True):
        if min(of_token) <= k:
            mean = sum(of_token) / back
            spread.append(sum((r - mean) ** 2 for r in of_token) / back)
    return (sum(spread) / len(spread) if spread else 0.0), len(spread)


def naive_selected(ranked, first, look_back, k, tau):
    """The first layer, up to the last but one, whose V is below tau times that of the first."""
    back = min(look_back, first + 1)
    base, _ = naive_variance(ranked, first, back, k)
    for layer in range(first, len(ranked) - 1):
        variance, _ = naive_variance(ranked, layer, back, k)
        if (variance / base if base else 0.0) < tau:
            return layer
    return None


SCORES = st.integers(1, 7).flatmap(
    lambda layers: st.integers(2, 12).flatmap(
        lambda m: st.lists(
            st.lists(st.integers(0, 6), min_size=m, max_size=m), min_size=layers, max_size=layers
        )
    )
)


@given(SCORES, st.data())
def test_a_curve_equals_loops(scores, data):
    """Variance, union, relative variance and selection layer, at any first layer and look-back."""
    layers, m = len(scores), len(scores[0])
    first = data.draw(st.integers(0, layers - 1))
    back = data.draw(st.integers(1, 9))
    k = data.draw(st.integers(1, m - 1))
    tau = data.draw(st.sampled_from((0.0, 0.3, 0.7, 0.9, 1.0, 1.5)))
    ranked = [propagation.ranks(row) for row in scores]
    one = made(scores, tau=tau, first_layer=first, look_back=back)

    curve = one.curve(k + 4)

    used = min(back, first + 1)
    assert (curve.first_layer, curve.look_back, curve.k) == (first, used, k)
    for layer in range(layers):
        variance, tokens = naive_variance(ranked, layer, used, k)
        assert curve.union[layer] == tokens
        if variance is None:
            assert np.isnan(curve.variance[layer])
        else:
            assert curve.variance[layer] == pytest.approx(variance, rel=1e-12)
    assert np.isnan(curve.relative[:first]).all()
    base = naive_variance(ranked, first, used, k)[0]
    for layer in range(first, layers):
        expected = naive_variance(ranked, layer, used, k)[0] / base if base else 0.0
        assert curve.relative[layer] == pytest.approx(expected, rel=1e-12)
    # the first layer's own 1 is exact
    if not np.isclose(curve.relative[first + 1 :], tau, rtol=1e-9, atol=0).any():
        assert curve.selected() == naive_selected(ranked, first, back, k, tau)


@given(SCORES, st.data())
def test_overlap_and_entropy_equal_loops(scores, data):
    """Sets of the first k, and entropy in nats."""
    layers, m = len(scores), len(scores[0])
    k = data.draw(st.integers(1, m))
    one = made(scores)
    tops = [
        {i for i, rank in enumerate(row) if rank <= k}
        for row in [propagation.ranks(row) for row in scores]
    ]

    jaccard, entropy = one.curve(k + 4).jaccard, one.entropy()

    assert np.isnan(jaccard[0])
    for layer in range(layers):
        if layer:
            a, b = tops[layer - 1], tops[layer]
            assert jaccard[layer] == pytest.approx(len(a & b) / len(a | b))
        total = sum(scores[layer])
        if total:
            parts = [x / total for x in scores[layer] if x]
            assert entropy[layer] == pytest.approx(-sum(p * math.log(p) for p in parts), abs=1e-9)
        else:
            assert np.isnan(entropy[layer])


@given(cases(min_n=6, max_n=24), st.data())
def test_scores_equal_loops_over_the_attention(case, data):
    """The pooled scores of every layer, from queries and keys."""
    if case.prompt_len < 2:
        return
    window = data.draw(st.integers(1, case.prompt_len - 1))
    pool = data.draw(st.sampled_from(("avg", "max", None)))
    kernel = data.draw(st.sampled_from((1, 3, 7)))

    found = ranking(case.trace(), ASL(window=window, pool=pool, pool_kernel=kernel))

    expected = [
        propagation.total(
            propagation.votes(q, k, case.prompt_len, case.scale, window, pool, kernel)
        )
        for q, k in zip(case.q, case.k, strict=True)
    ]
    np.testing.assert_allclose(found.scores.numpy(), expected, rtol=1e-9, atol=1e-12)
    assert (found.ranks.numpy() == [propagation.ranks(row) for row in found.scores.tolist()]).all()


@pytest.mark.parametrize(
    ("name", "piece", "layers"),
    [
        *(("asl", ASL, layers) for layers in (1, 2, 3, 12)),
        pytest.param("asl", ASL, 32, marks=pytest.mark.deep),
        *(("asl_2pass", TwoPass, layers) for layers in (1, 12)),
    ],
)
def test_the_curve_selects_where_replay_does(layers, name, piece):
    """The selection layer, and the variances up to it, bit for bit, at any parameters."""
    selected = set()
    for seed, speed in enumerate((0.2, 1.0, 1.6)):
        trace = settling_trace(layers, seed=seed, speed=speed)
        for window, pool in ((8, "avg"), (32, "max")):
            one = ranking(trace, piece(window=window, pool=pool))
            for budget, tau, more in itertools.product(
                (40, 90, 116, 130), (0.3, 1.0, 1.5), ({}, {"first_layer": 0, "look_back": 3})
            ):
                rule = piece(window=window, pool=pool, tau=tau, **more)
                curve = one.curve(budget, rule)
                given = {"window": window, "pool": pool, "tau": tau, **more}
                record = kvsim.replay(trace, kvsim.policy(name, **given), budget=budget)
                known = record.selection.notes.get("variance", [])
                tested = [at for at, value in enumerate(known) if value is not None]
                assert curve.selected() == record.selection.layer
                assert [curve.variance[at] for at in tested] == [known[at] for at in tested]
                relative = record.selection.notes.get("relative_variance", [])
                assert [curve.relative[at] for at in tested] == [relative[at] for at in tested]
                selected.add(curve.selected())
    assert layers < 3 or len(selected) > 2  # not all the same: the test can tell them apart


@pytest.mark.parametrize(
    ("layers", "budget", "parameters", "expected"),
    [
        (24, 64, {}, "selects after layer {layer} of 24: relative variance 0."),
        (24, 64, {"tau": 0.0}, "never selects: relative variance 0.0"),
        (24, 116, {}, "nothing to select: the prompt of 116 tokens fits the budget"),
        (3, 64, {}, "never selects: relative variance 1 at the least, and tau is 0.3"),
        (3, 64, {"first_layer": 2}, "never selects: relative variance nan"),
        (3, 64, {"first_layer": 0}, "selects after layer 0 of 3: relative variance 0.00, tau 0.3"),
    ],
)
def test_verdicts(layers, budget, parameters, expected):
    """Where ASL selects, or why it does not, in a sentence."""
    curve = ranking(settling_trace(layers)).curve(budget, ASL(**parameters))

    assert curve.verdict().startswith(expected.format(layer=curve.selected()))
