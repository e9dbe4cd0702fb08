"""Bugs of ports of SnapKV, H2O, TOVA and KeyDiff, each in a plain loop, are named."""

import numpy as np
import pytest
import torch

import kvsim
from kvsim.core.policy import Schedule
from kvsim.studies.conformance.dump import Dump

PROMPT, N, BUDGET, WINDOW, DIM = 30, 67, 20, 6, 8
EVENTS = range(PROMPT - 1, N - 1, 12)
COUNTED = {"last-row-twice": (-1, 2), "window-short": (0, 0)}


@pytest.fixture(scope="module")
def trace():
    """A random trace of two layers, three KV heads and six query heads."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, heads, N, DIM, generator=generator) for heads in (6, 3, 3))
    rope, at = kvsim.Rope.default(DIM), torch.arange(N)
    q, k = (rope.rotate(x, at) for x in (2 * q, k))
    return kvsim.Trace.from_arrays(q, k, v, prompt_len=PROMPT, rope=rope)


def attention(trace, layer, head, live, rows, bug):
    """Weights [G, w, n] of a KV head's query heads, with the deviation."""
    q, k = (trace.read(x)[layer] for x in "qk")
    if bug == "unrotated":
        q, k = (trace.ropes[0].unrotate(x, torch.arange(N)) for x in (q, k))
    out = []
    for i in range(2):
        of = (2 * head + i) % 3 if bug == "keys-interleaved" else head
        query = q[i * 3 + head if bug == "heads-interleaved" else head * 2 + i][rows].double()
        z = (query @ k[of][live[of]].double().T).numpy() * (1 if bug == "unscaled" else DIM**-0.5)
        z = np.exp(np.where(np.array(live[of]) <= np.array(rows)[:, None], z, -np.inf))
        out.append(z / z.sum(-1, keepdims=True))
    return np.array(out)


def scores(trace, name, layer, head, live, last, row, sums, bug):
    """The score of each live entry of a head."""
    if name == "keydiff":
        keys = trace.read("k")[layer, head]
        if bug == "unrotated":
            keys = trace.ropes[0].unrotate(keys, torch.arange(N))
        x = keys[live[head]].double().numpy()
        x /= np.linalg.norm(x, axis=-1, keepdims=True)
        return -x @ x.mean(0)
    first = {"snapkv": row + 1 - WINDOW, "h2o": last + 1, "tova": row}[name]
    rows, heads = list(range(first, row + 1)), range(3) if name == "tova" else [head]
    a = np.concatenate([attention(trace, layer, h, live, rows, bug) for h in heads])
    place, times = COUNTED.get(bug, (0, 1))
    a[:, place] *= times
    if bug == "prompt-row-twice" and row < PROMPT:
        a[:, -1] *= 2
    total = a[0] if bug == "first-head" else a.max(0) if bug == "max-of-heads" else a.mean(0)
    if name != "snapkv":
        old = np.zeros(len(live[head]))
        old[: len(sums)] = 0 if bug == "sums-anew" else sums
        return total.sum(0) + old * (name == "h2o")
    older = np.array(live[head]) <= row - WINDOW
    votes = a.mean(1) * older
    votes = votes.mean(0, keepdims=True) if "mean-before-pool" in bug else votes
    half = 2 if "pool_kernel=5" in bug else 3
    padded = np.pad(votes, ((0, 0), (half, half)))
    return (
        np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1, -1).max(-1).mean(0) * older
    )


def dumped(trace, name, bug):
    """Return the dump of a port with the bug."""
    lines, budget = [], BUDGET + ("one-more" in bug) - ("one-fewer" in bug)
    recent = {"snapkv": WINDOW, "h2o": budget // 2}.get(name, 0)
    recent += {"protected-fewer": -1, "protected-more": 1}.get(bug, 0)
    for layer in range(2):
        live, sums, last = [[], [], []], [np.zeros(0)] * 3, -1
        for row in EVENTS:
            live = [[*x, *range(last + 1, row + 1)] for x in live]
            now = [scores(trace, name, layer, h, live, last, row, sums[h], bug) for h in range(3)]
            both = list(zip(live, now, strict=True))
            key = [np.where(np.array(x) > row - recent, np.inf, y) for x, y in both]
            at = [np.sort(np.argsort(-x, kind="stable")[:budget]) for x in key]
            at = at[1:] + at[:1] if bug == "scores-permuted" else at
            sums = [
                x[: len(y)] if bug == "sums-by-slot" else x[y] for x, y in zip(now, at, strict=True)
            ]
            live, last = [[x[i] for i in y] for x, y in zip(live, at, strict=True)], row
            one = int(bug == "listed-from-1")
            order = [2, 0, 1] if bug == "heads-permuted" else [0, 1, 2]
            lines += [(layer, h, row + one, p + one) for h, i in enumerate(order) for p in live[i]]
    table = dict(zip(("layer", "head", "row", "pos"), np.array(lines).T, strict=True))
    return Dump.of_table(table, trace=trace, budget=BUDGET, schedule=Schedule(12, prefill=True))


ANY = (
    "",
    "one-more",
    "one-fewer",
    "unrotated",
    "heads-permuted",
    "scores-permuted",
    "listed-from-1",
)
HEADS = ("heads-interleaved", "keys-interleaved", "unscaled", "protected-fewer", "protected-more")
BUGS = {
    "snapkv": (*ANY, *HEADS, "window-short", "last-row-twice", "prompt-row-twice",
        "mean-before-pool, pool_kernel=5", "one-more, pool_kernel=5"),
    "h2o": (*ANY, *HEADS, "first-head", "max-of-heads", "last-row-twice", "prompt-row-twice",
        "sums-anew", "sums-by-slot"),
    "tova": ("", "one-more", "unrotated", "unscaled", "first-head", "max-of-heads"),
    "keydiff": ANY,
}  # fmt: skip
POLICIES = {
    name: kvsim.policy(name, **{"window": WINDOW} if name == "snapkv" else {}) for name in BUGS
}


@pytest.mark.parametrize(("name", "bug"), [(name, bug) for name in BUGS for bug in BUGS[name]])
def test_a_bug_of_a_port_is_named(trace, name, bug):
    """By that name, or with one that has the same effect; without a bug the sets are equal."""
    report = kvsim.conform(dumped(trace, name, bug), POLICIES[name])
    assert report.equal is not bool(bug)
    names = [each.name for each in report.deviations]
    assert names == [bug] * bool(bug) or names == ["last-row-twice", "prompt-row-twice"]


@pytest.mark.parametrize("name", BUGS)
@pytest.mark.parametrize("other", ["knorm", "random"])
def test_an_unrelated_policy_differs(trace, name, other):
    """No deviation and no pair explains it; the first event has both sides' scores."""
    record = kvsim.replay(trace, other, BUDGET, interval=12, prefill=True)
    report = kvsim.conform(Dump.of_record(record, trace), POLICIES[name])
    assert not report.equal
    assert {each.name for each in report.deviations} <= {"by-chance"}
    assert report.lines()[1].startswith(f"first after row {PROMPT - 1}, layer 0, head 0: keeps")
