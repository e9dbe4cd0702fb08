"""A context that is compressed before its question: which rows, which entries, what is refused."""

import numpy as np
import pytest

import kvsim
from kvsim.errors import KvsimError, NeedsError, PolicyError
from kvsim.testing.strategies import make_case

CASE = make_case("normal", layers=3, heads=2, group=2, n=80, prompt_len=50, seed=3)


def trace(context_len=40):
    """The case with a context."""
    return CASE.trace(context_len)


def test_budget_holds_after_the_context_and_not_after_the_question():
    """What the context keeps, and every row of the question, is there when the prompt ends."""
    record = kvsim.replay(trace(), kvsim.policy("h2o"), 20, compress="context")

    assert (record.retained(39).sum(-1) == 20).all()
    assert (record.kept(49).sum(-1) == 30).all()
    assert record.kept(49)[..., 40:50].all()
    assert (record.retained(50).sum(-1) == 20).all()


def test_window_lies_in_the_context():
    """snapkv protects the last rows of the context, and with both events those of the question."""
    policy = kvsim.policy("snapkv", window=8)
    context, both = (kvsim.replay(trace(), policy, 20, compress=x) for x in ("context", "both"))

    assert context.kept(79)[..., 32:50].all()
    assert both.kept(49)[..., 32:50].all()
    assert both.kept(79)[..., 42:50].all()
    assert not both.kept(79)[..., 32:42].all()


def test_trace_without_a_context_is_refused():
    """The line says how to record one."""
    with pytest.raises(NeedsError, match=r"does not say where its context ends, .*`context`"):
        kvsim.replay(trace(None), kvsim.policy("snapkv"), 36, compress="context")
    with pytest.raises(KvsimError, match="compress is 'question'; expected 'prompt', 'context'"):
        kvsim.replay(trace(), kvsim.policy("snapkv"), 36, compress="question")


@pytest.mark.parametrize("name", ["asl", "asl_2pass", "fastkv", "gemfilter", "pyramidinfer"])
def test_policies_that_drop_rows_are_refused(name):
    """Unless the context is the whole prompt, where it is the same as ever."""
    params = {"window": 4} if name in ("asl", "asl_2pass", "fastkv") else {}
    policy = kvsim.policy(name, **params, **({"layer": 1} if name == "gemfilter" else {}))

    with pytest.raises(PolicyError, match="no rule for a context before its question"):
        kvsim.replay(trace(), policy, 20, compress="context")
    same = [kvsim.replay(trace(50), policy, 20, compress=x).evicted_at for x in ("prompt", "both")]
    assert np.array_equal(*same)


def test_kept_sets_of_the_context_are_exact():
    """One event, after the context, is as settled as one after the prompt."""
    policy = kvsim.policy("snapkv", window=4)
    record = kvsim.replay(trace(), policy, 20, compress="context")

    table = kvsim.measure(trace(), record, ["wipeout", "output_error"])
    levels = {
        name: set(table.filter(metric=name, layer=2)["fidelity"]) for name in set(table["metric"])
    }
    assert levels == {"wipeout": {"exact"}, "output_error": {"open"}}
