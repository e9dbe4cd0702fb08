"""`kvsim fidelity`: the replay next to the running model."""

from __future__ import annotations

import json

import pytest

COMMAND = ("fidelity", "sample", "--model=tiny", "--policy=tova,knorm", "--budget=32,96")


def test_fidelity_prints_three_tables(run, tmp_path):
    """Correlations, errors by layer and kept sets; a finished run is read again with --resume."""
    out = tmp_path / "run"
    command = (*COMMAND, "--interval=100", f"--out={out}")
    status, text, err = run(*command)
    again, document, _ = run(*command, "--resume", "--json")
    tables = json.loads(document)

    assert (status, err, again) == (0, "", 0)
    assert "4 cells (a policy at a budget)" in text
    for heading in ("Rank correlation (Spearman)", "Errors of both loops", "Kept sets of both"):
        assert heading in text
    assert "answer_right" not in text  # nothing was written
    found = {(row["metric"], row["outcome"]): row for row in tables["correlations"]}
    assert f"{found['output_error', 'response_kl']['between']:+.2f}" in text
    assert [row["layer"] for row in tables["layers"]] == [0, 1, 2]
    assert tables["kept"][0]["mean"] > tables["kept"][0]["chance"]
    assert {path.name for path in out.iterdir()} >= {"run.json", "results.parquet"}


def test_fidelity_needs_a_folder_to_resume(run):
    """--resume without --out is refused before the model is loaded."""
    status, out, err = run(*COMMAND, "--resume")

    assert (status, out) == (2, "")
    assert "give --out DIR as well" in err


@pytest.mark.parametrize("policy", ["oracle"])
def test_fidelity_refuses_policies_that_cannot_run(run, policy):
    """A policy that reads the future has no live run."""
    status, _, err = run(*COMMAND[:3], f"--policy={policy}", "--budget=32")

    assert status == 2
    assert policy in err
