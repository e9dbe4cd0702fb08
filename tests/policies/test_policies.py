"""Policies by name: presets, parameters and clear refusals."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvsim
from kvsim.core.policy import Protection, Schedule
from kvsim.core.record import bounds_of
from kvsim.engine.checks import check_budget
from kvsim.errors import BudgetError, MemoryLimitError, NeedsError, PolicyError
from kvsim.policies import CATALOGUE, describe, names, parameters
from kvsim.policies.naming import parts_of
from kvsim.testing.strategies import make_case


def make(name, **params):
    """The policy or preset; around TOVA where it needs something inside, calibrated if it must."""
    entry = CATALOGUE[name.partition("@")[0]]
    inside = "" if entry.innermost or entry.default else "+tova"
    return kvsim.policy(name + inside, **{**entry.required, **params})


@pytest.mark.parametrize(
    ("name", "params", "bounds"),
    [
        ("full", {}, set()),
        ("pyramidinfer", {}, set()),
        ("tova", {}, {"held"}),
        ("topk", {}, {"read"}),
        ("topp", {}, set()),
        ("tova+quest", {}, {"held", "read"}),
        ("fastkv", {"kv_before": "full"}, {"held"}),
    ],
)
def test_what_a_budget_bounds(name, params, bounds):
    """Entries of all heads or propagated rows, entries that a row reads, or nothing."""
    assert {*bounds_of(kvsim.policy(name, **params))} == bounds


def test_the_file_of_a_policy_imports_no_other():
    """A scorer can be read with its contract alone."""
    script = """import sys, kvsim.policies.snapkv
for x in [x for name, x in sys.modules.items() if name.startswith("kvsim")]: print(x.__file__)"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    files = [*map(Path, done.stdout.decode().split())]
    assert {"snapkv", "window"} == {x.stem for x in files if x.parent.name == "policies"} - {
        "__init__"
    }


@pytest.mark.parametrize("name", names())
def test_a_policy_is_its_name_and_its_parameters(name):
    """They build it again, and its repr, its description and its file say the same of it."""
    policy, found = make(name), describe(name)
    base, _, preset = name.partition("@")
    piece = CATALOGUE[base].preset(preset).piece

    assert kvsim.policy(policy.name, **policy.params) == policy
    assert set(policy.params) == set(parameters(policy.name))
    assert all(f"{key}=" in repr(policy) for key in list(policy.params)[:8])
    assert found.entry.rule
    assert found.params.items() <= policy.params.items()
    assert sys.modules[piece.__module__].__doc__
    with pytest.raises(BudgetError, match="budget is 0; the smallest budget"):
        check_budget(policy, 0)


def test_a_policy_that_never_acts_is_remarked_on():
    """Numbers without a loss are not a policy's merit where none of its events could evict."""
    trace = make_case("normal", n=60, prompt_len=4).trace()

    assert "no event fires" in kvsim.replay(trace, kvsim.policy("ams"), budget=20).remark
    assert kvsim.replay(trace, kvsim.policy("full"), budget=20).remark == ""
    remarks = {kvsim.replay(trace, name, 60).remark for name in ("tova", "snapkv")}
    assert len(remarks) == 1
    assert "holds all 60 tokens" in remarks.pop()


@pytest.mark.parametrize("behind", ["quest", "infllm@release", "rocketkv+kivi"])
def test_parameters_of_an_eviction_with_sparse_attention_make_it_again(behind):
    """Also where it has parameters of the eviction's names, and the eviction an allocator."""
    evictions = [make(name) for name, entry in CATALOGUE.items() if entry.kind == "scorer"]
    combined = map(kvsim.policy, ("ams+kvzip", "adakv+snapkv", "global+kvzip"))
    for eviction in [*evictions, *combined]:
        policy = kvsim.policy(f"{eviction.name}+{behind}", **eviction.params)

        assert kvsim.policy(policy.name, **policy.params) == policy
        assert set(policy.params) == set(parameters(policy.name))


@pytest.mark.parametrize(
    ("name", "params", "named"),
    [
        ("snapkw", {}, "did you mean 'snapkv'"),
        ("snapkv@@scaled", {}, "'@scaled'"),
        ("snapkv", {"windw": 8}, "did you mean 'window'"),
        ("tova", {"heads": "some"}, "heads is 'some'"),
        ("tova", {"protect": 4}, "protect is 4"),
        ("tova", {"protect": {"sinks": 4}}, "protect is"),
        ("tova", {"protect": {"sink": -1}}, "sink is -1"),
        ("tova", {"scorer__heads": "all"}, "'scorer__heads'"),
        ("adakv", {}, "adakv+tova"),
        ("tova+snapkv", {}, "tova (scorer) + snapkv (scorer)"),
        ("adakv+ams+tova", {}, "adakv (allocator) + ams (allocator)"),
        ("ams+full", {}, "full decides itself"),
        ("global+global+tova", {}, "a global score already"),
        ("ams", {"max_segment": 8}, "max_segment is 8"),
        ("qfilter", {}, "calibration is missing"),
        ("qfilter", {"calibration": "prefix:0"}, "'prefix:0'"),
        ("qfilter", {"calibration": "no/such/trace"}, "'no/such/trace'"),
        ("qfilter", {"calibration": "b@0123456789ab"}, "'b@0123456789ab'"),
        ("no.such.module:NAME", {}, "'no.such.module'"),
        ("mine.py", {}, "a policy of your own is mine:NAME"),
        ("mine.py:Mine", {}, "expected its module, mine:Mine"),
        ("math:no_such_policy", {}, "'no_such_policy'"),
        ("math:pi", {}, "float"),
        ("builtins:dict", {"sink": 1}, "dict"),
        ("math:sqrt", {"sink": 1}, "'math:sqrt'"),
    ],
)
def test_what_cannot_be_a_policy_is_refused_with_a_way_out(name, params, named):
    """The error names what was found, in one line, with a suggestion if one is close."""
    with pytest.raises(PolicyError, match=re.escape(named)) as refused:
        kvsim.policy(name, **params)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", r"ZeroDivisionError: division by zero \(/.*/fails_here.py, line 1\)"),
        (
            "def blend():\n    {}[3]",
            r"cannot be built .*: KeyError: 3 \(/.*fails_here.py, line 2\)",
        ),
        ("def blend(): raise OSError('a\\nb' * 3000)", r"OSError: a ba ba .*py, line 1\)"),
    ],
)
def test_a_users_code_that_fails_is_an_error_of_one_line(text, message, tmp_path, monkeypatch):
    """It names the policy, what was raised, and the line of the user's file."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "fails_here.py").write_text(text, "utf-8")
    monkeypatch.delitem(sys.modules, "fails_here", raising=False)
    with pytest.raises(PolicyError, match=rf"^.*fails_here.*{message}$"):
        kvsim.policy("fails_here:blend")
    sys.modules.pop("fails_here", None)


@pytest.mark.parametrize("name", ["snapkv", "cake", "pyramidkv", "ams", "asl", "rpc", "dms+tova"])
@pytest.mark.parametrize("kept", [{}, {"sink": 2, "recent": 9}, {"prompt": True}])
def test_the_smallest_budget_that_works_is_the_first_of_all(name, kept):
    """Each budget below it is refused and names it, for any policy and protection."""
    try:
        policy = kvsim.policy(name, protect=kept)
    except PolicyError:
        return  # it drops rows of the prompt, and protects nothing more

    def refusal(budget):
        try:
            check_budget(policy, budget, prompt_len=21, n_layers=5, schedule=Schedule(16))
        except BudgetError as error:
            return str(error)
        return ""

    refused = [refusal(budget) for budget in range(1, 130)]
    smallest = refused.index("") + 1
    assert not any(refused[smallest - 1 :])
    for message in refused[: smallest - 1]:
        assert message.endswith(f"the smallest budget that works is {smallest}")


def test_a_keyword_goes_to_the_outermost_part_that_has_it():
    """`scorer__` looks one part further in; the rest keeps its defaults."""
    plain = kvsim.policy("ams+snapkv", window=9)
    inner = kvsim.policy("ams+snapkv", scorer__window=9)
    deep = kvsim.policy("adakv+criticalkv+expected_attention", epsilon=0.5, scorer__sink=2)

    assert (plain.allocator.window, plain.scorer.window) == (9, 32)
    assert (inner.allocator.window, inner.scorer.window) == (128, 9)
    assert (deep.scorer.epsilon, deep.scorer.scorer.epsilon, deep.scorer.scorer.sink) == (
        0.5,
        0.01,
        2,
    )
    assert deep.params["scorer__scorer__epsilon"] == 0.01


def test_a_policy_of_the_users_own_is_a_part_like_others(monkeypatch):
    """What its function names goes to it, not to the part behind; `scorer__` does."""

    def own(sink=1, **others):
        return replace(kvsim.policy("streaming_llm", sink=sink), name=",".join(others) or "own")

    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(own=own))
    plain = kvsim.policy("mine:own+infllm", sink=7, page=8, more=1)
    further = kvsim.policy("ams+mine:own+infllm", scorer__scorer__sink=7, scorer__sink=3)

    assert (plain.scorer.sink, plain.sparse.sink, plain.sparse.page) == (7, 4, 8)
    assert (further.scorer.sink, further.sparse.sink) == (3, 7)
    assert [key for key in parameters("mine:own+infllm") if "sink" in key] == ["scorer__sink"]
    with pytest.raises(PolicyError, match="no parameter 'scorer__more'"):
        kvsim.policy("mine:own+infllm", scorer__more=1)


def test_keys_of_parts_reach_their_parts():
    """The key of each parameter of a written part changes it, and nothing else of the policy."""
    for name in ("ams+snapkv", "adakv+criticalkv+snapkv", "snapkv+infllm+kivi", "ams"):
        plain = kvsim.policy(name).params
        for _, keys in parts_of(name):
            for key, taken in keys.items():
                assert taken in plain
                if type(plain[taken]) is int and key in ("window", "recent", "sink", "page"):
                    changed = kvsim.policy(name, **{taken: plain[taken] * 2 + 32}).params
                    assert {x for x in plain if plain[x] != changed[x]} == {taken}


def test_what_a_cross_changes_stands_in_its_fields():
    """TOVA's average over heads and TriAttention's pinned prompt are resolved by the name."""
    heads = {
        name: kvsim.policy(name).params["heads"]
        for name in ("tova", "ams", "ams@release", "adakv+tova", "chunkkv+tova", "global+tova")
    }

    assert heads == {
        "tova": "all",
        "ams": "group",
        "ams@release": "all",
        "adakv+tova": "group",
        "chunkkv+tova": "all",
        "global+tova": "all",
    }
    assert kvsim.policy("triattention", calibration="oracle").scorer.protect_prompt
    assert not kvsim.policy("ams+triattention", calibration="oracle").scorer.protect_prompt


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("ams", Schedule(512, prefill=False)),
        ("ams+snapkv", Schedule(512, prefill=False)),
        ("adakv+snapkv", Schedule(None)),
        ("adakv+gkv", Schedule(128)),
        ("global+knorm", Schedule(128)),
        ("ams+global+knorm", Schedule(512, prefill=False)),
        ("criticalkv+tova", Schedule(1)),
        ("rpc", Schedule(1024, prefill=False)),
        ("morphkv@original", Schedule(1, prefill=False)),
        ("oracle", Schedule(128)),
    ],
)
def test_a_cross_fires_when_its_outermost_part_says(name, schedule):
    """AMS and the global score have schedules of their own, other parts take the scorer's."""
    assert kvsim.policy(name).schedule == schedule


def test_protection_beside_the_policy_counts_in_its_smallest_budget():
    """Sinks, recent entries and the prompt are kept under any policy, and the Record says so."""
    trace = make_case("normal", n=60, prompt_len=20).trace()
    kept = Protection(sink=2, recent=3, prompt=True)
    policy = kvsim.policy("knorm", protect=kept)

    with pytest.raises(BudgetError, match="budget is 22; the smallest budget that works is 23"):
        kvsim.replay(trace, policy, budget=22, interval=8)
    record = kvsim.replay(trace, policy, budget=25, interval=8)
    assert record.params["protect"] == {"sink": 2, "recent": 3, "prompt": True}
    assert record.retained(trace.n_pos - 1)[..., :20].all()
    for row in record.events:
        assert record.retained(row)[..., row - 2 : row + 1].all()
    shared = kvsim.policy("cake", window=3, protect=Protection(sink=8))
    layers = make_case("sharp", layers=3, n=60, prompt_len=20).trace()
    assert kvsim.replay(layers, shared, budget=14, interval=8).retained(59)[..., :8].all()


def test_what_a_trace_or_a_schedule_lacks_is_said_before_any_work():
    """The output projection, and rows enough for moments."""
    trace = replace(make_case("normal", layers=2, n=40, prompt_len=4), o_proj=None).trace()

    with pytest.raises(NeedsError, match=r"o_proj.*--o-proj"):
        kvsim.replay(trace, kvsim.policy("criticalkv+tova"), budget=8)
    with pytest.raises(NeedsError, match="o_proj"):
        kvsim.replay(trace, kvsim.policy("expected_attention", value_norm="wo_v"), budget=8)
    with pytest.raises(PolicyError, match="after 4 rows; expected at least 5"):
        kvsim.replay(trace, kvsim.policy("expected_attention", sink=3), budget=3)


def test_what_comes_late_is_refused_early():
    """Layers that share a budget, buffers too short, budgets whose way out grows with them."""
    trace = make_case("normal", layers=3, n=60, prompt_len=20).trace()

    ranked = kvsim.policy("union+snapkv", across="layers", window=4)
    with pytest.raises(MemoryLimitError, match="needs all layers at once"):
        kvsim.replay(trace, ranked, budget=8, memory=(64 << 20) + 999)
    with pytest.raises(PolicyError, match=r"interval is 3, .* expected at least 6 rows"):
        kvsim.replay(trace, kvsim.policy("expected_attention@kvpress"), budget=8, interval=3)
    pinned = kvsim.policy("pyramidkv", window=4, protect=Protection(prompt=True))
    with pytest.raises(BudgetError, match="smallest budget that works is") as refused:
        kvsim.replay(trace, pinned, budget=20, interval=16)
    enough = int(str(refused.value).rpartition(" ")[2])
    assert kvsim.replay(trace, pinned, budget=enough, interval=16).retained(59)[..., :20].all()
    with pytest.raises(BudgetError):
        kvsim.replay(trace, pinned, budget=enough - 1, interval=16)


@pytest.mark.parametrize("name", ["criticalkv+tova", "global+expected_attention"])
def test_a_wrapper_refuses_logarithms(name):
    """Wrappers divide and subtract scores, which logarithms of nothing do not bear."""
    with pytest.raises(PolicyError, match=r"log is True for \w+ inside; expected False"):
        kvsim.policy(name, log=True)
