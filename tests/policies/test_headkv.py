"""HeadKV: entries by the scores of a plan, and in each head those that SnapKV keeps."""

import numpy as np
import pytest

import kvsim
from kvsim.policies.duo import HeadPlan
from kvsim.testing.strategies import make_case

SCORES = [[0.4, 0.0, 0.1], [0.2, 0.25, 0.05]]
WINDOW, BUDGET = 3, 15


@pytest.fixture
def plan(tmp_path):
    """The file of a plan of two layers of three heads."""
    path = tmp_path / "plan.json"
    path.write_text(HeadPlan(SCORES).text(), "utf-8")
    return path


@pytest.fixture
def case():
    """A prompt that is longer than what any head gets."""
    return make_case("sharp", layers=2, heads=3, group=2, n=70, prompt_len=60, seed=5)


def replayed(trace, plan, budget=BUDGET, **params):
    """Entries of each head after the prompt, bool [layer, head, pos]."""
    policy = kvsim.policy(f"headkv:{plan}", window=WINDOW, **params)
    return kvsim.replay(trace, policy, budget).retained(trace.prompt_len - 1)


@pytest.mark.parametrize("beta", [1, 1.5, 3, 12])
def test_entries_are_those_of_the_formula(plan, case, beta):
    """A base for every head and a share of the pool, to a rounding; the sum is the budget."""
    held = replayed(case.trace(), plan, beta=beta)[..., : case.prompt_len].sum(-1)

    base = BUDGET - WINDOW
    pool = base / beta * 6 + (base - base / beta) % 1 * 6  # what rounding the bases adds to it
    expected = WINDOW + np.floor(base - base / beta) + np.array(SCORES) * pool
    assert held.sum() == 6 * BUDGET
    assert np.abs(held - expected).max() < 1
    assert held.min() >= WINDOW + np.floor(base - base / beta)


def test_each_head_keeps_what_snapkv_keeps_at_its_number(plan, case):
    """The plan says how many, the scores which."""
    trace = case.trace()
    kept = replayed(trace, plan)

    for layer, head in np.ndindex(2, 3):
        alone = kvsim.policy("snapkv", window=WINDOW)
        record = kvsim.replay(trace, alone, int(kept[layer, head].sum()))
        assert (record.retained(trace.prompt_len - 1)[layer, head] == kept[layer, head]).all()
