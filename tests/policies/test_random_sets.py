"""Random eviction of the response: equal in distribution to uniform draws."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest

import kvsim
from kvsim.testing.strategies import make_case

PROMPT, RECENT, FREE, SEEDS = 5, 4, 3, 40
BUDGET = PROMPT + FREE + RECENT


def drawn():
    """Candidates and those of them that stay, at each event of each head, for several seeds."""
    case = make_case("normal", layers=4, heads=4, group=1, n=PROMPT + 12, prompt_len=PROMPT)
    trace = case.trace()
    for seed in range(SEEDS):
        policy = kvsim.policy("random@prompt", recent=RECENT, seed=seed)
        record = kvsim.replay(trace, policy, BUDGET, interval=4)
        before = np.ones((4, 4, 0), bool)
        for row in (PROMPT + 7, PROMPT + 11):
            kept = record.retained(row)[..., : row + 1]
            held = np.ones_like(kept)
            held[..., : before.shape[-1]] = before
            assert kept[..., :PROMPT].all()
            assert kept[..., row + 1 - RECENT :].all()
            middle = slice(PROMPT, row + 1 - RECENT)
            for old, new in zip(
                held[..., middle].reshape(16, -1), kept[..., middle].reshape(16, -1), strict=True
            ):
                yield row, tuple(np.flatnonzero(new[old]).tolist()), int(old.sum())
            before = kept


@pytest.mark.parametrize(("row", "size", "limit"), [(PROMPT + 7, 4, 16.3), (PROMPT + 11, 7, 65.2)])
def test_every_set_of_the_response_is_as_likely(row, size, limit):
    """The prompt and the last rows stay; chi-square over all sets is below its 99.9 % quantile."""
    counts = Counter()
    for at, ranks, candidates in drawn():
        if at == row:
            assert candidates == size
            counts[ranks] += 1
    every = list(combinations(range(size), FREE))
    assert set(counts) <= set(every)
    expected = 16 * SEEDS / len(every)
    assert sum((counts[x] - expected) ** 2 / expected for x in every) < limit
