"""Page *Fidelity* without a browser: shares and differences are those of the summaries."""

import polars as pl
import pytest

import kvsim
from kvsim.analysis.folder import read_run
from kvsim.analysis.results import labelled
from kvsim.analysis.summaries import level_shares
from kvsim.sweeps import replay_all
from traces import random_trace

METRICS = ["wipeout", "output_error", "entries_seen", "sparsity"]


def made(seed, layers=5, n=150):
    """A trace of five layers."""
    return random_trace(
        layers=layers, n=n, seed=seed, size=1.0, prompt_len=120, name=f"made-{seed}"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of replays, and a broken one."""
    root = tmp_path_factory.mktemp("fidelity")
    traces = [made(seed) for seed in range(2)]
    traces[0].save(root / "trace.zarr")
    policy = kvsim.policy("fastkv+snapkv", layer=0, rows=100)
    run = replay_all(traces, [policy, kvsim.policy("tova")], [64], metrics=METRICS)
    run.save(root / "open")
    (root / "worse").mkdir()
    (root / "worse" / "run.json").write_text("[]")
    (root / "worse" / "results.parquet").write_text("")
    return root


def values(folder, *names):
    """Tables of runs, one below the other."""
    found = [read_run(folder / name).table for name in names]
    return pl.concat([labelled(one) for one in found])


def test_shares_are_counts_of_the_table(opened, folder):
    """By metric, and by layer for one."""
    app = opened(folder, "fidelity", run="open", metric="wipeout")
    table = values(folder, "open")

    assert not app.exception
    for place, (by, part) in enumerate(
        [(["metric"], table), (["metric", "layer"], table.filter(metric="wipeout"))]
    ):
        expected, shown = level_shares(part, by), app.dataframe[place].value
        for name in (*by, "values", "of", "share"):
            assert shown[name].to_list() == expected[name].to_list()
        assert shown["fidelity"].to_list() == expected["fidelity"].cast(pl.String).to_list()
