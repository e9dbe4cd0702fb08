"""The rotary embedding, against loops from the formulas."""

import math

import pytest
import torch

from kvsim.core.attention import Rope


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
