"""The engine and the metrics against a naive float64 replay that shares no code with them."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import kvsim
import reference
from kvsim.analysis.attention.windows import window_overlap
from kvsim.analysis.kept.retention import retained_iou
from kvsim.analysis.output import seen as metrics_output
from kvsim.analysis.output.error import output_error
from kvsim.core.attention import Formula
from kvsim.engine import rows as engine_rows
from kvsim.engine.checks import Setup as Checked
from kvsim.engine.replay import run
from kvsim.errors import BudgetError, PolicyError
from kvsim.policies import CATALOGUE, describe, names
from kvsim.testing import loops, strategies
from kvsim.testing.loops import rows as loops_rows
from kvsim.testing.strategies import Case
from reference import NEVER
from reference import metrics as loop_metrics
from reference.rules import OUTER
from reference.strategies import Setup, examples, naive, seeded, setups
from traces import changed

CATALOGUED = {*CATALOGUE, *(f"{n}@{p}" for n, entry in CATALOGUE.items() for p in entry.presets)}
#: Policies that are replayed by the most cases, and measured.
SIMPLE = (
    "full",
    "random",
    "streaming_llm",
    "streaming_llm@original",
    "h2o",
    "h2o@kvpress",
    "tova",
    "tova@kvpress",
    "snapkv",
    "snapkv@kvpress",
    "snapkv@original",
)
#: Scorers inside, where it is not SnapKV.
INSIDE = {"adakv": "expected_attention", "chunkkv@kvpress": "expected_attention", "global": "tova"}
#: An allocator or a wrapper, each around a scorer of its own, as often as a policy.
AROUND = (
    "paged+keydiff",
    *(
        f"{name}+{INSIDE.get(name, 'snapkv')}"
        for name in names()
        if not (entry := describe(name).entry).innermost
        and not entry.default
        and ("@" not in name or name in OUTER)
    ),
)
CROSSES = (
    "ams+expected_attention",
    "ams+triattention",
    "ams+rkv@ams",
    "ams+cake",
    "ams@release+keydiff",
    "ams+criticalkv+tova@kvpress",
    "global+knorm",
    "criticalkv+keydiff",
    "criticalkv+gkv",
    "criticalkv+lagkv",
    "adakv+criticalkv+expected_attention",
    "adakv+gkv",
    "adakv+pyramidkv",
    "chunkkv+criticalkv+tova",
    "chunkkv+lagkv",
    "paged+raas",
    "union+global+tova",
    "paged+snapkv",
    "paged@release+tova",
    "paged+union+expected_attention",
    "chunkkv+union+keydiff",
    "dms+tova",
    "dms+global+expected_attention",
)
#: Scores that never tie exactly: positions, draws, and sums of many different numbers.
NEVER_TIED = ("random", "streaming_llm", "streaming_llm@original", "h2o", "h2o@kvpress")
#: Presets with rules of their own, which need more cases than others.
RULED = ("lacache@release", "paged@release")
#: What both the reference and the engine replay.
NAMES = tuple(
    name for name in (*reference.NAMES, *AROUND, *CROSSES) if CATALOGUED.issuperset(name.split("+"))
)
QUIET = settings(
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def possible(case: Case, setup: Setup) -> loops.Outcome:
    """The reference replay, where the policy has a rule for what was drawn and acts; else again."""
    try:
        policy, schedule = setup.built, setup.schedule
        fires = {"interval": schedule.interval, "prefill": schedule.prefill}
        assume(setup.policy == "full" or loops.event_rows(case.n, case.prompt_len, **fires))
        Checked(case.trace(), policy, setup.budget, schedule).checked()
        return naive(case, setup)
    except PolicyError:
        assume(condition=False)
        raise


def replay(case: Case, setup: Setup, **options) -> kvsim.Record:
    """The engine's replay of the same case."""
    checked = Checked(case.trace(), setup.built, setup.budget, setup.schedule).checked()
    return run(checked, **options)


def disagreement(
    case: Case, setup: Setup, outcome: loops.Outcome | None = None, **options
) -> str | None:
    """What the engine evicts otherwise than the reference, up to each head's first near-tie."""
    outcome = outcome or naive(case, setup)
    record = replay(case, setup, **options)
    ties = reference.ties_are_exact(setup.policy, case)
    if outcome.agrees(record.evicted_at, case.tolerance, ties=ties, faint=case.faint):
        return None
    return f"naive {outcome.evicted_at.tolist()}, engine {record.evicted_at.tolist()}"


def cases_of(name: str, part: str, least: int) -> Counter[str]:
    """Count what generated cases have on which the engine evicts what naive loops evict."""
    seen: Counter[str] = Counter()
    # the buffers of kvpress need intervals of some length
    longest = 26 if name in SIMPLE or name == "expected_attention@kvpress" else 18
    # Hypothesis draws variants of what it drew: each group, and heads that can be ragged, apart
    kinds = [{}]
    if name in SIMPLE:
        kinds = [{"groups": (group,)} for group in strategies.GROUPS]
    elif name.startswith("adakv") and name in AROUND:
        kinds = [{}, {"heads": 2}]

    def check(data, kind):
        drawn = strategies.cases(max_n=longest, groups=kind.get("groups", strategies.GROUPS))
        case = data.draw(drawn.filter(lambda case: case.shape[1] >= kind.get("heads", 1)))
        setup = data.draw(setups(case, [name], evicts=True))
        outcome = possible(case, setup)
        rows = set(outcome.evicted_at[outcome.evicted_at < NEVER].tolist())
        assume(rows or name == "full")
        assert disagreement(case, setup, outcome) is None
        seen["cases"] += 1
        seen["chained"] += len(rows) >= 3
        seen["tied"] += any(cut.margin == 0 for cut in outcome.cuts)
        at = max(rows, default=0)
        smallest = reference.smallest_budget(name, setup.params, at, prompt_len=case.prompt_len)
        seen["edge"] += setup.budget <= smallest + 1
        held = (outcome.evicted_at > at)[..., : at + 1].sum(-1)
        seen["ragged"] += bool((held != held[..., :1]).any())

    for kind in kinds:
        number = settings(QUIET, max_examples=examples(-(-least // len(kinds))))
        seeded(f"{name} {kind} {part}", number(given(st.data(), st.just(kind))(check)))()
    assert seen["cases"] >= least
    return seen


@pytest.mark.parametrize("name", [name for name in NAMES if name not in CROSSES])
def test_replay_in_float64_equals_the_naive_replay(name):
    """In generated cases that evict the engine evicts what naive loops evict."""
    cases_of(name, "some", 36 if name in (*SIMPLE, *AROUND, *RULED) else 15)


@pytest.mark.deep
@pytest.mark.parametrize("name", NAMES)
def test_more_replays_equal_the_naive_replay(name):
    """Crosses too; several events, ties, small budgets and ragged heads are among the cases."""
    preset = name in CROSSES or ("@" in name and name not in SIMPLE)  # the rule of its policy
    least = 150 if name in RULED else 30 if preset else 45
    seen = cases_of(name, "most", least)
    wanted = {} if name == "full" else {"chained": least // 20, "edge": 1}
    wanted |= {"tied": 1} if name in SIMPLE[1:] and name not in NEVER_TIED else {}
    wanted |= {"ragged": 1} if name.startswith("adakv") and name in AROUND else {}
    assert all(seen[what] >= count for what, count in wanted.items()), (wanted, seen)


@pytest.mark.parametrize("name", ["streaming_llm", "h2o", "raas"])
@settings(QUIET, max_examples=examples(15))
@given(data=st.data())
def test_small_blocks_of_rows_change_nothing(name, data):
    """Rows in blocks of three, attention received in blocks of one row: still the naive replay."""
    case = data.draw(strategies.cases(min_n=12))
    setup = data.draw(setups(case, [name]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_rows, "ROWS", 3)
        patch.setattr("kvsim.core.view.LOGIT_BYTES", 1)
        assert disagreement(case, setup) is None
        assert disagreement(case, setup, by_row=False) is None


@pytest.mark.parametrize(
    ("name", "params", "interval"),
    [
        ("h2o", {"recent": 10}, 33),
        ("tova", {}, None),
        ("snapkv@original", {}, 150),
    ],
)
def test_replay_of_a_longer_trace_equals_the_naive_replay(name, params, interval, tmp_path):
    """Several stored chunks and blocks of rows, in memory and from disk, at their real sizes."""
    case = strategies.make_case("sharp", layers=2, heads=2, group=2, n=530, prompt_len=290, seed=1)
    setup = Setup(name, params, 80, interval, prefill=None)
    assert disagreement(case, setup) is None
    stored = kvsim.open_trace(kvsim.save_trace(case.trace(), tmp_path / "trace.zarr"))
    policy = kvsim.policy(name, **params)
    from_disk = kvsim.replay(stored, policy, 80, interval=interval)
    assert (from_disk.evicted_at == replay(case, setup).evicted_at).all()


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("tova", {}),
        ("h2o", {}),
        ("snapkv", {"window": 3}),
        ("gkv", {"window": 3}),
        ("rkv@original", {"window": 3}),
        ("cake", {"window": 3}),
        ("morphkv@original", {"window": 3}),
        ("dropkv", {"window": 3, "pool_kernel": 1}),
        ("oracle", {}),
        ("ams", {"window": 3, "sink": 1, "recent": 2, "min_segment": 2, "max_segment": 6}),
    ],
)
def test_replay_under_a_softcap_equals_the_naive_replay(name, params, monkeypatch):
    """Rules that read logits read them after the softcap, which changes what is kept."""
    plain, cap, changes = loops_rows.logits_of, 1.0, False
    monkeypatch.setattr(loops_rows, "logits_of", lambda *x: cap * np.tanh(plain(*x) / cap))
    for seed in range(4):
        case = strategies.make_case(
            "sharp", layers=2, heads=2, group=2, n=26, prompt_len=15, seed=seed
        )
        formulas = [Formula(case.scale, softcap=cap)] * 2
        trace = changed(case.trace(), formulas=formulas, o_proj=case.o_proj)
        setup = Setup(name, params, 9, 4, prefill=None)
        outcome = naive(case, setup)
        record = run(Checked(trace, setup.built, 9, setup.schedule))
        assert outcome.agrees(record.evicted_at, 1e-9, ties=False)
        changes |= not outcome.agrees(replay(case, setup).evicted_at, 1e-9, ties=False)
    assert changes


def test_budget_below_what_is_protected_is_an_error_that_names_the_smallest():
    """Where the naive replay cannot keep what is protected, the engine refuses the budget."""
    case = strategies.make_case("normal", n=24, prompt_len=20)
    for name, params, smallest in [
        ("streaming_llm", {}, 4),
        ("snapkv", {"window": 8}, 8),
        ("snapkv@kvpress", {"window": 12}, 12),
    ]:
        setup = Setup(name, params, smallest - 1, interval=1, prefill=None)
        with pytest.raises(BudgetError):
            naive(case, setup)
        with pytest.raises(BudgetError, match=rf"\b{smallest}\b"):
            replay(case, setup)
        enough = Setup(name, params, smallest, interval=1, prefill=None)
        assert disagreement(case, enough) is None


@pytest.mark.parametrize("offset", ["ladder", "modulo"])
@pytest.mark.parametrize(("span", "overlap"), [(None, 0), (3, 1)])
def test_lacache_compacts_a_long_prompt_once(span, overlap, offset):
    """Passes over a prompt of many budgets are one of larger chunks, whose rest leaves later."""
    case = strategies.make_case("normal", layers=8, n=130, prompt_len=100, dim=2)
    params = {"span": span, "overlap": overlap, "offset": offset, "sink": 2}
    for budget in (13, 20, 33, 61):
        merged, each = (
            Setup("lacache", params | {"passes": passes}, budget, 1, prefill=None)
            for passes in ("merged", "each")
        )
        assert disagreement(case, merged) is None
        same = (naive(case, merged).evicted_at == naive(case, each).evicted_at).all()
        assert budget == 61 or not same


def test_reference_random_is_splitmix64():
    """The first outputs of SplitMix64 from state 0 are the published ones; scores are in [0, 1)."""
    gamma = 0x9E3779B97F4A7C15
    first = [reference.splitmix64(i * gamma) for i in range(3)]
    assert first == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    scores = [reference.hash_score(0, 0, 5, 0, p) for p in range(2000)]
    assert 0 <= min(scores) < 0.01
    assert 0.99 < max(scores) < 1
    assert abs(np.mean(scores) - 0.5) < 0.02


@st.composite
def measured(draw, names=SIMPLE, **kwargs):
    """A case, how it is replayed, and its Record."""
    kinds = [kind for kind in strategies.KINDS if kind != "steep"]
    case = draw(strategies.cases(kinds=kinds, **kwargs))
    setup = draw(setups(case, names))
    return case, setup, replay(case, setup)


def check_outputs(case: Case, record: kvsim.Record) -> None:
    """Error, its factors, retained mass and layer error of every row equal the naive ones."""
    found = output_error(case.trace(), [record], projected=True)[0]
    slots = 10_000.0 if record.positions == "slot" else None
    expected = loop_metrics.outputs(
        case.q, case.k, case.v, record.evicted_at, scale=case.scale, slot_theta=slots
    )
    tolerance = 1e-6 if case.q.dtype == np.float64 else 2e-4  # results are stored in float32
    close = {"rtol": tolerance, "atol": tolerance}
    np.testing.assert_allclose(found.error, expected.relative_error, **close)
    np.testing.assert_allclose(found.mass, expected.retained_mass, **close)
    np.testing.assert_allclose(found.missing, expected.missing_mass, **close)
    added = loop_metrics.added(expected, case.o_proj)
    size = np.abs(loop_metrics.projected(expected.out_full, case.o_proj)).max()
    np.testing.assert_allclose(found.added, added, rtol=tolerance, atol=tolerance * size)
    known = ~np.isnan(found.distance)
    if slots is not None:
        assert not known.any()
    else:
        assert (known == (found.missing >= 1e-4)).all()
        # a quotient: what rounds its two terms is divided by the missing mass
        apart = np.abs(found.distance - expected.distance) * found.missing
        assert (apart <= (1 + expected.distance) * min(tolerance, 2e-5))[known].all()


@settings(QUIET, max_examples=examples(40))
@given(measured(dtypes=(np.float64, np.float32), min_n=12), st.sampled_from((1, 2, 5, 1024)))
def test_output_error_equals_the_naive_one(drawn, rows):
    """Also in blocks of a few rows, so that the path without a mask and the merge are taken."""
    case, _, record = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics_output, "ROWS", rows)
        check_outputs(case, record)


@settings(QUIET, max_examples=examples(40))
@given(
    strategies.cases(kinds=("normal", "sharp", "sink")),
    st.integers(0, 2**16),
    st.integers(1, 9),
    st.sampled_from(["absolute", "slot"]),
)
def test_output_error_of_any_record_equals_the_naive_one(case, seed, rows, positions):
    """Whatever left whenever, and however many each head holds: p <= r <= evicted_at."""
    rng = np.random.default_rng(seed)
    record = replay(case, Setup("full", {}, case.n, None, None))
    last = np.arange(case.n) + rng.integers(0, case.n, size=record.evicted_at.shape)
    last = np.where(last >= case.n - 1, NEVER, last).astype(np.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics_output, "ROWS", rows)
        check_outputs(case, replace(record, evicted_at=last, positions=positions))


@settings(QUIET, max_examples=examples(40))
@given(measured(names=SIMPLE[1:], min_n=12))
def test_retained_iou_equals_the_naive_one(drawn):
    """IoU, survival and the random null between consecutive events."""
    record = drawn[2]
    for layer, evicted_at in enumerate(record.evicted_at):
        acting, found = retained_iou(evicted_at)
        iou, random = found[""]
        rows = loop_metrics.acting_rows(record.evicted_at, layer)
        assert acting.tolist() == rows[:-1]
        for j, (first, second) in enumerate(pairwise(rows)):
            for head in range(len(evicted_at)):
                expected = loop_metrics.retained_iou(record.evicted_at, layer, head, first, second)
                assert iou[head, j] == pytest.approx(expected.iou, abs=1e-12)
                assert random[head, j] == pytest.approx(expected.random_iou, abs=1e-12)


@settings(QUIET, max_examples=examples(30))
@given(
    strategies.cases(kinds=("normal", "sharp", "sink", "half"), min_n=12),
    st.integers(1, 8),
    st.sampled_from((0.05, 0.1, 0.25, 0.5, 1.0)),
)
def test_window_overlap_equals_the_naive_one(case, window, share):
    """Each block, their union, the equal-budget version and the chance levels."""
    if 4 * window >= case.n:
        return
    for layer in range(case.shape[0]):
        found = window_overlap(case.trace(), layer, window=window, shares=[share])
        expected = loop_metrics.window_overlap(
            case.q, case.k, layer, window=window, share=share, scale=case.scale
        )
        values = [*expected.before, expected.union, expected.equal_budget]
        assert [x[0] for x, _ in found.values()] == pytest.approx(values, abs=1e-12)
        chances = [*[expected.chance] * 3, expected.chance_union, expected.chance]
        assert [x[0] for _, x in found.values()] == pytest.approx(chances, abs=1e-12)
