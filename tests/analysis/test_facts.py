"""Facts about policies: columns that are written where a value is measured."""

from dataclasses import dataclass

import pytest

import kvsim
from kvsim.analysis.table import FACTS
from kvsim.core.pieces import Inputs, Scorer
from kvsim.core.policy import Protection
from traces import random_trace


@dataclass(frozen=True)
class Ahead(Scorer):
    """Of the user's own: it scores by the rows that are still to come."""

    reads = Inputs(future=True)

    def score(self, view):
        """Earlier entries stay."""
        return -view.pos.float()


#: looks_ahead, bounds, access, per_query_head, changed of policies, by hand.
CASES = [
    ("full", {}, (False, "", "", False, "")),
    ("tova", {}, (False, "held", "", False, "")),
    ("tova", {"protect": Protection(sink=2)}, (False, "held", "", False, "protect")),
    ("oracle", {}, (True, "held", "", False, "")),
    ("snapkv@original", {"window": 4}, (False, "held", "", True, "window")),
    ("ams", {"window": 4, "credit": False}, (False, "held", "", False, "credit,window")),
    ("gemfilter", {"layer": 0}, (False, "held", "", False, "layer")),
    ("pyramidinfer", {}, (False, "", "", False, "")),  # it keeps shares of its own
    ("topk", {}, (True, "read", "read", False, "")),
    ("topp", {"p": 0.9}, (True, "", "read", False, "p")),
    ("tova+quest", {"page": 4}, (False, "held,read", "read", False, "page")),
    ("tova+quest+int8", {}, (False, "held,read", "read,stored", False, "")),
    ("qfilter", {"calibration": "prefix:4"}, (False, "held", "", False, None)),
    ("qfilter", {"calibration": "oracle"}, (True, "held", "", False, None)),
    (Ahead(), {}, (True, "held", "", False, None)),
]


@pytest.fixture(scope="module")
def trace():
    """A trace of two layers."""
    return random_trace(n=40, prompt_len=24, layers=2, dim=128)


@pytest.mark.parametrize(("policy", "params", "expected"), CASES)
def test_facts_of_a_policy_are_columns(trace, policy, params, expected):
    """Each value says of its policy whether it looks ahead, what is bounded, read and changed."""
    built = kvsim.policy(policy, **params) if isinstance(policy, str) else policy
    table = kvsim.measure(trace, kvsim.replay(trace, built, 12, interval=8), ["entries_seen"])

    assert table.select(*FACTS).unique().rows() == [expected]
