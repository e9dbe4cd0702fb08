"""Lengths that fit the budget: the preset `scaled`, and the remark that says how to mend it."""

import numpy as np
import pytest

import kvsim
from kvsim.errors import PolicyError
from kvsim.policies.fit import fitted, remark_of
from kvsim.sweeps.driver import replay_all
from traces import random_trace

#: In the paper's Table 15, for 512 entries; recent is the release's.
AMS = {"window": 128, "recent": 32, "min_segment": 16, "max_segment": 256, "segment_length": 128}


def make_trace():
    """A random trace of 80 tokens."""
    return random_trace(n=80, prompt_len=30, size=1.0)


def scaled(value, budget, least=1):
    """A length at a budget, of one meant for 512: the value itself if half the budget holds it."""
    return value if 2 * value <= budget else min(value, max(least, round(value * budget / 512)))


@pytest.mark.parametrize("budget", [16, 40, 63, 64, 512, 4096])
def test_a_scaled_policy_is_the_one_with_lengths_that_fit(budget):
    """Those that do not have the paper's share; a window has 8 rows if half the budget does."""
    least = {"window": min(8, budget // 2)}
    given = {name: scaled(value, budget, least.get(name, 1)) for name, value in AMS.items()}
    trace = make_trace()

    policy = kvsim.policy("ams@scaled")
    record = kvsim.replay(trace, policy, budget, interval=8)
    expected = kvsim.replay(trace, kvsim.policy("ams", **given), budget, interval=8)

    assert policy.at(budget).allocator == kvsim.policy("ams", **given).allocator
    assert np.array_equal(record.evicted_at, expected.evicted_at)
    assert record.params["window"] == "128 * budget / 512 if 128 > budget / 2"
    assert record.params == kvsim.replay(trace, policy, 20, interval=8).params


def test_what_is_given_and_other_parts_are_not_scaled():
    """Only lengths of the part that is called so, and of a scorer that takes its values over."""
    given = kvsim.policy("ams@release@scaled+snapkv", recent=24).at(60)
    inner = kvsim.policy("ams+snapkv@scaled").at(60)
    asl = kvsim.policy("asl@scaled").at(60)
    fastkv = kvsim.policy("fastkv@scaled", rows=0.5).at(64)

    assert (given.allocator.recent, given.allocator.max_segment) == (24, 120)
    assert (given.scorer.window, given.allocator.window) == (32, 8)
    assert (inner.scorer.window, inner.allocator.window) == (8, 128)
    assert asl.propagation.window == asl.scorer.window == 8
    assert (fastkv.propagation.rows, fastkv.propagation.window) == (0.5, 8)
    assert fitted(kvsim.policy("snapkv")) == kvsim.policy("snapkv@scaled")
    assert fitted(kvsim.policy("tova")) == kvsim.policy("tova")
    with pytest.raises(PolicyError, match="tova has no preset 'scaled'"):
        kvsim.policy("tova@scaled")


def test_a_sweep_fits_policies_under_one_label():
    """At every budget the same name and parameters, and remarks with the values."""
    policies = [kvsim.policy(name) for name in ("ams+snapkv", "tova")]

    run = replay_all([make_trace()], policies, [16, 40], fit=True, metrics=["entries_seen"])

    assert {record.policy for record in run.records} == {"ams@scaled+snapkv@scaled", "tova"}
    assert len(set(run.table["params"].drop_nulls())) == 2
    assert any(
        "budget 16: " in one and "scorer.window=8 instead of 32" in one for one in run.remarks
    )


def test_a_remark_says_what_was_scaled_or_that_nothing_was():
    """Values of the budget beside the paper's; a length that fits is not named."""
    policy = kvsim.policy("snapkv@scaled")

    assert remark_of(policy, 32) == "snapkv@scaled: scaled to budget 32: window=8 instead of 32"
    assert remark_of(policy, 64) == "snapkv@scaled: scaled to budget 64: all lengths fit"


@pytest.mark.parametrize("name", ["ams", "snapkv", "asl", "gkv", "cake@gkv", "rpc@ams", "knorm"])
def test_scaled_lengths_mend_what_a_remark_is_on(name):
    """Windows and recent entries of over half of a budget are named, and none is left then."""
    policy = kvsim.policy(name)

    assert ("--set fit=true" in remark_of(policy, 30)) == (name != "knorm")
    assert "--set fit=true" not in remark_of(fitted(policy), 30)
    if name == "snapkv":
        assert "(window=32)" in remark_of(policy, 30)
