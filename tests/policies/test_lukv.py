"""LU-KV: plans of long-horizon utility against a heap, and what heads keep by them."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import kvsim
from kvsim.core.policy import Everything, Schedule
from kvsim.errors import NeedsError, PolicyError
from kvsim.policies.duo import HeadPlan
from kvsim.studies.learning.plans import greedy, utility_plan
from kvsim.testing.loops import replay
from kvsim.testing.strategies import cases, make_case
from reference import plans, rule
from reference.strategies import seeded
from traces import changed

#: Scorers of plans, and parameters that fit short prompts.
SCORERS = {
    "expected_attention": {"epsilon": 0.02, "n_future": 3},
    "snapkv": {"window": 2, "pool_kernel": 3},
    "knorm": {},
}
KINDS = ("normal", "sharp", "sink")
MANY = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where plans are written."""
    return tmp_path_factory.mktemp("plans")


def written(folder, ratios, **training):
    """The name of the policy of a plan."""
    path = folder / "plan.json"
    path.write_text(HeadPlan(np.asarray(ratios).tolist(), training).text(), "utf-8")
    return f"lukv:{path}"


def uniform(layers, heads, percents=99):
    """A plan that takes the same share of every head."""
    shares = np.arange(1, percents + 1).reshape(-1, 1, 1) / 100
    return np.broadcast_to(shares, (percents, layers, heads)).copy()


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("scorer", SCORERS)
def test_a_plan_keeps_what_loops_keep(folder, scorer, exact):
    """Numbers of the rule in fractions, and in each head the highest scores; generated cases."""
    ran = []

    @settings(max_examples=20, **MANY)
    @given(cases(kinds=KINDS, min_n=10, max_n=40), st.data())
    def check(case, data):
        layers, heads, *_ = case.shape
        n, sink = case.prompt_len, data.draw(st.integers(0, 3))
        least = max(sink, 2 * (scorer == "snapkv")) + 1 + sink if exact else 1
        assume(n > max(least, sink + 3))
        budget = data.draw(st.integers(least, n - 1))
        of = np.random.default_rng(data.draw(st.integers(0, 999)))
        ratios = of.integers(0, 65, (99, layers, heads)) / 64  # exact in any precision
        params = SCORERS[scorer]
        name = written(folder, ratios, scorer=scorer, params=params, sink=sink)
        record = kvsim.replay(case.trace(), kvsim.policy(name, exact=exact), budget)
        sinks = {"sink": sink} if scorer == "expected_attention" else {}
        naive = replace(
            rule(scorer, {**params, **sinks}),
            allocate=plans.allocate(ratios, exact=exact),
            protect=lambda event: [
                {p for p in live if p < sink or p == event.row} for live in event.live
            ],
            across_layers=True,
        )
        outcome = replay(case, naive, budget=budget)
        assert outcome.agrees(record.evicted_at, case.tolerance, ties=False, faint=case.faint)
        ran.append(bool(record.events))

    seeded(f"lukv {scorer} {exact}", check)()
    assert sum(ran) >= 10


@settings(max_examples=80, **MANY)
@given(st.data())
def test_entries_leave_as_from_a_heap(data):
    """Hulls in fractions and one entry at a time, equal utilities and limits of heads included."""
    layers, heads, m = (data.draw(st.integers(1, most)) for most in (3, 3, 14))
    extra = data.draw(st.integers(1, 120))
    n, most = m + extra, data.draw(st.integers(1, m))
    of = np.random.default_rng(data.draw(st.integers(0, 9999)))
    lost = of.integers(0, data.draw(st.sampled_from((2, 6, 1000))), (layers, heads, m))

    found = greedy(lost.astype(np.float64), n, most)
    assert (found == plans.leaving(lost.tolist(), n, n - most)).all()


def check_plan(case, scorer, sink, recent=1):
    """Compare the plan of a case with that of loops, whose order is the scorer's."""
    trace, scores = case.trace(), [None] * case.shape[0]
    plan = utility_plan(trace, scorer=scorer, sink=sink)
    sinks = {"sink": sink} if scorer == "expected_attention" else {}
    policy = kvsim.policy(scorer, **plan.training["params"], **sinks)
    whole = replace(policy, allocator=Everything(), schedule=Schedule(interval=None))
    for event in kvsim.replay(trace, whole, 1, internals=True).internals:
        for layer, of_layer in zip(event.layers, event.scores, strict=True):
            scores[layer] = of_layer.tolist()
    naive = plans.plan(case, scores, sink, recent)
    far = np.abs(np.array(plan.scores) - naive) * case.prompt_len
    # entries of two heads whose steps differ by rounding alone may leave in either order
    assert far.max() < 1.5
    assert (far > 1e-6).mean() < 0.01
    assert plan.training["traces"] == {trace.name: ""}


@pytest.mark.parametrize("scorer", ["expected_attention", "knorm"])
def test_a_plan_is_that_of_loops(scorer):
    """Utility, order by the scorer, hull and heap, on generated cases."""
    ran = []

    @settings(max_examples=25, **MANY)
    @given(cases(kinds=KINDS, min_n=12, max_n=30, max_layers=2), st.integers(0, 3))
    def check(case, sink):
        assume(sink + 3 < case.prompt_len < case.n)
        check_plan(case, scorer, sink)
        ran.append(case)

    seeded(f"plan {scorer}", check)()
    assert len(ran) >= 20


def test_a_layer_that_reads_the_entries_of_another_has_its_shares():
    """Utility is the largest over the query heads of both; a layer of its own has others."""
    case = make_case("sharp", layers=3, heads=2, group=2, n=60, prompt_len=40)
    k, v = (torch.from_numpy(x)[[0, 1, 1]] for x in (case.k, case.v))
    trace = kvsim.Trace.from_arrays(
        *(torch.from_numpy(case.q), k, v),
        prompt_len=40,
        rope=case.rope,
        o_proj=torch.from_numpy(case.o_proj),
        owners=(0, 1, 1),
    )
    scores = np.array(utility_plan(trace).scores)
    assert (scores[:, 1] == scores[:, 2]).all()
    assert (scores[:, 0] != scores[:, 1]).any()
    assert scores[49].min() > 0


def test_files_of_the_authors_are_plans(folder):
    """An array of shares goes with Expected Attention at epsilon 0.02; what is no such is refused.

    No pickle is read, and no memory is allocated as its header says.
    """
    trace = make_case("sharp", layers=2, heads=2, n=40, prompt_len=30).trace()
    path, ratios = folder / "avg_ratio.npy", uniform(2, 2)
    ratios[49, :, 0] = 0.1
    for array in (ratios, ratios.astype(np.float32), np.asfortranarray(ratios)):
        np.save(path, array)
        policy = kvsim.policy(f"lukv:{path}")
        assert policy.scorer.epsilon == 0.02
        kept, stored = (kvsim.replay(trace, x, 15) for x in (policy, written(folder, array)))
        assert (kept.evicted_at == stored.evicted_at).all()
        assert kept.retained(29).sum(-1).tolist() == [[19, 11]] * 2
    for array, message in (
        (ratios[:98], r"\[98, 2, 2\]; expected shares from 0 to 1"),
        (ratios[0], "expected shares from 0 to 1"),
        (ratios + 0.1, "expected shares from 0 to 1"),
        (ratios.astype(str), "expected shares from 0 to 1"),
        (np.full((99, 1, 1), None), r"lukv: .*no array of numbers"),
    ):
        np.save(path, array, allow_pickle=True)
        with pytest.raises(PolicyError, match=message):
            kvsim.policy(f"lukv:{path}")
    np.save(path, ratios)
    path.write_bytes(path.read_bytes().replace(b"(99, 2, 2), ", b"(99,2,2**9),")[:400])
    contents = [path.read_bytes(), path.read_bytes()[:90], b"", b"PK\3\4", b"\x93NUMPY\1\0\4\0(((("]
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(PolicyError, match=r"give a plan that `kvsim heads` has written"):
            kvsim.policy(f"lukv:{path}")


def test_what_cannot_be_planned_is_said(folder):
    """Another model, scorer or parameter, traces without projections, response or room."""
    case = make_case("normal", layers=1, heads=2, n=40, prompt_len=30)
    with pytest.raises(PolicyError, match=r"lukv: .*2 layers of 3 KV heads"):
        kvsim.replay(case.trace(), written(folder, uniform(2, 3)), 9)
    with pytest.raises(PolicyError, match="no parameter 'exat'; did you mean 'exact'"):
        kvsim.policy(written(folder, uniform(1, 2)), exat=True)
    for fields, message in (
        ({"scorer": "adakv"}, "its scorer is 'adakv'; expected one such as snapkv"),
        ({"scorer": "pyramidkv"}, "its scorer is 'pyramidkv'"),
        ({"scorer": "tova"}, "its scorer tova cannot be built .*epsilon"),
        ({"sink": -1}, "sink is -1; expected an integer"),
        ({"params": {"epsilon": -1}}, "epsilon is -1; expected a number of at least 0 and finite"),
    ):
        with pytest.raises(PolicyError, match=message):
            kvsim.policy(written(folder, uniform(1, 2), **fields))
    with pytest.raises(PolicyError, match="its scorer is 'none'"):
        utility_plan(case.trace(), scorer="none")
    with pytest.raises(PolicyError, match="no rows after its prompt"):
        utility_plan(make_case("normal", n=20, prompt_len=20).trace())
    with pytest.raises(PolicyError, match="all 5 tokens of the prompt of Case"):
        utility_plan(make_case("normal", n=20, prompt_len=5).trace())
    with pytest.raises(NeedsError, match=r"'o_proj'.*--o-proj"):
        utility_plan(changed(case.trace()))


def test_the_command_writes_a_plan_that_replays(run, folder):
    """`kvsim heads --policy lukv` prints and writes the shares, and `lukv:FILE` is a policy."""
    trace = make_case("sink", layers=2, heads=2, n=60, prompt_len=44).trace()
    path, out = kvsim.save_trace(trace, folder / "t.zarr"), folder / "lukv.json"
    command = ("heads", str(path), "--sink", "2", "--out", str(out), "--overwrite", "--policy")

    status, text, _ = run(*command, "lukv", "--json")
    assert status == 0
    document = json.loads(text)
    plan = HeadPlan.open(out, percents=99)
    assert document["policy"] == f"lukv:{out}"
    assert document["scores"] == plan.scores
    assert document["sha256"] == plan.digest == kvsim.policy(f"lukv:{out}").allocator.digest
    assert plan.scores == utility_plan(path, sink=2).scores
    assert abs(np.mean(plan.scores[49]) - 0.5) < 0.01
    assert kvsim.replay(path, f"lukv:{out}", 20).retained(43).sum() == 80
    status, text, _ = run(*command, "lukv+knorm")
    assert status == 0
    assert "4 KV heads, the share that each loses when half of all entries leave" in text
    assert HeadPlan.open(out, percents=99).training["scorer"] == "knorm"
    for words, message in (
        (("lukv", "--budget", "8"), "a plan for lukv has no --budget"),
        (("snapkv",), "--policy is 'snapkv'; expected duo, headkv, lukv or lukv\\+SCORER"),
        (("duo+tova",), "--policy is 'duo\\+tova'"),
    ):
        status, _, error = run(*command, *words)
        assert status == 2
        assert re.search(message, error)
