"""Wrappers say what they cannot rank; shares of a budget are those of exact numbers."""

import numpy as np
import pytest
from torch import Tensor

from kvsim import Policy, Trace, replay
from kvsim.core.policy import Schedule, Scorer
from kvsim.core.view import View
from kvsim.errors import ScoreError
from kvsim.policies.criticalkv import CriticalKV
from kvsim.policies.gkv import Global
from kvsim.policies.knorm import Knorm
from traces import random_trace


class Undeclared(Scorer):
    """Negative scores, which it does not declare."""

    def score(self, view: View) -> Tensor:
        """Short keys."""
        length: Tensor = view.keys.norm(dim=-1)
        return -length


def _trace(n: int) -> Trace:
    o_proj = np.random.default_rng(0).normal(size=(1, 2, 8, 6)).astype("f")
    return random_trace(layers=1, heads=1, n=n, prompt_len=n - 4, o_proj=o_proj)


@pytest.mark.parametrize("wrapper", [Global, CriticalKV])
def test_undeclared_negative_scores(wrapper: type[Global | CriticalKV]) -> None:
    """A wrapper that compares sizes refuses negative scores that nobody declared, and names it."""
    schedule = Schedule(interval=1)
    with pytest.raises(ScoreError, match=r"Undeclared .* `scale"):
        replay(_trace(24), Policy("mine", wrapper(Undeclared()), schedule=schedule), 8)
    assert replay(_trace(24), Policy("mine", wrapper(Knorm()), schedule=schedule), 8).events


def test_first_stage_is_an_exact_share() -> None:
    """int(100 x 0.57) is 56 entries of a first stage, which float32 would round to 57."""
    policy = Policy("mine", CriticalKV(Knorm(), first_stage=0.57), schedule=Schedule(None))
    record = replay(_trace(204), policy, 100, internals=True)
    scores = record.internals[0].scores
    assert (scores >= 1).sum(-1).tolist() == [[int(100 * 0.57)]] == [[56]]
