"""What rows see under several records: the weights of full attention against naive loops."""

import numpy as np
import pytest
import torch
from analysis.test_metrics import make_trace

import kvsim
from kvsim.analysis.output import seen as seen_module
from kvsim.analysis.output.error import output_error
from kvsim.analysis.output.layer import Layer
from reference import metrics as loop_metrics
from traces import changed, random_trace

PROJECTION = torch.randn(2, 4, 8, 24, generator=torch.Generator().manual_seed(0))


def test_records_together_have_the_values_of_each_alone():
    """Whatever the others leave: equal heads, unequal ones, events inside of blocks."""
    trace = make_trace(n=200, prompt_len=80, dtype=torch.float32)
    names = ("streaming_llm", "tova", "adakv+knorm", "tova@kvpress", "streaming_llm@original")
    records = [
        kvsim.replay(trace, kvsim.policy(name), budget, interval=interval)
        for name in names
        for budget in (16, 40)
        for interval in (5, 64)
    ]

    together = output_error(trace, records)

    for record, one in zip(records, together, strict=True):
        (alone,) = output_error(trace, [record])
        # products of other sizes may round otherwise
        np.testing.assert_allclose(one.error, alone.error, atol=2e-6)
        np.testing.assert_allclose(one.missing, alone.missing, atol=2e-6)


@pytest.mark.parametrize(
    "name",
    ["tova", "streaming_llm@original", "oracle", "h2o+int4", "quest", "h2o+quest", "gemfilter"],
)
def test_rows_after_the_prompt_are_those_of_all_rows(name, monkeypatch):
    """Bit for bit, whatever leaves, is read, rounded or dropped; what is read begins there too."""
    trace = random_trace(
        n=300, prompt_len=180, context_len=150, layers=2, dtype=torch.float32, o_proj=PROJECTION
    )
    given = {"oracle": {"by": "output"}, "quest": {"dense_layers": 0}}
    policy = kvsim.policy(name, **given.get(name, {}))
    compress = {"compress": "context"} if name == "h2o+int4" else {}
    records = [kvsim.replay(trace, policy, 60, interval=x, **compress) for x in (32, None)]
    first = 150 if compress else 180
    layers, read = [], Layer.read

    def reading(*args, **options):
        layers.append(read(*args, **options))
        return layers[-1]

    whole = output_error(trace, records, projected=True)
    monkeypatch.setattr(Layer, "read", reading)
    after = output_error(trace, records, projected=True, prompt=False)

    for one, expected in zip(after, whole, strict=True):
        for field in ("error", "missing", "added"):
            mine = getattr(one, field)
            assert mine.shape[-1] == 120
            np.testing.assert_array_equal(mine, getattr(expected, field)[..., 180:])
        assert one.error.any()
    assert {x.first for x in layers} == {first}
    assert {x.q.shape[2] for x in layers} == {300 - first}


@pytest.mark.parametrize("interval", [1, 32])
def test_rows_that_see_almost_nothing_of_full_attention_are_exact(interval, monkeypatch):
    """Where weights of full attention underflow, the output is that of the rows' own logits."""
    trace = make_trace(layers=1, n=200, prompt_len=60)
    q = trace.read("q") * 30  # logits range over hundreds
    sharp = changed(trace, q=q.float(), k=trace.read("k").float(), v=trace.read("v").float())
    record = kvsim.replay(sharp, kvsim.policy("random"), budget=8, interval=interval)
    expected = loop_metrics.outputs(q, trace.read("k"), trace.read("v"), record.evicted_at)
    assert (expected.retained_mass < 1e-30).any()

    (one,) = output_error(sharp, [record])

    np.testing.assert_allclose(one.error, expected.relative_error, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(one.mass, expected.retained_mass, atol=1e-4)
    monkeypatch.setattr(seen_module, "FAINT", 0.0)
    (coarse,) = output_error(sharp, [record])
    assert not np.allclose(coarse.error, expected.relative_error, rtol=1e-3, atol=1e-4)
