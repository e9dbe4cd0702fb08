"""One block of layers: what the policy chooses at an event, and what is applied."""

import pytest
import torch

import kvsim
from kvsim.engine.block import Block
from kvsim.engine.checks import Setup
from kvsim.engine.source import TraceSource
from kvsim.schema import NEVER
from traces import random_trace


@pytest.fixture
def block():
    """The block of `tova` over two layers, whose prompt is longer than the budget."""
    trace = random_trace(n=24, size=1.0, prompt_len=12)
    policy = kvsim.policy("tova")
    setting = Setup(trace, policy, 8).setting()
    return Block(TraceSource(trace, [0, 1], torch.device("cpu")), policy, setting, range(2))


def test_a_choice_changes_nothing_before_it_is_applied(block):
    """Entries are there until `apply`, and then those chosen stay."""
    choice = block.choose(11)

    assert (block.evicted_at == NEVER).all()
    assert choice.keep.sum(-1).eq(8).all()
    block.apply(choice)
    assert torch.equal(block.evicted_at[..., :12] == NEVER, choice.keep)
    assert block.since.tolist() == [11, 11]


def test_other_sets_can_be_applied_than_those_chosen(block):
    """The sets that are given stay, and layers of which nothing leaves have had no event."""
    choice = block.choose(11, fires=False)
    keep = choice.keep.clone()
    keep[1, :, 3:5] = False
    block.apply(choice, keep)

    assert choice.plan is None
    assert torch.equal(block.evicted_at[..., :12] == NEVER, keep)
    assert block.since.tolist() == [-1, 11]
