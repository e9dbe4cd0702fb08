"""`kvsim dashboard`: what it starts, and what it says where it cannot."""

import os
import sys

import pytest

from kvsim.cli import dashboard, main


@pytest.fixture
def started(monkeypatch):
    """The command that the process would become."""
    found = []
    monkeypatch.setattr(os, "execv", lambda program, command: found.append((program, command)))
    return found


def run(*arguments):
    """The exit status of a command."""
    with pytest.raises(SystemExit) as ended:
        main(["dashboard", *map(str, arguments)])
    return ended.value.code


def test_the_server_is_for_this_machine_alone_and_silent(started, tmp_path):
    """Loopback, no statistics, no question for an address; the folder comes last, absolute."""
    assert run(tmp_path, "--port", 9123, "--no-browser") in (0, None)

    ((program, command),) = started
    options = dict(zip(command[5:-3:2], command[6:-3:2], strict=True))
    assert (program, command[:4]) == (sys.executable, [sys.executable, "-c", dashboard._RUN, "run"])
    assert options["--server.address"] == "127.0.0.1"
    assert options["--browser.gatherUsageStats"] == "false"
    assert options["--server.showEmailPrompt"] == "false"
    assert options["--server.headless"] == "true"
    assert options["--server.port"] == "9123"
    assert command[-3:] == ["--", str(tmp_path.resolve()), "--no-browser"]


def test_a_folder_that_is_not_there_is_an_error(started, tmp_path, capsys):
    """Nothing starts."""
    assert run(tmp_path / "no") == 2
    assert "is no folder" in capsys.readouterr().err
    assert started == []


def test_without_the_extra_it_says_what_to_install(started, monkeypatch, tmp_path, capsys):
    """One line, with the command."""
    monkeypatch.setattr(dashboard, "find_spec", lambda _: None)

    assert run(tmp_path) == 2
    said = capsys.readouterr().err
    assert "plotly is not installed" in said
    assert "pip install 'kvsim[dashboard]'" in said
    assert started == []
