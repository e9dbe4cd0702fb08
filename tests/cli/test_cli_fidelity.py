"""`kvsim fidelity`: the replay next to the running model."""

import json
import re

import polars as pl

from kvsim.studies.prediction.command import _print_correlations
from kvsim.sweeps import closed_loop

COMMAND = ("fidelity", "sample", "--model=tiny", "--policy=tova,knorm", "--budget=32,96")


def test_fidelity_prints_its_tables(run, tmp_path):
    """Errors by layer and kept sets, why there are no correlations; --resume reads a run again."""
    out = tmp_path / "run"
    command = (*COMMAND, "--interval=100", f"--out={out}")
    status, text, err = run(*command)
    again, document, _ = run(*command, "--resume", "--json")
    tables = json.loads(document)

    assert (status, err, again) == (0, "", 0)
    for heading in ("Errors of both loops", "Kept sets of both"):
        assert heading in text
    assert "no rank correlation of 1 prompt and 2 policies that evict" in text
    assert "Rank correlation (Spearman)" not in text
    assert {row["between"] for row in tables["correlations"]} == {None}
    assert [row["layer"] for row in tables["layers"]] == [0, 1, 2]
    assert tables["kept"][0]["mean"] > tables["kept"][0]["chance"]
    assert {path.name for path in out.iterdir()} >= {"run.json", "results.parquet"}


def test_correlations_are_printed_for_each_budget(capsys):
    """A line for each budget and metric that has one; elsewhere the line says what is missing."""
    names = ("between", "low", "high", "within")
    numbers = dict(zip(names, (0.5, -0.125, 0.75, 0.25), strict=True))
    sizes = {"outcome": "response_kl", "prompts": 6, "policies": 5}
    rows = [
        {"budget": "64", "metric": "layer_error"} | sizes | numbers,
        {"budget": "64", "metric": "needle_recall"} | sizes | {"prompts": 2} | dict.fromkeys(names),
        {"budget": "9", "metric": "layer_error"} | sizes | {"policies": 4} | dict.fromkeys(names),
    ]
    _print_correlations(pl.DataFrame(rows))
    out = capsys.readouterr().out

    assert re.search(
        r"64 +layer_error +\+0\.50 \[-0\.12, \+0\.75\] +\+0\.25 +6 +5$",
        *(out, re.MULTILINE),
    )
    assert "needle_recall" not in out
    assert "budget 9: no rank correlation of 6 prompts and 4 policies" in out


def test_an_interrupted_run_compares_nothing(run, monkeypatch, tmp_path):
    """After Ctrl-C in the live run there are no tables, and the message says how to continue."""
    real = closed_loop.live

    def stops(*arguments, progress, **options):
        def report(done, total, label):
            if done == 1 and "measuring" not in label:
                raise KeyboardInterrupt
            progress(done, total, label)

        return real(*arguments, progress=report, **options)

    monkeypatch.setattr(closed_loop, "live", stops)
    status, out, err = run(*COMMAND, "--interval=100", f"--out={tmp_path / 'run'}")

    assert (status, out) == (130, "")
    assert err.startswith("interrupted, what is done is kept in")
    assert "--resume" in err
