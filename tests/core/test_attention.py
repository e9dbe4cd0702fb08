"""Partial attention and the rotary embedding, against loops from the formulas."""

import math

import pytest
import torch

from kvsim.core import attention
from kvsim.core.attention import Formula, Rope, attend


def naive(q, k, v, scale, seen):
    """Softmax attention of every row over the entries it sees, one row at a time, in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float64)
    lse = torch.full(q.shape[:-1], -math.inf, dtype=torch.float64)
    for b in range(q.shape[0]):
        for g in range(q.shape[1]):
            for row in range(q.shape[2]):
                at = seen[b, g, row].nonzero()[:, 0]
                if len(at):
                    z = k[b, 0, at] @ q[b, g, row] * scale
                    lse[b, g, row] = z.logsumexp(0)
                    out[b, g, row] = z.softmax(0) @ v[b, 0, at]
    return out, lse


def example(rows=9, entries=14, groups=3):
    """q [2, groups, rows, 8], k and v [2, 1, entries, 8]."""
    torch.manual_seed(0)
    return (
        torch.randn(2, groups, rows, 8),
        torch.randn(2, 1, entries, 8),
        torch.randn(2, 1, entries, 8),
    )


@pytest.fixture(params=["fused", "blocks"])
def kernel(request, monkeypatch):
    """Both ways to compute attention; the unfused one in blocks of few rows."""
    if request.param == "blocks":
        monkeypatch.setattr(attention, "_FUSED", None)
        monkeypatch.setattr(attention, "_BLOCK_LOGITS", 200)


def test_attention_with_a_mask_is_the_softmax_over_what_a_row_sees(kernel):
    """Output and log-sum-exp equal a float64 loop; a row that sees nothing gives 0 and -inf."""
    q, k, v = example()
    seen = torch.rand(2, 1, 9, 14) > 0.5
    seen[1, 0, 4] = False

    out, lse = attend(q, k, v, Formula(0.3), mask=seen)

    expected_out, expected_lse = naive(q, k, v, 0.3, seen.expand(-1, 3, -1, -1))
    torch.testing.assert_close(out.double(), expected_out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)
    assert bool((out[1, :, 4] == 0).all())


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotation_turns_each_pair_by_position_times_frequency(layout):
    """The rotary embedding equals its definition pair by pair; the other dimensions stay."""
    rope = Rope((1.0, 0.1), attention_scaling=1.5, layout=layout)
    x = torch.randn(3, 6, dtype=torch.float64)
    pos = torch.tensor([0, 5, 1000])

    turned = rope.rotate(x, pos)

    pairs = [(0, 2), (1, 3)] if layout == "half" else [(0, 1), (2, 3)]
    for n, p in enumerate(pos.tolist()):
        for (i, j), frequency in zip(pairs, rope.inv_freq, strict=True):
            cos, sin = math.cos(p * frequency) * 1.5, math.sin(p * frequency) * 1.5
            assert turned[n, i] == pytest.approx(x[n, i] * cos - x[n, j] * sin)
            assert turned[n, j] == pytest.approx(x[n, j] * cos + x[n, i] * sin)
    assert torch.equal(turned[:, 4:], x[:, 4:])


def test_unrotate_undoes_rotate_with_scaling_and_partial_rotation():
    """The scaling of yarn is divided out again."""
    rope = Rope((1.0, 0.3, 0.01), attention_scaling=1.2)
    x, pos = torch.randn(2, 4, 8, dtype=torch.float64), torch.arange(4) * 100

    torch.testing.assert_close(rope.unrotate(rope.rotate(x, pos), pos), x)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (7, 1), (5, 2), (300, 512), (-40, 17)])
def test_the_mean_rotation_is_the_average_of_rotations(layout, start, count):
    """The closed form equals the loop, also for frequencies of 0 and of more than a turn."""
    frequencies = (1.0, 0.3, 1e-4, 0.0, 2 * math.pi, 3 * math.pi, 9.0)
    rope = Rope(frequencies, attention_scaling=1.3, layout=layout)
    x = torch.randn(3, 4, 16, dtype=torch.float64)

    mean = rope.rotate_mean(x, start, count)

    each = [rope.rotate(x, torch.tensor(p)) for p in range(start, start + count)]
    torch.testing.assert_close(mean, torch.stack(each).mean(0))
