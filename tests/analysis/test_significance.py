"""The verdict's statistics, against plain loops over their definitions, closed forms, invariants.

The loops try every choice of signs, pair by pair, in Python's floats.
"""

import itertools
import math
from fractions import Fraction
from statistics import NormalDist, fmean, pstdev, stdev, variance

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from kvsim.analysis import significance
from kvsim.analysis.significance import (
    at_least,
    behind,
    best_set,
    excess,
    identical,
    interaction,
    needed,
    one_best,
    rank_correlation,
    rank_intervals,
    reliability,
    signs,
    weights,
)
from tests.reference import significance as loops

CUT = 0.04
TWO_TASKS = np.array(["a", "b", "a", "b", "b", "a", "b"])
#: Differences that 3 of 64 flips reach: 4.7 %, so in a set at 4 % and outside one at 5 %.
THREE_OF_64 = [4.0, 4.0, 4.0, 4.0, 1.0, -2.0]


def panel(prompts=(5, 7), policies=(2, 4)):
    """Values [prompt, policy] above 0, many of them tied."""
    cell = st.sampled_from([0.1, 0.2, 0.3, 0.7, 1.0, 1.5, 4.0])
    shapes = st.tuples(st.integers(*prompts), st.integers(*policies))
    return shapes.flatmap(
        lambda shape: st.lists(
            st.lists(cell, min_size=shape[1], max_size=shape[1]),
            min_size=shape[0],
            max_size=shape[0],
        )
    ).map(np.array)


def skewed(prompts=24, policies=6, seed=0, step=0.2):
    """Values [prompt, policy] of skewed prompts, each policy worse than the one before."""
    rng = np.random.default_rng(seed)
    prompt = rng.normal(size=(prompts, 1))
    return np.exp(prompt + 0.3 * rng.normal(size=(prompts, policies)) + step * np.arange(policies))


def with_bad(x, seed=0):
    """The panel and a policy that is far worse on each prompt, by about as much."""
    bad = 50 * x.max() + np.random.default_rng(seed).uniform(0, x.max(), len(x))
    return np.c_[x, bad]


@given(panel())
@settings(max_examples=15)
def test_the_set_of_the_best_is_that_of_plain_loops(x):
    """P-values equal a loop over every choice of signs, with and without tasks; 4 % is the cut."""
    for tasks in (None, TWO_TASKS[: len(x)]):
        p, inside = best_set(x, tasks)

        assert p.tolist() == pytest.approx(loops.p_of_best(x, tasks), abs=1e-12)
        assert inside.tolist() == [value > CUT for value in p]


@pytest.mark.parametrize(
    ("gaps", "flips"),
    [
        ([1, 2, 3, 4, 5, 6], 1),  # no other flip reaches the largest sum
        ([2.0] * 6, 1),  # no variance
        ([4, 4, 4, 4, 2, -1], 2),  # -1 flipped, and nothing: 3.1 %
        (THREE_OF_64, 3),  # -2 flipped, and 1 or nothing in its place
        ([3, 1, 1, 1, 1, -1], 6),  # nothing, or one of five
        ([1, 1, 1, 1, 1, -1], 7),
        ([0, 0, 0, 0, 0, 1], 32),  # half of all
    ],
)
def test_two_policies_have_the_p_value_worked_out_by_hand(gaps, flips):
    """The share of the 64 flips of six prompts whose sum is as large; the leader has 1 or less."""
    x = np.c_[np.ones(6), np.ones(6) + gaps]

    p, inside = best_set(x)

    assert p[1] == flips / 64
    assert inside.tolist() == [True, flips / 64 > CUT]
    assert p[0] >= 0.5


@given(st.lists(st.integers(-6, 9), min_size=6, max_size=9))
@settings(max_examples=15)
def test_rounding_decides_no_tie(tenths):
    """P-values of differences of tenths equal those counted in exact fractions."""
    tenths = tenths if sum(tenths) >= 0 else [-tenth for tenth in tenths]
    gaps, flips = [Fraction(tenth, 10) for tenth in tenths], loops.flips_of(len(tenths))
    reach = [sum(s * gap for s, gap in zip(flip, gaps, strict=True)) for flip in flips]

    p, _ = best_set(np.array([[0.3, 0.3 + tenth / 10] for tenth in tenths]))

    assert p[1] == fmean(total >= sum(gaps) for total in reach)


def test_a_policy_near_the_leader_is_compared_and_one_behind_the_screen_is_not():
    """Its paired t is just below the quantile 0.995 with n - 1 degrees of freedom, or above it."""
    gaps = np.array([3.0, 2.6, 2.9, 1.2, 1.9, -0.1])
    t = stats.ttest_1samp(gaps, 0).statistic
    assert t < stats.t.ppf(0.995, 5) < t * math.sqrt(6 / 5)  # a variance by n would pass the screen
    x = np.c_[np.ones(6), np.ones(6) + gaps]

    assert best_set(x)[0][0] == 63 / 64  # compared: one flip of 64 is below
    assert best_set(np.c_[np.ones(6), np.ones(6) + gaps + 0.2])[0][0] == 1.0  # nobody is near


def test_flips_are_all_up_to_twelve_prompts_and_drawn_above():
    """Distinct ones, half of each sign; the first flips nothing; equal on repetition."""
    for n in (1, 6, 12):
        assert len({*map(tuple, signs(n).T.tolist())}) == 2**n == signs(n).shape[1]
    drawn = signs(13)
    assert drawn.shape == (13, 4096)
    assert {*drawn.ravel()} == {1.0, -1.0}
    assert abs(drawn.mean()) < 4 / math.sqrt(drawn.size)
    assert (signs(6)[:, 0] == 1).all()
    assert (drawn[:, 0] == 1).all()
    assert (drawn == signs(13)).all()


def test_drawn_flips_have_nearly_the_p_values_of_all():
    """Thirteen prompts, within four standard errors of 4,096 draws."""
    x = skewed(13, 3, step=0.1)
    every = np.array(loops.flips_of(13)).T
    gaps = x[:, [1]] - x[:, [0, 2]]
    norms = np.sqrt((gaps**2).sum(0))[:, None]
    reach = ((gaps.T @ every) / norms).max(0)
    exact = (reach >= reach[0] - 1e-9).mean()

    assert 0.1 < exact < 0.9
    assert best_set(x)[0][1] == pytest.approx(exact, abs=4 * 0.5 / 64)


@given(panel(prompts=(6, 8)), st.sampled_from([1e-6, 0.3, 7.0, 1e5]), st.randoms())
@settings(max_examples=12)
def test_units_and_orders_change_no_verdict(x, factor, random):
    """Scaled values, permuted policies, and up to 12 prompts in another order."""
    order = random.sample(range(x.shape[1]), x.shape[1])
    prompts = random.sample(range(len(x)), len(x))
    tasks = TWO_TASKS.repeat(2)[: len(x)]

    for given_tasks in (None, tasks):
        moved = None if given_tasks is None else given_tasks[prompts]
        p, _ = best_set(x, given_tasks)
        low, high = rank_intervals(x, given_tasks)
        assert best_set(x * factor, given_tasks)[0] == pytest.approx(p)
        assert best_set(x[prompts], moved)[0] == pytest.approx(p)
        assert rank_intervals(x[:, order])[0].tolist() == rank_intervals(x)[0][order].tolist()
        assert rank_intervals(x[prompts] * factor, moved)[1].tolist() == high.tolist()
        assert (low <= high).all()
        assert excess(x * factor, given_tasks) == pytest.approx(excess(x, given_tasks), abs=1e-7)
        assert behind(x * factor, given_tasks) == pytest.approx(
            factor * behind(x, given_tasks), abs=1e-9 * factor
        )
    means = x.mean(0)
    if np.diff(np.sort(means)).min() > 1e-9:  # of equal means the first one leads
        assert best_set(x[:, order])[0] == pytest.approx(best_set(x)[0][order])
    assert one_best(x * factor, tasks)[order] == pytest.approx(one_best(x[:, order], tasks))
    assert interaction(x * factor, tasks) == pytest.approx(interaction(x, tasks), abs=0.02)


@given(st.integers(0, 10_000), st.integers(6, 16))
@settings(max_examples=10)
def test_a_policy_far_behind_changes_no_set_and_no_bound(seed, prompts):
    """Nor does a copy of a policy, which shares its p-value, its bounds and its ranks."""
    x = skewed(prompts, 5, seed)
    p, inside = best_set(x)
    low, high = rank_intervals(x)

    more, others = best_set(with_bad(x, seed))
    assert more[:5].tolist() == pytest.approx(p)
    assert more[5] <= 1 / 64
    assert others.tolist() == [*inside, False]
    assert excess(with_bad(x, seed))[:5, :5] == pytest.approx(excess(x))
    assert needed(x[:, 0], x[:, 1]) == needed(*with_bad(x, seed)[:, :2].T)
    assert with_bad(x, seed)[:, 5].mean() > 10 * x.mean()
    for j in range(5):
        twice = np.c_[x, x[:, j]]
        of_both, both = best_set(twice)
        assert of_both == pytest.approx([*p, p[j]])
        assert both[5] == inside[j]
        assert excess(twice)[j, 5] == excess(twice)[5, j] == 0
        again = rank_intervals(twice)
        assert [each[5] for each in again] == [each[j] for each in again]
        assert (again[0][:5] >= low).all()
        assert (again[1][:5] <= high + 1).all()


def test_values_stored_as_float32_are_converted_first():
    """Policies that are identical as stored stay so; other values give nearly the same verdict."""
    stored = skewed(12, 4).astype(np.float32)
    x = np.c_[stored, stored[:, 1]].astype(np.float64)

    assert identical(x)[1, 4]
    assert best_set(x)[0][4] == best_set(x)[0][1]
    assert best_set(x[:, :4])[0] == pytest.approx(best_set(skewed(12, 4))[0], abs=0.01)


def test_policies_are_identical_to_twelve_digits():
    """As a copy is, and one that rounding moved; a difference of 1e-10 counts."""
    x = skewed(8, 2)
    x = np.c_[x, x[:, 0] * (1 + 1e-14), x[:, 0] * (1 + 1e-10)]

    assert identical(x)[0].tolist() == [True, False, True, False]


@pytest.mark.parametrize("prompts", [6, 13])
def test_identical_policies_are_all_in_a_set_or_none(prompts):
    """All policies equal: the set is all, p = 1, each could have any rank, nothing is worse."""
    x = np.ones((prompts, 3))

    p, inside = best_set(x)

    assert p.tolist() == [1, 1, 1]
    assert inside.all()
    assert [each.tolist() for each in rank_intervals(x)] == [[1, 1, 1], [3, 3, 3]]
    assert excess(x).tolist() == behind(x).tolist() == [[0.0] * 3] * 3
    assert needed(x[:, 0], x[:, 1]) == (math.inf,) * 3
    assert best_set(np.c_[x, x + 1.0, x + 1.0])[1].tolist() == [True] * 3 + [False] * 6
    assert reliability(x) == 0.0


def test_six_prompts_without_variance_decide():
    """Each other mean is outside the set with p = 1/64, and each rank is known from 7 prompts."""
    x = np.tile([2.0, 1.0, 3.0], (7, 1))

    assert best_set(x[:6])[0].tolist() == [1 / 64, 1, 1 / 64]
    assert [each.tolist() for each in rank_intervals(x)] == [[2, 1, 3]] * 2
    assert excess(x)[2] == pytest.approx([0.5, 2.0, 0])
    assert needed(x[:, 1], x[:, 0])[::2] == (6, 6)
    assert needed(x[:, 0], x[:, 1]) == (math.inf,) * 3


def test_one_policy_is_the_best_of_one():
    """Without anything to compare with."""
    x = skewed(6, 1)

    assert best_set(x)[0].tolist() == [1.0]
    assert excess(x).tolist() == behind(x).tolist() == [[0.0]]
    assert [each.tolist() for each in rank_intervals(x)] == [[1], [1]]


def test_leaders_of_equal_means_are_all_in_the_set():
    """Whichever is first, and however uneven their values."""
    x = np.array([[1, 6, 2], [2, 5, 2], [3, 4, 2], [4, 3, 2], [5, 2, 9], [6, 1, 4.0]])

    for order in itertools.permutations(range(3)):
        assert best_set(x[:, order])[1].all()


def test_a_task_of_one_prompt_counts_as_much_as_one_of_many():
    """Means over tasks, each counting the same; weights add up to 1."""
    tasks = np.array(["many"] * 6 + ["one"])
    x = np.c_[np.ones(7), [1.1, 1.2, 1.1, 1.2, 1.1, 1.2, 0.0]]

    assert weights(7, tasks).tolist() == pytest.approx([1 / 12] * 6 + [1 / 2])
    assert weights(4).tolist() == [0.25] * 4
    assert (weights(7, tasks) @ x).tolist() == pytest.approx([1.0, (1.15 + 0.0) / 2])
    assert best_set(x, tasks)[0] == pytest.approx(loops.p_of_best(x, tasks))


def test_weights_of_unequal_tasks_decide_who_leads():
    """The policy that is better in the small task leads over tasks, not over prompts."""
    tasks = np.array(["a"] * 12 + ["b"] * 6)
    x = np.c_[np.r_[np.ones(12), np.full(6, 3.0)], np.r_[np.full(12, 1.5), np.full(6, 1.6)]]
    x = x + 0.01 * np.random.default_rng(0).normal(size=x.shape)

    assert x.mean(0).argmin() == 1 == (weights(18, tasks) @ x).argmin()
    assert (x[:12].mean(0).argmin(), x[12:].mean(0).argmin()) == (0, 1)
    assert best_set(x, tasks)[0][1] > best_set(x, tasks)[0][0]
    assert interaction(x, tasks) == 0.001


@pytest.mark.parametrize("tasks", [None, ["a", "b", "a", "b", "b", "a", "b", "a", "a"]])
@pytest.mark.parametrize("seed", range(4))
def test_bounds_are_where_a_t_test_of_the_ratio_turns(tasks, seed):
    """Found by bisection of a plain t test over prompts, or over tasks, for both directions."""
    x = skewed(9, 4, seed)
    x[:, 3] *= np.exp(np.random.default_rng(seed).normal(size=9) * (2 if seed else 0))
    labels = None if tasks is None else np.array(tasks)

    for higher in (False, True):
        bounds = excess(x, labels, higher=higher)

        for i, j in itertools.permutations(range(4), 2):
            expected = loops.largest_ratio(x[:, i], x[:, j], tasks or ["all"] * 9, higher=higher)
            assert bounds[i, j] == pytest.approx(expected, rel=1e-6, abs=1e-9), (i, j, higher)
        assert (bounds.diagonal() == 0).all()


def test_the_bound_against_a_constant_is_that_of_the_mean():
    """Fieller's bound by hand: (3.5 + 2.015 sd / root 6) / 2 - 1; none where the mean may be 0."""
    x = np.c_[np.arange(1.0, 7), np.full(6, 2.0), [0, 0, 0, 0, 0, 1.0]]

    assert excess(x)[0, 1] == pytest.approx((3.5 + 2.015048 * 1.870829 / math.sqrt(6)) / 2 - 1)
    assert excess(x)[0, 2] == math.inf
    assert excess(x, higher=True)[1, 0] == pytest.approx(1 - 2 / (3.5 + 1.539019), rel=1e-5)


def test_differences_are_bounded_by_a_paired_t_interval():
    """As scipy has it, for values of any sign; 0 at least."""
    x = skewed(9, 3) - 1.0

    for i, j in itertools.permutations(range(3), 2):
        end = stats.ttest_rel(x[:, i], x[:, j]).confidence_interval(0.9).high
        assert behind(x)[i, j] == pytest.approx(max(end, 0))
    assert behind(x)[2, 0] > behind(x)[1, 0] > 0


@given(panel(prompts=(6, 7), policies=(2, 4)), st.integers(0, 3))
@settings(max_examples=20)
def test_rank_intervals_are_those_of_plain_loops(x, shift):
    """Of tied values, and of policies that are shifted apart so that several steps decide."""
    x = x + shift * np.arange(x.shape[1])

    for tasks in (None, TWO_TASKS[: len(x)]):
        first, last = rank_intervals(x, tasks)
        assert (first.tolist(), last.tolist()) == loops.ranks(x, tasks)


def test_ranks_are_decided_in_steps():
    """A pair that the first step leaves open is decided once larger ones no longer count."""
    rng = np.random.default_rng(1)
    found = 0
    for _ in range(40):
        x = rng.normal([0, 1.2, 6], size=(8, 3))
        assert tuple(each.tolist() for each in rank_intervals(x)) == loops.ranks(x)
        found += (rank_intervals(x)[0] == [1, 2, 3]).all()
    assert 0 < found < 40


@pytest.mark.parametrize("rivals", [1, 5])
@pytest.mark.parametrize("gaps", [[1.0, 3, 2, 5, -1, 2], [0.1, -0.1, 0.3, 0, 0.1, -0.2]])
def test_prompts_needed_are_those_of_the_formula(gaps, rivals):
    """With the effect as measured, and 1.28 standard errors to each side."""
    quantile = NormalDist().inv_cdf
    e, level = fmean(gaps) / stdev(gaps), quantile(1 - 0.04 / rivals)
    half = quantile(0.9) * math.sqrt(1 / 6 + e**2 / 12)

    def count(g):
        return max(6, ((level + quantile(0.8)) / g) ** 2 + level**2 / 2) if g > 0 else math.inf

    prompts = needed(np.ones(6), 1 + np.array(gaps), rivals)

    assert prompts == pytest.approx((count(e), count(e + half), count(e - half)))
    assert prompts[1] <= prompts[0] <= prompts[2]


@given(panel(prompts=(5, 7), policies=(3, 4)))
@settings(max_examples=20)
def test_claims_have_the_p_value_of_plain_loops(x):
    """The L - r + 1 cells of the largest p-values, by every flip."""
    gaps = x - 0.65
    flips = loops.flips_of(len(x))
    cells = [
        [loops.sum_of(of, [0.0] * len(of), flip) or 0.0 for flip in flips] for of in gaps.T.tolist()
    ]
    cells = [[sum(y < x - 1e-9 for y in each) for x in each] for each in cells]  # 1 - p, in flips
    p = []
    for r in range(1, len(cells) + 1):
        weakest = sorted(cells, key=lambda each: each[0])[: len(cells) - r + 1]
        tops = [max(each[s] for each in weakest) for s in range(len(flips))]
        p.append(fmean(top >= tops[0] - 1e-9 for top in tops))

    measured = [at_least(gaps, r) for r in range(1, len(cells) + 1)]

    if len({round(each[0], 9) for each in cells}) == len(cells):  # of equal ones the first counts
        assert measured == pytest.approx(p)


def test_claims_by_hand():
    """Better on all of six prompts in each cell: 1/64; in all but one cell: that cell's p-value."""
    gaps = np.c_[np.ones(6), np.arange(1.0, 7), THREE_OF_64, np.zeros(6)]

    assert at_least(gaps[:, :2], 2) == 1 / 64
    assert at_least(gaps[:, :3], 3) == 3 / 64
    assert at_least(gaps[:, :3], 2) < 3 / 64
    assert at_least(gaps, 4) == 1  # a cell without differences
    assert at_least(-gaps[:, :2], 1) == 1


@given(panel(prompts=(6, 7), policies=(2, 3)))
@settings(max_examples=8)
def test_one_best_in_every_task_is_that_of_plain_loops(x):
    """Tasks of unequal sizes, of which the smallest p-value counts."""
    assert one_best(x, TWO_TASKS[: len(x)]) == pytest.approx(
        loops.p_of_one_best(x, TWO_TASKS[: len(x)].tolist())
    )


def opposite(prompts, factor=4.0, seed=0):
    """Values of two tasks with opposite winners, and the tasks."""
    x, tasks = skewed(2 * prompts, 4, seed, step=0.05), np.repeat(["a", "b"], prompts)
    x[:prompts, 0] /= factor
    x[prompts:, 1] /= factor
    return x, tasks


def test_opposite_winners_have_no_common_best():
    """One winner has; tasks that differ in scale alone do not interact."""
    x, tasks = opposite(12)

    assert one_best(x, tasks).max() <= 0.05 >= interaction(x, tasks)
    x[12:, [0, 1]] = x[12:, [1, 0]]
    assert one_best(x, tasks)[0] > 0.5
    assert interaction(x, tasks) > 0.05
    assert interaction(np.where(tasks[:, None] == "a", 100 * x, x), tasks) == interaction(x, tasks)


@pytest.mark.parametrize("seed", [1, 4, 13])
def test_interaction_is_a_permutation_test(seed):
    """Within four standard errors of 999 draws of the share of all 420 labellings.

    Tasks of unequal sizes, and a policy whose ratios vary more than those of others.
    """
    x, tasks = skewed(8, 3, seed), "aabbcccc"
    x[:, 2] *= np.exp(np.random.default_rng(seed + 50).normal(size=8))
    logs = [[math.log(v) for v in row] for row in x.tolist()]
    centred = [[v - fmean(row) for v in row] for row in logs]
    of_policies = [[(v - fmean(of)) / pstdev(of) for v in of] for of in zip(*centred, strict=True)]

    def size(labels):
        total = 0.0
        for task, of in itertools.product("abc", of_policies):
            part = [v for v, label in zip(of, labels, strict=True) if label == task]
            total += len(part) * fmean(part) ** 2
        return total

    sizes = [size(labels) for labels in {*itertools.permutations(tasks)}]
    exact = fmean(each >= size(tasks) - 1e-9 for each in sizes)

    error = math.sqrt(exact * (1 - exact) / 999)
    assert len(sizes) == 420
    assert interaction(x, np.array(list(tasks))) == pytest.approx(exact, abs=4 * error)


def test_zeros_count_as_the_smallest_value_above_0_in_any_unit():
    """Values of percent and of shares interact alike; all zeros do not."""
    x, tasks = opposite(6, factor=1.3)
    x[[0, 7], [2, 3]] = 0
    least = np.where(x > 0, x, x[x > 0].min())

    assert interaction(x, tasks) == interaction(least, tasks)
    assert interaction(1000 * x, tasks) == pytest.approx(interaction(x, tasks), abs=0.002)
    assert interaction(0 * x, tasks) == 1


def test_rank_correlations_are_spearmans_of_means():
    """The interval is that of a plain loop which draws prompts and policies, and shifts it."""
    x, y = skewed(12, 9, 4, 0.4), skewed(12, 9, 5, 0.4)
    y[:, :4] = y[:, 3::-1]
    rng = np.random.default_rng(5)
    both, noisy = [], []
    for _ in range(600):
        prompts, policies = rng.integers(0, 12, 12), rng.integers(0, 9, 9)
        a, b = x[prompts].mean(0), y[prompts].mean(0)
        noisy.append(math.atanh(min(stats.spearmanr(a, b).statistic, 0.999)))
        both.append(math.atanh(min(stats.spearmanr(a[policies], b[policies]).statistic, 0.999)))
    r = stats.spearmanr(x.mean(0), y.mean(0)).statistic
    ends = np.quantile(both, [0.025, 0.975]) + math.atanh(r) - np.median(noisy)

    found = rank_correlation(x, y)

    assert found[0] == pytest.approx(r)
    assert np.arctanh(found[1:]) == pytest.approx(ends, abs=0.1)
    assert found == rank_correlation(x, y)
    assert found[1] < r < found[2]
    assert rank_correlation(x, 3 * x)[1] > 0.9  # the same prompts are drawn of both
    for few in (x[:, :7], x[:11], skewed(12, 9, 4, 0.01), np.hstack([x, x * 1.01])):
        assert np.isnan(rank_correlation(few, few)[1:]).all()
    assert rank_correlation(x, -x)[0] == pytest.approx(-1)


def test_reliability_is_the_share_of_variance_between_policies():
    """By a plain loop; near 1 for policies far apart, low for equal ones."""
    x = skewed(12, 8)
    centred = [[v - fmean(row) for v in row] for row in x.tolist()]
    noise = fmean(variance(of) / 12 for of in zip(*centred, strict=True))

    assert reliability(x) == pytest.approx(1 - noise / variance(x.mean(0).tolist()))
    assert reliability(x) > 0.8 > reliability(skewed(12, 8, step=0.0))


def test_levels_are_those_of_the_definitions():
    """5 % in all, of which the screen costs 1 %; 80 % of power; flips and ties as documented."""
    assert (significance.ALPHA, significance.SCREEN, significance.POWER) == (0.05, 0.01, 0.8)
