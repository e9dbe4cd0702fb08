"""`kvsim demo`."""

import io
import json
import shutil
from contextlib import chdir, redirect_stderr, redirect_stdout

import pytest
from command_line import one_line

import kvsim
from kvsim.cli import main
from kvsim.store.records import read_records
from kvsim.studies.language import demo as demo_module


@pytest.fixture(scope="module")
def demo(tmp_path_factory, no_layout):
    """A folder with a demo, and what that printed."""
    folder = tmp_path_factory.mktemp("demo")
    out, err = io.StringIO(), io.StringIO()
    streams = redirect_stdout(out), redirect_stderr(err)
    with chdir(folder), streams[0], streams[1], pytest.raises(SystemExit) as end:
        main(["demo", "--out", "results/demo"])
    assert (end.value.code, err.getvalue()) == (0, "")
    return folder / "results" / "demo", out.getvalue()


def test_demo_answers_the_question(demo):
    """The demo prints one table of all policies at both budgets, and how to read it."""
    folder, out = demo
    lines = out.splitlines()

    real = lines[next(i for i, line in enumerate(lines) if line.startswith("Now a real model")) :]
    assert "layers 7, 17, 28 of SmolLM2-135M-Instruct" in real[0]
    for name in demo_module.POLICIES:
        rows = [line for line in real if line.split()[:1] == [name]]
        assert len(rows) == (1 if name == "full" else 2)
    assert "of the sentence with the code (the needle) rows see at most" in out
    document = json.loads((folder / "demo.json").read_text())
    recall = {(c["policy"], c["budget"]): c["needle_recall"] for c in document["smollm2"]["cells"]}
    assert recall["full", 64] == 1
    assert recall["streaming_llm", 64] == 0
    assert "needle_recall" not in document["cells"][0]
    assert "is right." in lines[0]
    for each in (document, document["smollm2"]):
        (best,) = each["verdict"][0]["first"]
        assert f"Budget 64: {best} has the lowest mean response_kl, " in out
    assert any(line.startswith("Fidelity of the values: ") for line in lines)
    assert [line for line in lines if line.startswith("Budget ")] == [
        line for each in (document, document["smollm2"]) for line in each["verdict_text"][:2]
    ]
    assert {p.name for p in folder.iterdir()} == demo_module._FILES
    assert kvsim.open_trace(folder / "trace.zarr").meta["answer_check"]["right"]
    for prefix in ("", "smollm2-"):
        for figure in ("retention.png", "budgets.png"):
            assert (folder / f"{prefix}{figure}").read_bytes().startswith(b"\x89PNG")
        assert len(read_records(folder / f"{prefix}run" / "records.zarr")) == 12


@pytest.mark.parametrize("kind", ["file", "more"])
def test_demo_refuses_what_it_did_not_make(run, demo, small_demo, tmp_path, kind):
    """A folder without the demo's mark, or with anything besides, is left alone."""
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "demo.json").write_text("{}")
        (out / "notes.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))

    status, text, err = run("demo", "--out", out)

    assert (status, text) == (2, "")
    assert "nothing was changed" in one_line(err)
    assert sorted(tmp_path.rglob("*")) == before


def test_interrupted_demo_keeps_the_earlier_one(run, demo, small_demo, tmp_path, monkeypatch):
    """Ctrl-C in a second demo: status 130, and the folder of the first is unchanged."""
    out = tmp_path / "demo"
    shutil.copytree(demo[0], out)

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_module, "_draw", stop)
    status, _, err = run("demo", "--out", out)

    assert status == 130
    assert one_line(err) == f"interrupted, {out} is unchanged"
    assert {p.name for p in out.iterdir()} == demo_module._FILES
    assert [p.name for p in tmp_path.iterdir()] == ["demo"]
