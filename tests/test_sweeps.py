"""Sweeps: budgets, run folders, failures that keep the rest."""

import json
from dataclasses import dataclass, replace
from typing import ClassVar

import polars as pl
import pytest
import torch

import kvsim
from kvsim.composition import Policy, Protection
from kvsim.errors import BudgetError, MemoryLimitError, OutputError, PolicyError
from kvsim.record import read_records
from kvsim.sweeps import resolve_budget, summarise, sweep


def make_trace(name="a", tokens=80):
    """A small random trace."""
    torch.manual_seed(0)
    return kvsim.Trace.from_arrays(
        torch.randn(2, 4, tokens, 8),
        torch.randn(2, 2, tokens, 8),
        torch.randn(2, 2, tokens, 8),
        prompt_len=30,
        rope=kvsim.Rope.default(8),
        name=name,
    )


@dataclass(frozen=True)
class Broken:
    """A scorer that fails when it is asked."""

    columns: ClassVar[dict[str, float]] = {}
    per_row: ClassVar[bool] = False

    def score(self, view):
        """NaN for everything."""
        return view.pos * torch.nan

    def protection(self, budget):
        """Nothing."""
        return Protection()


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(48, 48), ("64", 64), ("25%", 20), ("33%", 26), ("0.1%", 1), ("100%", 80), (" 10% ", 8)],
)
def test_a_budget_is_entries_or_a_share_of_the_final_length(budget, expected):
    """Shares are rounded down, to one entry at least."""
    assert resolve_budget(budget, 80) == expected


@pytest.mark.parametrize("budget", ["many", "0%", "101%", "-5%", "%", "1.5"])
def test_a_budget_that_is_neither_is_refused(budget):
    """The message says what is expected."""
    with pytest.raises(BudgetError, match="expected"):
        resolve_budget(budget, 80)


def test_a_sweep_measures_every_policy_at_every_budget_of_every_trace():
    """Traces, policies and budgets cross; a share is one row of the summary, not one per trace."""
    traces = [make_trace("a"), make_trace("b", tokens=60)]
    policies = [kvsim.policy("tova"), kvsim.policy("random")]

    run = sweep(traces, policies, [16, "25%"], interval=8)

    assert len(run.records) == 8
    assert run.failures == ()
    cells = run.table.filter(pl.col("metric") == "output_error")
    assert cells.select("trace", "policy", "budget").n_unique() == 8
    summary = summarise(run.table)
    assert summary.select("policy", "budget", "share").rows() == [
        ("tova", 16, None),
        ("tova", 18, "25%"),  # 20 entries of one trace, 15 of the other
        ("random", 16, None),
        ("random", 18, "25%"),
    ]


def test_two_policies_of_one_name_are_refused():
    """Their results could not be told apart; what a policy protects is part of what it is."""
    first = kvsim.policy("tova")
    second = replace(first, protect=Protection(sink=4))

    with pytest.raises(PolicyError, match="two different policies are called 'tova'"):
        sweep([make_trace()], [first, second], [16])
    run = sweep([make_trace()], [second], [16])
    assert run.parameters["policies"]["tova"]["protect"] == {"sink": 4, "recent": 0}


def test_a_summary_is_the_mean_over_heads_and_layers_within_traces():
    """Means of means, so that a trace with more heads or regions does not count more."""
    trace = make_trace()
    run = sweep([trace], [kvsim.policy("tova")], [16], interval=8)

    summary = summarise(run.table).row(0, named=True)

    error = run.table.filter(pl.col("metric") == "output_error")["value"].mean()
    assert summary["output_error"] == pytest.approx(error)
    assert summary["iou_chance"] == pytest.approx(16 / (16 + 2 * 8))


def test_a_run_folder_holds_parameters_records_and_results(tmp_path):
    """run.json, records.zarr and results.parquet, and nothing half-written beside them."""
    run = sweep([make_trace()], [kvsim.policy("snapkv", window=4)], [16])

    folder = run.save(tmp_path / "runs" / "x")

    assert sorted(p.name for p in folder.parent.iterdir()) == ["x"]
    assert sorted(p.name for p in folder.iterdir()) == [
        "records.zarr",
        "results.parquet",
        "run.json",
    ]
    assert pl.read_parquet(folder / "results.parquet").equals(run.table)
    (record,) = read_records(folder / "records.zarr")
    assert (record.evicted_at == run.records[0].evicted_at).all()
    stored = json.loads((folder / "run.json").read_text())
    assert stored["policies"] == {"snapkv": {"window": 4, "pool": "max", "pool_kernel": 7}}
    assert stored["versions"]["kvsim"] == kvsim.__version__


def test_a_run_is_never_saved_over_anything(tmp_path):
    """What is at the path stays as it was."""
    run = sweep([make_trace()], [kvsim.policy("tova")], [16])
    (tmp_path / "mine.txt").write_text("mine")

    with pytest.raises(OutputError, match="nothing was changed"):
        run.save(tmp_path)

    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_bad_budgets_are_found_before_any_work():
    """No cell is replayed when one of them cannot be."""
    calls = []

    with pytest.raises(BudgetError, match="smallest budget that works is 32"):
        sweep(
            [make_trace()],
            [kvsim.policy("tova"), kvsim.policy("snapkv")],
            [8],
            progress=lambda *call: calls.append(call),
        )

    assert calls == []


def test_a_memory_budget_that_holds_no_layer_is_found_before_any_work():
    """One error for the sweep, not one for every cell."""
    with pytest.raises(MemoryLimitError, match="give at least --memory"):
        sweep([make_trace()], [kvsim.policy("tova")], [8], memory=1000)


def test_a_cell_that_fails_is_listed_and_the_others_are_kept():
    """A policy that breaks while it runs loses its own results alone."""
    run = sweep([make_trace()], [Policy("broken", Broken()), kvsim.policy("tova")], [16])

    assert [(f.policy, f.budget) for f in run.failures] == [("broken", 16)]
    assert "NaN score" in run.failures[0].error
    assert set(run.table["policy"].drop_nulls()) == {"tova"}
