"""Every policy and preset satisfies every invariant."""

import math

import pytest

import kvsim
import reference
from kvsim.core.policy import Policy, Protection, Scorer
from kvsim.errors import PolicyError
from kvsim.policies import ACCESS, CATALOGUE, names, parameters
from kvsim.testing import INVARIANTS, InvariantError, Rule, check_policy, strategies
from kvsim.testing.invariants import EXEMPT
from kvsim.testing.invariants.trial import Trial, smallest_budget
from reference.strategies import examples

# Parameters that bind on a few dozen tokens.
SMALL = {
    "window": 4,
    "lag": 3,
    "sink": 1,
    "recent": 2,
    "n_future": 8,
    "query_buffer": 6,
    "origin": "next",  # kvpress leaves out what was buffered first, which may be all there is
    "calibration": "prefix:4",
    "protect_prompt": False,
    "chunk": 3,
    "page": 3,
    "segment_mass": 0.2,
    "min_segment": 3,
    "max_segment": 7,
    "segment_length": 5,
    "compression": 2,
}
# Those that replace them for one policy; every pooling is used by one of them.
OWN = {
    "snapkv": {"window": 5, "pool_kernel": 3},
    "snapkv@original": {"window": 3, "pool": None},
    "h2o": {"recent": None},
    "asl": {"tau": 1.01, "window": 2, "scorer__window": 3},
    "asl_2pass": {"tau": 0.9, "window": 2},
    "fastkv": {"rows": None, "window": 2},
    "fastkv@proportional": {"rows": 0.6, "window": 2, "layer": 0},
    "dms+tova": {"threshold": 0.1, "window": 3},
    "raas": {"alpha": 0.1, "protect_prompt": False},
    "pyramidinfer": {"least": 2, "sink": 1, "recent": 0.2},
}
NAMES = names()
SCORERS = [name for name in NAMES if CATALOGUE[name.partition("@")[0]].kind == "scorer"]
INNER = [name for name in SCORERS if name != "full"]  # nothing can be chosen from everything
OUTER = ("ams", "adakv", "chunkkv", "global")


def small(name):
    """Parameters of a policy, scorers inside included, small enough to bind."""
    known = reference.defaults(name)  # all but what a preset alone decides
    plain = {key: key.replace("scorer__", "") for key in parameters(name) if key in known}
    return {key: SMALL[p] for key, p in plain.items() if p in SMALL} | OWN.get(name, {})


def around(name):
    """The name, with TOVA inside where something has to be."""
    entry = CATALOGUE[name.partition("@")[0]]
    return name if entry.innermost or entry.default else f"{name}+tova"


PRESETS = pytest.mark.deep  # their policies come first


def more(name, params):
    """Another composition, or another value of parameters, of parts that are checked before."""
    return pytest.param(name, params, marks=pytest.mark.deep)


@pytest.mark.parametrize(
    "name", [pytest.param(around(x), marks=[PRESETS] if "@" in x else []) for x in NAMES]
)
def test_policy_satisfies_every_invariant(name):
    """Each policy and preset, on generated traces at budgets near what it protects."""
    reference.check(name, small(name), max_examples=examples(3), max_n=16)


#: Pieces behind evictions, alone and combined; others of the catalogue have `SMALL` parameters.
BEHIND = [
    ("quest", {"page": 3, "dense_layers": 1, "share": 0.5}),
    ("topk", {"heads": "kv", "share": 0.5}),
    ("skip_softmax", {"page": 3, "threshold": 0.5, "heads": "kv"}),
    ("magicpig", {"bits": 2, "tables": 6, "sink": 1, "local": 2, "dense_layers": 0}),
    ("topp", {"heads": "layer"}),
    ("pqcache", {"bits": 2, "sink": 1, "local": 1}),
    ("double_sparsity", {"calibration": "prefix:1", "dense_layers": 0, "share": 0.5}),
    ("kivi", {"group": 2, "window": 4}),
    ("int8", {}),
    ("h2o+q8_0", {"v_bits": 4}),
    ("h2o+lookm", {}),
    ("fp8", {"format": "e5m2", "window": 2}),
    ("tova+kvquant", {"group": 1, "outliers": 0.25}),
    ("nvfp4", {"window": 2}),
    ("turboquant@prod", {}),
    ("adakv+snapkv+think", {"pruned": 0.5, "window": 3, "recent": 1}),
]
NAMED = {part.partition("@")[0] for name, _ in BEHIND for part in name.split("+")}
BEHIND += [
    (name, {key: SMALL[key] for key in SMALL.keys() & {*parameters(name)}})
    for name in ACCESS
    if name not in NAMED
]
BEHIND += [
    more("adakv+snapkv+d2o", {"window": 4}),
    more("tova+int4", {"k_bits": 16}),
    more("think@kvpress", {"window": 3}),
    more("h2o+quest+kivi", {"page": 2, "dense_layers": 0, "group": 1, "window": 2}),
    more("adakv+snapkv+topk", {"window": 2, "share": 0.5}),
]


@pytest.mark.parametrize(("name", "params"), BEHIND)
def test_sparse_attention_and_quantizers_satisfy_every_invariant(name, params):
    """Alone and behind evictions, of one set for each head and of ragged ones."""
    check_policy(name, **params, max_examples=examples(4), max_n=14)


def test_a_window_of_the_release_is_whole_after_the_prompt():
    """`ams@release` reads no fewer rows at the prompt because later events would follow soon."""
    params = {"window": 4, "segment_mass": 0.2, "min_segment": 3, "max_segment": 7, "recent": 2}
    policy = kvsim.policy("ams@release", **params, sink=1, min_quota=1)
    for seed in range(6):
        case = strategies.make_case("sharp", heads=2, group=2, n=16, prompt_len=15, seed=seed)
        INVARIANTS["same_events"](Trial(policy, case, 8, None, None, salt=0))


@pytest.mark.deep
@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("inner", INNER)
def test_every_cross_satisfies_every_invariant(outer, inner):
    """All scorers x {AMS, AdaKV, ChunkKV, the global score}."""
    name = f"{outer}+{inner}"
    reference.check(name, small(name), max_examples=examples(2), max_n=13)


@pytest.mark.parametrize(
    "name",
    [
        "adakv+criticalkv+expected_attention",
        "paged+union+snapkv",
        *(
            pytest.param(name, marks=pytest.mark.deep)
            for name in (
                "ams@release+expected_attention",
                "adakv@kvpress+expected_attention",
                "chunkkv@kvpress+snapkv",
                "criticalkv+snapkv",
                "criticalkv+keydiff",
                "ams+global+knorm",
                "chunkkv+global+h2o",
            )
        ),
    ],
)
def test_presets_and_longer_crosses_satisfy_every_invariant(name):
    """Three parts, and what implementations do differently."""
    reference.check(name, small(name), max_examples=examples(3), max_n=16)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("h2o", {"recent": 2}),
        more("h2o", {"recent": 0}),
        ("streaming_llm", {"sink": 0}),
        ("snapkv", {"window": 5, "pool": "avg", "pool_kernel": 7}),
        more("snapkv", {"window": 1, "pool_kernel": 1}),
        ("random", {"seed": 2**63}),
        ("ams", {"mode": "reference", "min_segment": 3, "max_segment": 5, "min_quota": 3}),
        more("ams", {"min_quota": 4, "min_segment": 2, "max_segment": 2, "sink": 0, "recent": 0}),
        ("ams", {"suffix_fill": "observed", "window": 3, "credit": False, "max_segment": 16}),
        ("adakv+snapkv", {"floor": 0.0, "window": 2}),
        more("adakv+snapkv", {"floor": 1.0, "window": 2}),
        ("gkv", {"mix_lambda": 0.0, "window": 2}),
        ("expected_attention", {"rope": "mixture", "n_future": 3, "sink": 0}),
        ("union+keydiff", {"across": "layers", "reduction": "rank"}),
        ("paged+h2o", {"heads": "group", "reduction": "max", "prompt": "pages", "page": 4}),
        ("tova", {"protect": {"sink": 1, "recent": 1, "prompt": True}}),
        ("asl", {"window": 1, "tau": 1.1, "first_layer": 0, "kv_before": "full"}),
        more("asl+expected_attention", {"window": 2, "tau": 1.1}),
        ("fastkv+adakv+snapkv", {"window": 2, "rows": 14, "layer": 0}),
    ],
)
def test_parameters_at_their_edges_satisfy_every_invariant(name, params):
    """Parameters away from the defaults, h2o's fixed recent part among them."""
    reference.check(name, params, max_examples=examples(3), max_n=18)


@pytest.mark.parametrize("name", [around(name) for name in NAMES])
def test_every_policy_has_a_naive_counterpart(name):
    """The invariant `naive_replay` never passes because nothing was compared."""
    case = strategies.make_case("normal", layers=2, heads=2, group=2, n=20, prompt_len=8)
    policy = kvsim.policy(name, **small(name))
    trial = Trial(policy, case, 9, 4, None, 0, reference.rule_of(policy))

    assert trial.naive is not None
    assert trial.naive.agrees(trial.record.evicted_at, case.tolerance)


def test_exemptions_name_invariants_and_policies():
    """What a policy is exempt from exists, and so does the policy."""
    assert {name.partition("@")[0] for name in EXEMPT} <= {*CATALOGUE, *ACCESS}
    assert {name for names in EXEMPT.values() for name in names} <= set(INVARIANTS)


def test_unknown_invariant_is_an_error_with_a_suggestion():
    """A misspelt name does not silently check nothing."""
    with pytest.raises(PolicyError, match="did you mean 'causality'"):
        check_policy("tova", only=["causalty"])
    with pytest.raises(PolicyError, match="unknown invariant"):
        check_policy("tova", exempt=["nothing"])


class Recent(Scorer):
    """Protects as many entries as the longest case has, and scores by a NaN."""

    def score(self, view):
        """Never called."""
        return view.keys.mean(-1) * math.nan

    def protection(self, budget):
        """The last 32."""
        return Protection(recent=32)


def test_a_policy_that_never_evicts_and_a_rule_that_is_not_there_pass_nothing():
    """Cases too short for what a policy protects say nothing of it."""
    with pytest.raises(InvariantError, match=r"nothing was evicted in 16 cases .* raise max_n"):
        check_policy(Policy("recent", Recent()), only=["causality"], max_examples=16)
    assert "naive_replay" not in check_policy("tova", max_examples=1).invariants
    with pytest.raises(PolicyError, match="naive_replay compares with a rule"):
        check_policy("tova", only=["naive_replay"])
    with pytest.raises(InvariantError, match="naive_replay"):
        check_policy("tova", only=["naive_replay"], rule=Rule(score=None), max_examples=5)


def test_a_pass_says_what_was_tried():
    """The invariants, without those left out, and the number of cases."""
    passed = check_policy("tova", only=["causality", "isolation"], max_examples=2)

    assert repr(passed) == "tova: passed 2 invariants on 2 generated cases"
    assert passed.invariants == ("causality", "isolation")


def test_smallest_budget_is_what_a_policy_always_keeps():
    """The budgets that check_policy draws begin where the policy has a rule."""
    case = strategies.make_case("normal", n=20)

    assert smallest_budget(kvsim.policy("tova"), case) == 1
    assert smallest_budget(kvsim.policy("streaming_llm"), case) == 4
    assert smallest_budget(kvsim.policy("snapkv", window=7), case) == 7
    assert smallest_budget(kvsim.policy("snapkv"), case) == 20
