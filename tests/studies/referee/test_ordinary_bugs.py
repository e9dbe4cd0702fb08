"""Ordinary bugs of an implementation of SnapKV: each is named by the referee."""

import numpy as np
import pytest
import torch

import kvsim
from kvsim.core.policy import Schedule
from kvsim.studies.referee.dump import Dump

PROMPT, N, BUDGET, INTERVAL, WINDOW = 30, 75, 20, 12, 6
EVENTS = list(range(PROMPT - 1, N, INTERVAL))


def voted(trace, bug, row, layer, live):
    """SnapKV's scores in float64 with one bug, [head, entry]; live: of each head, equally many."""
    rows = np.arange(0 if bug == "softmax-over-rows" else row + 1 - WINDOW, row + 1)
    live = np.array([live[0], live[0], live[1], live[1]])
    q = trace.q[layer].double().numpy()[:, rows]
    k = trace.k[layer].double().numpy()[[[0], [0], [1], [1]], live]
    scale = {"no-scale": 1, "scaled-twice": 1 / 8}.get(bug, 8**-0.5)
    z = np.exp(q @ k.transpose(0, 2, 1) * scale) * (live[:, None] <= rows[:, None])
    axis = {"softmax-over-heads": 0, "softmax-over-rows": 1, "softmax-over-window": 1}.get(bug, 2)
    total = z.sum(axis, keepdims=True)
    attention = np.divide(z, total, out=np.zeros_like(z), where=total > 0)[:, -WINDOW:].mean(1)
    older = live <= row - WINDOW
    vote = attention * (older | bug.endswith("window"))
    if bug.startswith("shift"):
        n = older[0].sum() if bug.endswith("roll") else len(live[0])
        vote[:, :n] = np.roll(vote[:, :n], int(bug[5:7]), 1)
        vote[:, 0] *= bug.endswith("roll") or bug[5] == "-"
    half = {"pool_kernel=5": 2, "pool=none": 0}.get(bug, 3)
    padded = np.pad(vote * older, ((0, 0), (half, half)))
    near = np.stack([padded[:, i : i + len(live[0])] for i in range(2 * half + 1)])
    pooled = near.mean(0) if bug == "pool=avg" else near.max(0)
    return pooled.reshape(2, 2, -1).mean(1)


BUGS = {
    **{bug: bug for bug in ("pool=avg", "pool=none", "pool_kernel=5", "no-scale", "scaled-twice")},
    **{f"softmax-over-{axis}": f"softmax-over-{axis}" for axis in ("rows", "heads", "window")},
    **{
        f"shift{by}{how}": "attention-shifted"
        for by in ("+1", "-1")
        for how in ("zero", "roll", "window")
    },
}


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize("seed", range(3))
def test_an_ordinary_bug_is_named(bug, seed):
    """A plain loop of the default SnapKV with one bug differs, and is explained by it alone."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, heads, N, 8, generator=generator) for heads in (4, 2, 2))
    trace = kvsim.Trace.from_arrays(2 * q, k, v, prompt_len=PROMPT, rope=kvsim.Rope(torch.ones(4)))
    lines = []
    for layer in range(2):
        live = {0: [], 1: []}
        for before, row in zip([-1, *EVENTS], EVENTS, strict=False):
            for head in live:
                live[head] += range(before + 1, row + 1)
            for head, scores in enumerate(voted(trace, bug, row, layer, live)):
                order = sorted(
                    range(len(scores)), key=lambda i: (live[head][i] <= row - WINDOW, -scores[i], i)
                )
                live[head] = sorted(live[head][i] for i in order[:BUDGET])
                lines += [(layer, head, row, p) for p in live[head]]
    table = dict(zip(("layer", "head", "row", "pos"), np.array(lines).T, strict=True))
    dump = Dump.of_table(table, trace=trace, budget=BUDGET, schedule=Schedule(INTERVAL))
    ruling = kvsim.conform(dump, kvsim.policy("snapkv", window=WINDOW))
    assert not ruling.equal
    assert [each.name for each in ruling.deviations] == [BUGS[bug]]
