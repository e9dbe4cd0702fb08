"""Expected against observed attention: loops with matrices, and its tables."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.analysis.attention.agreement import pearson, places, spearman
from kvsim.studies.expectation.expectation import expected_and_observed
from kvsim.testing.strategies import cases


def rotation(inv_freq, p, dim):
    """The matrix that turns a vector at position p; pair i is (i, i + dim / 2)."""
    out = np.eye(dim)
    for i, f in enumerate(inv_freq):
        j = i + dim // 2
        out[[i, i, j, j], [i, j, i, j]] = (
            np.cos(f * p),
            -np.sin(f * p),
            np.sin(f * p),
            np.cos(f * p),
        )
    return out


def softmax(x):
    """Weights of a list of logits."""
    weights = [math.exp(one - max(x)) for one in x]
    return [one / sum(weights) for one in weights]


def loop(case, cut, sink):
    """Observed [L, Q, m] and expected [4, L, Q, m], number by number."""
    layers, heads, group, n, dim = case.shape
    at = range(sink, cut)
    turns = [rotation(case.rope.inv_freq, p, dim) for p in range(n)]
    mean_turn = sum(turns[cut:]) / (n - cut)
    observed = np.zeros((layers, heads * group, len(at)))
    expected = np.zeros((4, *observed.shape))
    for layer, qhead in itertools.product(range(layers), range(heads * group)):
        q, k = case.q[layer, qhead], case.k[layer, qhead // group]
        for row in range(cut, n):
            weights = softmax([case.scale * q[row] @ k[pos] for pos in range(row + 1)])
            observed[layer, qhead] += [weights[pos] / (n - cut) for pos in at]
        before = [turns[p].T @ q[p] for p in range(n)]
        for step, key in itertools.product(range(4), range(len(at))):
            x = k[sink + key]
            if step == 0:
                logits = [case.scale * q[row] @ x for row in range(cut, n)]
                top = max(logits)
                value = top + math.log(sum(math.exp(z - top) for z in logits) / len(logits))
            else:
                rows = range(sink, cut) if step == 3 else range(cut, n)
                samples = np.stack([(q if step == 1 else before)[row] for row in rows])
                turn = np.eye(dim) if step == 1 else mean_turn
                mu = turn @ samples.mean(0)
                spread = turn @ np.atleast_2d(np.cov(samples.T, ddof=0)) @ turn.T
                value = case.scale * mu @ x + case.scale**2 / 2 * x @ spread @ x
            expected[step, layer, qhead, key] = value
    shares = np.apply_along_axis(softmax, -1, expected)
    return observed, shares


@given(case=cases(min_n=6, max_n=20, max_layers=2, max_heads=2), data=st.data())
def test_every_step_equals_the_definition(case, data):
    """Observed attention and the four steps, per query head, for any cut and any sinks."""
    cut = data.draw(st.integers(2, case.n - 1))
    sink = data.draw(st.integers(0, min(4, cut - 2)))

    found = expected_and_observed(case.trace(), cut, sink=sink)
    observed, expected = loop(case, cut, sink)

    np.testing.assert_allclose(np.exp(found.observed), observed, rtol=1e-7, atol=1e-280)
    np.testing.assert_allclose(np.exp(found.expected), expected, rtol=1e-7, atol=1e-280)
    assert found.observed.shape[-1] == cut - sink


@given(pairs=st.lists(st.tuples(*[st.integers(-3, 3).map(float)] * 2), min_size=2), data=st.data())
def test_agreement_equals_loops(pairs, data):
    """Ranks with ties, and correlations, entry by entry."""
    a, b = np.array(pairs).T
    n = len(a)

    ranks = [[1 + sum(c < x) + (sum(c == x) - 1) / 2 for x in c] for c in (a, b)]
    if len(set(a)) > 1 and len(set(b)) > 1:
        assert pearson(a, b) == pytest.approx(np.corrcoef(a, b)[0, 1], abs=1e-9)
        assert spearman(a, b) == pytest.approx(np.corrcoef(*ranks)[0, 1], abs=1e-9)
    else:
        assert np.isnan(pearson(a, b))
        assert np.isnan(spearman(a, b))

    k = data.draw(st.integers(1, n))
    top = set(sorted(range(n), key=lambda i: (-a[i], i))[:k])
    assert set(np.flatnonzero(places(a) < k)) == top
