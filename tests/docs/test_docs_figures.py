"""The pictures of the documentation: there, small, and made by commands that the pages show."""

from __future__ import annotations

import shlex
import shutil

import numpy as np
import pytest
from PIL import Image

import drawing
from kvsim.plots.registry import plotted

(GALLERY,) = (
    block for block in drawing.running("figures") if (block.how or "").startswith(drawing.REASON)
)
LINES = list(drawing.lines(GALLERY))


def test_the_pictures_are_what_pages_show():
    """Each is there, small, shown, and written by a command on a page."""
    assert drawing.problems() == []


def test_every_figure_has_its_command_and_its_picture():
    """All that `kvsim plot` knows, once each, named as the figure is.

    But for the needle, whose grid takes prompts of several lengths and depths: quickstart.md.
    """
    drawn = [shlex.split(line) for line in LINES if line.startswith("kvsim plot ")]
    expected = set(plotted()) - {"needle"}

    assert sorted(one[2] for one in drawn) == sorted(expected)
    assert all(one[-2:] == ["--out", f"figures/{one[2]}.png"] for one in drawn)
    assert {f"figures/{name}.png" for name in expected} <= drawing.shown()


def test_what_is_wrong_with_pictures_is_told(tmp_path, monkeypatch):
    """No command, no file, a file that no page shows, too many bytes."""
    monkeypatch.setattr(drawing, "DOCS", tmp_path)
    figures = tmp_path / "figures"
    (figures / "more").mkdir(parents=True)
    (figures / "old.png").write_bytes(b"")
    (figures / "made.png").write_bytes(b"x" * (drawing.LARGEST + 1))
    (figures / "more" / "deep.png").write_bytes(b"x")
    (tmp_path / "page.md").write_text(
        "![a](figures/made.png) ![b](figures/typed.png) ![c](figures/more/deep.png)\n"
        "![d](figures/results.png)\n\n"
        "```bash exec\nkvsim plot x --out figures/made.png\n"
        "kvsim layers --figures figures/more\n```\n"
        "<!-- not run: needs a key -->\n```bash\nkvsim plot x --out figures/typed.png\n```\n"
    )

    assert drawing.makers() == {"figures/made.png": "page", "figures/more/deep.png": "page"}
    assert sorted(drawing.problems()) == [
        f"figures/made.png has {drawing.LARGEST + 1} bytes",
        "figures/old.png is there and not shown",
        "figures/typed.png is shown and no command on a page writes it",
        "figures/typed.png is shown and not there",
    ]


def test_pictures_are_made_small(tmp_path):
    """No wider than pages, with the colours of lines, and within the bytes if it can be."""
    wide = np.full((300, 2000, 3), 255, np.uint8)
    wide[100:120] = (0, 114, 178)
    wide[200:220] = (213, 94, 0)
    Image.fromarray(wide).save(tmp_path / "wide.png")
    noise = np.random.default_rng(0).integers(0, 256, (200, 350, 3)).astype(np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")

    for name in ("wide", "noise"):
        drawing.small(tmp_path / f"{name}.png", tmp_path / "out" / f"{name}.png")

    with Image.open(tmp_path / "out" / "wide.png") as image:
        assert image.size == (1000, 150)
        pixels = np.asarray(image.convert("RGB")).astype(int)
    assert pixels[55, 500].tolist() == [0, 114, 178]
    assert pixels[105, 500].tolist() == [213, 94, 0]
    assert pixels[10, 10].tolist() == [255, 255, 255]
    assert (tmp_path / "out" / "noise.png").stat().st_size <= drawing.LARGEST


def test_pictures_come_from_what_a_page_runs(tmp_path, monkeypatch):
    """Commands, scripts of a shell and Python in one folder, in order; pictures land in place."""
    monkeypatch.setattr(drawing, "DOCS", tmp_path)
    (tmp_path / "page.md").write_text(
        "![a](figures/a.png) ![b](figures/b.png)\n\n"
        "```text file=size.txt\n40\n```\n"
        "```bash exec\nmkdir figures && cp size.txt copied.txt\n```\n"
        "```python exec\nfrom pathlib import Path\n\nfrom PIL import Image\n\n"
        "image = Image.new('RGB', (int(Path('copied.txt').read_text()), 30), 'red')\n```\n"
        "```python exec\nimage.save('figures/a.png'); image.save('figures/b.png')\n```\n"
    )

    drawing.draw(["page"])

    with Image.open(tmp_path / "figures" / "a.png") as image:
        assert image.size == (40, 30)
    assert drawing.problems() == []


def test_a_command_that_fails_ends_the_drawing(tmp_path, monkeypatch):
    """With its line."""
    monkeypatch.chdir(tmp_path)

    with pytest.raises(RuntimeError, match=r"kvsim plot none sample --out x.png\nended with"):
        drawing.kvsim("kvsim plot none sample --out x.png")


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
