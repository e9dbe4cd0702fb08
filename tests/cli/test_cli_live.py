"""The command line of the running model: traces, folders, and what is refused."""

import json

import numpy as np
import polars as pl
import pytest

import kvsim
from kvsim.analysis.folder import read_run
from kvsim.analysis.table import COLUMNS
from kvsim.core.policy import Schedule
from kvsim.core.record import Record, Response
from kvsim.studies.language.tasks import prompts
from kvsim.sweeps import Run


@pytest.fixture(scope="module")
def prompt():
    """A short prompt for tiny."""
    return prompts(1, task="walk", facts=8, lines=3, kinds=3)[0]


@pytest.fixture(scope="module")
def trace(prompt, tmp_path_factory):
    """The path of a trace of it."""
    path = tmp_path_factory.mktemp("traces") / "short.zarr"
    kvsim.capture("tiny", None, prompt.prompt, max_new_tokens=16, out=path)
    return path


def test_recorded_prompts_run_again(run, printed, trace, tmp_path, no_layout):
    """A table of all policies, closed, and a folder that other commands read."""
    options = ("--model", "tiny", "--budget", "24,40", "--interval", "8", "--out", tmp_path / "run")
    _, out, _ = run("live", trace, "--policy", "full,tova,adakv+tova", *options)

    assert "Every policy evicts after: the prompt, every 8 rows." in out
    assert "Fidelity of the values: 100% closed." in out
    table = read_run(tmp_path / "run").table
    assert set(table["policy"]) == {"full", "tova", "adakv+tova"}
    assert set(table["metric"]) >= {"response_kl", "layer_error", "retained_iou", "peak_share"}
    assert "answer_right" not in set(table["metric"])
    printed("report", tmp_path / "run", trace, "--out", tmp_path / "report.html")
    figure = ("over_budgets", tmp_path / "run", "--metric", "response_kl")
    printed("plot", *figure, "--out", tmp_path / "kl.png")


def test_a_run_is_continued(run, trace, tmp_path):
    """The same command finds all of it done, and says so; all metrics are the usual ones."""
    options = ("--model", "tiny", "--policy", "tova", "--budget", "40", "--interval", "8")
    command = ("live", trace, *options, "--max-new-tokens", "24", "--out", tmp_path / "run")
    document = json.loads(run(*command, "--json")[1])

    (cell,) = document["cells"]
    assert {"response_kl", "peak_share"} <= cell.keys()
    (response,) = document["responses"]
    assert response["tokens"] <= 24
    before = read_run(tmp_path / "run").table
    status, _, err = run(*command, "--metric", "all")
    assert (status, "has results of 1 cell; continuing" in err) == (0, True)
    assert read_run(tmp_path / "run").table.equals(before)


def saved(folder, texts):
    """A run folder of one trace whose model wrote these texts, each token a word."""
    ids = {word: at for at, word in enumerate(sorted(set(" ".join(texts).split())))}
    full = tuple(ids[word] for word in texts[0].split())
    records = tuple(
        Record(
            np.full((1, 1, 4), 2**31 - 1, np.int32),
            *("tova", {}, budget, Schedule(8), 2, (0,), (0,)),
            trace="one",
            response=Response(
                tokens=tuple(ids[word] for word in text.split()),
                text=text,
                right=False,
                full_tokens=full,
                full_text=texts[0],
                full_right=True,
            ),
        )
        for budget, text in enumerate(texts, start=1)
    )
    table = pl.DataFrame(schema=COLUMNS)
    return Run(records, table, (), {"loop": "closed", "metrics": None}).save(folder)


def test_info_prints_what_the_model_wrote(run, printed, tmp_path):
    """The text with the full cache, and each other one that differs."""
    folder = saved(tmp_path / "run", ["a bad day", "a bad day", "a bat flew", "a bad"])
    out = printed("info", folder)
    lines = out.splitlines()

    assert lines[lines.index("one") :] == [
        *("one", "  full cache: right, 3 tokens", "    a bad day"),
        "  tova, budget 1: wrong, 3 tokens, the first 3 the same",
        "  tova, budget 2: wrong, 3 tokens, the first 3 the same",
        *("  tova, budget 3: wrong, 3 tokens, the first 1 the same", "    a bat flew"),
        *("  tova, budget 4: wrong, 2 tokens, the first 2 the same", "    a bad"),
    ]
    _, out, _ = run("info", folder, "--json")
    texts = [row["text"] for row in json.loads(out)["responses"]]
    assert texts == ["a bad day", "a bad day", "a bat flew", "a bad"]


def test_texts_are_cut_and_cannot_look_like_output(run, tmp_path):
    """Control characters are escaped, lines indented, long texts cut to their end."""
    long = " ".join(f"w{at}" for at in range(900))
    evil = "a \x1b[2J b\nFidelity: 100% exact"
    folder = saved(tmp_path / "run", [long, long.replace("w700", "other"), evil, *["w1"] * 5])
    _, out, _ = run("info", folder)

    assert "\x1b" not in out
    assert "    a \\u001b[2J b\n    Fidelity: 100% exact" in out
    parts = [line for line in out.splitlines() if line.startswith("    ... ")]
    assert {len(part) for part in parts} == {len("    ... ") + 600}
    assert "2 more responses; --json has all." in out
