"""Run folders that are damaged say so, each in its way, and in one line of kvsim's."""

from __future__ import annotations

import polars as pl
import pytest
import torch

import kvsim
from kvsim.errors import OutputError
from kvsim.report import read_run
from kvsim.sweeps.run import sweep


@pytest.fixture(scope="module")
def run():
    """A sweep of one policy over a small trace."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 40, 8, generator=generator) for heads in (2, 1, 1))
    trace = kvsim.Trace.from_arrays(q, k, v, prompt_len=10, rope=kvsim.Rope.default(8))
    return sweep([trace], [kvsim.policy("tova")], [16], metrics=["wipeout", "entries_seen"])


def strange(table):
    """A fidelity that there is not."""
    return table.with_columns(fidelity=pl.lit("certain"))


def words(table):
    """Values that are no numbers."""
    return table.with_columns(value=pl.lit("much"))


def fewer(table):
    """A column less."""
    return table.drop("chance")


@pytest.mark.parametrize(
    ("change", "said"), [(strange, "no result has"), (words, "no result has"), (fewer, "chance")]
)
def test_values_that_no_run_has_are_refused(run, tmp_path, change, said):
    """Whatever wrote the table."""
    folder = run.save(tmp_path / "run")
    change(pl.read_parquet(folder / "results.parquet")).write_parquet(folder / "results.parquet")

    with pytest.raises(OutputError, match=said):
        read_run(folder)


@pytest.mark.parametrize("text", ["[]", "null", '"run"', "{", "\udcff"])
def test_parameters_must_be_an_object(run, tmp_path, text):
    """Valid JSON of another kind is as bad as none."""
    folder = run.save(tmp_path / "run")
    (folder / "run.json").write_bytes(text.encode("utf-8", "surrogateescape"))

    with pytest.raises(OutputError, match="damaged"):
        read_run(folder)


def test_a_folder_in_the_place_of_a_file_is_damage(run, tmp_path):
    """The system's own error is told as kvsim's."""
    folder = run.save(tmp_path / "run")
    (folder / "run.json").unlink()
    (folder / "run.json").mkdir()

    with pytest.raises(OutputError, match="damaged"):
        read_run(folder)


@pytest.mark.parametrize("name", ["run", "runs of [a] *", "<b>?"])
def test_a_run_comes_back_as_it_was(run, tmp_path, name):
    """Types of columns included, and whatever its folder is called."""
    found = read_run(run.save(tmp_path / name))

    assert found.table.equals(run.table)
    assert found.table.schema == run.table.schema
