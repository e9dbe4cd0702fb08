"""Values of another size than keys: replay, metrics, storage, against naive loops."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import kvsim
from kvsim.errors import TraceError
from kvsim.store.verification import verify
from kvsim.testing import loops
from kvsim.testing.strategies import make_case
from reference import composition, metrics
from traces import random_arrays, random_trace

SIZE = 12
POLICIES = ("snapkv", "expected_attention", "criticalkv+tova", "lagkv", "h2o", "norm_ratio")


def wide(size, seed=0):
    """A case with keys of 8 and values of `size` dimensions."""
    case = make_case("sharp", layers=2, heads=2, group=2, n=40, dim=8, prompt_len=24, seed=seed)
    rng = np.random.default_rng(seed + 1)
    shape = (*case.v.shape[:3], size)
    o_proj = rng.standard_normal((2, 4, size, 5))
    return replace(case, v=rng.standard_normal(shape), o_proj=o_proj)


@pytest.mark.parametrize("name", POLICIES)
def test_replays_equal_a_naive_loop(name):
    """The same entries leave after the same rows."""
    case = wide(SIZE)
    params = {"window": 4} if name == "snapkv" else {}
    policy = kvsim.policy(name, **params)
    rule = composition.rule(name, params)

    record = kvsim.replay(case.trace(), policy, 10, interval=4)

    naive = loops.replay(case, rule, budget=10, interval=4)
    np.testing.assert_array_equal(record.evicted_at, naive.evicted_at)
    assert record.events


def test_metrics_equal_a_naive_loop():
    """Output error, mass and layer error are those of the definitions, at every row."""
    case = wide(SIZE)
    trace = case.trace()
    record = kvsim.replay(trace, "random", 8, interval=4, prefill=True)
    found = metrics.outputs(case.q, case.k, case.v, record.evicted_at, scale=case.scale)
    rows = slice(case.prompt_len, None)
    moved = metrics.projected(found.out_seen - found.out_full, case.o_proj)[:, rows]

    table = kvsim.measure(trace, record, metrics=["output_error", "retained_mass", "layer_error"])

    def mean(name):
        return table.filter(table["metric"] == name)["value"].mean()

    assert mean("output_error") == pytest.approx(found.relative_error[:, :, rows].mean(), rel=1e-6)
    assert mean("retained_mass") == pytest.approx(found.retained_mass[:, :, rows].mean(), rel=1e-6)
    of_layers = np.sqrt((moved**2).sum(-1).mean(-1))
    assert mean("layer_error") == pytest.approx(of_layers.mean(), rel=1e-6)


@pytest.mark.parametrize("size", [SIZE, 8])
def test_stored_traces_are_the_same(size, tmp_path):
    """Whatever the size; the axis of values has its own name."""
    trace = wide(size).trace()
    kvsim.save_trace(trace, tmp_path / "a.zarr")

    stored = kvsim.open_trace(tmp_path / "a.zarr")

    assert stored.digest == trace.digest
    assert torch.equal(stored.read("v"), trace.read("v"))
    assert verify(tmp_path / "a.zarr", deep=True).ok
    assert (stored.dim, stored.value_dim, stored.entry_size) == (8, size, 8 + size)


def test_bytes_count_keys_and_values_by_their_sizes():
    """16 bits of each number of the entries that rows see."""
    case = wide(3)
    record = kvsim.replay(case.trace(), "full", 40)

    table = kvsim.measure(case.trace(), record, metrics=["bytes_held"])

    seen = np.arange(case.prompt_len + 1, case.n + 1).mean()
    assert table["value"].to_list() == pytest.approx([2 * 2 * (8 + 3) * seen] * 2)  # of two heads


def test_sizes_that_do_not_fit_are_refused():
    """Output and projection have the size of values."""
    arrays = random_arrays() | {"v": torch.randn(2, 2, 90, 3)}
    with pytest.raises(TraceError, match=r"attn_out has shape .*, expected \(2, 4, 90, 3\)"):
        random_trace(**arrays, attn_out=torch.zeros(2, 4, 90, 8))
