"""The verdict's statistics, against plain loops over their definitions, closed forms, invariants.

The loops try every choice of signs, pair by pair, in Python's floats.
"""

import itertools
import math
from statistics import NormalDist, fmean, pstdev, stdev

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from kvsim.analysis.significance import (
    at_least,
    behind,
    best_set,
    excess,
    interaction,
    needed,
    one_best,
    rank_intervals,
)
from tests.reference import significance as loops

CUT = 0.04
TWO_TASKS = np.array(["a", "b", "a", "b", "b", "a", "b"])


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


@pytest.mark.parametrize("tasks", [None, ["a", "b", "a", "b", "b", "a", "b", "a", "a"]])
@pytest.mark.parametrize("seed", range(2))
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
