"""Outputs: whole or not at all, and what was there before stays until then."""

import errno
import os
import resource
import tracemalloc
from contextlib import contextmanager
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from kvsim import files, plots
from kvsim.errors import OutputError
from kvsim.files import check_output, published, replace_file, write_file
from kvsim.sweeps.driver import replay_all
from traces import random_trace

pytestmark = pytest.mark.usefixtures("no_layout")

EARLIER = b"what was there before\n" * 400


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder of a run."""
    run = replay_all([random_trace(prompt_len=50)], "streaming_llm", [32], interval=8)
    return run.save(tmp_path_factory.mktemp("run") / "r")


@contextmanager
def limit(size):
    """Let the system refuse every byte of a file behind `size`, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def refuse(monkeypatch, owner, name, number=errno.ENOSPC):
    """Let the system refuse a call."""

    def call(*arguments, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(owner, name, call)


def bytes_of(path):
    """The content of a file, or of every file in a folder."""
    if path.is_file():
        return path.read_bytes()
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


#: Commands that write a file or folder, and how they replace one that is there, if they do.
COMMANDS = {
    "prompts": (["prompts", "--n", "40"], "p.jsonl", "--overwrite"),
    "report": (["report", "RUN"], "r.html", "--overwrite"),
    "plot": (["plot", "pareto", "RUN"], "f.png", None),
    "masks": (["study", "masks", "RUN"], "m.safetensors", "--overwrite"),
}


def command(name, run_folder, out):
    """The arguments of a command that writes to a path."""
    arguments, _, overwrite = COMMANDS[name]
    replace = [overwrite] if overwrite and out.exists() else []
    given = [str(run_folder) if each == "RUN" else each for each in arguments]
    return [*given, "--out", str(out), *replace]


@pytest.mark.deep
@pytest.mark.parametrize("name", COMMANDS)
def test_a_disk_that_is_full_at_any_write_leaves_the_earlier_file(
    name, ran, run, tmp_path, monkeypatch
):
    """Whichever write, flush or rename fails: one line with the path, and the bytes of before."""
    _, file, overwrite = COMMANDS[name]
    whole = tmp_path / file
    assert run(*command(name, ran, whole))[0] == 0
    size = whole.stat().st_size
    out = tmp_path / "results" / file
    out.parent.mkdir()
    before = EARLIER if overwrite else None
    if overwrite:
        out.write_bytes(EARLIER)
    arguments = command(name, ran, out)

    def check(status, stdout, err):
        assert (status, stdout) == (2, "")
        assert len(err.splitlines()) == 1
        assert str(out.parent) in err
        assert [p.name for p in out.parent.iterdir()] == ([file] if overwrite else [])
        assert (out.read_bytes() if overwrite else None) == before

    for room in (0, size // 4, size // 2, size - 1):
        with limit(room):
            outcome = run(*arguments)
        check(*outcome)
        assert "File too large" in outcome[2]
    for owner, call in ((files.os, "fsync"), (Path, "replace"), (Path, "mkdir")):
        with monkeypatch.context() as patch:
            refuse(patch, owner, call)
            outcome = run(*arguments)
        check(*outcome)
        assert f"{out} cannot be written (No space left on device)" in outcome[2]
    assert run(*arguments)[0] == 0
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_figure_replaces_a_file_whole(ending, tmp_path):
    """Only with `overwrite`, and with all bytes that matplotlib would write, or the file stays."""
    figure = Figure()
    figure.subplots().plot([1, 2, 3])
    out = tmp_path / f"f.{ending}"
    out.write_bytes(EARLIER)

    with pytest.raises(OutputError, match="exists; give another path, or overwrite=True"):
        plots.save(figure, out)
    with limit(1024), pytest.raises(OutputError, match="cannot be written"):
        plots.save(figure, out, overwrite=True)
    assert out.read_bytes() == EARLIER
    assert plots.save(figure, out, overwrite=True) == out
    with pytest.raises(OutputError, match=r"expected \.png, \.svg or \.pdf"):
        plots.save(figure, tmp_path / "f.jpg")
    assert len(out.read_bytes()) > 1024
    assert [p.name for p in tmp_path.iterdir()] == [out.name]


def test_what_is_in_the_way_is_one_line_before_any_work(run, ran, tmp_path):
    """A folder, a pipe, a parent that is a file, or a name that is too long: refused at once."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    cases = {
        "folder": "is not a file",
        "pipe": "is not a file",
        "file/r.html": "(Not a directory), expected a writable folder",
        "n" * 300: "File name too long",
    }
    for name, message in cases.items():
        for arguments in (["prompts"], ["report", ran]):
            status, out, err = run(*arguments, "--out", tmp_path / name, "--overwrite")
            assert (status, out, len(err.splitlines())) == (2, "", 1)
            assert message in err
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder", "pipe"]


def test_a_file_takes_the_memory_that_it_has(tmp_path):
    """Not that of the limit; a pipe does not block, a device or a larger file is not read."""
    (tmp_path / "file").write_bytes(bytes(22_000))
    (tmp_path / "device").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    tracemalloc.start()
    try:
        assert files.read_input(tmp_path / "file", 8 << 30) == bytes(22_000)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    for name, message in (
        ("file", "it has 22000 bytes, expected at most 21999"),
        ("device", "it is a pipe or a device"),
        ("pipe", "it is a pipe or a device"),
        (".", "directory"),
    ):
        with pytest.raises(OSError, match=message):
            files.read_input(tmp_path / name, 21_999)


def test_a_folder_that_cannot_be_written_is_found_before_any_work(run, tmp_path, monkeypatch):
    """Without permission, on a read-only or full disk, an output is refused before any work."""
    refuse(monkeypatch, files, "TemporaryFile", errno.EROFS)
    status, out, err = run("report", "sample", "--out", tmp_path / "r.html")

    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert f"{tmp_path} cannot be written to ({os.strerror(errno.EROFS)})" in err


def test_a_file_that_is_replaced_keeps_its_mode_and_its_links(tmp_path):
    """The permissions stay, and a link still points to the file that is replaced."""
    (tmp_path / "deep").mkdir()
    target, link = tmp_path / "deep" / "a.txt", tmp_path / "link.txt"
    target.write_text("before")
    target.chmod(0o640)
    link.symlink_to(target)

    write_file(link, "after", overwrite=True)

    assert link.is_symlink()
    assert target.read_text() == "after"
    assert target.stat().st_mode & 0o777 == 0o640
    assert [p.name for p in target.parent.iterdir()] == ["a.txt"]


def test_an_interrupt_leaves_the_earlier_file(tmp_path):
    """Ctrl-C while a file is written: nothing of the new one is left."""
    out = tmp_path / "a.txt"
    out.write_bytes(EARLIER)

    def interrupted():
        with published(out, overwrite=True) as draft:
            draft.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert bytes_of(tmp_path) == {"a.txt": EARLIER}


def test_what_appears_meanwhile_is_not_replaced(tmp_path):
    """A file that appears during the work stays, unless it may be replaced."""
    out = tmp_path / "a.txt"

    def write():
        with published(out) as draft:
            draft.write_text("mine")
            out.write_text("of someone else")

    with pytest.raises(OutputError, match="exists"):
        write()
    assert bytes_of(tmp_path) == {"a.txt": b"of someone else"}


def test_an_output_is_checked_and_left_alone(tmp_path):
    """Looking whether a path can be written leaves no trace, also of folders that are not there."""
    check_output(tmp_path / "not" / "there" / "a.txt")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_replaced_stays(tmp_path):
    """A full disk leaves the earlier content and no draft; otherwise the new content is there."""
    path = tmp_path / "part"
    replace_file(path, EARLIER)

    with limit(1000), pytest.raises(OSError, match="File too large"):
        replace_file(path, bytes(5000))

    assert path.read_bytes() == EARLIER
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]
