"""Sentences below charts: what they say is in the numbers, and changes with them."""

import numpy as np

from apps.dashboard import readings
from kvsim.analysis.kept.states import TokenStates


def test_texts_count_what_each_policy_keeps_and_misses():
    """Of all tokens so far, and of the needle."""
    codes = np.array([1, 1, 0, 3, 3, 1, 2])
    state = TokenStates(5, codes, list("abcdefg"))

    assert readings.texts({"tova": state}, (1, 4)) == (
        "tova keeps 3 of 6 tokens and misses 2 that later rows would attend to. "
        "Of the needle's 3 tokens, tova keeps 1 and misses 1."
    )
    state.codes[0] = 3
    assert "keeps 2 of 6 tokens and misses 3" in readings.texts({"tova": state})
