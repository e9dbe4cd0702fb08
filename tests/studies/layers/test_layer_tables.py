"""Tables of layers at a reader's knobs, against loops over their definitions."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.policies.asl import ASL
from kvsim.studies.layers.ranking import rank_pattern, ranking
from traces import random_trace


@settings(max_examples=20)
@given(st.data())
def test_a_pattern_shows_the_ranks_of_what_could_go_on(data):
    """Tokens of a loop, in either order; geometric means of neighbours in a narrow picture."""
    trace = random_trace(layers=4, prompt_len=70, seed=data.draw(st.integers(0, 5)))
    known = ranking(trace, ASL(window=8))
    look_back, k = data.draw(st.integers(1, 4)), data.draw(st.integers(0, known.ranked))
    columns, by = data.draw(st.integers(1, 80)), data.draw(st.sampled_from(["rank", "position"]))
    found = rank_pattern(known, look_back, k, by=by, columns=columns)
    of = known.ranks.numpy()
    wanted = [
        token
        for token in range(known.ranked)
        if any(of[layer, token] <= k for layer in range(4 - look_back, 4))
    ]
    if by == "rank":
        wanted.sort(key=lambda token: of[-1, token])

    assert found.tokens.tolist() == wanted
    assert found.ranks.shape == (4, len(found.edges) - 1)
    assert len(found.edges) - 1 <= columns
    for column in range(len(found.edges) - 1):
        own = wanted[found.edges[column] : found.edges[column + 1]]
        for layer in range(4):
            mean = math.prod(float(of[layer, token]) for token in own) ** (1 / len(own))
            assert found.ranks[layer, column] == pytest.approx(mean)
    assert sum(np.diff(found.edges)) == len(wanted)
