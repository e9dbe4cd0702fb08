"""Replay: schedules, blocks, and the path for an interval of 1."""

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch

import kvsim
from kvsim.core.policy import Allocator, Plan, Policy, Schedule, Scorer, Scores
from kvsim.engine.checks import Setup
from kvsim.engine.replay import run
from kvsim.errors import PolicyError, ScoreError
from kvsim.schema import NEVER
from traces import random_trace


def make_trace(**options):
    """A random float64 trace of 40 tokens, 10 of them prompt."""
    return random_trace(**{"n": 40, "prompt_len": 10, "dtype": torch.float64} | options)


def replay_by_event(trace, name, budget):
    """The Record of a policy of kvsim without the faster way through rows."""
    policy = kvsim.policy(name)
    return run(Setup(trace, policy, budget), by_row=False)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule(interval=None), [9]),
        (Schedule(interval=None, prefill=False), []),
        (Schedule(interval=1), list(range(9, 16))),
        (Schedule(interval=4), [9, 13]),
        (Schedule(interval=4, prefill=False), [13]),
        (Schedule(interval=100), [9]),
        (Schedule(interval=1).override(3, prefill=None), [9, 12, 15]),
        (Schedule(interval=1).override(None, prefill=False), list(range(10, 16))),
    ],
)
def test_events_fire_after_the_prompt_and_every_interval_rows(schedule, expected):
    """Rows prompt_len - 1 + m * interval, m = 0 only with the prefill event."""
    assert schedule.rows(prompt_len=10, n_pos=16) == expected


def test_a_given_schedule_replaces_the_policys_own_and_is_recorded():
    """The Record says which schedule ran, and whether it was the policy's own."""
    trace = make_trace()
    policy = kvsim.policy("snapkv", window=4)

    own = kvsim.replay(trace, policy, budget=8)
    given = kvsim.replay(trace, policy, budget=8, interval=6, prefill=False)

    assert (own.schedule, own.facts.own_schedule) == (Schedule(None), True)
    assert own.events == [9]
    assert (given.schedule, given.facts.own_schedule) == (Schedule(6, prefill=False), False)
    assert given.events == [15, 21, 27, 33, 39]


def test_an_entry_that_left_does_not_dim_those_that_stay(monkeypatch):
    """A dead entry's logit, 300 above all others, takes the block's maximum and changes nothing."""
    trace = make_trace(layers=1, heads=1, group=1, n=60, prompt_len=10)
    q, k = trace.read("q").clone(), trace.read("k").clone()
    # position 3 gets the lowest logit up to row 12, so it leaves, and a huge one from row 14 on
    k[0, 0, 3] = 0
    k[0, 0, 3, 0] = 100.0
    q[0, 0, :14, 0], q[0, 0, 14:, 0] = -10.0, 10.0
    trace = make_trace(layers=1, heads=1, group=1, n=60, prompt_len=10, q=q, k=k)

    for name in ("tova", "h2o"):
        by_row = kvsim.replay(trace, kvsim.policy(name), budget=8)
        by_event = replay_by_event(trace, name, 8)

        assert by_row.evicted_at[0, 0, 3] < 14
        assert (by_row.evicted_at == by_event.evicted_at).all()


@dataclass(frozen=True)
class Mistaken(Scorer):
    """Makes a mistake."""

    kind: str

    columns: ClassVar[dict[str, float]] = {"age": 0.0}
    per_row: ClassVar[bool] = True

    def score(self, view):
        """Read or return what is not allowed, or scores that cannot rank every entry."""
        score = view.pos.double().clone()
        if self.kind == "future":
            view.queries(range(view.row + 2))
        if self.kind == "column":
            score = score + view["old"]
        if self.kind == "nan":
            score[1, 1, 2] = torch.nan
        wrong = {"infinite": score + torch.inf, "half": score.half(), "short": score[..., :3]}
        columns = {"new": {"old": score}, "shape": {"age": score[..., :3]}, "none": {"age": None}}
        return Scores(wrong.get(self.kind, score), columns.get(self.kind, {}))


@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("future", PolicyError, "reads row 10 at the event after row 9; a score may use rows up"),
        ("column", PolicyError, "reads a column 'old' that it does not declare; it declares age;"),
        ("new", PolicyError, "column 'old' at row 9 is"),
        ("shape", PolicyError, r"column 'age' at row 9 is torch.float64 \[2, 2, 3\]"),
        ("none", PolicyError, "column 'age' at row 9 is NoneType"),
        ("nan", ScoreError, r"the score at row 9 is NaN; .*\(layer 1, head 1\)"),
        ("infinite", ScoreError, r"the score at row 9 is infinite; .*\(layer 0, head 0\)"),
        ("half", ScoreError, r"the score at row 9 is torch.float16 .*float64 \[2, 2, 10\]"),
        ("short", ScoreError, r"the score at row 9 is .*\[2, 2, 3\]; expected"),
    ],
)
def test_mistakes_of_a_scorer_name_the_rule_and_the_page(kind, error, message, interval):
    """One line that begins with the policy, in both ways of replaying."""
    with pytest.raises(error, match=f"^mine: {message}") as caught:
        kvsim.replay(make_trace(), Policy("mine", Mistaken(kind)), budget=7, interval=interval)

    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("see docs/add-a-policy.md")


@dataclass(frozen=True)
class Uneven(Allocator):
    """Gives the first layer half of the budget, the others all of it."""

    def plan(self, view, scores, protected):
        """The first layer drops below the budget, and then acts less often than the others."""
        quotas = view.budget.expand_as(view.count).clone()
        quotas[view.layers == 0] //= 2
        return Plan(quotas)


@pytest.mark.parametrize("name", ["h2o", "tova", "random"])
def test_an_event_acts_only_on_layers_that_hold_more_than_the_budget(name):
    """A layer with room is left alone, columns included: each layer replays as it does alone."""
    trace = make_trace(layers=3, n=120)
    params = {"recent": 1} if name == "h2o" else {}
    policy = replace(kvsim.policy(name, **params), allocator=Uneven())

    together = kvsim.replay(trace, policy, budget=16, interval=2)

    events = [set(np.unique(together.evicted_at[layer]).tolist()) - {NEVER} for layer in range(3)]
    assert events[0] < events[1] == events[2]
    for layer in range(3):
        alone = kvsim.replay(trace, policy, budget=16, interval=2, layers=[layer])
        assert (together.evicted_at[layer] == alone.evicted_at[0]).all()


DIGEST = """
import hashlib, kvsim
trace = kvsim.open_trace(kvsim.sample_trace())
digest = hashlib.sha256()
for name in ("random", "h2o", "snapkv"):
    for interval in (1, 32):
        record = kvsim.replay(trace, kvsim.policy(name), budget=64, interval=interval)
        digest.update(record.evicted_at.tobytes())
print(digest.hexdigest())
"""


@pytest.mark.deep
def test_another_process_evicts_the_same(capsys):
    """Records of a stored trace do not depend on the process or on its hash seed."""
    elsewhere = subprocess.run(
        [sys.executable, "-c", DIGEST],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout

    exec(DIGEST, {})  # noqa: S102 - of this file

    assert capsys.readouterr().out == elsewhere
