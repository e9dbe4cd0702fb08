"""Error of a layer's output against the share that is evicted once: a naive loop, known cases."""

import numpy as np
import polars as pl
from hypothesis import given
from hypothesis import strategies as st

import kvsim
from kvsim.analysis.output.reconstruction import RATIOS, reconstruction_table
from kvsim.schema import NEVER
from kvsim.testing.strategies import cases
from reference import metrics
from traces import changed

POLICIES = ("expected_attention", "knorm", "streaming_llm", "adakv+tova", "h2o")


def naive(case, kept, cut):
    """Mean error [L] of rows from the cut on, over |o_full|; kept bool [layer, head, cut]."""
    gone = np.full(case.k.shape[:3], NEVER)
    gone[..., :cut][~kept] = cut - 1
    found = metrics.outputs(case.q, case.k, case.v, gone, scale=case.scale)
    moved, size = (  # all heads as one vector, [layer, row]
        np.sqrt((x[:, :, cut:] ** 2).sum((1, 3)))
        for x in (found.out_full - found.out_seen, found.out_full)
    )
    relative = np.divide(moved, size, out=np.zeros_like(moved), where=size > 0)
    return relative.mean(-1)


@given(
    case=cases(kinds=("normal", "sharp", "sink", "zero_values"), min_n=10, max_n=20),
    name=st.sampled_from(POLICIES),
    data=st.data(),
)
def test_errors_equal_the_definition(case, name, data):
    """All heads as one vector, whatever the trace's prompt and the policy's own schedule are."""
    cut = data.draw(st.integers(8, case.n - 1))
    ratio = data.draw(st.sampled_from((0.0, 0.1, 0.25, 0.4)))
    made = kvsim.policy(name)

    table = reconstruction_table(case.trace(), [made], [ratio], cut=cut)

    ended = changed(case.trace(), prompt_len=cut)
    # the policy as it is, on a trace that ends its prompt there: its first event
    once = kvsim.replay(ended, made, int(cut * (1 - ratio) + 1e-9), interval=100, prefill=True)
    kept = once.evicted_at[..., :cut] >= cut
    expected = naive(case, kept, cut)

    assert table["layer"].to_list() == list(range(case.shape[0]))
    assert table["budget"].unique().item() == once.budget
    np.testing.assert_allclose(table["relative_head_error"], expected, atol=1e-6)


def test_the_table_has_every_policy_ratio_and_layer():
    """On the sample: nine ratios, labels of fidelity, nothing moves where nothing leaves."""
    trace = kvsim.open_trace(kvsim.sample_trace())
    said = []

    table = reconstruction_table(
        trace,
        [kvsim.policy(name) for name in ("knorm", "full")],
        progress=lambda *step: said.append(step),
    )

    assert table.height == 2 * 9 * 3
    assert table["cut"].unique().item() == 377
    assert table["rows"].unique().item() == 95
    assert table["ratio"].unique(maintain_order=True).to_list() == list(RATIOS)
    knorm, full = (table.filter(policy=name) for name in ("knorm", "full"))
    assert (full["relative_head_error"] == 0).all()
    assert (full["fidelity"] == "exact").all()
    assert (knorm.filter(layer=0)["fidelity"] == "exact").all()
    assert (knorm.filter(pl.col("layer") > 0)["fidelity"] == "open").all()
    assert (knorm["relative_head_error"] > 0).all()
    assert knorm["budget"].unique(maintain_order=True).to_list() == [
        377 - -(-377 * i // 10) for i in range(1, 10)
    ]
    assert said[0] == (0, 18, "sample: knorm, ratio 0.1")
    assert len(said) == 18
