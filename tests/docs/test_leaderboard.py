"""docs/leaderboard.py: the page follows from one file, whose values are those of the studies."""

import numpy as np
import polars as pl
import pytest

import leaderboard
from claims.plan import PLANS
from claims.statistics import read_values
from leaderboard import BOARDS, KL, PAGE, VALUES

pytestmark = pytest.mark.deep


@pytest.fixture(scope="module")
def values():
    """The file of the page."""
    return pl.read_parquet(VALUES)


def test_the_page_follows_from_the_file(tmp_path, monkeypatch):
    """Tables, sentences and figures."""
    monkeypatch.setattr(leaderboard, "picture", lambda *_: None)

    assert leaderboard.page() == PAGE.read_text("utf-8")


@pytest.mark.parametrize("name", [board.plan for board in BOARDS])
def test_values_are_those_of_the_study(name, values):
    """Each policy has the KL of each prompt that claims are tested on."""
    plan = PLANS[name]
    study = read_values(leaderboard.DOCS / plan.values, plan)
    of_board = values.filter(board=name, metric=KL)

    assert of_board.select("trace", "policy", "budget").is_unique().all()
    for (policy, budget), rows in of_board.group_by("policy", "budget"):
        found = study.of(policy, budget, KL)
        assert np.sort(found[~np.isnan(found)]) == pytest.approx(rows["value"].sort().to_numpy())


def test_a_cell_is_the_mean_over_equal_prompts(values):
    """By loops: SmolLM2's documents on the prompts that all budgets have, each task the same."""
    rows = values.filter(board="smollm2", metric=KL)
    tasks, kl = {}, {}
    for row in rows.iter_rows(named=True):
        kl.setdefault(row["trace"], {}).setdefault(row["budget"], {})[row["policy"]] = row["value"]
        tasks[row["trace"]] = row["task"]
    both = [trace for trace, budgets in kl.items() if {128, 256} <= {*budgets}]
    comparison = leaderboard.compared(leaderboard.table("smollm2"))

    assert len(both) == 42
    for policy in ("dropkv", "snapkv", "random", "oracle", "kvzip"):
        for budget in (128, 256):
            of_task = {}
            for trace in both:
                of_task.setdefault(tasks[trace], []).append(kl[trace][budget][policy])
            mean = np.mean([np.mean(each) for each in of_task.values()])
            found = comparison.overall.filter(policy=policy, requested=str(budget))
            assert found["mean"].item() == pytest.approx(mean), policy
            assert found["n"].item() == 42
            assert found["rank"].is_null().item() == (policy in ("oracle", "kvzip"))


def test_a_policy_is_measured_on_the_prompts_of_a_board(tmp_path, capsys):
    """That of the catalogue gets the mean of its stored values, but for another processor."""
    board = next(board for board in BOARDS if board.plan == "tiny")

    leaderboard.stand(board, "tova", 2, tmp_path, None)

    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tova at ")]
    stored = leaderboard.table("tiny").filter(policy="tova", metric=KL)
    stored = stored.filter(pl.col("prompt").str.contains("-0[12]-"))
    for line, (_, rows) in zip(
        lines, stored.sort("budget").group_by("budget", maintain_order=True), strict=True
    ):
        assert float(line.split()[3].strip("[],")) == pytest.approx(rows["value"].mean(), rel=0.05)


def test_another_prompt_is_refused(tmp_path, monkeypatch):
    """A board of other weights or prompts says so before anything is recorded."""
    monkeypatch.setattr(leaderboard, "key", lambda *_: "another")

    with pytest.raises(SystemExit, match="prompt 1"):
        leaderboard.stand(BOARDS[-1], "tova", 1, tmp_path, None)
    assert list(tmp_path.iterdir()) == []
