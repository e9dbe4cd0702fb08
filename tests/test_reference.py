"""The engine and the metrics against a naive float64 replay that shares no code with them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import kvsim
from kvsim.engine import rows as engine_rows
from kvsim.errors import BudgetError
from kvsim.metrics import output as metrics_output
from kvsim.metrics import output_error, retained_iou, window_overlap, wipeout
from kvsim.policies import CATALOGUE
from kvsim.testing import reference, strategies
from kvsim.testing.reference import NEVER
from kvsim.testing.strategies import Case, Setup

CATALOGUED = [
    *CATALOGUE,
    *(f"{name}@{p}" for name, entry in CATALOGUE.items() for p in entry.presets),
]
NAMES = tuple(name for name in reference.RULES if name in CATALOGUED)
QUIET = settings(
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def examples(usual: int) -> int:
    """How many to draw: the usual number, more of them under the nightly profile."""
    return usual * max(1, settings().max_examples // 100)


def naive(case: Case, setup: Setup) -> reference.Outcome:
    """The reference replay of a generated case."""
    return reference.replay(
        case.q,
        case.k,
        case.v,
        prompt_len=case.prompt_len,
        policy=setup.policy,
        params=setup.params,
        budget=setup.budget,
        interval=setup.interval,
        prefill=setup.prefill,
        scale=case.scale,
    )


def replay(case: Case, setup: Setup, **hooks) -> kvsim.Record:
    """The engine's replay of the same case."""
    return kvsim.replay(
        case.trace(),
        kvsim.policy(setup.policy, **setup.params),
        setup.budget,
        interval=setup.interval,
        prefill=setup.prefill,
        **hooks,
    )


def disagreement(
    case: Case, setup: Setup, outcome: reference.Outcome | None = None, **hooks
) -> str | None:
    """What the engine evicts otherwise than the reference, up to each head's first near-tie."""
    outcome = outcome or naive(case, setup)
    record = replay(case, setup, **hooks)
    ties = case.ties_are_exact(setup.policy)
    if outcome.agrees(record.evicted_at, case.tolerance, ties=ties, faint=case.faint):
        return None
    return f"naive {outcome.evicted_at.tolist()}, engine {record.evicted_at.tolist()}"


# -------------------------------------------------------------------------- replay, case by case


@pytest.mark.parametrize("name", NAMES)
def test_replay_in_float64_equals_the_naive_replay(name):
    """In 200 generated cases that evict, the engine evicts what the naive loops evict."""
    seen: Counter[str] = Counter()

    @settings(QUIET, max_examples=examples(200))
    @given(st.data())
    def check(data):
        case = data.draw(strategies.cases())
        setup = data.draw(strategies.setups(case, [name]))
        outcome = naive(case, setup)
        assume(outcome.cuts or name == "full")
        assert disagreement(case, setup, outcome) is None
        seen["cases"] += 1
        seen[f"group {case.shape[2]}"] += 1

    check()
    assert seen["cases"] >= 200
    assert all(seen[f"group {group}"] for group in strategies.GROUPS)


@pytest.mark.parametrize("name", NAMES)
@settings(QUIET, max_examples=examples(100))
@given(data=st.data())
def test_replay_of_narrow_floats_equals_the_naive_replay(name, data):
    """In float32 and from float16 input, too, outside near-ties of the scores."""
    case = data.draw(strategies.cases(dtypes=(np.float32, np.float16)))
    setup = data.draw(strategies.setups(case, [name]))
    assert disagreement(case, setup) is None


@pytest.mark.parametrize("name", ["random", "streaming_llm", "h2o", "tova"])
@settings(QUIET, max_examples=examples(40))
@given(data=st.data())
def test_small_blocks_of_rows_change_nothing(name, data):
    """Rows in blocks of three, attention received in blocks of one row: still the naive replay."""
    case = data.draw(strategies.cases(min_n=12))
    setup = data.draw(strategies.setups(case, [name]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_rows, "ROWS", 3)
        patch.setattr("kvsim.view.LOGIT_BYTES", 1)
        assert disagreement(case, setup) is None
        assert disagreement(case, setup, _by_row=False) is None


@pytest.mark.parametrize(
    ("name", "params", "interval"),
    [
        ("h2o", {}, None),
        ("h2o", {"recent": 10}, 33),
        ("tova", {}, None),
        ("random", {}, None),
        ("streaming_llm", {}, None),
        ("snapkv", {}, 100),
        ("snapkv@kvpress", {}, 20),
        ("snapkv@original", {}, 150),
        ("h2o@kvpress", {}, 70),
    ],
)
def test_replay_of_a_longer_trace_equals_the_naive_replay(name, params, interval, tmp_path):
    """Several stored chunks and blocks of rows, in memory and from disk, at their real sizes."""
    case = strategies.make_case("sharp", layers=2, heads=2, group=2, n=530, prompt_len=290, seed=1)
    setup = Setup(name, params, 80, interval, prefill=None)
    assert disagreement(case, setup) is None
    stored = kvsim.open_trace(case.trace().save(tmp_path / "trace.zarr"))
    policy = kvsim.policy(name, **params)
    from_disk = kvsim.replay(stored, policy, 80, interval=interval)
    assert (from_disk.evicted_at == replay(case, setup).evicted_at).all()


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


@pytest.mark.parametrize("name", NAMES)
def test_budget_below_one_is_an_error(name):
    """No policy has a rule for an empty cache."""
    case = strategies.make_case("normal", n=6, prompt_len=3)
    with pytest.raises(BudgetError):
        replay(case, Setup(name, {}, 0, None, None))
    with pytest.raises(BudgetError):
        naive(case, Setup(name, {}, 0, None, None))


# ------------------------------------------------------------------- the reference, worked by hand


def by_hand(weights: list[list[float]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v of one head whose row r has attention proportional to weights[r] (zeros are tiny)."""
    n = len(weights)
    q = np.full((1, 1, n, n), -50.0)
    for row, given_weights in enumerate(weights):
        for p, w in enumerate(given_weights):
            q[0, 0, row, p] = np.log(w) if w else -50.0
    k = np.eye(n)[None, None]
    return q, k, np.ones_like(k)


def evicted(name: str, weights: list[list[float]], **kwargs) -> list[int]:
    """When each entry leaves, by the reference."""
    q, k, v = by_hand(weights)
    out = reference.replay(q, k, v, policy=name, scale=1.0, **kwargs)
    return [-1 if e == NEVER else e for e in out.evicted_at[0, 0].tolist()]


FOUR = [[1.0], [0.5, 0.5], [0.6, 0.1, 0.3], [0.1, 0.2, 0.3, 0.4], [0.4, 0.1, 0.2, 0.2, 0.1]]


def test_reference_tova_by_hand():
    """Row 2 attends least to 1, row 3 (of 0, 2, 3) least to 0, row 4 (of 2, 3, 4) least to 4."""
    assert evicted("tova", FOUR, prompt_len=1, budget=2) == [3, 2, -1, -1, 4]
    # the current token may leave at once; kvpress's variant keeps it, after the prompt only
    assert evicted("tova@kvpress", FOUR, prompt_len=5, budget=2) == [-1, 4, 4, 4, -1]


def test_reference_h2o_by_hand():
    """Sums after the prompt of 4: 2.2, 0.8, 0.6, 0.4; one recent entry and the best of the rest."""
    assert evicted("h2o", FOUR, prompt_len=4, budget=2) == [-1, 3, 3, 4, -1]
    # row 4 sees 0, 3, 4 with 0.4, 0.2, 0.1 of 0.7: sums 2.77, 0.69; 4 is recent, so 3 leaves
    # averages over the rows that see the entry: 2.2/4, 0.8/3, 0.6/2, 0.4/1
    assert evicted("h2o@kvpress", FOUR, prompt_len=4, budget=2) == [-1, 3, 3, -1, -1]


def test_reference_snapkv_by_hand():
    """Window of rows 3 and 4: mean 0.25, 0.15, 0.25 of 0, 1, 2; a tie keeps the lower position."""
    plain = {"window": 2, "pool": None}
    kwargs = {"prompt_len": 5, "params": plain}
    assert evicted("snapkv", FOUR, budget=4, **kwargs) == [-1, 4, -1, -1, -1]
    assert evicted("snapkv", FOUR, budget=3, **kwargs) == [-1, 4, 4, -1, -1]
    # averaged over neighbours 0.4/3, 0.65/3, 0.4/3: the middle one stays
    kwargs["params"] = {"window": 2, "pool": "avg", "pool_kernel": 3}
    assert evicted("snapkv", FOUR, budget=3, **kwargs) == [4, -1, 4, -1, -1]


def test_reference_streaming_llm_by_hand():
    """Sink 0 stays, and the two most recent entries."""
    found = evicted("streaming_llm", FOUR, prompt_len=2, budget=3, params={"sink": 1})
    assert found == [-1, 3, 4, -1, -1]


def test_reference_random_is_splitmix64():
    """The first outputs of SplitMix64 from state 0 are the published ones; scores are in [0, 1)."""
    gamma = 0x9E3779B97F4A7C15
    first = [reference.splitmix64(i * gamma) for i in range(3)]
    assert first == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    scores = [reference.hash_score(0, 0, 5, 0, p) for p in range(2000)]
    assert 0 <= min(scores) < 0.01
    assert 0.99 < max(scores) < 1
    assert abs(np.mean(scores) - 0.5) < 0.02


def test_schedule_counts_from_the_end_of_the_prompt():
    """Events fire after rows prompt_len - 1 + m * interval; m = 0 only with prefill."""
    assert reference.event_rows(10, 4, interval=3, prefill=None) == [3, 6, 9]
    assert reference.event_rows(10, 4, interval=3, prefill=False) == [6, 9]
    assert reference.event_rows(10, 4, interval=None, prefill=True) == [3]
    assert reference.event_rows(10, 10, interval=1, prefill=False) == []


# --------------------------------------------------------------------------------- the metrics


@st.composite
def measured(draw, names=NAMES, **kwargs):
    """A case, how it is replayed, and its Record."""
    kinds = [kind for kind in strategies.KINDS if kind != "steep"]
    case = draw(strategies.cases(kinds=kinds, **kwargs))
    setup = draw(strategies.setups(case, names))
    return case, setup, replay(case, setup)


def check_outputs(case: Case, record: kvsim.Record) -> None:
    """Error, its two factors and retained mass of every row equal the naive ones."""
    found = output_error(case.trace(), [record])[0]
    slots = 10_000.0 if record.positions == "slot" else None
    expected = reference.outputs(
        case.q, case.k, case.v, record.evicted_at, scale=case.scale, slot_theta=slots
    )
    tolerance = 1e-6 if case.q.dtype == np.float64 else 2e-4  # results are stored in float32
    close = {"rtol": tolerance, "atol": tolerance}
    np.testing.assert_allclose(found.error, expected.relative_error, **close)
    np.testing.assert_allclose(found.mass, expected.retained_mass, **close)
    np.testing.assert_allclose(found.missing, expected.missing_mass, **close)
    known = ~np.isnan(found.distance)
    if slots is not None:
        assert not known.any()
    else:
        assert (known == (found.missing >= 1e-5)).all()
        close = {"rtol": 1e-3 if tolerance < 1e-4 else 0.2, "atol": 1e-3}
        np.testing.assert_allclose(found.distance[known], expected.distance[known], **close)


@settings(QUIET, max_examples=examples(120))
@given(measured())
def test_output_error_equals_the_naive_one(drawn):
    """Rows of small traces, whose events are close together."""
    case, _, record = drawn
    check_outputs(case, record)


@settings(QUIET, max_examples=examples(80))
@given(measured(dtypes=(np.float64, np.float32), min_n=24), st.integers(1, 5))
def test_output_error_in_blocks_equals_the_naive_one(drawn, rows):
    """Rows in blocks of a few, so that the path without a mask and the merge are taken."""
    case, _, record = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics_output, "ROWS", rows)
        check_outputs(case, record)


@settings(QUIET, max_examples=examples(60))
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


def test_output_error_of_a_longer_trace_equals_the_naive_one():
    """Blocks of their real size, with events far apart and close together in the same record."""
    case = strategies.make_case("sharp", heads=2, group=2, n=330, prompt_len=70, seed=3)
    for name, interval in [("snapkv", 150), ("tova", 65), ("h2o", 20), ("streaming_llm", None)]:
        params = {"window": 8} if name == "snapkv" else {}
        check_outputs(case, replay(case, Setup(name, params, 24, interval, None)))


def test_records_measured_together_equal_records_measured_alone():
    """What records of a trace share is not changed by any of them."""
    case = strategies.make_case("sharp", heads=2, group=2, n=200, prompt_len=40, seed=5)
    records = [
        replay(case, Setup(name, {}, 24, 70, None)) for name in ("tova", "h2o", "random", "tova")
    ]
    together = output_error(case.trace(), records)
    for record, found in zip(records, together, strict=True):
        alone = output_error(case.trace(), [record])[0]
        np.testing.assert_array_equal(found.error, alone.error)
        np.testing.assert_array_equal(found.missing, alone.missing)


@settings(QUIET, max_examples=examples(150))
@given(
    measured(names=[name for name in NAMES if name != "full"], min_n=20),
    st.sampled_from((2, 3, 5, 8)),
    st.sampled_from((0.0, 0.1, 0.34, 0.5)),
    st.sampled_from((0, 1, 4)),
    st.sampled_from((0, 3, 6)),
)
def test_wipeout_equals_the_naive_one(drawn, length, threshold, sink, recent):
    """Regions, wiped, alive before and wiped now, of every head at every event."""
    record = drawn[2]
    for layer, evicted_at in enumerate(record.evicted_at):
        found = wipeout(evicted_at, length, threshold, sink, recent)
        assert found.rows.tolist() == reference.acting_rows(record.evicted_at, layer)
        for j, row in enumerate(found.rows.tolist()):
            for head in range(len(evicted_at)):
                expected = reference.wipeout(
                    record.evicted_at,
                    layer,
                    head,
                    row,
                    length=length,
                    threshold=threshold,
                    sink=sink,
                    recent=recent,
                )
                counts = (found.regions[j], *(x[head, j] for x in (found.wiped, found.alive)))
                assert (*counts, found.now[head, j]) == (
                    expected.regions,
                    expected.wiped,
                    expected.alive_before,
                    expected.wiped_now,
                )
                np.testing.assert_equal(found.cumulative[head, j], expected.cumulative)
                np.testing.assert_equal(found.hazard[head, j], expected.hazard)


@settings(QUIET, max_examples=examples(100))
@given(measured(names=[name for name in NAMES if name != "full"], min_n=12))
def test_retained_iou_equals_the_naive_one(drawn):
    """IoU, survival and the random null between consecutive events."""
    record = drawn[2]
    for layer, evicted_at in enumerate(record.evicted_at):
        found = retained_iou(evicted_at)
        rows = reference.acting_rows(record.evicted_at, layer)
        assert found.rows.tolist() == rows[:-1]
        for j, (first, second) in enumerate(pairwise(rows)):
            for head in range(len(evicted_at)):
                expected = reference.retained_iou(record.evicted_at, layer, head, first, second)
                assert found.iou[head, j] == pytest.approx(expected.iou, abs=1e-12)
                assert found.survival[head, j] == pytest.approx(expected.survival, abs=1e-12)
                assert found.chance[head, j] == pytest.approx(expected.random_iou, abs=1e-12)


@settings(QUIET, max_examples=examples(60))
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
        expected = reference.window_overlap(
            case.q, case.k, layer, window=window, share=share, scale=case.scale
        )
        assert found.before[:, 0] == pytest.approx(expected.before, abs=1e-12)
        assert found.union[0] == pytest.approx(expected.union, abs=1e-12)
        assert found.union_size[0] == pytest.approx(expected.union_size, abs=1e-12)
        assert found.equal_budget[0] == pytest.approx(expected.equal_budget, abs=1e-12)
        assert found.chance[0] == expected.chance
        assert found.chance_union[0] == pytest.approx(expected.chance_union, abs=1e-12)


# ------------------------------------------------------- the reference's metrics, by closed forms


def test_error_is_missing_mass_times_distance():
    """The identity of the two factors holds to rounding wherever something is missing."""
    case = strategies.make_case("sharp", heads=2, group=2, n=40, prompt_len=10, seed=1)
    outcome = naive(case, Setup("tova", {}, 6, None, None))
    found = reference.outputs(case.q, case.k, case.v, outcome.evicted_at, scale=case.scale)
    some = ~np.isnan(found.distance)
    assert some.sum() > 50
    np.testing.assert_allclose(
        found.relative_error[some], (found.missing_mass * found.distance)[some], atol=1e-10
    )
    assert (found.relative_error[~some] < 1e-12).all()


def test_streaming_llm_wipes_out_what_lies_between_sinks_and_window():
    """A region is wiped out iff it lies in [4, N - (budget - 4))."""
    case = strategies.make_case("normal", n=48, prompt_len=40)
    budget, length = 12, 4
    outcome = naive(case, Setup("streaming_llm", {}, budget, None, None))
    for row in (39, 43, 47):
        found = reference.wipeout(outcome.evicted_at, 0, 0, row, length=length, sink=4, recent=0)
        total = row + 1
        starts = [s for s in range(4, total, length) if s + length <= total]
        assert found.regions == len(starts)
        assert found.wiped == sum(s + length <= total - (budget - 4) for s in starts)


def test_random_null_of_the_iou_has_its_closed_form():
    """For a constant budget b and s new entries: b / (b + 2 s)."""
    case = strategies.make_case("normal", n=48, prompt_len=16)
    budget, interval = 8, 8
    outcome = naive(case, Setup("random", {}, budget, interval, None))
    found = reference.retained_iou(outcome.evicted_at, 0, 0, 23, 31)
    assert found.random_iou == pytest.approx(budget / (budget + 2 * interval))
    assert found.iou == pytest.approx(found.survival / (2 - found.survival))
