"""docs/validity.py: the correlations of the page on fidelity, from the values in the repository."""

from pathlib import Path
from statistics import fmean, variance

import numpy as np
import polars as pl
import pytest
import validity
from scipy import stats
from scipy.stats import spearmanr

from claims.answers import pairs
from claims.rank_correlation import rank_correlation, reliability
from kvsim.analysis.evidence import ANSWERS, WORTH


@pytest.mark.parametrize("model", validity.STUDIES)
def test_cells_are_the_correlations_of_the_stored_values(model):
    """Between policies, from the rows with scipy; `random` is left out."""
    rows = pl.read_parquet(validity.RESULTS).filter(
        pl.col("policy").cast(pl.String) != "random", pl.col("model").cast(pl.String) == model
    )
    rows = rows.with_columns(pl.col(pl.Categorical).cast(pl.String))
    budget = validity.STUDIES[model][1][1]
    kl = rows.filter(budget=budget, metric="response_kl").pivot(
        on="fidelity", index=["prompt", "policy"], values="value"
    )
    means = kl.group_by("policy").agg(pl.col("judged", "closed").mean())
    judged, live = (
        validity.matrix(model, budget, "response_kl", way) for way in ("judged", "closed")
    )

    between, low, high = rank_correlation(judged, live)

    assert between == pytest.approx(spearmanr(means["judged"], means["closed"]).statistic)
    # the means of the other model are not sure enough
    assert low <= between <= high if model == "tiny" else np.isnan([low, high]).all()
    assert validity.cell(model, budget, "response_kl", "judged").startswith(f"{between:.2f}")
    assert judged.shape == (30, len(validity.POLICIES) - 1)


@pytest.mark.parametrize("metric", WORTH)
def test_what_verdicts_say_of_their_number_is_what_the_page_shows(metric):
    """The range of the correlations between policies, over both models and all budgets."""
    way = "judged" if metric == "response_kl" else "open"
    found = [
        rank_correlation(
            validity.matrix(model, budget, metric, way),
            validity.matrix(model, budget, "response_kl", "closed"),
        )[0]
        for model, (_, budgets, _) in validity.STUDIES.items()
        for budget in budgets
    ]
    assert WORTH[metric] == (round(min(found), 2), round(max(found), 2))


def test_more_is_better_turns_the_sign():
    """Retained mass and live KL order alike where more mass goes with less divergence."""
    mass = validity.matrix("tiny", 96, "retained_mass", "open")
    assert (mass <= 0).all()


def test_answers_are_of_every_policy_prompt_and_budget():
    """18 prompts; the page has the shares of pairs and the correlations of these values."""
    rows = pl.read_parquet(validity.ANSWERS)
    cells = rows.select("digest", "policy", "budget")

    assert cells.n_unique() == rows.height == 18 * len(validity.ANSWERED) * 2
    of = rows.filter(budget=128, policy="snapkv").select("kl", "wrong").to_numpy()
    lost, kept = (of[of[:, 1] == wrong, 0] for wrong in (1, 0))
    share = pairs(of[:, :1], of[:, 1:].astype(bool)).mean()
    assert share == pytest.approx((lost[:, None] > kept).mean())
    between = [float(line.split("|")[5].split()[0]) for line in validity.answers().split("\n")[2:]]
    assert (min(between), max(between)) == ANSWERS
    assert validity.answers() in Path(validity.__file__).with_name("fidelity.md").read_text("utf-8")


def skewed(prompts=24, policies=6, seed=0, step=0.2):
    """Values [prompt, policy] of skewed prompts, each policy worse than the one before."""
    rng = np.random.default_rng(seed)
    prompt = rng.normal(size=(prompts, 1))
    return np.exp(prompt + 0.3 * rng.normal(size=(prompts, policies)) + step * np.arange(policies))


def test_rank_correlations_are_spearmans_of_means():
    """With scipy; the interval holds it, is the same again, and needs reliable rankings."""
    x, y = skewed(12, 9, 4, 0.4), skewed(12, 9, 5, 0.4)
    y[:, :4] = y[:, 3::-1]
    r = stats.spearmanr(x.mean(0), y.mean(0)).statistic

    found = rank_correlation(x, y)

    assert found[0] == pytest.approx(r)
    assert found == rank_correlation(x, y)
    assert found[1] < r < found[2]
    assert rank_correlation(x, 3 * x)[1] > 0.9  # the same prompts are drawn of both
    for few in (x[:, :7], x[:11], skewed(12, 9, 4, 0.01), np.hstack([x, x * 1.01])):
        assert np.isnan(rank_correlation(few, few)[1:]).all()
    assert rank_correlation(x, -x)[0] == pytest.approx(-1)


def test_ends_of_an_interval_do_not_depend_on_the_draws():
    """Twice as many other draws give the same ends within 0.02."""
    x = validity.matrix("tiny", 96, "output_error", "open")
    y = validity.matrix("tiny", 96, "response_kl", "closed")
    rng = np.random.default_rng(8)
    prompts, policies = rng.integers(0, 30, (20_000, 30)), rng.integers(0, 16, (20_000, 16))
    a, b = (np.stack([of[:, k][prompts].mean(1) for k in range(16)], axis=1) for of in (x, y))

    def correlation(*sides):
        ranks = [stats.rankdata(each, axis=1) - 8.5 for each in sides]
        product, *squares = ((u * v).sum(1) for u, v in (ranks, ranks[:1] * 2, ranks[1:] * 2))
        return np.arctanh((product / np.sqrt(squares[0] * squares[1])).clip(-0.999, 0.999))

    r, low, high = rank_correlation(x, y)
    drawn = correlation(*(np.take_along_axis(each, policies, 1) for each in (a, b)))
    ends = np.quantile(drawn, [0.025, 0.975]) + np.arctanh(r) - np.median(correlation(a, b))
    assert [low, high] == pytest.approx(np.tanh(ends), abs=0.02)


def test_reliability_is_the_share_of_variance_between_policies():
    """By a plain loop; near 1 for policies far apart, low for equal ones."""
    x = skewed(12, 8)
    centred = [[v - fmean(row) for v in row] for row in x.tolist()]
    noise = fmean(variance(of) / 12 for of in zip(*centred, strict=True))

    assert reliability(x) == pytest.approx(1 - noise / variance(x.mean(0).tolist()))
    assert reliability(np.ones((12, 3))) == 0.0
    assert reliability(x) > 0.8 > reliability(skewed(12, 8, step=0.0))
