"""`kvsim fidelity`: the replay next to the running model."""

from __future__ import annotations

import json
import re

import polars as pl
import pytest

import kvsim
from kvsim.studies.language.tasks import prompts
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
    names = [f"{name}{end}" for name in ("between", "within") for end in ("", "_low", "_high")]
    numbers = dict(zip(names, (0.5, -0.125, 0.75, 0.25, 0.0, 0.375), strict=True))
    sizes = {"outcome": "response_kl", "prompts": 6, "policies": 5}
    rows = [
        {"budget": "64", "metric": "layer_error"} | sizes | numbers,
        {"budget": "64", "metric": "needle_recall"} | sizes | {"prompts": 2} | dict.fromkeys(names),
        {"budget": "9", "metric": "layer_error"} | sizes | {"policies": 4} | dict.fromkeys(names),
    ]
    _print_correlations(pl.DataFrame(rows))
    out = capsys.readouterr().out

    assert re.search(
        r"64 +layer_error +\+0\.50 \[-0\.12, \+0\.75\] +\+0\.25 \[\+0\.00, \+0\.38\] +6 +5$",
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


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """Six small traces, and where the calibration fitted on their live runs goes."""
    folder = tmp_path_factory.mktemp("calibration")
    asked = prompts(6, task="walk", facts=6, lines=6, kinds=3)
    paths = [folder / f"{number}.zarr" for number in range(6)]
    for path, prompt in zip(paths, asked, strict=True):
        kvsim.capture("tiny", None, prompt.prompt, max_new_tokens=24, o_proj=True, out=path)
    return paths, folder / "calibration.json"


def test_fidelity_fits_what_predict_reads(run, calibrated):
    """The curve of a user's own runs predicts cells between its errors, and no others."""
    paths, file = calibrated
    policies = "--policy=tova,knorm,keydiff,streaming_llm,h2o"
    terms = ("--budget=16,32", "--interval=16", f"--calibration={file}")
    fitted = run("fidelity", *paths, "--model=tiny", policies, *terms)
    status, text, err = run("predict", *paths, "--policy=tova,knorm", *terms)
    _, document, _ = run("predict", *paths, "--policy=tova,knorm", *terms, "--json")
    rows = {(row["policy"], row["requested"]): row for row in json.loads(document)["cells"]}
    (stored,) = json.loads(file.read_text())
    gains = stored["curve"]["gains"]
    stored["curve"] |= {"lowest": 1e6, "highest": 2e6, "gains": [["16", 0.1, -0.2, 0.3]]}
    stored["interval"] = 5
    file.with_name("far.json").write_text(json.dumps([stored]))
    far = run(
        "predict",
        *paths,
        "--policy=tova",
        *terms[:2],
        f"--calibration={file.with_name('far.json')}",
    )

    assert (fitted[0], fitted[2]) == (0, "")
    for budget in ("16", "32"):
        line = rf"^{budget} +output_error +[+-][01]\.\d\d \[.*\] +6 +5 *$"
        assert re.search(line, fitted[1], re.MULTILINE), fitted[1]
    assert (status, err) == (0, "")
    assert "Calibration: tiny, 6 prompts of " in text
    assert f"{rows['knorm', '16']['error']:.3g}" in text
    assert rows["knorm", "16"]["low"] <= rows["knorm", "16"]["kl"] <= rows["knorm", "16"]["high"]
    assert rows["knorm", "32"]["kl"] <= rows["knorm", "16"]["kl"]
    factor = max(rows["knorm", "16"]["high"], 0.01) / rows["knorm", "16"]["kl"]
    assert rows["knorm", "16"]["factor"] >= factor
    assert re.search(rf"^knorm +16 .* {rows['knorm', '16']['factor']:.1f} *$", text, re.MULTILINE)
    assert "answer lost" not in text  # nothing was written in the live runs
    for budget, gain, low, high in gains:
        assert f"{gain:.0%} [{low:.0%}, {high:.0%}] at {budget}" in text
    assert "Note: budget 16: no gain over its mean is shown" in far[1]
    assert "Note: budget 32: the gain over its mean was not measured" in far[1]
    assert far[0] == 2
    assert "Note: tova, budget 16: layer error" in far[1]
    assert "the calibration is of events after" in far[1]
    assert far[2].startswith("error: no cell is within the calibration")
