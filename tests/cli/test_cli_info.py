"""`kvsim info` of folders and of damaged traces, and what no URL may be."""

import json
import shutil

import pytest
from command_line import one_line

import kvsim
from damage import edit, flip, reseal
from traces import random_trace


def make(path, **meta):
    """A stored trace of random numbers."""
    path.parent.mkdir(exist_ok=True)
    return kvsim.save_trace(
        random_trace(layers=2, heads=1, n=20, dim=4, prompt_len=5, meta=meta), path
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with everything that can lie in one, not to be changed."""
    folder = tmp_path_factory.mktemp("traces")
    right = {"right": True, "answer": "x"}
    model = {"name": "m", "layers": 4}
    labels = {"task": "walk", "level": 2, "colour": 9}
    make(folder / "b" / "whole.zarr", labels=labels, answer_check=right, model=model)
    make(folder / "bare.zarr")
    (make(folder / "bad" / "cut.zarr") / "zarr.json").write_text('{"attr')
    (folder / "bad" / "empty.zarr").mkdir()
    make(folder / "b" / "x.zarr").rename(folder / "b" / ".x.zarr.tmp-12-000000ab")
    (folder / "run").mkdir()
    (folder / "run" / "run.json").write_text("{}")
    make(folder / "run" / "records.zarr")
    (folder / "notes.txt").write_text("no trace")
    return folder


def test_a_folder_is_listed(run, made):
    """A line for each trace, then what cannot be opened and why; hidden folders are left out."""
    status, text, err = run("info", made)

    lines = text.splitlines()
    assert lines[0].split() == (
        ["trace", "model", "task", "level", "answer", "layers", "tokens", "prompt", "MB"]
    )
    assert lines[1].split()[:-1] == (
        ["b/whole.zarr", "m", "walk", "2", "right", "2", "of", "4", "layers", "(0-1)", "20", "5"]
    )
    assert lines[2].split()[:5] == ["bare.zarr", "-", "-", "-", "-"]
    assert f"{made}/bad/cut.zarr: " in text
    assert f"{made}/bad/empty.zarr: " in text
    assert lines[-1] == f"4 traces in {made}, 2 damaged"
    assert status == 2
    assert one_line(err).startswith("error: 2 of 4 traces: ")

    whole = run("info", made / "b", "--deep")
    assert (whole[0], whole[2]) == (0, "")
    assert whole[1].endswith(f"1 trace in {made / 'b'}, complete and undamaged\n")
    documents = json.loads(run("info", made, "--json")[1])["traces"]
    assert [len(each.get("problems", ())) for each in documents] == [0, 1, 1, 0]


def test_names_and_labels_are_text(run, tmp_path):
    """What a terminal would act upon is escaped, and makes no line of its own."""
    evil = "x\x1b[31m\nerror: y"
    make(tmp_path / "a\x1b\n.zarr", labels={"task": evil}, model={"name": evil})
    (tmp_path / "b\x1b\n.zarr").mkdir()

    _, text, _ = run("info", tmp_path)

    assert "\x1b" not in text
    assert not [line for line in text.splitlines() if line.startswith(("error", ".zarr"))]


@pytest.mark.parametrize("value", [None, [1], {"name": 3}])
def test_foreign_metadata_is_harmless(value, run, tmp_path):
    """Whatever a foreign writer put in, the trace is listed."""
    trace = make(tmp_path / "a.zarr")
    edit(trace / "zarr.json", lambda document: document["attributes"].update(meta={"model": value}))
    reseal(trace)

    status, text, err = run("info", tmp_path)

    assert (status, err) == (0, "")
    assert text.endswith(f"1 trace in {tmp_path}\n")


def test_a_check_goes_through_all_traces(run, tmp_path):
    """One that is damaged is named with its problem, and the others are checked too."""
    good, bad = make(tmp_path / "a.zarr"), make(tmp_path / "b.zarr")
    flip(next(path for path in (bad / "k" / "c").rglob("*") if path.is_file()))

    status, text, err = run("info", bad, good, "--deep")

    assert status == 2
    assert "complete and undamaged" in text
    assert f"{bad}: {bad}" not in text
    assert one_line(err).startswith("error: 1 of 2 traces: ")
    shutil.rmtree(good)
    status, _, err = run("info", bad, good, "--deep")
    assert status == 2
    assert one_line(err).startswith("error: 2 of 2 traces: ")


LOCAL = [
    ("dashboard", "URL"),
    ("replay", "sample", "--policy", "tova", "--budget", "32", "--out", "URL"),
    ("report", "sample", "--out", "URL"),
    ("plot", "mass_curve", "sample", "--out", "URL"),
    ("study", "cost", "--policy", "tova", "--budget", "32", "--model-config", "URL"),
    ("prompts", "--out", "URL"),
    ("demo", "--out", "URL"),
    ("capture", "--model", "tiny", "--out", "a.zarr", "--prompts", "URL"),
]


@pytest.mark.parametrize("words", LOCAL, ids=" ".join)
def test_a_url_is_no_path(words, run, tmp_path, monkeypatch):
    """Where a path of this machine is expected a URL is named as it was given, in one line."""
    monkeypatch.chdir(tmp_path)
    url = "http://127.0.0.1:1/a.zarr"

    status, out, error = run(*[url if word == "URL" else word for word in words])

    assert (status, out, error.count("\n")) == (2, "", 1)
    assert f"{url} is a URL, expected" in error.replace(";", ",")
    assert not list(tmp_path.iterdir())
