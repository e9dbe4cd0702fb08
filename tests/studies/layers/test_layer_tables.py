"""Tables of layers at given parameters, against loops over their definitions."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.policies.asl import ASL
from kvsim.studies.layers.ranking import rank_pattern, ranking
from traces import random_trace


@settings(max_examples=20)
@given(st.data())
def test_a_pattern_shows_the_ranks_of_what_could_go_on(data):
    """Tokens of a loop by their last rank; geometric means of neighbours in a narrow picture."""
    trace = random_trace(layers=4, prompt_len=70, seed=data.draw(st.integers(0, 5)))
    known = ranking(trace, ASL(window=8))
    look_back, k = data.draw(st.integers(1, 4)), data.draw(st.integers(0, known.ranked))
    columns = data.draw(st.integers(1, 80))
    count, ranks = rank_pattern(known, look_back, k, columns=columns)
    of = known.ranks.numpy()
    wanted = [
        token
        for token in range(known.ranked)
        if any(of[layer, token] <= k for layer in range(4 - look_back, 4))
    ]
    wanted.sort(key=lambda token: of[-1, token])
    width = max(1, math.ceil(len(wanted) / columns))
    shared = [wanted[at : at + width] for at in range(0, len(wanted), width)]

    assert count == len(wanted)
    assert ranks.shape == (4, len(shared))
    for column, own in enumerate(shared):
        for layer in range(4):
            mean = math.prod(float(of[layer, token]) for token in own) ** (1 / len(own))
            assert ranks[layer, column] == pytest.approx(mean)
