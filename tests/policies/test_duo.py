"""Plans of heads: their file, the policy of a plan against loops, and how a plan is measured."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvsim
from kvsim.core.policy import Schedule
from kvsim.errors import BudgetError, PolicyError
from kvsim.policies.duo import HeadPlan
from kvsim.studies.cost.accounting import estimate
from kvsim.studies.cost.model import Model
from kvsim.studies.learning.plans import head_plan
from kvsim.testing import Rule, Scored
from kvsim.testing.invariants import INVARIANTS
from kvsim.testing.invariants.trial import Trial
from kvsim.testing.loops import first, replay
from kvsim.testing.strategies import cases, make_case
from reference import metrics
from reference.strategies import seeded


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where plans are written."""
    return tmp_path_factory.mktemp("plans")


def plan_of(folder, scores, **training):
    """The file of a plan."""
    path = folder / "plan.json"
    path.write_text(HeadPlan(scores, training).text(), "utf-8")
    return path


def rule_of(scores, share, stream, sink):
    """The policy once more, in loops: sinks and recent entries, or what the last row attends to."""
    ranked = sorted(
        ((layer, head) for layer, row in enumerate(scores) for head, _ in enumerate(row)),
        key=lambda place: (-scores[place[0]][place[1]], place),
    )
    retrieval = set(ranked[: round(share * len(ranked))])

    def score(event):
        values = []
        for head, live in enumerate(event.live):
            total = dict.fromkeys(live, 0.0)
            for qhead in event.qheads(head):
                for pos, weight in event.attention(qhead, event.row).items():
                    total[pos] += weight / event.group
            values.append(total)
        return Scored(values, protected=first(event, sink))

    def allocate(event, scored, protected):
        budget, heads = event.budgets[0], range(len(event.live))
        if budget < sink:
            raise BudgetError("sinks")
        retrieves = [h for h in heads if (event.layer, h) in retrieval]
        size = {h: min(budget, len(event.live[h])) for h in heads}
        if stream is None:
            size.update({h: len(event.live[h]) for h in retrieves})
        elif retrieves:
            others = [h for h in heads if h not in retrieves]
            for h in others:
                size[h] = min(len(event.live[h]), max(min(stream, budget), len(protected[h])))
            for h in retrieves:
                size[h] = min(len(event.live[h]), len(protected[h]))
            left = min(budget * len(heads), sum(map(len, event.live))) - sum(size.values())
            while left:  # one by one to the smallest, as far as there are entries
                open_ = [h for h in retrieves if size[h] < len(event.live[h])]
                open_ = open_ or [h for h in others if size[h] < len(event.live[h])]
                least = min(open_, key=lambda h: (size[h] - protected_of(h, others, protected), h))
                size[least] += 1
                left -= 1
        kept, decisions = [], []
        for h, live in enumerate(event.live):
            rest = [p for p in live if p not in protected[h]]
            if h in retrieves:
                rest.sort(key=lambda p: (-scored.values[h][p], p))
            else:
                rest.reverse()
            number = size[h] - len(protected[h])
            if h in retrieves and 0 < number < len(rest):
                a, b = (scored.values[h][rest[at]] for at in (number - 1, number))
                decisions.append(((a - b) / a if a > 0 else 0.0, a))
            kept.append(protected[h] | set(rest[:number]))
        return kept, decisions

    def protected_of(head, others, protected):
        return 0 if head in others else len(protected[head])

    return Rule(score, allocate=allocate)


@pytest.mark.parametrize("stream", [None, 3, 6])
def test_a_plan_keeps_what_loops_keep(folder, stream):
    """On generated cases, whichever heads retrieve and however many there are."""
    ran = []

    @settings(
        max_examples=20, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(cases(max_n=12), st.data())
    def check(case, data):
        layers, heads, *_ = case.shape
        row = st.lists(st.sampled_from((0.1, 0.2, 0.7)), min_size=heads, max_size=heads)
        scores = data.draw(st.lists(row, min_size=layers, max_size=layers))
        share, sink = data.draw(st.sampled_from((0.0, 0.3, 0.5, 1.0))), data.draw(st.integers(0, 3))
        budget = data.draw(st.integers(max(1, sink), 9))
        interval = data.draw(st.sampled_from((1, 2, 5)))
        path = plan_of(folder, scores)
        policy = kvsim.policy(f"duo:{path}", share=share, stream=stream, sink=sink)
        record = kvsim.replay(case.trace(), policy, budget, interval=interval)
        rule = rule_of(scores, share, stream, sink)
        outcome = replay(case, rule, budget=budget, interval=interval)
        assert outcome.agrees(record.evicted_at, case.tolerance, ties=False, faint=case.faint)
        ran.append(bool(record.events))

    seeded(f"duo {stream}", check)()
    assert sum(ran) >= 8


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("duo", {"sink": 1}),
        ("duo", {"sink": 1, "stream": 3}),
        ("headkv", {"window": 2, "pool_kernel": 3}),
        ("lukv", {}),
        ("lukv", {"exact": False}),
    ],
)
def test_a_plan_satisfies_the_invariants(folder, kind, params):
    """Sizes, protection, causality and the rest, where a budget binds and where it does not."""
    case = make_case("sharp", layers=2, heads=3, n=24, prompt_len=12, seed=1)
    scores, training = [[1.0, 0.4, 0.1], [0.9, 1.0, 0.7]], {"params": {"n_future": 3}, "sink": 1}
    if kind == "lukv":
        scores = (np.arange(1, 100).reshape(-1, 1, 1) / 100 * np.array(scores)).tolist()
    path = plan_of(folder, scores, **(training if kind == "lukv" else {}))
    policy = kvsim.policy(f"{kind}:{path}", **params)
    assert kvsim.policy(policy.name, **policy.params) == policy
    for interval in (None, 3):
        trial = Trial(policy, case, 6, interval, None, 1)
        for name, invariant in INVARIANTS.items():
            if name != "head_permutation":  # a plan is of heads in their order
                invariant(trial)


def test_a_score_is_the_error_of_a_head_that_streams():
    """Rows after the prompt, the mean over query heads and traces, against loops."""
    made = [
        make_case("sink", layers=2, heads=2, group=2, n=30, prompt_len=20, seed=s) for s in (1, 2)
    ]
    plan = head_plan([case.trace() for case in made], 8, sink=2)
    expected = np.zeros((2, 2))
    for case in made:
        pos = np.arange(30)
        evicted_at = np.where(pos < 2, 2**31 - 1, np.maximum(pos + 6, 19)).astype(np.int32)
        evicted_at[evicted_at >= 30] = 2**31 - 1
        shape = (2, 2, 30)
        of = metrics.outputs(
            case.q, case.k, case.v, np.broadcast_to(evicted_at, shape), scale=case.scale
        )
        errors = of.relative_error[..., 20:].mean(-1).reshape(2, 2, 2)
        expected += errors.mean(-1) / 2

    np.testing.assert_allclose(plan.scores, expected, rtol=1e-4)
    assert plan.training["budget"] == 8


def test_traces_without_a_response_or_of_two_models_have_no_plan():
    """One line says which trace, and what was expected."""
    trace = make_case("normal", layers=2, heads=2, n=20, prompt_len=10).trace()
    other = make_case("normal", layers=1, heads=2, n=20, prompt_len=10).trace()
    with pytest.raises(PolicyError, match="no rows after its prompt"):
        head_plan(make_case("normal", n=20, prompt_len=20).trace(), 8)
    with pytest.raises(PolicyError, match=r"of a model \(1 layers, .*expected traces of one model"):
        head_plan([trace, other], 8)
    with pytest.raises(PolicyError, match="there are no traces"):
        head_plan([], 8)
    with pytest.raises(BudgetError, match="budget 20 holds all 20 tokens"):
        head_plan(trace, 20)


def test_a_plan_belongs_to_its_model(folder):
    """Traces of two models of one shape make no plan, and a plan of one refuses the other."""
    trace, same, other, running = (
        make_case("normal", layers=2, heads=2, n=20, prompt_len=10, seed=seed).trace()
        for seed in range(4)
    )
    running.meta.update(model={"layers": 2})  # a live run says no more of its model
    trace.meta.update(model={"name": "hub/m", "type": "llama"})
    same.meta.update(model={"name": "m", "type": "llama"})  # a folder of the same name
    other.meta.update(model={"name": "base", "type": "llama"})
    with pytest.raises(PolicyError, match=r"of base \(2 layers.*of hub/m .*traces of one model"):
        head_plan([trace, other], 8)
    path = folder / "belongs.json"
    path.write_text(head_plan([trace, same], 8).text(), "utf-8")

    for fits in (same, running):
        assert kvsim.replay(fits, f"duo:{path}", 6).evicted_at.shape == (2, 2, 20)
    with pytest.raises(PolicyError, match=r"plan of hub/m .*give a plan of the same model"):
        kvsim.replay(other, f"duo:{path}", 6)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "Expecting property name"),
        ("[]", "expected finite numbers"),
        ({"version": 1, "scores": [[0.1], [0.1, 0.2]]}, "expected finite numbers"),
        ({"version": 1, "scores": [[0.1, "x"]]}, "expected finite numbers"),
        ({"version": 1, "scores": [[1.0]], "training": 3}, "expected finite numbers"),
        ({"version": 1, "scores": [[1.0]], "training": {"model": {"name": "m"}}}, "finite numbers"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(folder, content, message):
    """In one line that names the file, the reason and the command that writes plans."""
    path = folder / "bad.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    with pytest.raises(PolicyError, match=message) as error:
        kvsim.policy(f"duo:{path}")
    assert str(path) in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_plan_is_of_one_model_and_of_one_content(folder):
    """Another shape, a changed file and an unknown parameter are errors; plans of authors work."""
    trace = make_case("normal", layers=2, heads=2, n=20, prompt_len=10).trace()
    path = plan_of(folder, [[0.1, 0.2, 0.3]])
    with pytest.raises(PolicyError, match="1 layers of 3 KV heads"):
        kvsim.replay(trace, f"duo:{path}", 6)
    with pytest.raises(PolicyError, match="expected 00"):
        kvsim.policy(f"duo:{path}", digest="00")
    with pytest.raises(PolicyError, match="no parameter 'shares'; did you mean 'share'"):
        kvsim.policy(f"duo:{path}", shares=0.5)
    table = folder / "full_attention_heads.tsv"
    table.write_text("0.1\t0.9\n0.8\t0.2\n", "utf-8")
    record = kvsim.replay(trace, f"duo:{table}", 6)
    assert record.retained(19).sum(-1).tolist() == [[6, 20], [20, 6]]


def test_the_command_writes_a_plan_that_replays(run, folder):
    """`kvsim heads` prints and writes the scores of each head, and `duo:FILE` is a policy."""
    trace = make_case("sink", layers=2, heads=2, n=40, prompt_len=24).trace()
    path, out = kvsim.save_trace(trace, folder / "t.zarr"), folder / "heads.json"

    status, text, _ = run("heads", str(path), "--budget", "8", "--out", str(out), "--json")
    assert status == 0
    document = json.loads(text)
    assert document["scores"] == HeadPlan.open(out).scores == head_plan(path, 8).scores
    status, text, _ = run("heads", str(path), "--budget", "8", "--out", str(folder / "b.json"))
    assert "4 KV heads, the error of each if it streams 8 entries" in text
    status, text, _ = run(
        *("replay", str(path), "--policy", document["policy"], "--budget", "8"),
        *("--set", "stream=5", "--metric", "output_error"),
    )
    assert status == 0
    assert document["policy"] in text


@pytest.mark.parametrize("interval", [None, 4])
def test_the_cost_of_a_plan_is_what_a_replay_holds(folder, interval):
    """Streaming heads hold the budget, others everything; a plan of another model is refused."""
    model = Model("two", 2, 4, 2, 8, hidden=24, vocab=50, parameters=13_944, matrices=11_520)
    path = plan_of(folder, [[0.9, 0.1], [0.8, 0.7]])
    built = replace(kvsim.policy(f"duo:{path}", share=0.75), schedule=Schedule(interval))
    case = make_case("sharp", layers=2, heads=2, n=41, prompt_len=20, seed=1)
    record = kvsim.replay(case.trace(), built, 10)
    cost = estimate(model, built, 10, 40, prompt=20)

    row = 19 if interval is None else 39
    assert cost.entries == tuple(record.retained(row).sum(-1).mean(-1))
    assert cost.entries == ((15, 20) if interval is None else (25, 40))
    assert cost.peak == ((35, 40) if interval is None else (27, 40))
    larger = replace(model, n_layers=3)
    with pytest.raises(PolicyError, match="a plan of 2 layers, the model has 3"):
        estimate(larger, built, 10, 40, prompt=20)
