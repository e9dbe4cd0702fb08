"""KVzip worked by hand, in blocks of rows, and beyond the context."""

import numpy as np
import pytest
import torch

import kvsim
from kvsim.core.attention import Formula
from kvsim.errors import PolicyError
from kvsim.schema import NEVER
from kvsim.testing.strategies import make_case
from traces import changed


def test_scores_are_those_worked_out_by_hand():
    """Two rows over a chunk of three entries, the second one over the first row as well."""
    logits = np.log([[4.0, 2.0, 1.0, 1.0, 9.0], [1.0, 2.0, 9.0, 2.0, 1.0]])  # entries, then rows
    q = torch.zeros(1, 1, 4, 5)
    k, probe_k = torch.eye(5)[None, None, [0, 1, 2, 4]], torch.eye(5)[None, None, 3:]
    probe = {"kind": "repeat", "chunks": [[0, 3, 2]], "tokens": [0, 0]}
    trace = kvsim.Trace.from_arrays(
        q,
        k,
        k,
        prompt_len=4,
        context_len=3,
        rope=kvsim.Rope(()),
        scale=1.0,
        probe_q=torch.tensor(logits)[None, None].float(),
        probe_k=probe_k,
        meta={"probe": probe},
    )

    record = kvsim.replay(trace, "kvzip", 2, internals=True)

    # row 0 sees 4, 2, 1 and itself with 1; row 1 sees 1, 2, 9, row 0 with 2, and itself with 1
    expected = [4 / 8, 2 / 8, 9 / 15, 2.0 + 3]
    assert record.internals[0].scores[0, 0] == pytest.approx(expected)
    assert (record.evicted_at[0, 0] == NEVER).tolist() == [False, False, True, True]


def test_blocks_of_rows_change_nothing(monkeypatch):
    """Rows of the probe one by one give the same scores as all at once."""
    case = make_case("normal", layers=2, heads=2, group=2, n=20, prompt_len=15, seed=1)
    whole = kvsim.replay(case.trace(), "kvzip@kvpress", 8, internals=True).internals[0].scores
    monkeypatch.setattr("kvsim.policies.kvzip.LOGIT_BYTES", 1)
    rows = kvsim.replay(case.trace(), "kvzip@kvpress", 8, internals=True).internals[0].scores

    assert np.allclose(whole, rows, rtol=1e-12)


def test_what_follows_the_context_stays_before_it_and_the_newest_first():
    """At events in decoding the context leaves first, then the oldest of the response."""
    case = make_case("normal", layers=1, heads=2, n=24, prompt_len=12, seed=2)
    record = kvsim.replay(case.trace(), "kvzip@uniform", 8, interval=4)

    stays = record.evicted_at[0] == NEVER
    assert (stays == (np.arange(24) >= 16)).all()  # nothing of the context, the newest of the rest
    early = record.retained(15)[0]
    assert early[:, 12:16].all()
    assert (early[:, :12].sum(-1) == 4).all()


def test_layers_with_sinks_of_their_own_are_refused_with_a_variant_that_takes_them():
    """As in gpt-oss: one ranking needs layers that compute alike, equal heads do not."""
    case = make_case("normal", layers=2, heads=2, n=20, prompt_len=15, seed=3)
    formulas = [Formula(1.0, sinks=(layer, 0.0) * case.shape[2]) for layer in range(2)]
    probe = {"probe_q": case.probe_q, "probe_k": case.probe_k, "meta": case.trace().meta}
    trace = changed(case.trace(), **probe, formulas=formulas)
    with pytest.raises(PolicyError, match=r"differ in their sinks.* such as kvzip@uniform"):
        kvsim.replay(trace, "kvzip", 8)
    assert kvsim.replay(trace, "kvzip@uniform", 8).retained(14).sum() == 2 * 2 * 8
