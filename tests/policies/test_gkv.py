"""G-KV and what it compares itself with: formulas by hand, against loops, and their properties."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import kvsim
import reference
from kvsim.core.entries import Entries
from kvsim.core.policy import Policy, Schedule, Scorer
from kvsim.core.select import select
from kvsim.core.view import Setting, View
from kvsim.engine.source import TraceSource
from kvsim.errors import PolicyError
from kvsim.policies import redundancy
from kvsim.policies.cake import Cake, CakeBudgets, preferences, variance
from kvsim.policies.gkv import GKV, Global, Local, fuse, local_score, normalise
from kvsim.policies.h2o import H2O
from kvsim.policies.knorm import Knorm
from kvsim.policies.morphkv import MorphKV
from kvsim.policies.redundancy import mean_similarity
from kvsim.policies.rkv import RKV
from kvsim.policies.rpc import RPC, AmsRPC, Growing
from kvsim.policies.window import before_window, shares, smooth
from kvsim.testing.strategies import make_case

FUSIONS = ("max", "mean", "sum")
LAYERS, HEADS, GROUP, N, DIM, PROMPT = 2, 2, 3, 40, 8, 12


def make_trace(seed=0, *, group=GROUP, prompt_len=PROMPT, keys=None):
    """Two layers, float64; keys lean in a common direction, so that many are similar."""
    draw = np.random.default_rng(seed)
    q, k, v = (draw.standard_normal((LAYERS, h, N, DIM)) for h in (HEADS * group, HEADS, HEADS))
    k = k + draw.standard_normal((LAYERS, HEADS, 1, DIM)) if keys is None else keys
    return kvsim.Trace.from_arrays(q, k, v, prompt_len=prompt_len, rope=kvsim.Rope((1.0, 0.1)))


def view_of(trace, row=N - 5, *, keep=None, columns=(), budget=20):
    """The View after `row`; keep bool [layers, heads, row + 1] says what is still there."""
    source = TraceSource(trace, range(trace.n_layers), torch.device("cpu"))
    entries = Entries(
        trace.n_layers, trace.n_heads, dict.fromkeys(columns, math.nan), like=source.keys
    )
    entries.append(0, row + 1)
    if keep is not None:
        entries.compress(keep)
    setting = Setting(budget=budget, prompt_len=trace.prompt_len, interval=8, n_layers=LAYERS)
    return View(
        source,
        entries,
        setting,
        row=row,
        since=torch.full((LAYERS,), -1),
        layers=torch.arange(LAYERS),
    )


def ragged(row=N - 5, *, window=6, seed=1):
    """bool [layers, heads, row + 1]: heads of different length, each with the last `window`."""
    draw = np.random.default_rng(seed)
    share = draw.uniform(0.3, 0.9, (LAYERS, HEADS, 1))
    keep = draw.uniform(size=(LAYERS, HEADS, row + 1)) < share
    keep[..., row + 1 - window :] = True
    return torch.from_numpy(keep)


def replayed(scorer, *, trace=None, budget=20, interval=8, **kwargs):
    """Record of a scorer with the scores of every event."""
    policy = Policy("it", scorer, schedule=Schedule(interval=interval), **kwargs)
    return kvsim.replay(trace or make_trace(), policy, budget, internals=True)


def heads_of(view):
    """(layer, head, slots, positions, logits [group, row, n]) of every head, in float64 numpy."""
    q = view.queries(view.row + 1).numpy()
    for layer in range(LAYERS):
        for head in range(view.pos.shape[1]):
            live = view.live[layer, head].numpy()
            pos = view.pos[layer, head].numpy()[live]
            keys = view.keys[layer, head].numpy()[live]
            z = q[layer, head] @ keys.T * view.scale
            z[:, np.arange(view.row + 1)[:, None] < pos] = -np.inf
            yield layer, head, np.flatnonzero(live), pos, z


def softmax(z):
    """Over the last dimension; 0 where everything is hidden."""
    with np.errstate(invalid="ignore"):
        weight = np.exp(z - z.max(-1, keepdims=True))
    total = np.nansum(weight, -1, keepdims=True)
    return np.nan_to_num(weight) / np.where(total == 0, 1, total)


def pooled(score, pool, kernel):
    """One list of scores pooled by its definition."""
    if pool is None:
        return np.array(score)
    near = [score[max(0, j - kernel // 2) : j + kernel // 2 + 1] for j in range(len(score))]
    return np.array([max(x) if pool == "max" else sum(x) / kernel for x in near])


def similarity(keys, threshold, epsilon, *, else_first=False):
    """Mean cosine of every key with the others by a matrix and loops, float64."""
    keys = np.asarray(keys, dtype=np.float64)
    unit = keys / (np.linalg.norm(keys, axis=-1, keepdims=True) + epsilon)
    cosine = unit @ unit.T
    np.fill_diagonal(cosine, 0.0)
    zeroed = cosine.copy()
    for i in range(len(keys)):
        similar = [j for j in range(len(keys)) if cosine[i, j] > threshold]
        if similar:
            zeroed[i, similar[-1]] = 0.0
        elif else_first:
            zeroed[i, 0] = 0.0
    return zeroed.mean(0)


def check(scorer, expected, view):
    """Compare values of a scorer with `expected(layer, head, slots, pos, logits) -> {slot: s}`."""
    answer = scorer.score(view)
    values = answer if isinstance(answer, torch.Tensor) else answer.values
    assert bool(values[view.live].isfinite().all())
    seen = 0
    for layer, head, slots, pos, z in heads_of(view):
        for slot, score in expected(layer, head, slots, pos, z).items():
            assert float(values[layer, head, slot]) == pytest.approx(score, rel=1e-9, abs=1e-12)
            seen += 1
    assert seen > 0


# ---------------------------------------------------------------------------- the golden example

FIRST, SECOND = [0.4, 0.1, 0.2, 0.3], [0.03, 0.20, 0.05, 0.10, 0.02, 0.04]
GLOBAL = {
    "max": [0.8, 1.0, 0.6, 0.5, 0.1, 0.2],
    "mean": [0.83, 0.6, 0.65, 0.5, 0.1, 0.2],
    "sum": [0.95, 1.4, 0.85, 0.5, 0.1, 0.2],
}


def chosen(scores, pos, *, budget, window):
    """Positions that one head keeps: the best by score, and the window."""
    pos = torch.tensor([[pos]])
    values = torch.zeros(pos.shape)
    values[..., : len(scores)] = torch.as_tensor(scores)
    protected = pos > pos.max() - window
    kept = select(values, torch.tensor([[budget]]), protected, torch.ones_like(protected))
    return pos[kept].tolist()


@pytest.mark.parametrize("fusion", FUSIONS)
def test_golden_example(fusion):
    """One head, budget 5, window 2, decay 0.8: two events worked by hand, to the number."""
    every = torch.ones(1, dtype=torch.bool)
    new = normalise(torch.tensor(FIRST), every)
    score = fuse(torch.full((4,), math.nan), new, fusion, 0.8)
    assert score.tolist() == pytest.approx([1, 0.25, 0.5, 0.75])
    assert chosen(score, [0, 1, 2, 3, 4, 5], budget=5, window=2) == [0, 2, 3, 4, 5]

    old = torch.tensor([1, 0.5, 0.75, math.nan, math.nan, math.nan])
    new = normalise(torch.tensor(SECOND), every)
    assert new.tolist() == pytest.approx([0.15, 1, 0.25, 0.5, 0.1, 0.2])
    score = fuse(old, new, fusion, 0.8)
    assert score.tolist() == pytest.approx(GLOBAL[fusion])
    pos = [0, 2, 3, 4, 5, 6, 7, 8]
    assert chosen(score, pos, budget=5, window=2) == [0, 2, 3, 7, 8]
    assert chosen(new, pos, budget=5, window=2) == [2, 3, 4, 7, 8]  # the local score alone


# ---------------------------------------------------------------------------------- fuse, normalise

scores_of = st.lists(st.floats(0, 1, width=32), min_size=5, max_size=5)


@pytest.mark.parametrize("fusion", FUSIONS)
@given(old=scores_of, new=scores_of)
def test_without_memory_the_fused_score_is_the_new_one(fusion, old, new):
    """Decay 0, or no history: whatever was before, the local score ranks."""
    old, new = torch.tensor(old), torch.tensor(new)

    assert torch.equal(fuse(old, new, fusion, 0.0), new)
    assert torch.equal(fuse(torch.full_like(old, math.nan), new, fusion, 0.8), new)


@given(events=st.lists(scores_of, min_size=2, max_size=6))
def test_the_maximum_without_decay_never_falls(events):
    """Fusion max with decay 1 is the largest score so far."""
    score = torch.full((5,), math.nan)
    for j, new in enumerate(events):
        score = fuse(score, torch.tensor(new), "max", 1.0)
        assert score.tolist() == np.max(events[: j + 1], axis=0).tolist()


@given(decay=st.floats(0, 0.99), fusion=st.sampled_from(FUSIONS))
def test_fused_scores_stay_in_their_range(decay, fusion):
    """Normalised scores of 1 add up to less than 1 / (1 - decay), and stay 1 in the other two."""
    score = torch.full((1,), math.nan, dtype=torch.float64)
    for _ in range(200):
        score = fuse(score, torch.ones(1, dtype=torch.float64), fusion, decay)
    limit = 1 / (1 - decay) if fusion == "sum" else 1.0
    assert float(score) <= limit * (1 + 1e-12)
    assert fusion != "sum" or float(score) > 0.85 * limit


@given(scores=scores_of, factor=st.floats(0.01, 100))
def test_normalised_scores_do_not_know_their_scale(scores, factor):
    """S and a multiple of S are the same; the largest is 1 unless all are 0."""
    scores, every = torch.tensor(scores, dtype=torch.float64), torch.ones(5, dtype=torch.bool)
    share = normalise(scores, every)

    torch.testing.assert_close(normalise(factor * scores, every), share)
    assert float(share.max()) == (1.0 if float(scores.max()) > 0 else 0.0)


def test_normalised_signed_scores_run_from_zero_to_one():
    """Among what is chosen; elsewhere, and where all are equal, 0."""
    scores = torch.tensor([[-3.0, -1.0, -2.0, 9.0], [2.0, 2.0, 2.0, 9.0]])
    among = torch.tensor([True, True, True, False])

    assert normalise(scores, among, signed=True).tolist() == [[0, 1, 0.5, 0], [0, 0, 0, 0]]
    assert normalise(scores, among & False).tolist() == [[0] * 4] * 2


def test_sums_over_single_rows_are_the_accumulator_of_h2o():
    """Window 1, every row, sum, decay 1, not normalised: H2O's sums but for the row's own entry."""
    trace = make_trace(group=1, prompt_len=1)
    noted = replayed(H2O(), trace=trace, budget=N - 1, interval=N - 1).internals[0]
    score = torch.full((LAYERS, HEADS, N), math.nan, dtype=torch.float64)
    own = torch.zeros(LAYERS, HEADS, N, dtype=torch.float64)
    for row in range(N):
        at = view_of(trace, row)
        attention = at.attn(1)[:, :, 0, 0]  # [L, H, row + 1]
        own[..., row] = attention[..., row]
        if row:
            local = local_score(at, 1)
            torch.testing.assert_close(local[..., :row], attention[..., :row])
            score[..., :row] = fuse(score[..., :row], local[..., :row], "sum", 1.0)

    assert noted.row == N - 1
    received = torch.from_numpy(noted.scores)
    torch.testing.assert_close(score[..., :-1] + own[..., :-1], received[..., :-1])


# ------------------------------------------------------------------------------------- redundancy


def keys_of(kind, n=37, heads=3, dim=8, seed=0):
    """[2, heads, n, dim] keys, float64: isotropic, with a common direction, repeated, some zero."""
    draw = np.random.default_rng(seed)
    keys = draw.standard_normal((2, heads, n, dim))
    if kind == "common":
        keys += 1.5 * draw.standard_normal((2, heads, 1, dim))
    elif kind == "repeated":
        keys = keys[:, :, draw.integers(0, 5, n)]
    elif kind == "zero":
        keys[:, :, draw.integers(0, n, n // 3)] = 0.0
        keys[0, 0] = 0.0
    return torch.from_numpy(keys)


@pytest.mark.parametrize("blocks", ["usual", "small"])
@pytest.mark.parametrize("else_first", [False, True])
@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("kind", ["isotropic", "common", "repeated", "zero"])
def test_redundancy_equals_the_matrix(kind, threshold, else_first, blocks, monkeypatch):
    """For heads of any length, in one block or in many, with rows that match nothing or not."""
    if blocks == "small":
        monkeypatch.setattr(redundancy, "_BLOCK_BYTES", 500)
        monkeypatch.setattr(redundancy, "_NARROW", 2)
        monkeypatch.setattr(redundancy, "_WIDE", 5)
    keys = keys_of(kind)
    among = torch.ones(keys.shape[:3], dtype=torch.bool)
    among[0, 1, :11] = False
    among[1, 0, ::3] = False
    among[1, 1, :-1] = False
    among[1, 2] = False
    found = mean_similarity(keys, among, threshold=threshold, epsilon=1e-6, else_first=else_first)
    for layer, head in np.ndindex(2, 3):
        there = among[layer, head]
        if bool(there.any()):
            expected = similarity(keys[layer, head, there], threshold, 1e-6, else_first=else_first)
            np.testing.assert_allclose(found[layer, head, there], expected, atol=1e-12)
        assert not found[layer, head, ~there].any()


def test_redundancy_of_many_keys_in_float32_equals_the_matrix():
    """Blocks of their real size, several of each kind."""
    keys = keys_of("common", n=700, heads=5, dim=32).float()
    keys[0] -= keys[0].mean(1, keepdim=True)  # and a layer in which few keys match
    among = torch.ones(keys.shape[:3], dtype=torch.bool)
    found = mean_similarity(keys, among, threshold=0.5, epsilon=1e-8, else_first=True)
    for layer, head in np.ndindex(2, 5):
        expected = similarity(keys[layer, head], 0.5, 1e-8, else_first=True)
        np.testing.assert_allclose(found[layer, head], expected, atol=1e-6)


def replay_searching(name, kind, monkeypatch, search):
    """Replay a policy of redundancy with ten events; search stands in for `mean_similarity`."""
    monkeypatch.setattr(redundancy, "_NARROW", 2)
    for module in ("gkv", "rkv"):
        monkeypatch.setattr(f"kvsim.policies.{module}.mean_similarity", search)
    trace = make_trace(keys=keys_of(kind, n=N, heads=HEADS, dim=DIM).numpy())
    codec = {"scorer__window": 4, "group": 4, "bits_per_number": 1} if "kivi" in name else {}
    kvsim.replay(trace, kvsim.policy(name, window=2, **codec), budget=10, interval=3)


@pytest.mark.parametrize("name", ["gkv", "rkv@original", "rkv@ams", "adakv+gkv", "gkv+kivi"])
@pytest.mark.parametrize("kind", ["isotropic", "common", "repeated"])
def test_redundancy_goes_on_from_the_event_before(kind, name, monkeypatch):
    """It is that of a new search, whoever has left, and where a codec changes keys."""
    events = []

    def both(keys, among, *, view, **how):
        found = mean_similarity(keys, among, view=view, **how)
        torch.testing.assert_close(found, mean_similarity(keys, among, **how))
        events.append(view.row)
        return found

    replay_searching(name, kind, monkeypatch, both)
    assert len(events) == 10


def test_redundancy_compares_what_is_new(monkeypatch):
    """Of keys that match nothing, later events compare new ones with the others alone."""
    products = []

    def counted(keys, among, *, view, **how):
        for of in (view, None):
            with FlopCounterMode(display=False) as count:
                found = mean_similarity(keys, among, view=of, **how)
            products.append(count.get_total_flops())
        return found

    replay_searching("gkv", "isotropic", monkeypatch, counted)
    (first, same), *later = np.reshape(products, (-1, 2))
    assert first == same
    fewer, all_ = np.sum(later, axis=0)
    assert fewer < 0.7 * all_


def test_redundancy_holds_no_matrix():
    """2048 keys in 8 heads have 128 MiB of similarities; blocks take a few MiB."""
    keys = torch.randn(1, 8, 2048, 4, generator=torch.Generator().manual_seed(0))
    among = torch.ones(keys.shape[:3], dtype=torch.bool)
    with torch.profiler.profile(profile_memory=True, record_shapes=True) as profile:
        mean_similarity(keys, among, threshold=0.999, epsilon=1e-6)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 0 < largest <= 16 << 20


def test_of_repeated_keys_the_last_is_the_least_redundant():
    """Every copy points at the last other one, which loses its similarity there."""
    keys = torch.ones(1, 1, 4, 2)
    among = torch.ones(1, 1, 4, dtype=torch.bool)
    found = mean_similarity(keys, among, threshold=0.5, epsilon=0.0)[0, 0]
    # rows 0, 1, 2 leave out column 3; row 3 leaves out column 2
    assert found.tolist() == pytest.approx([0.75, 0.75, 0.5, 0.0], abs=1e-6)


@pytest.mark.parametrize("kind", ["isotropic", "common", "repeated"])
def test_normalised_redundancy_is_a_softmax_over_its_maximum(kind):
    """R' = exp(c - max c) is softmax then R / max R, and lies in [exp(-2), 1]."""
    trace = make_trace(keys=keys_of(kind, n=N, heads=HEADS).numpy())
    window = 4
    view = view_of(trace, keep=ragged(window=window), columns=["global"])
    repeated = -GKV(window=window, mix_lambda=0.0).score(view).values
    older = before_window(view, window)
    mean = mean_similarity(view.keys, view.live, threshold=0.5, epsilon=1e-6)
    share = shares(mean, view.live)
    expected = share / share.masked_fill(~older, 0.0).amax(-1, keepdim=True)

    torch.testing.assert_close(repeated[older], expected[older])
    assert float(repeated[older].min()) >= math.exp(-2)
    assert float(repeated.max()) == 1.0


# ------------------------------------------------------------------------------------------ pooling


@pytest.mark.parametrize("pool", ["max", "avg", None])
@pytest.mark.parametrize("kernel", [1, 3, 7])
@pytest.mark.parametrize("n", [1, 2, 9])
def test_pooling_equals_the_loop(pool, kernel, n):
    """Same length, zeros outside an average, and any leading dimensions."""
    scores = torch.from_numpy(np.random.default_rng(n).uniform(size=(2, 3, n)))
    found = smooth(scores, pool, kernel)

    assert found.shape == scores.shape
    for place in np.ndindex(2, 3):
        np.testing.assert_allclose(found[place], pooled(scores[place].tolist(), pool, kernel))
    assert smooth(scores[..., :0], pool, kernel).shape == (2, 3, 0)


# ------------------------------------------------------------------------ the scorers against loops

W = 4


def candidates(slots, pos, view, window=W):
    """(slot, place among the live) of each candidate."""
    return [(int(s), j) for j, s in enumerate(slots) if pos[j] < view.first(window)]


def local_of(z, view, old, window=W):
    """The local score of the candidates by its definition."""
    largest = softmax(z[:, view.first(window) :]).max(0)  # [row, n]
    return largest.mean(0)[[j for _, j in old]]


@pytest.mark.parametrize("pool", ["max", "avg", None])
def test_local_score_equals_the_loop(pool):
    """Softmax over all entries, largest of the group, mean over rows, pooled over candidates."""
    view = view_of(make_trace(), keep=ragged())

    def expected(layer, head, slots, pos, z):
        old = candidates(slots, pos, view)
        score = pooled(local_of(z, view, old), pool, 3)
        own = {s: x for (s, _), x in zip(old, score, strict=True)}
        return dict.fromkeys(slots.tolist(), 0.0) | own

    check(Local(W, pool, 3), expected, view)


@pytest.mark.parametrize("fusion", ["sum", "max"])
def test_morphkv_equals_the_loop(fusion):
    """Softmax over the candidates alone, largest of the group, sum or maximum of the window."""
    view = view_of(make_trace(), keep=ragged())

    def expected(layer, head, slots, pos, z):
        old = candidates(slots, pos, view)
        share = softmax(z[:, view.first(W) :, [j for _, j in old]]).max(0)
        score = share.sum(0) if fusion == "sum" else share.max(0)
        return {s: x for (s, _), x in zip(old, score, strict=True)}

    check(MorphKV(W, fusion), expected, view)


@pytest.mark.parametrize("variant", ["gkv", "original", "ams"])
@pytest.mark.parametrize("mix_lambda", [0.0, 0.1, 1.0])
def test_rkv_equals_the_loop(variant, mix_lambda):
    """Each of the three variants in both of its terms, for ragged heads."""
    view = view_of(make_trace(), keep=ragged())

    def expected(layer, head, slots, pos, z):
        old = candidates(slots, pos, view)
        places = [j for _, j in old]
        rows = z[:, view.first(W) :]
        if variant == "gkv":
            attention = local_of(z, view, old)
        elif variant == "original":
            attention = softmax(rows[..., places].max(0)).mean(0)
        else:
            attention = softmax(rows[..., places]).mean((0, 1))
        keys = view.keys[layer, head, slots].numpy()
        if variant == "ams":
            share = softmax(similarity(keys[places], 0.5, 1e-8, else_first=True))
        else:
            epsilon = 1e-6 if variant == "gkv" else 1e-8
            mean = similarity(keys, 0.5, epsilon, else_first=variant == "original")
            share = softmax(mean)[places]
        score = mix_lambda * pooled(attention, "max", 3) - (1 - mix_lambda) * share
        return {s: x for (s, _), x in zip(old, score, strict=True)}

    scorer = RKV(W, "max", 3, mix_lambda, variant=variant)
    check(scorer, expected, view)
    assert scorer.signed == (mix_lambda < 1)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("rkv", {"slot_order": "topk"}),
        ("rkv@original", {"slot_order": "topk"}),
        ("rkv@ams", {"slot_order": "topk", "sink": 2}),
        ("gkv", {"cosine": "raw"}),
    ],
)
def test_options_of_the_releases_equal_the_naive_replay(name, params):
    """Scores in top-k's order of slots, and raw cosines, over five events; both change sets."""
    shared = {"window": 3, "mix_lambda": 0.3, "pool": "max", "pool_kernel": 3}
    option = next(iter(params))
    without = {key: value for key, value in params.items() if key != option}
    differs = 0
    for seed in range(8):
        case = make_case(
            ("normal", "sink", "sharp")[seed % 3],
            seed=seed,
            layers=2,
            heads=2,
            group=2,
            n=44,
            prompt_len=16,
        )
        terms = {"interval": 6, "prefill": True}
        record, plain = (
            kvsim.replay(case.trace(), kvsim.policy(name, **shared, **given), 12, **terms)
            for given in (params, without)
        )
        outcome = reference.replay(
            *(case.q, case.k, case.v),
            prompt_len=case.prompt_len,
            policy=name,
            params={**shared, **params},
            budget=12,
            scale=case.scale,
            **terms,
        )
        assert outcome.agrees(record.evicted_at, case.tolerance, faint=case.faint)
        differs += bool((record.evicted_at != plain.evicted_at).any())
        # nothing has a slot before the first event, and cosines differ at once
        first = (record.evicted_at == 15) == (plain.evicted_at == 15)
        assert first.all() or option == "cosine"
    assert differs >= 2


def test_slots_of_top_k_are_in_front_and_the_best_is_the_first():
    """Kept candidates by falling score, then the old window and the rows since, by position."""
    scorer = RKV(W, slot_order="topk")
    view = view_of(make_trace(), keep=ragged(), columns=("slot",))
    before = scorer.score(view)
    slot = before.columns["slot"]
    older = view.live & (view.pos < view.first(W))
    assert (slot.isnan() == ~older).all()
    for layer, head in np.ndindex(*slot.shape[:2]):
        at = older[layer, head].nonzero().flatten()
        ranked = at[slot[layer, head, at].argsort()]
        values = before.values[layer, head, ranked]
        assert (values[:-1] >= values[1:]).all()
        assert sorted(slot[layer, head, at].tolist()) == list(range(len(at)))


def test_rkv_variants_differ():
    """So that the comparison above tells them apart."""
    view = view_of(make_trace(), keep=ragged())
    a, b, c = (RKV(W, variant=v).score(view) for v in ("gkv", "original", "ams"))
    assert not any(torch.allclose(x, y, rtol=1e-3) for x, y in ((a, b), (b, c), (a, c)))


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("redundant", [False, True])
def test_gkv_carries_the_score_that_is_neither_pooled_nor_mixed(fusion, redundant):
    """Three events by loops: the state is F of the candidates, what ranks is pooled and mixed."""
    window, budget, interval, mix = 4, 14, 6, 0.7
    scorer = GKV(
        window, fusion, 0.8, redundancy=redundant, mix_lambda=mix, pool="max", pool_kernel=3
    )
    trace = make_trace()
    record = replayed(scorer, trace=trace, budget=budget, interval=interval)
    assert [plan.row for plan in record.internals][:3] == [17, 23, 29]
    history = {place: {} for place in np.ndindex(LAYERS, HEADS)}
    for plan in record.internals[:3]:
        keep = torch.from_numpy(record.kept(plan.row)[..., : plan.row + 1])
        view = view_of(trace, plan.row, keep=keep)
        assert (view.pos.numpy() == plan.pos).all()
        for layer, head, slots, pos, z in heads_of(view):
            old = candidates(slots, pos, view, window)
            local = local_of(z, view, old, window)
            score = {}
            for (_, j), new in zip(old, local / local.max(), strict=True):
                before = history[layer, head].get(pos[j])
                fused = {
                    "max": lambda a, b: max(0.8 * a, b),
                    "mean": lambda a, b: 0.8 * a + (1 - 0.8) * b,
                    "sum": lambda a, b: 0.8 * a + b,
                }[fusion]
                score[pos[j]] = new if before is None else fused(before, new)
            history[layer, head] = score
            expected = pooled(list(score.values()), "max", 3)
            if redundant:
                mean = similarity(view.keys[layer, head, slots], 0.5, 1e-6)[: len(old)]
                expected = mix * expected - (1 - mix) * np.exp(mean - mean.max())
            got = plan.scores[layer, head, [slot for slot, _ in old]]
            np.testing.assert_allclose(got, expected, rtol=1e-9)


def test_gkv_without_memory_and_redundancy_ranks_by_the_local_score():
    """Decay 0: the same entries stay as with the local score alone, at every event."""
    local = replayed(Local(window=4))
    for fusion in FUSIONS:
        forgetful = replayed(GKV(4, fusion, 0.0, redundancy=False))
        assert (forgetful.evicted_at == local.evicted_at).all()
    remembering = replayed(GKV(4, "max", 0.9, redundancy=False))
    assert (remembering.evicted_at != local.evicted_at).any()


def test_weight_one_is_no_redundancy():
    """mix_lambda 1 is redundancy off; threshold and keys then do not matter."""
    off = replayed(GKV(4, redundancy=False))
    assert (replayed(GKV(4, mix_lambda=1.0, threshold=0.0)).evicted_at == off.evicted_at).all()
    assert (replayed(GKV(4, mix_lambda=0.3)).evicted_at != off.evicted_at).any()
    assert not GKV(mix_lambda=1.0).signed
    assert not GKV(redundancy=False).signed
    assert GKV().signed


def test_every_window_scorer_treats_a_ragged_head_as_it_would_be_alone():
    """Pads change nothing: each head of a ragged block scores as in a block of its own."""
    trace, keep = make_trace(), ragged()
    scorers = [
        Local(W, "avg"),
        GKV(W, pool="avg"),
        RKV(W),
        RKV(W, variant="original"),
        RKV(W, variant="ams"),
        MorphKV(W),
        Cake(W),
        Cake(W, group="max", decoding=True, pool="max"),
        RPC(W, heads="group"),
        AmsRPC(W),
    ]
    for scorer in scorers:
        together = view_of(trace, keep=keep, columns=["global"])
        answer = scorer.score(together)
        values = answer if isinstance(answer, torch.Tensor) else answer.values
        for layer, head in np.ndindex(LAYERS, HEADS):
            only = keep[layer : layer + 1, head : head + 1].expand(LAYERS, HEADS, -1)
            answer = scorer.score(view_of(trace, keep=only, columns=["global"]))
            alone = answer if isinstance(answer, torch.Tensor) else answer.values
            n = alone.shape[-1]
            torch.testing.assert_close(values[layer, head, -n:], alone[layer, head])


# -------------------------------------------------------------------------- the global score of any


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("inner", [Local(4, "max"), Knorm(), GKV(4)])
def test_global_fuses_the_normalised_scores_of_any_scorer(inner, fusion):
    """Event by event: candidates normalised as the scorer is signed, fused with what they had."""
    trace = make_trace()
    record = replayed(Global(inner, fusion, 0.6), trace=trace, budget=14, interval=6)
    view_columns = {"global": torch.full((LAYERS, HEADS, N), math.nan, dtype=torch.float64)}
    before = torch.full((LAYERS, HEADS, N), math.nan, dtype=torch.float64)
    assert len(record.internals) > 3
    for plan in record.internals:
        keep = torch.from_numpy(record.kept(plan.row)[..., : plan.row + 1])
        view = view_of(trace, plan.row, keep=keep, columns=["global"], budget=14)
        view._entries.columns["global"] = view_columns["global"].gather(-1, view.pos)
        answer = inner.score(view)
        own = answer if isinstance(answer, torch.Tensor) else answer.values
        if not isinstance(answer, torch.Tensor):
            view_columns["global"].scatter_(-1, view.pos, answer.columns["global"])
        recent = inner.protection(14).recent
        for place in np.ndindex(LAYERS, HEADS):
            old = [s for s, p in enumerate(view.pos[place].tolist()) if p <= plan.row - recent]
            share = own[place][old]
            least = share.min() if inner.signed else 0.0
            share = (share - least) / (share.max() - least)
            had = before[place][view.pos[place][old]]
            both = {
                "max": torch.maximum(0.6 * had, share),
                "mean": 0.6 * had + 0.4 * share,
                "sum": 0.6 * had + share,
            }[fusion]
            score = torch.where(had.isnan(), share, both)
            np.testing.assert_allclose(plan.scores[place][old], score, rtol=1e-9, atol=1e-12)
            before[place] = math.nan
            before[place][view.pos[place][old]] = score


def test_global_takes_what_it_is_from_the_scorer_inside():
    """Columns, rows, protection; its own scores are not signed, and it goes around once."""
    it = Global(GKV(window=9))

    assert set(it.columns) == {"global", "fused"}
    assert all(math.isnan(value) for value in it.columns.values())
    assert (it.rows, it.least_rows, it.needs, it.clairvoyant) == (9, 1, frozenset(), False)
    assert it.protection(50) == GKV(window=9).protection(50)
    assert not it.signed
    with pytest.raises(PolicyError, match="global score already"):
        Global(Global(Knorm()))


def test_global_of_equal_scores_is_zero():
    """Nothing to tell candidates apart: the lower positions stay."""

    class Same(Scorer):
        signed = True

        def score(self, view):
            return torch.full(view.pos.shape, -2.0, dtype=torch.float64)

    record = replayed(Global(Same()), budget=10)
    assert all(np.nansum(np.abs(plan.scores)) == 0 for plan in record.internals)
    assert record.kept(N - 1)[0, 0].nonzero()[0][:10].tolist() == list(range(10))


# --------------------------------------------------------------------------------------------- CAKE


@pytest.mark.parametrize("dispersion", ["var", "std"])
@pytest.mark.parametrize("group", ["mean", "max"])
@pytest.mark.parametrize(("row", "decoding"), [(PROMPT - 1, False), (N - 5, False), (N - 5, True)])
def test_cake_equals_the_loop(dispersion, group, row, decoding):
    """Mean and unbiased dispersion over the window, per query head or of the group's largest."""
    view = view_of(make_trace(), row)
    gamma = 20.0 if row == PROMPT - 1 or decoding else 0.0

    def expected(layer, head, slots, pos, z):
        old = candidates(slots, pos, view)
        attention = softmax(z[:, view.first(W) :])[..., [j for _, j in old]]
        heads = attention.max(0)[None] if group == "max" else attention
        spread = heads.var(1, ddof=1) if dispersion == "var" else heads.std(1, ddof=1)
        own = [pooled(x, "avg", 3) for x in heads.mean(1) + gamma * spread]
        return {s: x for (s, _), x in zip(old, np.mean(own, 0), strict=True)}

    check(Cake(W, 20.0, dispersion, "avg", 3, group, decoding), expected, view)


def test_cake_of_one_row_has_no_dispersion():
    """A window of one row, in the score and in the preferences."""
    view = view_of(make_trace(), PROMPT - 1)
    torch.testing.assert_close(Cake(1).score(view), Cake(1, gamma=0.0).score(view))
    assert not variance(view.attn(1)).any()
    assert preferences(view, 1, 1.0, 1.0).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("tau1", "tau2"), [(1.0, 1.0), (2.0, 0.5)])
def test_cake_preferences_equal_the_loop(tau1, tau2):
    """Entropy and variance, each summed over query heads and candidates, to their powers."""
    view = view_of(make_trace(), keep=ragged())
    entropy, shift = np.zeros(LAYERS), np.zeros(LAYERS)
    for layer, _, slots, pos, z in heads_of(view):
        places = [j for _, j in candidates(slots, pos, view)]
        attention = softmax(z[:, view.first(W) :])[..., places]
        entropy[layer] -= sum(a * math.log(a) for a in attention.flatten() if a > 0)
        shift[layer] += attention.var(1, ddof=1).sum()
    found = preferences(view, W, tau1, tau2)

    np.testing.assert_allclose(found, entropy ** (1 / tau1) * shift ** (1 / tau2), rtol=1e-9)
    assert found[0] != found[1]


def test_cake_layers_share_one_budget_exactly():
    """What all layers hold after an event is layers x heads x budget; the preferred has more."""
    budget = 14
    record = replayed(
        Cake(4), budget=budget, interval=6, layer_budgets=CakeBudgets(4), trace=make_trace(3)
    )
    assert record.internals
    uneven = 0
    for plan in record.internals:
        assert plan.budgets.sum() == LAYERS * budget
        assert plan.budgets.min() >= 4
        held = ((record.evicted_at > plan.row) & (np.arange(N) <= plan.row)).sum((1, 2))
        assert held.tolist() == [HEADS * b for b in plan.budgets]
        keep = torch.from_numpy(record.kept(plan.row)[..., : plan.row + 1])
        wanted = preferences(view_of(make_trace(3), plan.row, keep=keep), 4, 1.0, 1.0)
        uneven += int(plan.budgets[0] != plan.budgets[1])
        if wanted[0] > 1.2 * wanted[1]:
            assert plan.budgets[0] > plan.budgets[1]
    assert uneven


# ---------------------------------------------------------------------------------------------- RPC


@pytest.mark.parametrize("heads", ["all", "group"])
def test_rpc_equals_the_loop(heads):
    """Softmax over the generated candidates alone, sum over rows, mean over heads, average-pool."""
    trace = make_trace()
    view = view_of(trace)
    share = {}
    for layer, head, _, pos, z in heads_of(view):
        old = [j for j, p in enumerate(pos) if PROMPT <= p < view.first(W)]
        share[layer, head] = softmax(z[:, view.first(W) :, old]).sum(1).mean(0)

    def expected(layer, head, slots, pos, z):
        own = share[layer, head]
        if heads == "all":
            own = np.mean([share[layer, h] for h in range(HEADS)], 0)
        start = PROMPT  # the first candidate's slot: nothing has left yet
        return {start + j: x for j, x in enumerate(pooled(own, "avg", 3))}

    check(RPC(W, 3, heads), expected, view)


def test_rpc_shares_one_set_over_heads_and_grows_with_the_text():
    """Prompt and window stay, and one of four generated tokens; the budget does not bind."""
    interval, window = 8, 4
    policy = Policy(
        "it",
        RPC(window),
        schedule=Schedule(interval, prefill=False),
        layer_budgets=Growing(window),
    )
    trace = make_trace()
    record = kvsim.replay(trace, policy, 5)

    assert list(record.events) == [19, 27, 35]
    assert (record.evicted_at == record.evicted_at[:, :1]).all()
    assert (record.evicted_at[..., :PROMPT] > N).all()
    for row in record.events:
        held = ((record.evicted_at > row) & (np.arange(N) <= row)).sum(-1)
        assert (held == PROMPT + window + (row + 1 - PROMPT) // 4).all()
    assert (kvsim.replay(trace, policy, 30).evicted_at == record.evicted_at).all()
    per_head = kvsim.replay(trace, replace(policy, scorer=RPC(window, heads="group")), 5)
    assert (per_head.evicted_at != per_head.evicted_at[:, :1]).any()


def test_rpc_of_ams_equals_the_loop():
    """Softmax over the whole cache, sum over rows, mean over the group, pooled with the window."""
    view = view_of(make_trace(), keep=ragged())

    def expected(layer, head, slots, pos, z):
        vote = softmax(z[:, view.first(W) :]).sum(1).mean(0)
        return dict(zip(slots.tolist(), pooled(vote, "avg", 3), strict=True))

    check(AmsRPC(W, 3), expected, view)


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Local(window=0), "gkv: window is 0; expected an integer of at least 1"),
        (lambda: Local(pool="median"), "pool is 'median'; expected 'max', 'avg' or None"),
        (lambda: GKV(window=-1), "gkv: window is -1"),
        (lambda: GKV(fusion="min"), "gkv: fusion is 'min'; expected 'max', 'mean' or 'sum'"),
        (lambda: GKV(decay=1.5), "gkv: decay is 1.5; expected a number from 0 to 1"),
        (lambda: GKV(mix_lambda=-0.1), "gkv: mix_lambda is -0.1; expected a number from 0 to 1"),
        (lambda: GKV(threshold=2.0), "gkv: threshold is 2.0; expected a number from 0 to 1"),
        (lambda: GKV(pool_kernel=4), "gkv: pool_kernel is 4; expected an odd integer"),
        (lambda: Global(Knorm(), decay=math.nan), "global: decay is nan"),
        (lambda: MorphKV(fusion="mean"), "morphkv: fusion is 'mean'; expected 'sum' or 'max'"),
        (lambda: RKV(sink=-1), "rkv: sink is -1; expected an integer of at least 0"),
        (lambda: RKV(variant="other"), "rkv: variant is 'other'"),
        (
            lambda: Cake(gamma=math.inf),
            "cake: gamma is inf; expected a finite number of at",
        ),
        (lambda: RKV(slot_order="score"), "rkv: slot_order is 'score'; expected 'position' or"),
        (lambda: GKV(cosine="exact"), "gkv: cosine is 'exact'; expected 'kernel' or 'raw'"),
        (lambda: Cake(dispersion="mad"), "cake: dispersion is 'mad'; expected 'var' or 'std'"),
        (lambda: Cake(group="sum"), "cake: group is 'sum'; expected 'mean' or 'max'"),
        (lambda: CakeBudgets(tau2=0.0), "cake: tau2 is 0.0; expected a finite number above 0"),
        (lambda: RPC(heads="some"), "rpc: heads is 'some'; expected 'all' or 'group'"),
        (
            lambda: RPC(pool_kernel=0),
            "rpc: pool_kernel is 0; expected an odd integer",
        ),
        (lambda: AmsRPC(sink=-2), "rpc: sink is -2; expected an integer of at least 0"),
        (
            lambda: Growing(compression=0),
            "rpc: compression is 0; expected an integer of",
        ),
    ],
)
def test_parameters_out_of_range_are_refused(make, message):
    """The error names the parameter, what it is and what it may be."""
    with pytest.raises(PolicyError, match=message):
        make()
