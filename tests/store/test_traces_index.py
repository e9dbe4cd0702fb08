"""What lies in a folder of traces, found without reading queries, keys or values."""

import json
from dataclasses import asdict

import pytest
import torch

from damage import edit, edit_header
from kvsim.core.attention import Rope
from kvsim.core.trace import Trace
from kvsim.store import describe
from kvsim.store.index import find_runs, index


def make(path, n=20, layers=2, **meta):
    """A stored trace of random numbers."""
    q = torch.randn(layers, 2, n, 8, generator=torch.Generator().manual_seed(0))
    trace = Trace.from_arrays(q, q, q, prompt_len=5, rope=Rope.default(8), meta=meta)
    path.parent.mkdir(exist_ok=True)
    return trace.save(path)


CHECKS = {
    "right": {"right": True, "answer": "x"},
    "wrong": {"right": False, "answer": "y"},
    "none": {"right": False, "answer": None},
    None: {"right": None, "reason": "unknown"},
}

BROKEN = {
    "chunkless": lambda trace: (trace / "v" / "c" / "1" / "0" / "0" / "0").unlink(),
    "cut": lambda trace: (trace / "zarr.json").write_text('{"attr'),
    "empty": lambda trace: (trace / "zarr.json").unlink(),
    "later": lambda trace: edit_header(trace, lambda found: found.update(kvsim_format=9)),
}
#: Whole ones, in order.
WHOLE = ["a.zarr", "b/whole.zarr", "bare.zarr", "plain"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with everything that can lie in one, not to be changed."""
    folder = tmp_path_factory.mktemp("traces")
    said = {"model": {"name": "m", "layers": 4}, "versions": {"kvsim": "0.1"}}
    labels = {"task": "walk", "level": 2, "colour": 9}
    make(folder / "b" / "whole.zarr", labels=labels, answer_check=CHECKS["right"], **said)
    make(folder / "a.zarr", n=300, layers=4, answer_check=CHECKS["wrong"], **said)
    make(folder / "bare.zarr")
    make(folder / "plain")
    (folder / "bad").mkdir()
    (folder / "bad" / "cut.zarr.zip").write_bytes(b"PK\x03\x04")
    (folder / "store").mkdir()
    (folder / "store" / "zarr.json").write_text('{"attributes": {}}')
    for name, change in BROKEN.items():
        change(make(folder / "bad" / f"{name}.zarr"))
    make(folder / "b" / "x.zarr").rename(folder / "b" / ".x.zarr.tmp-12-000000ab")
    (folder / "run").mkdir()
    (folder / "run" / "run.json").write_text("{}")
    make(folder / "run" / "records.zarr")
    (folder / "notes.txt").write_text("no trace")
    return folder


def test_traces_are_as_they_describe_themselves(made):
    """What cannot be opened has its reason; runs and hidden folders are left out."""
    found = index(made)
    whole = [one for one in found if one.state == "whole"]
    broken = {one.path: one.reason for one in found if one.state == "broken"}

    assert [one.path for one in whole] == WHOLE
    for one in whole:
        full = describe(made / one.path)
        for name in ("tokens", "prompt_len", "layers", "bytes", "labels", "versions"):
            assert getattr(one, name) == full[name], name
        assert one.model == full["model"].get("name")
        assert one.model_layers == full["model"].get("layers")
    assert broken.keys() == {f"bad/{name}.zarr" for name in BROKEN} | {"bad/cut.zarr.zip"}
    assert all(reason.startswith(path) for path, reason in broken.items())
    assert list(find_runs(made)) == ["run"]


def test_answers(tmp_path):
    """Right, wrong, none in the response, or not checked."""
    for name, check in CHECKS.items():
        make(tmp_path / f"{name}.zarr", answer_check=check)

    found = {one.path: one.answer for one in index(tmp_path)}

    assert found == {f"{name}.zarr": name for name in CHECKS}


@pytest.mark.parametrize("value", [None, 3, "x", [1], {"q": 3}, {"q": {"shape": "x"}}])
def test_foreign_metadata_is_harmless(value, tmp_path):
    """Whatever a foreign writer put in, the trace is listed."""
    for name, place in (("a", "consolidated_metadata"), ("b", "attributes")):
        trace = make(tmp_path / f"{name}.zarr")
        edit(trace / "zarr.json", lambda document, at=place: document.update({at: value}))

    assert [one.state for one in index(tmp_path)] == ["broken", "broken"]


def test_the_table(run, made):
    """A line for each trace, then what cannot be opened, then the totals; or all as JSON."""
    status, text, err = run("traces", made)

    lines = [line.split() for line in text.splitlines()]
    assert (status, err) == (0, "")
    assert [line[0] for line in lines[1:5]] == WHOLE
    assert lines[2][:-1] == (
        ["b/whole.zarr", "m", "walk", "2", "right", "0.1", "20", "5", "2", "of", "4"]
    )
    assert text.count("\ncannot be opened: bad/") == 5
    assert text.splitlines()[-1].startswith(f"4 traces in {made}, 360 tokens, ")
    listed = json.loads(run("traces", made, "--json")[1])["traces"]
    assert listed == [asdict(one) for one in index(made)]
    for name in ("a.zarr", "notes.txt", "none"):
        status, out, err = run("traces", made / name)
        assert (status, out, len(err.splitlines())) == (2, "", 1)


LOCAL = [
    ("traces", "URL"),
    ("dashboard", "URL"),
    ("replay", "sample", "--policy", "tova", "--budget", "32", "--out", "URL"),
    ("report", "sample", "--out", "URL"),
    ("plot", "mass_curve", "sample", "--out", "URL"),
    ("layers", "sample", "--figures", "URL"),
    ("cost", "--policy", "tova", "--budget", "32", "--model-config", "URL"),
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


def test_names_and_labels_are_text(run, tmp_path):
    """What a terminal would act upon is escaped, and makes no line of its own."""
    evil = "x\x1b[31m\nerror: y"
    make(tmp_path / "a\x1b\n.zarr", labels={"task": evil}, model={"name": evil})
    (tmp_path / "b\x1b\n.zarr").mkdir()

    _, text, _ = run("traces", tmp_path)

    assert "\x1b" not in text
    assert not [line for line in text.splitlines() if line.startswith(("error", ".zarr"))]
