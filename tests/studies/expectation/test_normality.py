"""How queries and projections are distributed: distances and gaps against loops."""

import itertools
import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvsim
from kvsim.studies.expectation.expectation import (
    key_gaps,
    normal_gap,
    normal_ks,
    state_normality,
)
from kvsim.testing.strategies import cases

NORMAL = statistics.NormalDist()


def naive(x):
    """The distance of samples from the normal that fits them, one at a time."""
    n, mean = len(x), sum(x) / len(x)
    size = math.sqrt(sum((one - mean) ** 2 for one in x) / n)
    z = sorted((one - mean) / size for one in x)
    return max(
        max((i + 1) / n - NORMAL.cdf(one), NORMAL.cdf(one) - i / n) for i, one in enumerate(z)
    )


numbers = st.lists(st.integers(-40, 40), min_size=4, max_size=30).filter(lambda x: len(set(x)) > 1)


@given(drawn=st.lists(numbers, min_size=1, max_size=3), scale=st.sampled_from((1e-3, 1.0, 1e4)))
def test_distances_equal_their_definition(drawn, scale):
    """For any numbers, ties included, and several rows of them at once."""
    n = min(map(len, drawn))
    rows = [x[:n] for x in drawn if len(set(x[:n])) > 1] or [[0, 1, 2, 3]]
    found = normal_ks(torch.tensor(rows, dtype=torch.float64) * scale)

    for i, x in enumerate(rows):
        assert float(found[i]) == pytest.approx(naive([one * scale for one in x]), abs=1e-4)


def test_queries_before_rope_are_found_again():
    """Every layer, head and dimension in its place, with and without the first rows."""
    rng = np.random.default_rng(0)
    rope = kvsim.Rope((1.0, 0.2), attention_scaling=1.3)
    before = torch.from_numpy(rng.standard_normal((2, 4, 25, 4)) + np.arange(4))
    before[:, :, :4] += 20.0
    k = rng.standard_normal((2, 2, 25, 4))
    q = rope.rotate(before, torch.arange(25))
    trace = kvsim.Trace.from_arrays(q, k, k, prompt_len=9, rope=rope)

    found = [state_normality(trace, skip=skip) for skip in (0, 4)]

    for one, skip in zip(found, (0, 4), strict=True):
        assert one.shape == (2, 4, 4)
        expected = naive(before[1, 3, skip:, 2].tolist())
        assert one[1, -1, 2] == pytest.approx(expected, abs=1e-4)
    assert found[0].mean() > found[1].mean() + 0.1


@given(case=cases(min_n=3, max_n=14, max_layers=2, max_heads=2), data=st.data())
def test_the_gap_of_every_key_equals_the_definition(case, data):
    """Log mean exponential of s q.k, less mean and half the variance, query by query."""
    skip = data.draw(st.integers(0, min(3, case.n - 2)))
    trace, future, end = case.trace(), 5, case.n
    layers, heads, group, _, dim = case.shape

    found = key_gaps(trace, skip=skip, n_future=future)

    assert found.shape == (layers, heads * group, end - skip)
    variances, gaps = np.empty(found.shape), np.empty(found.shape)
    eye = torch.eye(dim, dtype=torch.float64)
    turns = [trace.ropes[0].rotate(eye, torch.tensor(p)).mT.numpy() for p in range(end + future)]
    mean_turn = sum(turns[end:]) / future
    for layer, qhead in itertools.product(range(layers), range(heads * group)):
        q = case.q[layer, qhead]
        for key in range(end - skip):
            k = case.k[layer, qhead // group, skip + key]
            x = [case.scale * (mean_turn @ turns[row].T @ q[row]) @ k for row in range(skip, end)]
            top, m = max(x), sum(x) / len(x)
            variance = sum((one - m) ** 2 for one in x) / len(x)
            exact = top + math.log(sum(math.exp(one - top) for one in x) / len(x))
            variances[layer, qhead, key], gaps[layer, qhead, key] = (
                variance,
                exact - m - variance / 2,
            )
    expected = gaps - normal_gap(variances, end - skip)
    np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-8)
