"""The study of scores and protection: the page follows from its values, and its tests decide."""

import math
from itertools import product

import numpy as np
import polars as pl
import pytest
import scipy.stats
import scoring
import scoring_page as page
from scoring_plan import CLAIMS, ENDS, NOTHING, PROMPT, SEEDS, SMALLEST, WORKLOADS


def values(workload, prompts=24, **factors):
    """Values of a workload: noise of 2 % around 1, times the factor of `POLICY_PROTECTION`."""
    rng = np.random.default_rng(0)
    rows = []
    cells = product(range(prompts), workload.protections, workload.shares, workload.policies)
    for number, protection, share, policy in cells:
        factor = factors.get(f"{policy}_{protection}", factors.get(policy, 1.0))
        rows.append(
            {
                "workload": workload.name,
                "number": number,
                "digest": f"{number:02}",
                "protection": protection,
                "share": share,
                "policy": policy,
                "seed": 0,
                "kl": factor * rng.normal(1, 0.02),
                "prompt_tokens": 100,
                "tokens": 200,
                "seconds": 1.0,
            }
        )
    return page.Values(workload, pl.DataFrame(rows))


def test_the_page_follows_from_the_stored_values():
    """All cells of each measured prompt have a value; every number of the page is theirs."""
    stored = scoring.values(scoring.RESULTS)
    text = scoring.PAGE.read_text("utf-8")

    assert page.fill(text, page.parts(stored)) == text
    for (name, _), rows in stored.group_by("workload", "number"):
        of = WORKLOADS[name]
        cells = len(of.protections) * len(of.shares)
        assert len(rows) == cells * (len(of.policies) - 1 + len(of.seeds))
        assert rows["digest"].n_unique() == 1
    assert stored["kl"].is_finite().all()
    assert stored["kl"].min() >= 0
    assert scoring.RESULTS.stat().st_size < 1_000_000


def test_bounds_of_a_ratio_are_those_of_fieller():
    """Every ratio within the bounds is one that a paired t-test at 5 % does not reject."""
    rng = np.random.default_rng(1)
    y = rng.lognormal(0, 0.5, 24)
    for factor in (0.3, 1.0, 4.0):
        x = factor * y * rng.lognormal(0, 0.2, 24)
        mean, low, high = page.ratio(x, y)
        assert low < mean < high
        for bound, side in ((high, "less"), (low, "greater")):
            p = scipy.stats.ttest_1samp(x - bound * y, 0, alternative=side).pvalue
            assert p == pytest.approx(0.05, rel=1e-6)


def test_the_gain_of_scorers_is_a_geometric_mean():
    """Of random sets over scorers, for each prompt, by a loop; 1 where all are equal."""
    of = values(WORKLOADS["answers"], random=3.0, h2o=2.0, tova=0.5)
    shown = page.gain(of, NOTHING)
    for i in range(24):
        logs = [math.log(of.kl(NOTHING, x)[i, 1]) for x in of.workload.scorers]
        expected = math.log(of.kl(NOTHING, "random")[i, 1]) - sum(logs) / len(logs)
        assert shown[i] == pytest.approx(expected)
    assert page.gain(values(WORKLOADS["answers"]), NOTHING) == pytest.approx(0, abs=0.05)
    text = page.opening({"answers": of})
    assert text.startswith("On average scorers are better than random sets on all workloads with")
    assert "* Nothing protected: 3 times (answers, SmolLM2); 12 of 12 better" in text


def test_a_scorer_is_better_worse_or_equivalent_by_all_budgets():
    """Equality is shown by bounds, never by a difference that was not found."""
    of = values(WORKLOADS["answers"], h2o=0.8, tova=1.3, lagkv_nothing=1.08, knorm_nothing=1.11)
    shown = {name: page.against_random(of, NOTHING, name) for name in of.workload.scorers}

    assert shown.pop("h2o") == page.BETTER
    assert shown.pop("tova") == shown.pop("knorm") == page.WORSE
    assert {*shown.values()} == {page.SAME}
    noise = np.random.default_rng(1).lognormal(0, 0.5, len(of.rows))
    noisy = page.Values(of.workload, of.rows.with_columns(pl.col("kl") * noise))
    assert page.against_random(noisy, NOTHING, "capkv") == page.OPEN


FOUND = {
    "R1": ({}, {"rkv_prompt": 0.7}),
    "R2": ({"random_nothing": 3.0}, {"random_prompt": 3.0, "random_nothing": 2.0}),
    "R3": ({}, {"rkv_prompt": 0.7}),
    "R4": ({"rkv_nothing": 0.5}, {"rkv_nothing": 2.0}),
    "P1": (dict.fromkeys(("random_ends", "lru_ends", "h2o_ends", "snapkv_ends"), 0.5), {}),
    "P2": ({}, {"h2o_ends": 0.5}),
    "P3": ({"lru_nothing": 3.0}, {"h2o_ends": 0.5}),
    "P4": ({"lru_ends": 2.0}, {"lru_ends": 0.5}),
    "P5": ({"adakv+snapkv_ends": 0.8}, {"adakv+snapkv_ends": 1.2}),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_holds_fails_or_is_open(claim):
    """By values that are made so; of equal ones only claims of equality hold."""
    test, fits = page.TESTS[claim]
    of = next(each for each in WORKLOADS.values() if fits(each))
    holding, failing = FOUND[claim]
    if claim == "P1":
        holding, failing = holding | {"adakv+snapkv_ends": 0.5}, {"h2o_ends": 2.0}

    assert test(values(of, **holding))[0] == page.HOLDS
    assert test(values(of, **failing))[0] == page.FAILS
    equal = test(values(of))[0]
    assert equal == (page.HOLDS if claim in ("R1", "R3", "P2") else page.OPEN)


def test_a_page_has_all_parts_of_what_is_measured(tmp_path):
    """Of two workloads, one with too few prompts for a test."""
    some = [values(WORKLOADS["answers"], h2o=0.8), values(WORKLOADS["turns"], prompts=3)]
    stored = pl.concat([each.rows for each in some])
    page.write(stored, scoring.PAGE, tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text("utf-8")

    assert "| answers, SmolLM2 | 24 | 200 to 200 | " + " | ".join(["1, 0, 11, 0"] * 3) in text
    assert "| turns, SmolLM2 |" not in text
    assert "| `h2o` | 1/1 | 1/1 | 1/1 |" in text
    assert "Measured so far: 1 of 9 workloads" in text
    assert (tmp_path / "figures" / "scoring.png").stat().st_size < 50_000


@pytest.mark.deep
def test_a_page_of_all_workloads_is_short():
    """Every claim has a result on each workload that it is about."""
    parts = page.parts(pl.concat([values(each).rows for each in WORKLOADS.values()]))

    assert "Measured so far" not in parts["opening"]
    assert parts["workloads"].count(" | 24 | ") == len(WORKLOADS)
    assert "not measured" not in parts["claims"]
    assert sum(len(text.split()) for text in parts.values()) < 1_300


@pytest.mark.deep
def test_the_smallest_version_resumes(tmp_path):
    """One prompt of tiny: a piece, values, a page; what is there is not measured again."""
    arguments = ["--smallest", f"--pieces={tmp_path / 'pieces'}", f"--out={tmp_path / 'page.md'}"]
    scoring.main(arguments)
    stored = scoring.values(tmp_path / scoring.RESULTS.name)
    (piece,) = (tmp_path / "pieces").glob("*.parquet")

    assert len(stored) == 3 * len(SMALLEST.policies)
    assert {*stored["protection"]} == {NOTHING, ENDS, PROMPT}
    assert len(SEEDS) > len(SMALLEST.seeds) == 1
    piece.unlink()
    scoring.main(arguments)
    assert not piece.exists()
    assert scoring.values(tmp_path / scoring.RESULTS.name).equals(stored)
