"""The pictures of the documentation: there, small, and made by commands that the pages show."""

import shlex
import shutil

import pytest

import drawing
from kvsim.plots.registry import FIGURES

(GALLERY,) = (
    block for block in drawing.running("figures") if (block.how or "").startswith(drawing.REASON)
)
LINES = list(drawing.lines(GALLERY))


def test_the_pictures_are_what_pages_show():
    """Each is there, small, shown, and written by a command on a page."""
    assert drawing.problems() == []


def test_a_figure_of_the_gallery_has_its_command_and_its_picture():
    """Of those that the gallery shows, once each, named as the figure is."""
    drawn = [shlex.split(line) for line in LINES if line.startswith("kvsim plot ")]
    expected = {one[2] for one in drawn}

    assert len(drawn) == len(expected)
    assert expected <= {*FIGURES}
    assert all(one[-2:] == ["--out", f"figures/{one[2]}.png"] for one in drawn)
    assert {f"figures/{name}.png" for name in expected} <= drawing.shown()


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    """A folder with the runs that the commands of the gallery draw from."""
    folder = tmp_path_factory.mktemp("gallery")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for line in LINES:
            if line.startswith("kvsim replay "):
                drawing.kvsim(line)
    return folder


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("kvsim plot ")])
def test_the_commands_of_the_gallery_run(replayed, tmp_path, monkeypatch, line):
    """Each writes its picture."""
    shutil.copytree(replayed, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")

    drawing.kvsim(line)

    assert [path.name for path in (tmp_path / "here" / "figures").iterdir()] == [
        f"{shlex.split(line)[2]}.png"
    ]
