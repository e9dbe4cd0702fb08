"""The check of action.yml, in its small version: tiny, six prompts, the toy engine."""

import csv
import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

import kvsim
from kvsim.analysis.significance import sign_flip

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "apps" / "conform" / "check.py"
ENGINE = ROOT / "tests" / "outside" / "toy_engine.py"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Six beginnings of the sample, each with a response of 40 tokens."""
    folder = tmp_path_factory.mktemp("check")
    trace = kvsim.open_trace("sample")
    ids = trace.read("tokens").tolist()
    rows = [{"id": f"p{n}", "prompt": ids[:n], "response": ids[n : n + 40]} for n in range(90, 96)]
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def check(prompts, monkeypatch, capsys):
    """Runs the check on an engine with a bug; returns its exit status and what it prints."""

    def run(bug, *options):
        monkeypatch.setenv("PYTHONPATH", str(ROOT / "docs"))
        command = f'{sys.executable} {ENGINE} {{states}} {{dump}} "{bug}"'
        words = ["--policy", "snapkv", "--set", "window=8", "--model", "tiny", "--run", command]
        words += ["--prompts", str(prompts), "--cache", str(prompts.parent / "traces"), *options]
        monkeypatch.setattr("sys.argv", [str(SCRIPT), *words])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        return end.value.code, capsys.readouterr().out

    return run


def test_the_right_engine_passes_and_a_bug_fails(check):
    """The bug is named."""
    status, out = check("", "--limit", "1")
    assert (status, out.count("p90: equal; 12 sets")) == (0, 1)
    assert "passed: 1 of 1 prompts have equal sets" in out
    status, out = check("sign", "--limit", "1")
    assert (status, "explained by lowest-scores" in out) == (1, True)
    assert "a verdict takes 6 prompts" in out


@pytest.mark.deep
def test_a_margin_decides_where_kl_does(check):
    """From six prompts on, and with --accept kl alone."""
    options = "--margin", "1e9"
    for more, expected in ((), 1), (("--accept", "kl"), 0), (("--accept", "kl", "--limit", "5"), 1):
        status, out = check("sign", *options, *more)
        assert (status, "within 1e+09 %" in out) == (expected, "--limit" not in more)


def test_kl_is_within_a_margin_by_the_bound_of_the_verdicts():
    """Of pairs that differ by a factor: every ratio is the bound; few prompts decide nothing."""
    verdict = runpy.run_path(str(SCRIPT))["verdict"]
    kl = np.linspace(1, 2, 8)
    pairs = np.stack([1.05 * kl, kl], axis=1)
    assert verdict(pairs, 6)[0]
    assert not verdict(pairs, 4)[0]
    assert "at most 5.0% worse" in verdict(pairs, 6)[1]
    assert not verdict(pairs[:5], 6)[0]
    assert verdict(np.stack([kl, kl], axis=1)[:1], 0)[0]


def test_the_page_says_which_bugs_sets_and_kl_find():
    """On each of twelve prompts sets differ; of KL, the check accepts one bug alone."""
    text = (ROOT / "docs" / "conformance" / "toy-engine.csv").read_text("utf-8")
    rows = list(csv.DictReader(text.splitlines()))
    assert all((int(row["apart"]) > 0) is bool(row["bug"]) for row in rows)
    verdict, accepted, worse = runpy.run_path(str(SCRIPT))["verdict"], set(), set()
    for bug in {row["bug"] for row in rows} - {""}:
        kl = [[float(x["kl"]), float(x["policy_kl"])] for x in rows if x["bug"] == bug]
        accepted |= {bug} if verdict(np.array(kl), 10)[0] else set()
        gaps = np.array(kl) @ [[1], [-1]]
        p = [sign_flip(gaps[None, :n, 0])[0] for n in range(6, 13)]
        worse |= {bug} if gaps.mean() > 0 and max(p) < 0.05 else set()
    assert accepted == {"window pooled"}
    assert worse == {"softmax axis", "softmax over rows", "heads interleaved", "sign"}
