"""Where a trace goes: what replaces what, who comes first, and paths that cannot be."""

import errno
import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from interrupted_captures import PROMPT, RESPONSE, ids, interrupted, names, record, stopping

from kvsim.errors import TraceError, TraceExistsError
from kvsim.recorder import capture_many
from kvsim.recorder.prompts import Prompt
from kvsim.store import (
    check_writable,
    find_drafts,
    open_trace,
    publication,
    recover,
)
from small_model import small


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
    rename, sync = Path.rename, publication.sync

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
    monkeypatch.setattr(publication, "sync", fail_sync)
    with pytest.raises(TraceError, match="Input/output error") as told:
        record(path, overwrite=True)
    monkeypatch.undo()

    whole = snapshot(tmp_path)
    (left,) = find_drafts(tmp_path)
    assert len(set(whole.values())) == 2
    assert str(left.path) in str(told.value)
    if step == STEPS[2]:
        assert whole["a.zarr"] != old.digest
        assert left.kind == "old"
        assert "could not be flushed to disk" in str(told.value)
    else:
        assert whole["a.zarr"] == old.digest
        assert open_trace(recover(left.path, overwrite=True)).n_pos == PROMPT + RESPONSE


def test_another_file_system_is_refused(tmp_path, monkeypatch):
    """`out` on another disk: one line, and the draft can still be recovered."""
    left = interrupted(tmp_path / "a.zarr")

    def cross(self, target):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", cross)
        with pytest.raises(TraceError, match="is on another file system than"):
            recover(left.path, out=tmp_path / "b.zarr")

    assert find_drafts(tmp_path)[0].complete
    assert open_trace(recover(left.path)).n_pos == 512


def test_two_threads_and_one_path(tmp_path, whole):
    """One is published; the other is refused, and if it had begun, it can be recovered."""
    ends = []

    def run():
        try:
            ends.append(record(tmp_path / "a.zarr").digest)
        except TraceExistsError as error:
            ends.append(str(error))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=100)

    assert sorted(end == whole.digest for end in ends) == [False, True]
    assert any("exists, expected a free path" in end for end in ends)
    for left in find_drafts(tmp_path):
        assert open_trace(recover(left.path, out=tmp_path / "b.zarr")).digest == whole.digest
    assert open_trace(tmp_path / "a.zarr").digest == whole.digest


def test_a_trace_that_appears_at_the_last_moment_stays(tmp_path, whole, monkeypatch):
    """Between the last look and the renaming another process publishes: its trace is kept."""
    record(tmp_path / "a.zarr")
    before = (tmp_path / "a.zarr" / "zarr.json").stat()
    for home in ("store.publication", "store.writer", "recorder.capturing"):
        monkeypatch.setattr(f"kvsim.{home}.check_target", lambda *_, **__: None)

    with pytest.raises(TraceExistsError, match="exists, expected a free path"):
        record(tmp_path / "a.zarr")

    monkeypatch.undo()
    assert (tmp_path / "a.zarr" / "zarr.json").stat().st_mtime_ns == before.st_mtime_ns
    (left,) = find_drafts(tmp_path)
    assert open_trace(recover(left.path, out=tmp_path / "b.zarr")).digest == whole.digest


def test_an_interrupted_series_keeps_what_is_complete_and_what_is_not(tmp_path):
    """Of several prompts the first is a trace, the second a draft, the third was not begun."""
    prompts = [Prompt(name, ids(PROMPT)) for name in ("one", "two", "three")]
    seen = []

    def progress(done, total):
        seen.append(done)
        if seen.count(550) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture_many(small(), None, prompts, tmp_path, max_new_tokens=RESPONSE, progress=progress)

    (left,) = find_drafts(tmp_path)
    assert names(tmp_path) == [left.path.name, "one.zarr"]
    assert open_trace(recover(tmp_path / "two.zarr")).n_pos == 512


def test_a_folder_for_reading_only(tmp_path, monkeypatch, unprivileged):
    """It is refused by trying, before a model is loaded or run."""
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(0o555)
    monkeypatch.chdir(folder)
    with unprivileged():
        with pytest.raises(TraceError, match=r"cannot be written to \(Permission denied\)"):
            check_writable(Path())
        with pytest.raises(TraceError, match=r"cannot be written to \(Permission denied\)"):
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
