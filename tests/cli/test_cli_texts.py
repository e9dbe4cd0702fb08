"""Texts of a trace are text, whatever they hold."""

import pytest

import kvsim
from damage import edit_header, reseal
from traces import random_trace

#: What a terminal would act upon, what a reader would be misled by, and what UTF-8 cannot hold.
HOSTILE = "\x1b[31m\x9b2J\x07\u202e\u2066\u2028<i>[b]x[/b] $x^$\r\nsecond line\x7f\ud800 漢"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A trace whose names and texts are not to be trusted."""
    words = [HOSTILE.replace("\ud800", ""), "y" * 5000, "<b>", "[/]"]
    made = random_trace(token_text=[words[i % 4] for i in range(90)])
    path = tmp_path_factory.mktemp("hostile") / "t.zarr"
    kvsim.save_trace(made, path)
    meta = {
        "text": {"prompt": HOSTILE * 50, "response": HOSTILE},
        "labels": {"task": HOSTILE, "domain": "d"},
        "answer_check": {"answer": HOSTILE, "right": False, "expected": HOSTILE},
        "model": {"name": HOSTILE, "type": HOSTILE},
        "versions": {"kvsim": HOSTILE},
        "notes": [HOSTILE],
    }
    edit_header(path, lambda found: found.update(name=f"evil {HOSTILE}", meta=meta))
    reseal(path)
    return path


@pytest.mark.parametrize(
    "command",
    [
        "info {0}",
        "info {0} --json",
        "info {0} --deep",
        "replay {0} --policy tova,h2o --budget 16",
        "replay {0} {0} --policy tova --budget 16",
        "plot token_text {0} --policy tova --budget 16 --out x.png",
        "plot bursts {0} --policy tova --budget 16 --out x.png",
    ],
)
def test_texts_of_a_trace_are_text(run, hostile, tmp_path, monkeypatch, command):
    """No control character and no mark of direction reaches the terminal, no name makes a line."""
    monkeypatch.chdir(tmp_path)

    status, out, err = run(*command.format(hostile).split())

    assert status in (0, 2)
    for said in (out, err):
        assert all(c == "\n" or c.isprintable() for c in said)
        assert not any(line.startswith("second line") for line in said.splitlines())
        said.encode("utf-8")
    if status == 2:
        assert err.startswith("error: ")
        assert out == ""
    if "info" in command:
        assert "\\u001b[31m" in out
        assert "\\u202e" in out
