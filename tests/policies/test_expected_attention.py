"""Expected Attention: its moments and rotations, and scores against a loop with matrices."""

import math

import numpy as np
import pytest
import torch

import kvsim
from kvsim.core.policy import Policy, Protection, Schedule
from kvsim.errors import NeedsError, PolicyError
from kvsim.policies.expected_attention import (
    ExpectedAttention,
    expected_logits,
    mixture_logits,
    moments,
    quadratic,
)

LAYERS, HEADS, GROUP, N, DIM, HIDDEN = 2, 2, 3, 60, 8, 5
PROMPT = 20
SCALE = 0.4

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


def make_trace(rope=ROPES["half"], *, turn=None, **arrays):
    """Queries off the centre; `turn` turns one rotated pair of q and k by an angle before RoPE."""
    at = torch.arange(N)
    q, k = normal(LAYERS, HEADS * GROUP, N, DIM) + 0.5, normal(LAYERS, HEADS, N, DIM, seed=1)
    if turn is not None:
        q, k = turn(q), turn(k)
    drawn = {
        "q": rope.rotate(q, at),
        "k": rope.rotate(k, at),
        "v": normal(LAYERS, HEADS, N, DIM, seed=2),
        "o_proj": normal(LAYERS, HEADS * GROUP, DIM, HIDDEN, seed=3),
    }
    return kvsim.Trace.from_arrays(**drawn | arrays, prompt_len=PROMPT, rope=rope, scale=SCALE)


def events(trace, scorer, budget=12, interval=15):
    """What was scored at each event of a replay."""
    policy = Policy("expected_attention", scorer, schedule=Schedule(interval=interval))
    return kvsim.replay(trace, policy, budget, internals=True).internals


def rotation(rope, p):
    """The rotation at position p as a matrix, column by column."""
    return rope.rotate(torch.eye(DIM, dtype=torch.float64), torch.tensor(p)).mT


def loop(trace, scorer, plan, interval=15):
    """Scores of an event by the definition: matrices, one query head and one entry at a time."""
    row, out = plan.row, np.full(plan.pos.shape, np.nan)
    if row == PROMPT - 1:
        samples, start = range(scorer.sink, row + 1), row + 1
    elif scorer.origin == "next":
        samples = range(max(scorer.sink, row + 1 - scorer.query_buffer), row + 1)
        start = row + 1
    else:
        start = min(interval, scorer.query_buffer + 1)
        samples = range(row + 1 - start, row + 1)[scorer.sink :]
    future = [rotation(trace.rope, p) for p in range(start, start + scorer.n_future)]
    mean = sum(future) / len(future)

    for layer in range(LAYERS):
        for head in range(HEADS):
            live = [(i, int(p)) for i, p in enumerate(plan.pos[layer, head]) if p >= 0]
            scored = [(i, p) for i, p in live if p >= scorer.sink]
            total = np.zeros(plan.pos.shape[-1])
            size = np.zeros(plan.pos.shape[-1])
            for g in range(head * GROUP, (head + 1) * GROUP):
                q = torch.stack(
                    [rotation(trace.rope, r).inverse() @ trace.q[layer, g, r] for r in samples]
                )
                mu = q.mean(0)
                sigma = (q - mu).T @ (q - mu) / len(q) * scorer.covariance
                x = []
                for _, p in scored:
                    k = trace.k[layer, head, p]
                    turns = [mean] if scorer.rope == "mean" else future
                    each = [
                        SCALE * (t @ mu) @ k + SCALE**2 / 2 * k @ (t @ sigma @ t.T) @ k
                        for t in turns
                    ]
                    x.append(torch.stack(each).logsumexp(0) - math.log(len(turns)))
                weights = torch.stack(x).softmax(0)
                for (i, _), weight in zip(scored, weights, strict=True):
                    total[i] += weight / GROUP
                for i, p in live:
                    v = trace.v[layer, head, p]
                    seen = v @ trace.o_proj[layer, g] if scorer.value_norm == "wo_v" else v
                    size[i] += seen.norm() / GROUP
            for i, _ in live:
                bare = scorer.value_norm == "none"
                value = total[i] if bare else (total[i] + scorer.epsilon) * size[i]
                out[layer, head, i] = value
    return out


# -------------------------------------------------------------------------------- the whole score


CASES = [(rope, params) for rope in ROPES for params in ({}, {"rope": "mixture", "n_future": 4})]
CASES += [
    ("yarn", params)
    for params in (
        {"n_future": 1},
        {"covariance": False},
        {"value_norm": "none"},
        {"value_norm": "wo_v", "epsilon": 0.0},
        {"sink": 0, "query_buffer": 7},
        {"origin": "buffer", "epsilon": 0.0},
        {"origin": "buffer", "query_buffer": 6, "sink": 2},
    )
]


@pytest.mark.parametrize(("rope", "params"), CASES)
def test_scores_equal_the_definition_with_matrices(rope, params):
    """At the prefill event and at two decode events, for every layout of the rotary embedding."""
    trace, scorer = make_trace(ROPES[rope]), ExpectedAttention(**{"n_future": 9, **params})
    plans = events(trace, scorer)

    assert [plan.row for plan in plans] == [PROMPT - 1, PROMPT + 14, PROMPT + 29]
    for plan in plans:
        np.testing.assert_allclose(plan.scores, loop(trace, scorer, plan), rtol=1e-9)


def test_the_softmax_comes_first_and_the_mean_over_the_group_second():
    """A query head that looks at one entry alone counts as much as one that looks at all."""
    q = torch.zeros(1, 2, 6, 2, dtype=torch.float64)
    q[0, 0, :, 0] = 50.0  # all of its weight on the first key; the other head sees all alike
    k = torch.zeros(1, 1, 6, 2, dtype=torch.float64)
    k[0, 0, 0, 0] = 10.0
    still = kvsim.Rope((0.0,))
    trace = kvsim.Trace.from_arrays(q, k, k, prompt_len=6, rope=still, scale=1.0)
    scorer = ExpectedAttention(sink=0, value_norm="none")
    policy = Policy("expected_attention", scorer, schedule=Schedule(interval=None))
    (plan,) = kvsim.replay(trace, policy, 3, internals=True).internals

    assert plan.scores[0, 0] == pytest.approx([(1 + 1 / 6) / 2] + [1 / 12] * 5)


def test_a_large_epsilon_ranks_by_the_size_of_the_value():
    """What attention says drowns."""
    trace = make_trace()
    for norm in ("v", "wo_v"):
        plan = events(trace, ExpectedAttention(epsilon=1e9, value_norm=norm))[0]
        v = trace.v[:, :, :PROMPT]
        if norm == "v":
            size = v.norm(dim=-1)
        else:
            o_proj = trace.o_proj.unflatten(1, (HEADS, GROUP))
            size = (v.unsqueeze(2) @ o_proj).norm(dim=-1).mean(2)
        assert np.array_equal(plan.scores.argsort(-1), size.numpy().argsort(-1))
        assert not np.array_equal(
            events(trace, ExpectedAttention(epsilon=0.0))[0].scores.argsort(-1), size.argsort(-1)
        )


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("kind", ["mean", "mixture"])
def test_turning_a_pair_of_queries_and_keys_together_changes_nothing(rope, kind):
    """The score depends on what the model computes, not on the basis of a rotated pair."""
    used = ROPES[rope]
    layout, width = used.layout, used.rotary_dim
    i, j = (0, width // 2) if layout == "half" else (0, 1)

    def turn(x, angle=0.7):
        out = x.clone()
        out[..., i] = math.cos(angle) * x[..., i] - math.sin(angle) * x[..., j]
        out[..., j] = math.sin(angle) * x[..., i] + math.cos(angle) * x[..., j]
        return out

    scorer = ExpectedAttention(n_future=6, rope=kind)
    plain, turned = (events(make_trace(used, turn=by), scorer) for by in (None, turn))
    keys_alone = events(make_trace(used, k=turn(make_trace(used).k)), scorer)
    for one, other, broken in zip(plain, turned, keys_alone, strict=True):
        np.testing.assert_allclose(one.scores, other.scores)
        assert not np.allclose(one.scores, broken.scores)


def test_a_mixture_over_one_position_is_the_mean_over_it():
    """Where nothing is averaged the two are one."""
    mean, mixture = (
        events(make_trace(), ExpectedAttention(n_future=1, rope=rope))
        for rope in ("mean", "mixture")
    )

    for one, other in zip(mean, mixture, strict=True):
        np.testing.assert_allclose(one.scores, other.scores)
        assert one.row == other.row


def test_the_sinks_take_no_part_in_the_softmax_and_stay():
    """The other weights add up to 1, and what the sinks' keys are does not matter."""
    trace, scorer = make_trace(), ExpectedAttention(sink=4, value_norm="none")
    plan = events(trace, scorer)[0]

    assert plan.scores[..., 4:].sum(-1) == pytest.approx(np.ones((LAYERS, HEADS)))
    assert (plan.scores[..., :4] == 0).all()
    k = trace.k.clone()
    k[:, :, :4] *= 100
    other = events(make_trace(k=k), scorer)[0]
    np.testing.assert_allclose(plan.scores, other.scores)
    assert scorer.protection(9) == Protection(sink=4)


# -------------------------------------------------------------------------------------- the parts


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


@pytest.mark.parametrize("rope", ROPES)
def test_keys_rotated_back_meet_the_moments_as_keys_meet_rotated_moments(rope):
    """R' mu . k + k . R' S R'^T k on one side, mu . (R'^T k) on the other."""
    used, start, count = ROPES[rope], 37, 11
    mu, k = normal(1, 1, 2, DIM, seed=4), normal(1, 1, 6, DIM, seed=5)
    root = normal(1, 1, 2, DIM, DIM, seed=6)
    sigma = root @ root.mT
    turn = sum(rotation(used, p) for p in range(start, start + count)) / count

    forward = expected_logits(k, mu @ turn.T, turn @ sigma @ turn.T, SCALE)
    back = expected_logits(used.rotate_mean(k, 1 - start - count, count), mu, sigma, SCALE)

    torch.testing.assert_close(back, forward)


def test_the_expected_exponential_of_normal_queries_is_what_drawing_them_gives():
    """The closed form is the mean of exp(scale q.k), here over 400,000 draws."""
    mu, k = normal(DIM, seed=7), normal(3, DIM, seed=8)
    root = 0.5 * normal(DIM, DIM, seed=9)
    q = mu + normal(400_000, DIM, seed=10) @ root.T
    drawn = (SCALE * q @ k.T).exp().mean(0).log()

    sigma = root @ root.T
    closed = expected_logits(k[None, None], mu[None, None, None], sigma[None, None, None], SCALE)

    torch.testing.assert_close(closed[0, 0, 0], drawn, atol=0.05, rtol=0)
    without = expected_logits(k[None, None], mu[None, None, None], None, SCALE)
    assert not torch.allclose(without[0, 0, 0], drawn, atol=0.05, rtol=0)


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


# ------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n_future": 0}, "expected_attention: n_future is 0; expected an integer of at least 1"),
        ({"sink": -1}, "sink is -1; expected an integer of at least 0"),
        ({"epsilon": -0.1}, "epsilon is -0.1; expected a finite number of at least 0"),
        ({"epsilon": math.nan}, "epsilon is nan"),
        ({"query_buffer": 1}, "query_buffer is 1; expected an integer of at least 2"),
        ({"value_norm": "k"}, "value_norm is 'k'; expected 'none', 'v' or 'wo_v'"),
        ({"rope": "none"}, "rope is 'none'; expected 'mean' or 'mixture'"),
        ({"origin": "here"}, "origin is 'here'; expected 'next' or 'buffer'"),
        (
            {"origin": "buffer", "query_buffer": 4},
            r"query_buffer is 4, of which the first 4 \(sink\) are left out; expected at least 5",
        ),
    ],
)
def test_what_cannot_be_is_refused(params, message):
    """When the policy is made, with what was expected."""
    with pytest.raises(PolicyError, match=message):
        ExpectedAttention(**params)


def test_fewer_than_two_samples_are_refused():
    """A prompt of the sinks and one row, and a buffer that the sinks use up."""
    with pytest.raises(PolicyError, match=f"fires after {PROMPT} rows; expected at least 21"):
        events(make_trace(), ExpectedAttention(sink=19), budget=19)
    assert events(make_trace(), ExpectedAttention(sink=18), budget=19)
    buffer = ExpectedAttention(origin="buffer")
    with pytest.raises(PolicyError, match=r"interval is 5, .* expected at least 6"):
        events(make_trace(), buffer, interval=5)
    assert events(make_trace(), buffer, interval=6)


def test_the_norm_behind_the_output_projection_needs_it():
    """A trace without one is refused; the other norms do without."""
    trace = make_trace(o_proj=None)

    with pytest.raises(NeedsError, match="o_proj"):
        events(trace, ExpectedAttention(value_norm="wo_v"))
    assert events(trace, ExpectedAttention(value_norm="v"))
