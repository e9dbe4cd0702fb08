"""`kvsim demo`."""

import io
from contextlib import chdir, redirect_stderr, redirect_stdout

import pytest
from command_line import one_line

import kvsim
from kvsim.cli import main
from kvsim.store.records import read_records
from kvsim.studies.language import demo as demo_module


def test_the_demo_shows_its_commands_and_their_results(tmp_path, no_layout):
    """A table of all policies for both models, figures and runs; a second demo replaces it."""
    folder, out, err = tmp_path / "results" / "demo", io.StringIO(), io.StringIO()
    folder.mkdir(parents=True)
    (folder / "demo.json").write_text("{}")  # of version 0.1.0

    streams = redirect_stdout(out), redirect_stderr(err)
    with chdir(tmp_path), streams[0], streams[1], pytest.raises(SystemExit) as end:
        main(["demo", "--out", "results/demo"])

    assert (end.value.code, err.getvalue()) == (0, "")
    for name in ("full", "streaming_llm", "h2o", "tova", "snapkv", "random"):
        rows = [line for line in out.getvalue().splitlines() if line.split()[:1] == [name]]
        assert len(rows) == (2 if name == "full" else 4)
    assert {path.name for path in folder.iterdir()} == demo_module._FILES
    assert kvsim.open_trace(folder / "trace.zarr").meta["answer_check"]["right"]
    for prefix in ("", "smollm2-"):
        for figure in ("retention.png", "budgets.png"):
            assert (folder / f"{prefix}{figure}").read_bytes().startswith(b"\x89PNG")
        assert len(read_records(folder / f"{prefix}run" / "records.zarr")) == 12


@pytest.mark.parametrize("kind", ["file", "more"])
def test_demo_refuses_what_it_did_not_make(run, tmp_path, kind):
    """A file, or a folder with anything besides a demo, is left alone."""
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "notes.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))

    status, text, err = run("demo", "--out", out)

    assert (status, text) == (2, "")
    assert "nothing was changed" in one_line(err)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_command_that_fails_ends_the_demo(run, tmp_path, monkeypatch):
    """Its status is that of the demo, and no later command runs."""
    monkeypatch.setattr(demo_module, "COMMANDS", {"info none": "", "prompts --out p.jsonl": ""})

    status, _, err = run("demo", "--out", tmp_path / "demo")

    assert status == 2
    assert "none" in err
    assert not [*(tmp_path / "demo").iterdir()]
