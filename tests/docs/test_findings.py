"""docs/findings.md: each number follows from a stored file."""

import json
import re

import numpy as np
import polars as pl
import pytest
import scoring
import scoring_page
from scipy import stats
from scoring_plan import NOTHING, PROMPT

import leaderboard_page
import leaderboard_rows
from answer import wilson
from kvsim.analysis.evidence import ANSWERS, WORTH
from kvsim.studies.claims import CLAIMS
from results import DOCS, committed

pytestmark = pytest.mark.deep

TEXT = {
    int(line.partition(".")[0]): line
    for line in (DOCS / "findings.md").read_text("utf-8").splitlines()
    if re.match(r"\d+\. ", line)
}


def percent(right, n):
    """Wilson's interval as the page has it."""
    low, high = (f"{100 * x:.0f}" for x in wilson(right, n))
    return f"[{low}, {high}]"


def test_answers_by_workload():
    """Of the live runs and of the needles that judged rows keep."""
    live = pl.DataFrame(map(json.loads, (DOCS / "qwen-live.jsonl").read_text().splitlines()))
    live = live.filter(budget=128, model="qwen2.5-coder-1.5b-instruct")
    right = dict(live.group_by("policy").agg(pl.col("right").sum()).iter_rows())
    needles = leaderboard_rows.table("qwen-1.5b-8k").filter(metric="answer_kept", budget=512)
    kept = dict(needles.group_by("policy").agg(pl.col("value").sum()).iter_rows())

    assert max(right, key=right.get) == "expected_attention"
    assert len(right) == 8
    assert (
        f"{right['expected_attention']} of 48 questions right (83 % {percent(40, 48)})" in TEXT[1]
    )
    assert (kept["expected_attention"], kept["snapkv"], needles["trace"].n_unique()) == (0, 6, 6)
    assert f"({percent(0, 6)} %)" in TEXT[1]
    assert f"({percent(6, 6)} %)" in TEXT[1]


def test_transfer_of_rankings():
    """As on the leaderboard."""
    table = leaderboard_page.transfer()

    cases = (("0.38 [-0.30, 0.86]", 13), ("0.25 [-0.16, 0.57]", 37), ("0.80", 13))
    ends = [x.split("[")[1].split(",") for x in table.splitlines() if "[" in x]
    assert all(float(low) < 0 for low, _ in ends), "no correlation is shown to be positive"
    for text, policies in cases:
        assert f"| {policies} | {text} |" in table
        assert f"{policies} policies" in TEXT[2]
        assert text in TEXT[2]


def test_numbers_of_the_first_page():
    """Of the leaderboard: a transfer, and the needles; `test_ranks_of_random` has ranks."""
    readme = (DOCS.parent / "README.md").read_text("utf-8")
    row = "| Answers, Qwen2.5-Coder-1.5B | Long documents, Qwen2.5-Coder-1.5B | 11 | -0.07 |"
    needles = leaderboard_rows.table("qwen-1.5b-8k").filter(metric="answer_kept", budget=1024)
    kept = dict(needles.group_by("policy").agg(pl.col("value").sum()).iter_rows())

    assert row in leaderboard_page.transfer()
    assert "correlate at -0.07 (no interval)." in readme
    assert "ranks among 14 policies by KL are 3 to 7." in readme
    assert "at 22 %, they are 11 to 14." in readme
    assert (kept["expected_attention"], kept["snapkv"]) == (5, 6)
    assert "loses all of six needles, at 22 % one. SnapKV loses none." in readme
    for low, high in (WORTH["response_kl"], ANSWERS):
        assert f"[{low:.2f} to {high:.2f}](docs/fidelity.md" in readme


def test_ranks_of_random():
    """Of the leaderboard's comparison."""
    for board, budget, ranks, n in (
        ("qwen-1.5b", "128", (3, 7), 40),
        ("qwen-1.5b-8k", "256", (14, 14), 12),
        ("qwen-1.5b-8k", "1024", (11, 14), 12),
    ):
        rows = leaderboard_rows.compared(leaderboard_rows.table(board)).overall
        (row,) = rows.filter(policy="random", requested=budget).to_dicts()
        assert (row["rank_low"], row["rank_high"], row["n"]) == (*ranks, n)
        assert rows.filter(requested=budget)["rank"].max() == 14


def test_scorers_and_protection():
    """Of the stored values of the page on scoring."""
    every = scoring_page.read(scoring.values(scoring.RESULTS))
    answers = [every[name] for name in ("answers", "tiny-answers")]
    nothing = scoring_page.shown(answers[0], NOTHING)
    assert [nothing.count(x) for x in ("better", "worse")] == [9, 0]
    for protection, text in ((NOTHING, "2.9 [2.6, 3.3]"), (PROMPT, "1.6 [1.4, 1.7]")):
        gains = [scoring_page.gain(values, protection) for values in answers]
        means = [gain.mean() for gain in gains]
        low, high = stats.t.interval(0.95, 23, means[0], stats.sem(gains[0]))
        assert "{:.1f} [{:.1f}, {:.1f}]".format(*np.exp([means[0], low, high])) == text
        assert text in TEXT[4]
        assert means[1] == pytest.approx({NOTHING: 0.435, PROMPT: 4.298}[protection], abs=1e-3)
    large, readme = every["1.5b-answers"], (DOCS.parent / "README.md").read_text("utf-8")
    shown = scoring_page.shown(large, NOTHING)
    better = [x for x, y in zip(large.workload.scorers, shown, strict=True) if y == "better"]
    assert better == ["expected_attention"]
    assert f"`{better[0]}` alone of {len(shown)} scorers is better at all budgets and " in TEXT[4]
    assert f" and {shown.count('worse')} are worse" in TEXT[4]
    said = {NOTHING: "under SmolLM2 and {} times under the 1.5B", PROMPT: "protected, 1.6 and {}."}
    for protection, form in ((NOTHING, ".2f"), (PROMPT, ".1f")):
        gain = scoring_page.gain(large, protection)
        ends = gain.mean(), *stats.t.interval(0.95, 23, gain.mean(), stats.sem(gain))
        mean, low, high = (format(x, form) for x in np.exp(ends))
        assert f"{mean} [{low}, {high}] times" in TEXT[4]
        assert said[protection].format(mean) in readme
    x, y = (answers[0].kl(PROMPT, each)[:, 1] for each in ("h2o", scoring_page.RANDOM))
    assert f"({x.mean() / y.mean():.2f} [0.44, 0.66] of the KL" in TEXT[5]
    ends = [x - end * y for end in (0.44, 0.66)]  # whose paired t is that of 2.5 %
    found = [stats.ttest_1samp(end, 0).statistic for end in ends]
    assert found == pytest.approx([stats.t.ppf(0.975, 23), stats.t.ppf(0.025, 23)], rel=0.06)
    assert "9 of 12 scorers are better and none is worse" in TEXT[3]
    named = (("h2o", "0.003"), ("lagkv", "0.009"), ("expected_attention", "0.023"))
    for values, (policy, p) in zip((*answers, large), named, strict=True):
        verdict, detail = scoring_page.TESTS["R1"][0](values)
        assert verdict == scoring_page.FAILS
        assert f"p = {p}, `{policy}`" in detail
        assert f"`{policy}`" in TEXT[5]
        assert f"p = {p}" in TEXT[5]


def test_numbers_that_rank():
    """Of the tables of docs/fidelity.md, which docs/generate.py keeps fresh."""
    page = (DOCS / "fidelity.md").read_text("utf-8").partition("Answers of up to 24 tokens")[0]

    def cells(name):
        found = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
        return [[float(x.split(",")[0].split()[0]) for x in row.split("|")[2:5]] for row in found]

    smollm2, tiny = cells("`output_error`")
    assert {x for row in cells("judged KL") for x in row} == {0.99, 1.0}
    assert f"{min(smollm2):.2f} to {max(smollm2):.2f} on SmolLM2" in TEXT[8]
    *_, row = (line for line in page.splitlines() if line.startswith("| `output_error` |"))
    for cell, value in zip(row.split("|")[2:5], tiny, strict=True):
        assert cell.strip().startswith(f"{value:.2f} [")
        assert cell.strip().rpartition(",")[0] in TEXT[8]
    weighted = [x for row in cells("`weighted_error`") for x in row]
    assert f"{min(weighted):.2f} to {max(weighted):.2f}" in TEXT[8]
    for row in ("0.26 [-0.77, 1.00]", "0.85 [0.20, 1.00]"):
        assert row in page
        assert row in TEXT[7]


def test_claims_of_papers():
    """Counted over the stored values of SmolLM2."""
    results = committed()
    verdicts = [
        claim
        for claims in CLAIMS.values()
        for claim in claims(results["smollm2"].evidence)
        if claim.n
    ]
    counts = [
        sum(c.verdict == x for c in verdicts) for x in ("holds", "does not hold", "not decided")
    ]

    assert (len(verdicts), *counts) == (64, 22, 17, 25)
    for number in (64, *counts):
        assert str(number) in TEXT[9]
    contrary = [
        next(c for c in CLAIMS["AMS, arXiv 2605.23200"](r.evidence) if c.number == "Q1")
        for name, r in results.items()
        if name != "qwen-1.5b-8k"
    ]
    assert [c.verdict for c in contrary] == ["does not hold"] * 3
    assert max(c.n for c in verdicts) == 46
    assert f"of {sum(c.n <= 12 for c in verdicts)} claims at most 12" in TEXT[9]


def test_room_above_policies():
    """Means of the leaderboard on SmolLM2's documents at 128 entries."""
    rows = leaderboard_rows.compared(leaderboard_rows.table("smollm2")).overall.filter(
        requested="128"
    )
    values = {row["policy"]: row for row in rows.to_dicts()}

    assert rows.filter(pl.col("rank") == 1)["policy"].item() == "dropkv"
    for policy, form in (("oracle", ".3f"), ("dropkv", ".2f"), ("kvzip", ".3f")):
        mean, low, high = (f"{values[policy][x]:{form}}" for x in ("mean", "low", "high"))
        assert f"{mean} [{low}, {high}]" in TEXT[10]
        assert values[policy]["n"] == 42
