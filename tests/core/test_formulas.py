"""Formulas of attention (softcap, window, chunk, sinks) against float64 loops of the definition."""

import math

import numpy as np
import pytest
import torch

import kvsim
from kvsim.analysis.output.error import output_error
from kvsim.core import attention
from kvsim.core.attention import Formula, Rope, attend, causal_attention, merge, with_sinks
from kvsim.core.policy import Inputs, Policy, Scorer
from kvsim.engine.checks import Setup
from kvsim.engine.replay import run
from kvsim.errors import PolicyError
from kvsim.schema import NEVER
from kvsim.store.verification import verify
from traces import changed

N, DIM, VALUES, QHEADS, HEADS = 40, 8, 6, 4, 2
SINKS = (0.5, -1.0, 2.0, 0.0)

FORMULAS = {
    "plain": Formula(0.3),
    "softcap": Formula(0.9, softcap=2.0),
    "window": Formula(0.3, window=7),
    "sinks": Formula(0.3, sinks=SINKS),
    "chunk": Formula(0.3, chunk=9),
    "both": Formula(0.3, window=5, chunk=12),
    "all": Formula(0.9, softcap=3.0, window=11, sinks=SINKS),
}
#: Those of layers that see the whole text.
WHOLE = ("plain", "softcap", "sinks")


def naive(q, k, v, formula, seen):
    """Output, log-sum-exp, weights of a row q [d] over `seen` k, v [n, d], a sink if any; loops."""
    scale, softcap, sink = formula
    z = {}
    for p in seen:
        z[p] = scale * float(np.dot(q, k[p]))
        if softcap is not None:
            z[p] = softcap * math.tanh(z[p] / softcap)
    total = math.fsum(math.exp(x) for x in z.values())
    total += 0.0 if sink is None else math.exp(sink)
    if not total:
        return np.zeros(VALUES), -math.inf, {}
    weights = {p: math.exp(x) / total for p, x in z.items()}
    out = sum((w * v[p] for p, w in weights.items()), np.zeros(VALUES))
    return out, math.log(total), weights


def facts(formula, qhead):
    """Scale, softcap and the query head's sink."""
    return formula.scale, formula.softcap, formula.sinks[qhead] if formula.sinks else None


def before(row, formula):
    """What a row sees in full attention."""
    window, chunk = formula.window or N, formula.chunk or N
    return [p for p in range(row + 1) if row - p < window and p // chunk == row // chunk]


def arrays(seed=0, layers=1, dtype=torch.float64):
    """q, k, v with attention that is far from uniform, and values of another size than keys."""
    made = torch.Generator().manual_seed(seed)
    shapes = (layers, QHEADS, N, DIM), (layers, HEADS, N, DIM), (layers, HEADS, N, VALUES)
    return [torch.randn(shape, generator=made, dtype=dtype) * 1.5 for shape in shapes]


def make(names, seed=0, dtype=torch.float64, **changes):
    """A trace whose layers compute by these formulas."""
    formulas = [FORMULAS[name] for name in names]
    rope = changes.pop("rope", Rope.default(DIM))
    return kvsim.Trace.from_arrays(
        *arrays(seed, len(names), dtype), prompt_len=12, rope=rope, formulas=formulas, **changes
    )


@pytest.fixture(params=["fused", "blocks"])
def kernel(request, monkeypatch):
    """Both ways to compute attention; the unfused one in blocks of few rows."""
    if request.param == "blocks":
        monkeypatch.setattr(attention, "_FUSED", None)
        monkeypatch.setattr(attention, "_BLOCK_LOGITS", 200)


@pytest.mark.parametrize("rows", [5, 256])
@pytest.mark.parametrize("name", FORMULAS)
def test_full_attention_equals_the_definition(name, rows, kernel, monkeypatch):
    """Output and log-sum-exp of every row equal the loop, in blocks of rows of any size."""
    monkeypatch.setattr(attention, "_WINDOW_ROWS", rows)
    formula = FORMULAS[name]
    q, k, v = (x[0] for x in arrays())

    out, lse = causal_attention(q, k, v, formula)

    for i in range(QHEADS):
        for row in range(N):
            h = i // (QHEADS // HEADS)
            expected = naive(
                q[i, row].numpy(),
                k[h].numpy(),
                v[h].numpy(),
                facts(formula, i),
                before(row, formula),
            )
            assert np.allclose(out[i, row], expected[0], atol=1e-12)
            assert math.isclose(float(lse[i, row]), expected[1], abs_tol=1e-12)


@pytest.mark.parametrize("name", ["plain", "softcap"])
def test_a_mask_says_what_a_row_sees(name, kernel):
    """Output and log-sum-exp equal the loop; a row that sees nothing gives 0 and -inf."""
    formula = FORMULAS[name]
    q, k, v = (x[0].unflatten(0, (HEADS, -1)) for x in arrays())
    seen = torch.rand(HEADS, 1, N, N, generator=torch.Generator().manual_seed(2)) > 0.5
    seen[1, 0, 4] = False

    out, lse = attend(q, k, v, formula, mask=seen)

    for h, g, row in np.ndindex(HEADS, QHEADS // HEADS, N):
        entries = k[h, 0].numpy(), v[h, 0].numpy(), facts(formula, 0)
        at = seen[h, 0, row].nonzero()[:, 0].tolist()
        expected = naive(q[h, g, row].numpy(), *entries, at)
        assert np.allclose(out[h, g, row], expected[0], atol=1e-12)
        assert np.isclose(float(lse[h, g, row]), expected[1], atol=1e-12)


@pytest.mark.parametrize("cut", [0, 1, 13, N - 1])
@pytest.mark.parametrize("name", WHOLE)
def test_parts_merge_and_sinks_count_once(name, cut):
    """Parts that merge and then meet the sinks give what all entries give at once."""
    formula = FORMULAS[name]
    q, k, v = (x[0].unflatten(0, (HEADS, -1)) for x in arrays())
    whole = attend(q, k, v, formula)

    parts = [
        attend(q, k[:, :, part], v[:, :, part], formula) for part in (slice(cut), slice(cut, N))
    ]
    merged = merge(*parts[0], *parts[1])

    for found, expected in zip(merged, whole, strict=True):
        torch.testing.assert_close(found, expected)
    if formula.sinks:
        sinks = formula.sink(q, HEADS)
        out, lse = with_sinks(*merged, sinks)
        # a sink is an entry of its own with a value of 0
        assert torch.allclose(lse.exp(), whole[1].exp() + sinks.exp().unsqueeze(-1))
        assert torch.allclose(
            out * lse.exp().unsqueeze(-1), whole[0] * whole[1].exp().unsqueeze(-1)
        )


@pytest.mark.parametrize("name", FORMULAS)
def test_attention_of_a_trace_equals_the_definition(name):
    """`Trace.attention` gives the weights of any rows and positions, whole sums less the sink."""
    trace, formula = make([name]), FORMULAS[name]
    rows, pos = [0, 3, 17, 39], [0, 2, 3, 16, 30, 39]

    found = trace.attention(0, rows, pos)
    whole = trace.attention(0, slice(0, N))

    q, k, v = (x[0].numpy() for x in map(trace.read, "qkv"))
    for i in range(QHEADS):
        for at, row in enumerate(rows):
            weights = naive(
                q[i, row], k[i // 2], v[i // 2], facts(formula, i), before(row, formula)
            )[2]
            expected = [weights.get(p, 0.0) for p in pos]
            assert np.allclose(found[i, at], expected, atol=1e-12)
    sums = whole.sum(-1)
    assert bool((sums < 0.999).any()) == bool(formula.sinks)
    assert bool((sums < 1 + 1e-9).all())


class Watching(Scorer):
    """Scores by position and keeps what it was shown."""

    reads = Inputs(rows=6)

    def __init__(self):
        self.shown = []

    def score(self, view):
        """The oldest leave."""
        self.shown.append(
            (view.row, view.pos.clone(), view.attn(6).clone(), view.received().clone())
        )
        return view.pos.to(view.keys.dtype)


@pytest.mark.parametrize("name", WHOLE)
def test_a_policy_sees_attention_over_what_is_left(name):
    """Windows and received attention follow the formula, over the live entries alone."""
    trace, formula = make([name]), FORMULAS[name]
    watching = Watching()
    kvsim.replay(trace, Policy("watching", watching), 9, interval=5)

    q, k, v = (x[0].numpy() for x in map(trace.read, "qkv"))
    assert len(watching.shown) > 3
    last = -1
    for row, pos, attn, received in watching.shown:
        for i in range(QHEADS):
            h, g = divmod(i, 2)
            live = pos[0, h].tolist()
            for w, r in enumerate(range(max(0, row - 5), row + 1)):
                weights = naive(
                    q[i, r], k[h], v[h], facts(formula, i), [p for p in live if p <= r]
                )[2]
                assert np.allclose(attn[0, h, g, w], [weights.get(p, 0) for p in live], atol=1e-12)
        for h in range(HEADS):
            live = pos[0, h].tolist()
            total = dict.fromkeys(live, 0.0)
            for i in (2 * h, 2 * h + 1):
                for r in range(last + 1, row + 1):
                    seen = [p for p in live if p <= r]
                    for p, w in naive(q[i, r], k[h], v[h], facts(formula, i), seen)[2].items():
                        total[p] += w
            assert np.allclose(received[0, h], [total[p] for p in live], atol=1e-12)
        last = row


@pytest.mark.parametrize(("policy", "interval"), [("h2o", 1), ("adakv+snapkv", 8)])
@pytest.mark.parametrize("name", WHOLE)
def test_the_output_error_equals_the_definition(name, policy, interval):
    """Error and retained mass of every row equal the loop over what the record leaves it."""
    trace, formula = make([name], seed=3), FORMULAS[name]
    options = {"window": 4} if "snapkv" in policy else {}
    record = kvsim.replay(trace, kvsim.policy(policy, **options), 10, interval=interval)

    table = kvsim.measure(trace, record, metrics=["output_error", "retained_mass"])
    found = output_error(trace, [record])[0]

    assert len(table)
    q, k, v = (x[0].numpy() for x in map(trace.read, "qkv"))
    assert (record.evicted_at != NEVER).any()
    for i in range(QHEADS):
        for row in range(N):
            h = i // 2
            one = q[i, row], k[h], v[h], facts(formula, i)
            full = naive(*one, range(row + 1))
            seen = [p for p in range(row + 1) if record.evicted_at[0, h, p] >= row]
            left = naive(*one, seen)
            error = np.linalg.norm(full[0] - left[0]) / np.linalg.norm(full[0])
            assert math.isclose(found.error[0, i, row], error, abs_tol=1e-5)
            missing = math.fsum(w for p, w in full[2].items() if p not in set(seen))
            assert math.isclose(found.missing[0, i, row], missing, abs_tol=1e-5)


@pytest.mark.parametrize("policy", ["tova", "h2o"])
@pytest.mark.parametrize("name", WHOLE)
def test_rows_one_by_one_equal_blocks_of_rows(name, policy):
    """The fast way for policies that evict after each row gives what the general one gives."""
    trace = make([name], seed=5)

    fast = kvsim.replay(trace, kvsim.policy(policy), 10, interval=1)
    by_event = kvsim.policy(policy)
    schedule = by_event.schedule.override(1, None)
    slow = run(Setup(trace, by_event, 10, schedule), by_row=False)

    assert np.array_equal(fast.evicted_at, slow.evicted_at)


def test_layers_that_differ_are_replayed_each_by_its_own():
    """A trace of mixed layers gives what each layer gives as a trace of its own."""
    names = ["plain", "plain", "softcap", "sinks", "plain"]
    ropes = [
        Rope.default(DIM),
        Rope(()),
        Rope.default(DIM),
        Rope.default(DIM),
        Rope.default(DIM, 50.0),
    ]
    trace = make(names, rope=ropes)
    policy = kvsim.policy("expected_attention", n_future=8, value_norm="v")

    record = kvsim.replay(trace, policy, 16, interval=4)
    errors = output_error(trace, [record])[0].error

    for layer, name in enumerate(names):
        only = {x: trace.read(x)[layer : layer + 1] for x in "qkv"} | {"layer_ids": [0]}
        alone = changed(trace, **only, rope=ropes[layer], formulas=[FORMULAS[name]])
        own = kvsim.replay(alone, policy, 16, interval=4)
        assert np.array_equal(record.evicted_at[layer], own.evicted_at[0])
        assert np.allclose(errors[layer], output_error(alone, [own])[0].error[0])


def test_layers_with_a_window_are_left_alone():
    """The others are replayed, and the record says so; a window that hides nothing is none."""
    trace = make(["window", "plain", "window", "sinks"])

    record = kvsim.replay(trace, kvsim.policy("tova"), 8)

    assert trace.windowed == (0, 2)
    assert record.layers == (1, 3)
    assert "2 of 4 layers do not see the whole text" in record.remark
    assert "a sliding window in layers 0, 2 (7 tokens)" in record.remark
    table = kvsim.measure(trace, record, metrics=["output_error", "wipeout"])
    assert sorted(table["layer"].unique().to_list()) == [1, 3]
    with pytest.raises(PolicyError, match="layer 2 of memory does not see"):
        kvsim.replay(trace, kvsim.policy("tova"), 8, layers=[2])
    with pytest.raises(PolicyError, match="no layer sees all of its"):
        kvsim.replay(make(["window"]), kvsim.policy("tova"), 8)
    with pytest.raises(PolicyError, match=r"a sliding window in layers 0, 2 \(7 tokens\)"):
        kvsim.replay(trace, kvsim.policy("asl+tova", window=4), 8)
    wide = kvsim.Trace.from_arrays(
        *arrays(), prompt_len=12, rope=Rope.default(DIM), formulas=[Formula(0.3, window=N)]
    )
    assert kvsim.replay(wide, kvsim.policy("tova"), 8).layers == (0,)
    chunks = kvsim.replay(make(["chunk", "window", "plain"]), kvsim.policy("tova"), 8)
    assert "chunks in layer 0 (9 tokens), a sliding window in layer 1 (7 tokens)" in chunks.remark
    with pytest.raises(PolicyError, match=r"layer 0 of memory .*chunks in layer 0"):
        kvsim.replay(make(["chunk"]), kvsim.policy("tova"), 8, layers=[0])


@pytest.mark.parametrize(
    "names", [["plain"], ["all", "plain"], ["sinks"], ["softcap", "window", "chunk"]]
)
def test_a_trace_keeps_its_formulas(names, tmp_path):
    """What is stored reads back equal, verifies and has the digest of the trace in memory."""
    ropes = [Rope.default(DIM) if i % 2 == 0 else Rope((0.5,), 1.2) for i in range(len(names))]
    trace = make(names, rope=ropes, tokens=list(range(N)))
    path = kvsim.save_trace(trace, tmp_path / "a.zarr")

    again = kvsim.open_trace(path)

    assert again.formulas == trace.formulas
    assert again.ropes == trace.ropes
    assert again.digest == trace.digest
    assert verify(path, deep=True).ok
    assert torch.equal(again.attention(0, [30]), trace.attention(0, [30]))
