"""Arrays that change after a trace was built change no trace, and are copied only then."""

import numpy as np
import pytest
import torch

from kvsim.core.trace import Trace
from kvsim.testing.strategies import make_case

CASE = {"layers": 2, "heads": 2, "group": 2, "n": 24, "dim": 4, "prompt_len": 15}


def test_tensors_are_not_copied():
    """Changes of a tensor are noticed."""
    case = make_case("normal", dtype=np.float32, **CASE)
    keys = torch.from_numpy(case.k)
    trace = Trace.from_arrays(case.q, keys, case.v, prompt_len=3, rope=case.rope)
    assert trace.read("k").data_ptr() == keys.data_ptr()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_numpy_arrays_that_change_later_change_no_trace(dtype):
    """What is written to an array after the trace was built is no part of it."""
    case = make_case("normal", dtype=dtype, **CASE)
    arrays = [x.copy() for x in (case.q, case.k, case.v)]
    trace = Trace.from_arrays(*arrays, prompt_len=3, rope=case.rope)

    for array in arrays:
        array[...] = array[..., ::-1] * 3

    for found, expected in zip(map(trace.read, "qkv"), (case.q, case.k, case.v), strict=True):
        assert np.array_equal(found, expected)
