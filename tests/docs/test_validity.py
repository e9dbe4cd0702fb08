"""docs/validity.py: the correlations of the page on fidelity, from the values in the repository."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import validity
from scipy.stats import spearmanr

from kvsim.analysis.evidence import ANSWERS, WORTH
from kvsim.analysis.significance import rank_correlation
from results_page.answers import pairs


@pytest.mark.parametrize("model", validity.STUDIES)
def test_cells_are_the_correlations_of_the_stored_values(model):
    """Between policies and within prompts, from the rows with scipy; `random` is left out."""
    rows = pl.read_parquet(validity.RESULTS).filter(
        pl.col("policy").cast(pl.String) != "random", pl.col("model").cast(pl.String) == model
    )
    rows = rows.with_columns(pl.col(pl.Categorical).cast(pl.String))
    budget = validity.STUDIES[model][1][1]
    kl = rows.filter(budget=budget, metric="response_kl").pivot(
        on="fidelity", index=["prompt", "policy"], values="value"
    )
    means = kl.group_by("policy").agg(pl.col("judged", "closed").mean())
    within = [spearmanr(of["judged"], of["closed"]).statistic for _, of in kl.group_by("prompt")]
    judged, live = (
        validity.matrix(model, budget, "response_kl", way) for way in ("judged", "closed")
    )

    between, low, high = rank_correlation(judged, live)

    assert between == pytest.approx(spearmanr(means["judged"], means["closed"]).statistic)
    # the means of the other model are not sure enough
    assert low <= between <= high if model == "tiny" else np.isnan([low, high]).all()
    assert validity.cell(judged, live).endswith(f", {np.mean(within):.2f}")
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
