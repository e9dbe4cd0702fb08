"""Outputs: whole or not at all, and what was there before stays until then."""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import tracemalloc
from contextlib import contextmanager
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import kvsim
from kvsim import files, plots
from kvsim.errors import OutputError
from kvsim.files import check_output, published, replace_file, write_file
from kvsim.report import write_report
from kvsim.sweeps.driver import replay_all
from traces import random_trace

pytestmark = pytest.mark.usefixtures("no_layout")

EARLIER = b"what was there before\n" * 400


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """The path of a trace of two layers and 90 tokens."""
    return random_trace(prompt_len=50).save(tmp_path_factory.mktemp("trace") / "t.zarr")


@pytest.fixture(scope="module")
def ran(trace, tmp_path_factory):
    """The folder of a run."""
    policies = [kvsim.policy("streaming_llm")]
    run = replay_all([kvsim.open_trace(trace)], policies, [32], interval=8)
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
    "masks": (["masks", "RUN"], "m.safetensors", "--overwrite"),
    "pack": (["trace", "pack", "TRACE"], "t.zip", None),
}


def command(name, trace, run_folder, out):
    """The arguments of a command that writes to a path."""
    arguments, _, overwrite = COMMANDS[name]
    places = {"RUN": str(run_folder), "TRACE": str(trace)}
    replace = [overwrite] if overwrite and out.exists() else []
    return [*(places.get(each, each) for each in arguments), "--out", str(out), *replace]


@pytest.mark.deep
@pytest.mark.parametrize("name", COMMANDS)
def test_a_disk_that_is_full_at_any_write_leaves_the_earlier_file(
    name, trace, ran, run, tmp_path, monkeypatch
):
    """Whichever write, flush or rename fails: one line with the path, and the bytes of before."""
    _, file, overwrite = COMMANDS[name]
    whole = tmp_path / file
    assert run(*command(name, trace, ran, whole))[0] == 0
    size = whole.stat().st_size
    out = tmp_path / "results" / file
    out.parent.mkdir()
    before = EARLIER if overwrite else None
    if overwrite:
        out.write_bytes(EARLIER)
    arguments = command(name, trace, ran, out)

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


def test_figures_of_layers_appear_together_or_not_at_all(trace, run, tmp_path):
    """The folder of `kvsim layers --figures` holds all figures or is not there."""
    whole, out = tmp_path / "whole", tmp_path / "figures"
    arguments = ["layers", trace, "--budget", "8", "--window", "4", "--figures"]
    assert run(*arguments, whole)[0] == 0
    sizes = sorted({p.stat().st_size for p in whole.iterdir()})

    for room in (4096, sizes[0] - 1, sizes[-1] - 1):
        with limit(room):
            status, _, err = run(*arguments, out)
        assert status == 2
        assert f"error: {out} cannot be written (File too large), nothing was changed" in err
        assert [p.name for p in tmp_path.iterdir()] == ["whole"]
    assert run(*arguments, out)[0] == 0
    assert bytes_of(out) == bytes_of(whole)


@pytest.mark.deep
def test_a_demo_on_a_full_disk_leaves_the_earlier_one(run, small_demo, tmp_path, monkeypatch):
    """Whichever file of a second demo cannot be written, the first one is there byte for byte."""
    out = tmp_path / "demo"
    assert run("demo", "--out", out)[0] == 0
    before = bytes_of(out)

    def refused():
        status, _, err = run("demo", "--out", out)
        assert status == 2
        assert err.splitlines()[-1].startswith(f"error: {out} cannot be written (")
        assert bytes_of(out) == before
        assert [p.name for p in tmp_path.iterdir()] == ["demo"]

    for room in (8192, max(map(len, before.values())) - 1):
        with limit(room):
            refused()
    with monkeypatch.context() as patch:
        refuse(patch, Path, "rename")
        refused()
    (out / "demo.json").chmod(0o640)
    assert run("demo", "--out", out)[0] == 0


@pytest.mark.parametrize("ending", ["png", "svg", "pdf", "PNG"])
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
    assert len(out.read_bytes()) > 1024
    assert [p.name for p in tmp_path.iterdir()] == [out.name]


@pytest.mark.parametrize("name", ["f", "f.jpg", "f.png.txt"])
def test_a_figure_of_another_format_is_refused(name, tmp_path):
    """Formats other than PNG, SVG and PDF are an error that names the three."""
    with pytest.raises(OutputError, match=r"expected \.png, \.svg or \.pdf"):
        plots.save(Figure(), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_what_is_in_the_way_is_one_line_before_any_work(run, ran, tmp_path):
    """A folder, a pipe, a parent that is a file, or a name that is too long: refused at once."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    cases = {
        "folder": "is not a file",
        "pipe": "is not a file",
        "file/r.html": "is a file; expected a folder",
        "n" * 300: "File name too long",
    }
    for name, message in cases.items():
        for arguments in (["prompts"], ["report", "no-such-run"]):
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


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_folder_that_cannot_be_written_is_found_before_any_work(
    run, number, tmp_path, monkeypatch
):
    """Without permission, on a read-only or full disk, an output is refused before any work."""
    refuse(monkeypatch, files, "TemporaryFile", number)
    status, out, err = run("report", "no-such-run", "--out", tmp_path / "r.html")

    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert f"{tmp_path} cannot be written to ({os.strerror(number)})" in err


def test_a_report_of_the_library_checks_its_output_first(tmp_path):
    """`write_report` looks at its path before it reads the runs."""
    (tmp_path / "r.html").write_text("mine")
    with pytest.raises(OutputError, match="exists; give another --out, or --overwrite"):
        write_report([tmp_path / "no-such-run"], tmp_path / "r.html")


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


def test_a_folder_that_cannot_be_put_back_is_named(tmp_path, monkeypatch):
    """Where neither the new folder nor the old one can be renamed, the message says where it is."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "a").write_text("before")
    rename = Path.rename

    def once(path, target):
        monkeypatch.setattr(Path, "rename", refused)
        return rename(path, target)

    def refused(path, target):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def write():
        with published(out, overwrite=True) as draft:
            draft.mkdir()
            monkeypatch.setattr(Path, "rename", once)

    with pytest.raises(OutputError, match="cannot be put back") as error:
        write()
    (aside,) = tmp_path.iterdir()
    assert str(aside) in str(error.value)
    assert (aside / "a").read_text() == "before"


def test_a_flush_that_fails_after_the_rename_says_that_the_file_is_written(tmp_path, monkeypatch):
    """The last flush is of the folder: the file is then there, and the message says so."""
    monkeypatch.setattr(files, "sync", lambda _: None)
    out = tmp_path / "a.json"
    write_file(out, json.dumps({}))
    refuse(monkeypatch, files, "sync")
    monkeypatch.setattr(files, "sync_tree", lambda _: None)
    with pytest.raises(OutputError, match="is written, but could not be flushed"):
        write_file(out, json.dumps({"new": 1}), overwrite=True)
    assert json.loads(out.read_text()) == {"new": 1}


def test_an_output_is_checked_and_left_alone(tmp_path):
    """Looking whether a path can be written leaves no trace, also of folders that are not there."""
    check_output(tmp_path / "not" / "there" / "a.txt")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_command_leaves_is_listed_and_discarded(run, tmp_path):
    """`kvsim traces` names the hidden folder of an output until `trace discard` removes it."""
    out, kept = tmp_path / "a.svg", tmp_path / "kept"
    with published(out) as draft:
        draft.write_text("half of")
        shutil.copytree(draft.parent, kept)  # what a kill leaves
        status, text, _ = run("traces", tmp_path)
        assert (status, "is being written" in text) == (0, True)
        assert run("trace", "discard", draft.parent)[0] == 2
    left = kept.rename(draft.parent)
    discard = f"kvsim trace discard {left} removes it"

    assert discard in run("traces", tmp_path)[1]
    assert run("trace", "discard", left)[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["a.svg"]


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


KILLED = """
import os, sys
from pathlib import Path
from kvsim.files import published

rename = Path.rename
with published(Path(sys.argv[1]), overwrite=True) as draft:
    draft.mkdir()
    (draft / "demo.json").write_text("new")
    Path.rename = lambda path, target: os._exit(9) if path == draft else rename(path, target)
"""


def test_what_a_kill_between_two_renames_leaves_is_listed_and_removed(run, tmp_path):
    """The earlier folder and the new one: `traces` names the command that removes each."""
    out = tmp_path / "demo"
    out.mkdir()
    (out / "demo.json").write_text("earlier")
    command = [sys.executable, "-c", KILLED, str(out)]
    assert subprocess.run(command, check=False).returncode == 9
    old, new = sorted(tmp_path.iterdir())
    assert (old / "demo.json").read_text() == "earlier"

    status, text, _ = run("traces", tmp_path)

    assert status == 0
    assert f"{old.name}: was set aside for another output, and is no whole trace" in text
    removals = [line.partition("; ")[2].removesuffix(" removes it") for line in text.splitlines()]
    for removal in filter(None, removals):
        assert run(*removal.split()[1:])[0] == 0
    assert list(tmp_path.iterdir()) == []
    assert new.name.startswith(".demo.tmp-")
