"""What all commands share: values of options, bugs, pipes and signals."""

import math
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from command_line import one_line

import kvsim
from kvsim.cli import GONE, main
from kvsim.cli.shared import parse_set
from kvsim.errors import KvsimError
from kvsim.studies.language.tasks import prompts
from kvsim.sweeps.grid import _Loader, _values
from traces import random_trace


def test_bugs_show_their_traceback(monkeypatch, trace):
    """What kvsim does not expect is not swallowed: Python reports it, with status 1."""

    def broken(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr("kvsim.sweeps.driver.Plan.of", broken)
    with pytest.raises(ZeroDivisionError):
        main(["replay", str(trace), "--policy", "tova", "--budget", "16"])


def test_a_warning_of_a_library_is_one_line(monkeypatch, trace, capsys):
    """No file and no line of source code reach the screen."""

    def warned(*_, **__):
        warnings.warn("x is deprecated\nin 6.0", FutureWarning, stacklevel=1)
        raise KvsimError("stopped")

    monkeypatch.setattr("kvsim.sweeps.driver.Plan.of", warned)
    monkeypatch.setattr(warnings, "filters", [])
    monkeypatch.setattr(warnings, "showwarning", printed)
    with pytest.raises(SystemExit):
        main(["replay", str(trace), "--policy", "tova", "--budget", "16"])
    assert capsys.readouterr().err == "warning: x is deprecated in 6.0\nerror: stopped\n"


def printed(message, category, filename, lineno, file=None, line=None):
    """Show a warning as Python does; pytest only keeps it."""
    sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("window=64", ("window", 64)),
        ("a=0.5", ("a", 0.5)),
        ("a=1e-3", ("a", 1e-3)),
        ("pool=none", ("pool", None)),
        ("flag=True", ("flag", True)),
        ("pool=avg", ("pool", "avg")),
        ("path=a=b", ("path", "a=b")),
        *((f"a={text}", ("a", True)) for text in ("yes", "ON", "true")),
        *((f"a={text}", ("a", False)) for text in ("no", "Off", "FALSE")),
        *((f"a={text}", ("a", None)) for text in ("~", "null", "None")),
        ("a=1_000", ("a", 1000)),
        ("a=017", ("a", 17)),
        ("a=.5", ("a", 0.5)),
        ("a=1e3", ("a", 1e3)),
        ("a=-.inf", ("a", -math.inf)),
        *((f"a={text}", ("a", text)) for text in ("0o17", "0x1F", "1:30", "2024-01-02", "nones")),
    ],
)
def test_values_of_settings(text, expected):
    """Numbers, true, false and none are values, as in a configuration; everything else is text."""
    key, value = parse_set(text)
    _, _, right = text.partition("=")
    configured = _values(_Loader(f"{{k: [{right}]}}").get_single_data()["k"][0])

    assert (key, value) == (key, configured) == expected
    assert type(value) is type(configured) is type(expected[1])


def kvsim_process(program, *arguments, **options):
    """A command in a process of its own."""
    return subprocess.Popen(
        [str(program), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_output_in_a_pipe(trace, warm_kvsim):
    """In a pipe there is no progress bar, no colour, and no line is broken."""
    process = kvsim_process(
        warm_kvsim / "kvsim",
        *("replay", trace, "--policy", "tova,streaming_llm", "--budget", "16"),
        env={**os.environ, "COLUMNS": "20"},
    )
    out, err = process.communicate()

    assert (process.returncode, err) == (0, "")
    assert "\x1b" not in out
    assert sum(line.startswith(("tova", "streaming_llm")) for line in out.splitlines()) == 2


def test_reader_that_stops(trace):
    """A reader that closes the pipe early gets no traceback, also at the end of the process."""
    installed = Path(sys.executable).with_name("kvsim")
    process = kvsim_process(installed, "info", trace, "--json")
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    process.wait()

    assert err == ""


LOST = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
except BaseException:
    pass
time.sleep(60)
"""


def test_an_interrupt_in_an_import_is_not_lost(tmp_path, warm_kvsim):
    """A library that catches it does not go on: one line and status 130."""
    (tmp_path / "mine.py").write_text(LOST)
    process = kvsim_process(warm_kvsim / "kvsim", "policies", "mine:make", cwd=tmp_path)
    out, err = process.communicate(timeout=50)

    assert (process.returncode, out, one_line(err)) == (130, "", "interrupted")


@pytest.mark.parametrize("name", GONE)
def test_a_command_that_is_gone_says_what_to_do(run, name):
    """One line with its name, and status 2."""
    status, out, err = run(*name.split(), "x", "--option")

    assert (status, out) == (2, "")
    assert one_line(err) == f"error: kvsim {name} was removed: {GONE[name]}"


def test_a_terminal_of_eight_bits_shows_escapes(tmp_path, trace):
    """Names, texts and authors are printed as far as the encoding has their characters."""
    kvsim.save_trace(random_trace(name="漢字 → é"), tmp_path / "é漢.zarr")
    environment = {**os.environ, "PYTHONIOENCODING": "cp1252"}
    for command in (
        ["info", str(tmp_path / "é漢.zarr")],
        ["info", str(tmp_path)],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "kvsim", *command],
            env=environment,
            capture_output=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"\\u" in done.stdout
        assert done.stdout.decode("cp1252")


@pytest.mark.parametrize(
    "command",
    [
        ["capture", "--model", "tiny", "--prompt", "caf\udce9", "--out", "x"],
        ["info", "caf\udce9"],
        ["caf\udce9"],
        ["replay", "sample", "--policy", "h2o", "--budget", "9", "--set", "\udce9=3"],
    ],
)
def test_an_argument_that_is_no_text_is_refused(run, command):
    """Bytes of another encoding, wherever they stand: one line and status 2."""
    status, out, err = run(*command)
    assert (status, out) == (2, "")
    assert re.fullmatch(
        r"error: an argument is '.*\\udce9.*', expected text in UTF-8; .*", one_line(err)
    )


@pytest.mark.parametrize(
    "command",
    [
        ["info", "{0}"],
        ["{0}"],
        ["replay", "sample", "--policy", "{0}", "--budget", "9"],
        ["replay", "{0}", "--policy", "h2o", "--budget", "9"],
        ["capture", "--model", "{0}", "--prompt", "a", "--out", "x"],
    ],
)
def test_a_long_argument_is_cut_short_in_its_error(run, command):
    """An error quotes both ends of it, in one line with status 2."""
    status, out, err = run(*(part.format("x" * 100_000) for part in command))
    assert (status, out) == (2, "")
    assert len(one_line(err)) < 2100


def test_an_interrupted_capture_leaves_nothing(tmp_path, warm_kvsim):
    """SIGINT while the model writes: status 130, one line, and no trace."""
    prompt = prompts(1, task="walk", level=5)[0].prompt
    asked = ("--model", "tiny", "--prompt", prompt, "--out", tmp_path / "t.zarr")
    process = kvsim_process(warm_kvsim / "kvsim", "capture", *asked)
    deadline = time.monotonic() + 60
    while not [*tmp_path.glob(".t.zarr.*/t.zarr/k")] and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    stdout, err = process.communicate(timeout=60)

    assert (process.returncode, stdout) == (130, "")
    assert one_line(err).startswith("interrupted")
    assert not [*tmp_path.iterdir()]
