"""Arrays in any memory layout, dtype and byte order give the numbers of their C-ordered copy."""

import itertools
import warnings

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kvsim
from kvsim.core.attention import Formula, attend
from kvsim.core.trace import Trace
from kvsim.testing.strategies import make_case
from reference.strategies import examples

ORDERS = [*itertools.permutations(range(4))]
LAST_FIRST = (3, 2, 1, 0)

#: How an array lies in memory: the order of its axes, a step along each of them (negative ones run
#: backwards), the margin around it, whether it repeats one row, the byte order, torch or numpy.
layouts = st.fixed_dictionaries(
    {
        "order": st.sampled_from(ORDERS),
        "steps": st.tuples(*[st.sampled_from((1, 1, 2, -1, -3))] * 4),
        "margin": st.integers(0, 2),
        "repeat": st.sampled_from((None, None, 2, 3)),
        "native": st.booleans(),
        "tensor": st.booleans(),
    }
)


def plain(array):
    """A fresh array in C order, the reference."""
    return np.array(array, order="C", copy=True)


def laid_out(array, *, order, steps, margin, repeat, native, tensor):
    """The numbers of `array` in another layout, as far as numpy or a tensor can have it."""
    if tensor:
        steps, native = [abs(step) for step in steps], True
    dtype = array.dtype if native else array.dtype.newbyteorder()
    if repeat is not None:
        array = np.take(array, [0], axis=repeat)
    shape = [abs(step) * size + 2 * margin for step, size in zip(steps, array.shape, strict=True)]
    back = np.argsort(order)
    whole = np.full([shape[axis] for axis in order], 7, dtype).transpose(back)
    inner = whole[tuple(slice(margin, size - margin) for size in shape)]
    view = inner[tuple(slice(None, None, step) for step in steps)]
    view[...] = array
    if repeat is None:
        return torch.from_numpy(view) if tensor else view
    sizes = list(view.shape)
    sizes[repeat] = _SIZES[repeat]
    if tensor:
        return torch.from_numpy(view).expand(sizes)
    return np.broadcast_to(view, sizes)


CASE = {"layers": 2, "heads": 2, "group": 2, "n": 24, "dim": 4, "prompt_len": 15}
_SIZES = {2: CASE["n"], 3: CASE["dim"]}


def outcome(q, k, v, case, **options):
    """What a trace of these arrays shows: kept sets, every quick metric, attention and digest."""
    trace = Trace.from_arrays(q, k, v, prompt_len=case.prompt_len, rope=case.rope, **options)
    records = [kvsim.replay(trace, kvsim.policy(name), 8) for name in ("oracle", "keydiff")]
    kept = [record.evicted_at.tobytes() for record in records]
    table = kvsim.measure(trace, records)
    return kept, table.write_json(), trace.lse.numpy().tobytes(), trace.digest


@settings(max_examples=examples(15))
@given(
    layouts=st.tuples(layouts, layouts, layouts),
    dtype=st.sampled_from((np.float16, np.float32, np.float64)),
    seed=st.integers(0, 99),
)
def test_the_memory_layout_of_arrays_changes_no_number(layouts, dtype, seed):
    """Kept sets, metrics, attention and digest are those of C-ordered copies, to the bit."""
    case = make_case("normal", seed=seed, dtype=dtype, **CASE)
    arrays = [laid_out(x, **how) for x, how in zip((case.q, case.k, case.v), layouts, strict=True)]
    copies = [plain(np.asarray(array, dtype)) for array in arrays]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert outcome(*arrays, case) == outcome(*copies, case)


@given(
    sizes=st.tuples(*[st.integers(1, 3)] * 2, *[st.integers(1, 9)] * 3),
    orders=st.tuples(*[st.sampled_from(ORDERS)] * 4),
    steps=st.tuples(*[st.sampled_from((1, 2))] * 4),
    masked=st.booleans(),
)
@example((2, 2, 3, 5, 4), (LAST_FIRST,) * 4, (1, 1, 1, 1), True)  # noqa: FBT003  positional
def test_attention_reads_queries_keys_values_and_masks_in_any_layout(sizes, orders, steps, masked):
    """The kernel's output and log-sum-exp are those of C-ordered copies, up to rounding."""
    batch, group, rows, entries, dim = sizes
    torch.manual_seed(0)
    shapes = [(batch, group, rows, dim), (batch, 1, entries, dim), (batch, 1, entries, dim)]
    given = [torch.randn(shape) for shape in shapes]
    given.append(torch.rand(batch, 1, rows, entries) > 0.4)

    def moved(x, order):
        wide = x.repeat_interleave(steps[0], 2).repeat_interleave(steps[1], 3)
        back = [order.index(axis) for axis in range(4)]
        return wide.permute(order).contiguous().permute(back)[..., :: steps[0], :: steps[1]]

    views = [moved(x, order) for x, order in zip(given, orders, strict=True)]
    assert all(torch.equal(x, y) for x, y in zip(given, views, strict=True))

    out, lse = attend(*views[:3], Formula(0.3), mask=views[3] if masked else None)

    expected = attend(*given[:3], Formula(0.3), mask=given[3] if masked else None)
    torch.testing.assert_close((out, lse), tuple(expected), rtol=1e-5, atol=1e-6)


def test_arrays_that_cannot_change_unseen_are_not_copied():
    """Tensors, whose changes are noticed, and read-only arrays stay where they are."""
    case = make_case("normal", dtype=np.float32, **CASE)
    keys, values = torch.from_numpy(case.k), case.v.copy()
    values.flags.writeable = False

    trace = Trace.from_arrays(case.q, keys, values, prompt_len=3, rope=case.rope)

    assert trace.k.data_ptr() == keys.data_ptr()
    assert trace.v.data_ptr() == values.ctypes.data


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_numpy_arrays_that_change_later_change_no_trace(dtype):
    """What is written to an array after the trace was built is no part of it."""
    case = make_case("normal", dtype=dtype, **CASE)
    arrays = [x.copy() for x in (case.q, case.k, case.v)]
    trace = Trace.from_arrays(*arrays, prompt_len=3, rope=case.rope)

    for array in arrays:
        array[...] = array[..., ::-1] * 3

    for found, expected in zip((trace.q, trace.k, trace.v), (case.q, case.k, case.v), strict=True):
        assert np.array_equal(found, expected)
