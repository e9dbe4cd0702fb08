"""Where a trace goes: what replaces what, who comes first, and paths that cannot be."""

import errno
import os
from contextlib import suppress
from pathlib import Path

import pytest
from interrupted_captures import PROMPT, names, record, stopping

from kvsim import files
from kvsim.errors import OutputError, TraceError
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
def test_a_fault_at_any_step_of_replacing_keeps_the_old_trace(step, tmp_path, monkeypatch):
    """It is whole after the fault, and at the path until a new one is there."""
    path = tmp_path / "a.zarr"
    old = record(path, max_new_tokens=0)
    rename, replace, sync = Path.rename, Path.replace, files.sync

    def fail_rename(self, target):
        if step == STEPS[0] and self == path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    def fail_replace(self, target):
        if step == STEPS[1] and target == path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return replace(self, target)

    def fail_sync(folder):
        if step == STEPS[2] and folder == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(folder)

    monkeypatch.setattr(Path, "rename", fail_rename)
    monkeypatch.setattr(Path, "replace", fail_replace)
    monkeypatch.setattr(files, "sync", fail_sync)
    with pytest.raises(OutputError, match="Input/output error") as told:
        record(path, overwrite=True)
    monkeypatch.undo()

    whole = snapshot(tmp_path)
    assert old.digest in whole.values()
    assert all(name in str(told.value) for name in whole)
    assert (whole["a.zarr"] == old.digest) == (step != STEPS[2])


def test_a_trace_that_appears_at_the_last_moment_stays(tmp_path, monkeypatch):
    """Between the last look and the renaming another process publishes: its trace is kept."""
    record(tmp_path / "a.zarr")
    before = (tmp_path / "a.zarr" / "zarr.json").stat()
    for home in ("store.opening", "store.writer", "recorder.capturing"):
        monkeypatch.setattr(f"kvsim.{home}.check_target", lambda *_, **__: None)

    with pytest.raises(OutputError, match=r"a\.zarr cannot be written"):
        record(tmp_path / "a.zarr")

    monkeypatch.undo()
    assert (tmp_path / "a.zarr" / "zarr.json").stat().st_mtime_ns == before.st_mtime_ns
    assert names(tmp_path) == ["a.zarr"]


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
        ("file/a.zarr", "file cannot be written to (Not a directory)"),
        (
            "file/deeper/a.zarr",
            "file cannot be written to (Not a directory)",
        ),
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
