"""docs/leaderboard.py: the page follows from one file, whose values are those of the studies."""

import re

import numpy as np
import polars as pl
import pytest

import kvsim
import leaderboard
import leaderboard_page
import leaderboard_rows
import leaderboard_site
from claims.plan import PLANS
from claims.statistics import read_values
from kvsim.analysis.summaries import per_prompt
from leaderboard_rows import BOARDS, DOCS, VALUES
from workloads import KL

pytestmark = pytest.mark.deep


@pytest.fixture(scope="module")
def values():
    """The file of the page."""
    return pl.read_parquet(VALUES)


def test_the_page_follows_from_the_file(monkeypatch):
    """Tables, sentences and the spreadsheet."""
    monkeypatch.setattr(leaderboard_page, "picture", lambda *_: None)

    for path, text in leaderboard_page.pages().items():
        assert path.read_text("utf-8") == text


@pytest.mark.parametrize("name", [x.name for x in BOARDS if x.name in PLANS])
def test_values_are_those_of_the_study(name, values):
    """Each policy has the KL of each prompt that claims are tested on."""
    plan = PLANS[name]
    study = read_values(DOCS / plan.values, plan)
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
    comparison = leaderboard_rows.compared(leaderboard_rows.table("smollm2"))

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


@pytest.mark.parametrize("policies", [["tova"], ["test_leaderboard_policy:newest"]])
def test_policies_are_measured_on_frozen_prompts(policies, tmp_path, capsys, monkeypatch):
    """The smallest form of the command: values are those of a sweep; other prompts are refused."""
    (tmp_path / "test_leaderboard_policy.py").write_text(NEWEST)
    monkeypatch.syspath_prepend(tmp_path)
    values, folder = tmp_path / "values.parquet", tmp_path / "traces"
    common = ["--model=tiny", "--workloads=needles", "--prompts=1"]
    common += [f"--traces={folder}", f"--values={values}", "--policy"]

    leaderboard.main([*common, "full", "random", *policies, "--add"])
    leaderboard.main([*common, *policies])

    printed = capsys.readouterr().out.splitlines()
    (path,) = folder.glob("tiny-needles-00*.zarr")
    run = kvsim.sweep(
        traces=path, policies=policies, budgets=["25%", "50%"], interval=32, judge=True,
        metrics=[KL, "bytes_held"],
    )  # fmt: skip
    expected = per_prompt(run.table)
    stored = pl.read_parquet(values).filter(policy=policies[0])
    for budget in ("25%", "50%"):
        for metric in (KL, "bytes_held"):
            (value,) = stored.filter(metric=metric, share=budget)["value"]
            (known,) = expected.filter(metric=metric, requested=budget)["value"]
            assert value == pytest.approx(known, rel=1e-4)
        shown = [line for line in printed if line.startswith(f"tiny-needles: {policies[0]} ")]
        of_budget = [line for line in shown if f" at {budget}, 1 prompt: KL " in line]
        assert len(of_budget) == 2
        assert all(re.search(r"rank \d of 2.*; next to random \(", line) for line in of_budget)
    pl.read_parquet(values).with_columns(prompt=pl.lit("another")).write_parquet(values)
    with pytest.raises(SystemExit, match="prompt 0 of needles has digest"):
        leaderboard.main([*common, "tova"])


NEWEST = """
from kvsim.core.policy import Policy, Scorer

class Newest(Scorer):
    scale = "signed"

    def score(self, view):
        return view.keys[..., 0]

def newest():
    return Policy("newest", Newest())
"""


def test_prompts_of_a_board_are_equal_for_all_policies(values):
    """Boards of frozen workloads have the same prompts under every policy, each with its digest."""
    frozen = values.drop_nulls("number").filter(metric=KL)
    assert {"smollm2-answers", "smollm2-needles"} <= {*frozen["board"]}
    for _, rows in frozen.group_by("board"):
        per_policy = rows.group_by("policy").agg(pl.col("prompt").unique().sort())
        assert per_policy["prompt"].n_unique() == 1
        assert per_policy["prompt"].list.len().min() >= 12
        assert rows.select("number", "prompt").unique().height == rows["number"].n_unique()


def test_nothing_that_holds_as_few_bytes_beats_the_front():
    """By pairs, on the rows of a board."""
    rows = leaderboard_rows.rows_of(leaderboard_rows.table("smollm2-needles"))
    usable = [x for x in rows if "bound" not in x["class"] and x["class"] != "no budget"]
    front = leaderboard_rows.on_front(rows)

    for row in usable:
        others = (x for x in usable if x is not row and x["held"] <= row["held"])
        beaten = any(x["mean"] < row["mean"] for x in others)
        assert beaten != any(row is x for x in front), row["policy"]


def test_rows_of_boards_on_the_site():
    """Each row of the spreadsheet is a row of the table, which words filter."""
    page = leaderboard_site.with_rows("# Leaderboard")

    rows = leaderboard_site.ROWS.read_text("utf-8").splitlines()
    assert page.count("<tr><td>") == len(rows) - 1
    assert page.count("<th>") == rows[0].count(",") + 1
