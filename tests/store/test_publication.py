"""Where a trace goes: what replaces what, who comes first, and paths that cannot be."""

import errno
import os
from contextlib import suppress
from pathlib import Path

import pytest
from interrupted_captures import PROMPT, names, record, stopping

from kvsim import files
from kvsim.errors import OutputError, TraceError, TraceExistsError
from kvsim.files import check_writable
from kvsim.store.reader import open_trace


def snapshot(folder):
    """The digests of the whole traces of a folder, hidden or not."""
    found = {}
    for path in folder.iterdir():
        with suppress(TraceError):
            found[path.name] = open_trace(path).digest
    return found


STEPS = ("set aside", "put in place", "flush the folder")


@pytest.mark.parametrize("step", STEPS)
def test_a_fault_at_any_step_of_replacing_loses_neither_trace(step, tmp_path, monkeypatch):
    """Old and new trace are both whole after the fault, and one of them is at the path."""
    path = tmp_path / "a.zarr"
    old = record(path, max_new_tokens=0)
    rename, sync = Path.rename, files.sync

    def fail_rename(self, target):
        aside, new = self == path, target == path and ".tmp-" in self.name
        if (step == STEPS[0] and aside) or (step == STEPS[1] and new):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    def fail_sync(folder):
        if step == STEPS[2] and folder == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(folder)

    monkeypatch.setattr(Path, "rename", fail_rename)
    monkeypatch.setattr(files, "sync", fail_sync)
    with pytest.raises(TraceError, match="Input/output error") as told:
        record(path, overwrite=True)
    monkeypatch.undo()

    whole = snapshot(tmp_path)
    assert len(set(whole.values())) == 2
    assert any(name in str(told.value) for name in whole.keys() - {"a.zarr"})
    assert (whole["a.zarr"] == old.digest) == (step != STEPS[2])


def test_a_trace_that_appears_at_the_last_moment_stays(tmp_path, monkeypatch):
    """Between the last look and the renaming another process publishes: its trace is kept."""
    whole = record(tmp_path / "a.zarr")
    before = (tmp_path / "a.zarr" / "zarr.json").stat()
    for home in ("store.index", "store.writer", "recorder.capturing"):
        monkeypatch.setattr(f"kvsim.{home}.check_target", lambda *_, **__: None)

    with pytest.raises(TraceExistsError, match="exists, expected a free path"):
        record(tmp_path / "a.zarr")

    monkeypatch.undo()
    assert (tmp_path / "a.zarr" / "zarr.json").stat().st_mtime_ns == before.st_mtime_ns
    (left,) = tmp_path.glob(".a.zarr.tmp-*")
    assert open_trace(left.rename(tmp_path / "b.zarr")).digest == whole.digest


def test_a_folder_for_reading_only(tmp_path, monkeypatch, unprivileged):
    """It is refused by trying, before a model is loaded or run."""
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(0o555)
    monkeypatch.chdir(folder)
    with unprivileged():
        with pytest.raises(OutputError, match=r"cannot be written to \(Permission denied\)"):
            check_writable(Path())
        with pytest.raises(OutputError, match=r"cannot be written to \(Permission denied\)"):
            record(Path("a.zarr"), progress=stopping(PROMPT, AssertionError))


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("file/a.zarr", "file is a file; expected a folder to write to"),
        ("file/deeper/a.zarr", "file is a file; expected a folder to write to"),
        ("taken.zarr", "taken.zarr exists, expected a free path"),
    ],
)
def test_a_path_that_cannot_be_is_refused_before_a_model_is_loaded(out, message, tmp_path, run):
    """The command looks at the path first: the model that it names does not exist."""
    (tmp_path / "file").write_text("mine")
    record(tmp_path / "taken.zarr", max_new_tokens=0)
    before = names(tmp_path)

    status, stdout, err = run(
        "capture", "--model", tmp_path / "no-model", "--prompt", "x", "--out", tmp_path / out
    )

    assert (status, stdout) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert names(tmp_path) == before
