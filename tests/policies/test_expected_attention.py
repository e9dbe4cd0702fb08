"""Rotary embeddings of every layout before the reference, and moments in blocks of rows."""

import math
from dataclasses import replace

import pytest
import torch

import kvsim
import reference
from kvsim.core.moments import moments
from kvsim.policies.expected_attention import expected_logits, mixture_logits, quadratic
from kvsim.testing import loops
from kvsim.testing.strategies import make_case
from traces import random_trace

DIM, SCALE = 8, 0.4

ROPES = {
    "half": kvsim.Rope((1.0, 0.3, 0.05, 0.001)),
    "interleaved": kvsim.Rope((1.0, 0.3, 0.05, 0.001), layout="interleaved"),
    "partial": kvsim.Rope((1.0, 0.1)),
    "yarn": kvsim.Rope((1.0, 0.3, 0.05, 0.001), attention_scaling=1.3),
    "partial yarn": kvsim.Rope((1.0, 0.1), attention_scaling=1.3, layout="interleaved"),
}


def normal(*shape, seed=0):
    """Numbers of a normal distribution, float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotation(rope, p):
    """The rotation at position p as a matrix, column by column."""
    return rope.rotate(torch.eye(DIM, dtype=torch.float64), torch.tensor(p)).mT


CASES = [
    ("expected_attention", {"n_future": 9, "sink": 2}, ROPES),
    ("expected_attention", {"n_future": 4, "rope": "mixture", "query_buffer": 7}, ROPES),
    ("expected_attention@kvpress", {"n_future": 5, "query_buffer": 9}, ROPES),
    # the series of TriAttention is over pairs that rotate
    (
        *("triattention", {"calibration": "prefix:9", "protect_prompt": False}),
        ("half", "interleaved", "yarn"),
    ),
    ("triattention", {"calibration": "oracle", "offsets": "max"}, ("interleaved", "yarn")),
]


@pytest.mark.parametrize(
    ("name", "params", "rope"),
    [(name, params, rope) for name, params, ropes in CASES for rope in ropes],
)
def test_every_rotary_layout_equals_the_naive_replay(name, params, rope):
    """Interleaved pairs, partial rotation and YaRN's scaling, at the prefill and in decoding."""
    used = ROPES[rope]
    width, order = used.rotary_dim, list(range(DIM))
    if used.layout == "interleaved":
        order = [*range(0, width, 2), *range(1, width, 2), *range(width, DIM)]
    trace = random_trace(n=60, group=3, seed=1, dtype=torch.float64, rope=used, scale=SCALE)
    setting = {"interval": 6, "prefill": True}
    record = kvsim.replay(trace, kvsim.policy(name, **params), 24, **setting)
    q, k, v = trace.read("q")[..., order], trace.read("k")[..., order], trace.read("v")
    sizes = {"n": 60, "dim": DIM, "prompt_len": trace.prompt_len}
    case = make_case("normal", layers=len(k), heads=k.shape[1], group=3, **sizes)
    case = replace(case, q=q, k=k, v=v, scale=SCALE)
    vars(case)["rope"] = used
    outcome = loops.replay(case, reference.rule(name, params), budget=24, **setting)

    assert (record.evicted_at < 60).any()
    assert outcome.agrees(record.evicted_at, 1e-9)


@pytest.mark.parametrize("sizes", [[30], [1] * 30, [7, 1, 22], [29, 1]])
def test_moments_of_blocks_are_those_of_all_rows(sizes):
    """Mean and population covariance, however the rows come in."""
    rows = normal(2, 3, 30, 5) * 3 + 100

    count, mean, covariance = moments(rows.split(sizes, dim=-2))

    assert count == 30
    torch.testing.assert_close(mean, rows.mean(-2))
    for layer in range(2):
        for head in range(3):
            expected = rows[layer, head].T.cov(correction=0)
            torch.testing.assert_close(covariance[layer, head], expected)
    assert moments(rows.split(sizes, dim=-2), covariance=False)[2] is None


def test_moments_do_not_cancel_where_the_mean_is_far_off():
    """float32 rows around 10,000 with a deviation of 1, in blocks."""
    rows = normal(1, 500, 3) + 1e4
    _, mean, covariance = moments(rows.float().split(17, dim=-2))

    torch.testing.assert_close(mean.double(), rows.mean(-2), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        covariance[0].double(), rows[0].T.cov(correction=0), atol=0.02, rtol=0
    )


@pytest.mark.parametrize("held", [1, 2000, 1 << 24])
def test_forms_and_mixtures_do_not_depend_on_what_is_held_at_once(held, monkeypatch):
    """Blocks of entries and of positions, down to one at a time."""
    used = ROPES["yarn"]
    mu, k = normal(2, 2, 3, DIM, seed=4), normal(2, 2, 7, DIM, seed=5)
    root = normal(2, 2, 3, DIM, DIM, seed=6)
    sigma = root @ root.mT
    monkeypatch.setattr("kvsim.policies.expected_attention.LOGIT_BYTES", held)

    form = quadratic(k, sigma)
    mixture = mixture_logits(k, mu, sigma, SCALE, used, 9, 13)

    torch.testing.assert_close(form, torch.einsum("lhni,lhgij,lhnj->lhgn", k, sigma, k))
    each = []
    for p in range(9, 22):
        turn = rotation(used, p)
        each.append(expected_logits(k, mu @ turn.T, turn @ sigma @ turn.T, SCALE))
    expected = torch.stack(each).logsumexp(0) - math.log(13)
    torch.testing.assert_close(mixture, expected)
