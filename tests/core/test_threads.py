"""What does not depend on the number of threads."""

import numpy as np
import pytest
import torch

import kvsim
from kvsim.testing.strategies import make_case


@pytest.fixture
def threads():
    """Set the number of threads of torch, for a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["zero_keys", "repeated_keys"])
@pytest.mark.parametrize("name", ["gemfilter", "streaming_llm@original"])
def test_threads_change_last_digits_alone(threads, name, kind):
    """One and two threads keep the same entries, and values differ by less than 1e-6."""
    sizes = {"layers": 3, "heads": 2, "n": 64, "dim": 8, "prompt_len": 60, "dtype": np.float32}
    found = []
    for count in (1, 2):
        threads(count)
        trace = make_case(kind, seed=2, **sizes).trace()
        records = [kvsim.replay(trace, kvsim.policy(name), budget) for budget in (15, 59)]
        values = kvsim.measure(trace, records, metrics=["output_error", "retained_mass"])["value"]
        found.append(([record.evicted_at for record in records], values.to_numpy()))

    (one, first), (two, second) = found
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
    assert np.allclose(first, second, rtol=0, atol=1e-6, equal_nan=True)
