"""OpenVINO's blocks by hand: KVCrush, when events come, and what their sizes are rounded to."""

import numpy as np
import pytest
import torch

import kvsim
from kvsim.errors import BudgetError
from kvsim.policies.openvino import Blocks
from kvsim.testing.strategies import make_case

SIZES = {"page": 4, "sink": 4, "recent": 8, "window": 3}


@pytest.mark.parametrize(
    ("crush", "anchor", "stay"),
    [
        (1, "mean", [1]),
        (2, "mean", [1, 2]),
        (3, "mean", [1, 2, 3]),
        (4, "mean", []),
        (1, "ones", [2]),
        (1, "alternating", [3]),
    ],
)
def test_blocks_that_kvcrush_returns_are_those_worked_out_by_hand(crush, anchor, stay):
    """Of four blocks with bits 11, 00, 10 and 01, whose majority is 00, the last three leave."""
    sums = torch.tensor([[9.0, 8, 1, 2, 7, 0, 3, 4]])
    slot = torch.arange(8)[None]
    leaves = torch.tensor([[False, True, True, True]])

    piece = Blocks(page=2, crush=crush, anchor=anchor)
    found = piece._crushed(sums, slot >= 0, slot // 2, slot % 2, leaves)

    assert found.nonzero()[:, 1].tolist() == stay


@pytest.mark.parametrize("crush", [0, 1])
def test_whole_blocks_leave_after_the_first_row_of_the_response(crush):
    """Not after the prompt; then as soon as there is a block more than the budget, of all heads."""
    trace = make_case("sharp", layers=2, heads=2, group=2, n=70, prompt_len=41, seed=3).trace()
    record = kvsim.replay(trace, kvsim.policy("openvino@sum", crush=crush, **SIZES), 24)

    assert record.events == [41, 43, 47, 51, 55, 59, 63, 67]  # 42 tokens; 44, 48 and so on
    for row in record.events:
        kept = record.retained(row)[:, :, : row + 1]
        assert (kept == kept[:, :1]).all()
        assert (kept.sum(-1) == 24 + (row + 1) % 4 + 4 * crush).all()
        assert kept[..., :4].all()
        assert kept[..., (row + 1) // 4 * 4 - 8 :].all()
        blocks = np.split(record.evicted_at[0, 0] == row, np.arange(4, 70, 4))
        assert all(block.all() or not block.any() for block in blocks[: row // 4])


def test_sizes_are_whole_blocks():
    """Ends are rounded up, which bounds the budget; of the budget whole blocks are filled."""
    trace = make_case("sharp", n=70, prompt_len=41, seed=3).trace()
    policy = kvsim.policy("openvino", **SIZES | {"sink": 3, "recent": 5})

    kept, same = (kvsim.replay(trace, policy, budget).evicted_at for budget in (24, 27))
    assert (kept == same).all()
    with pytest.raises(BudgetError, match=r"\b12\b"):
        kvsim.replay(trace, policy, 11)
