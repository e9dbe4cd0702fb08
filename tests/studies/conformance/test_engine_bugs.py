"""Bugs of a toy engine: each is explained by its name, and the right engine is equal."""

import numpy as np
import pytest
from outside import toy_engine

import kvsim
from kvsim.studies.conformance.dump import read_dump

POLICY = kvsim.policy("snapkv", window=toy_engine.WINDOW)


@pytest.fixture(scope="module")
def states():
    """What the engine's attention is given, of the sample."""
    trace = kvsim.open_trace("sample")
    arrays = {name: trace.read(name).numpy() for name in "qkv"}
    inv_freq = np.array(trace.ropes[0].inv_freq)
    scale = trace.formulas[0].scale
    return arrays | {"prompt_len": trace.prompt_len, "inv_freq": inv_freq, "scale": scale}


@pytest.mark.parametrize("bug", ["", *toy_engine.BUGS])
def test_each_bug_is_explained_by_name(states, tmp_path, bug):
    """That explanation comes first; the right engine keeps what the policy does."""
    toy_engine.run(states, tmp_path / "d.npz", bug)
    report = kvsim.conform(read_dump(tmp_path / "d.npz"), POLICY, trace="sample")
    assert report.equal is not bool(bug)
    if bug:
        assert [each.name for each in report.deviations] == [toy_engine.BUGS[bug]]
        assert f"explained by {toy_engine.BUGS[bug]}: " in str(report.lines())
