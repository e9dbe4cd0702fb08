"""Bugs of a toy engine: each is explained by its name, and the right engine is equal."""

import numpy as np
import pytest
from kvsim_dump import Dump
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


def kept_by(q, k, scale, name):
    """SnapKV by a loop over query heads: what each KV head keeps of q [qhead, n, d] and k."""
    heads, n, _ = k.shape
    group, rows, out = len(q) // heads, np.arange(n - toy_engine.WINDOW, n), []
    for head in range(heads):
        score = np.zeros(n)
        for i in range(head * group, (head + 1) * group):
            z = q[i, rows] @ k[i % heads if name == "keys-interleaved" else head].T * scale
            a = toy_engine.softmax(np.where(np.arange(n) <= rows[:, None], z, -1e30))
            vote = a[name == "window-short" :].mean(0)
            vote[rows] = 0
            score += toy_engine.pooled(vote, toy_engine.KERNEL, average=False)
        top = np.argsort(-score[: rows[0]], kind="stable")[: toy_engine.BUDGET - len(rows)]
        top = np.clip(top + {"chosen-low": -1, "chosen-high": 1}.get(name, 0), 0, rows[0] - 1)
        rest = rows[: -1 if name == "newest-lost" else None]
        out.append(np.unique(np.r_[top, rest]) - int(name == "positions-low"))
    return out


SHIFTED = ("newest-lost", "chosen-low", "chosen-high", "positions-low", "listed-late")


@pytest.mark.parametrize("name", ["keys-interleaved", "window-short", *SHIFTED])
def test_sets_beside_the_right_ones_are_explained(states, tmp_path, name):
    """Heads, rows and positions that are off by one, and `repeat` for `repeat_interleave`."""
    n, out = states["prompt_len"], Dump(budget=toy_engine.BUDGET, interval=0, prefill=True)
    for layer, (q, k) in enumerate(zip(*(states[x][..., :n, :] for x in "qk"), strict=True)):
        sets = kept_by(q.astype(float), k.astype(float), states["scale"], name)
        out.kept(layer, n - (name != "listed-late"), sets)
    out.save(tmp_path / "d.npz")
    report = kvsim.conform(tmp_path / "d.npz", POLICY, trace="sample")
    assert [each.name for each in report.deviations] == [name]
