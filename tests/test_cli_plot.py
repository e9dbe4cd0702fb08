"""`kvsim plot`: every figure by name, and what it refuses."""

from __future__ import annotations

import re

import matplotlib as mpl
import pytest

import kvsim
from kvsim.cli.figures import FIGURES
from kvsim.tiny.tasks import prompts

#: What each figure takes beside a trace, a policy and a budget.
OPTIONS = {
    "retention_map": ["--layer", "1", "--head", "1"],
    "middle_coverage": ["--layer", "1"],
    "mass_curve": ["--policy", "ams+tova", "--set", "window=16", "--head", "1"],
    "iou_by": ["--by", "task"],
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Two small traces of the shipped model."""
    folder = tmp_path_factory.mktemp("traces")
    made = prompts(2, task="walk", facts=6, lines=6, kinds=3)
    for name, one in zip("ab", made, strict=True):
        out = folder / f"{name}.zarr"
        kvsim.capture("tiny", None, one.prompt, max_new_tokens=48, out=out, labels={"task": "walk"})
    return [folder / "a.zarr", folder / "b.zarr"]


def arguments(name, paths):
    """A command that draws the figure."""
    drawing = FIGURES[name]
    traces = paths[:1] if drawing.single else paths
    given = OPTIONS.get(name, [])
    if drawing.policies and "--policy" not in given:
        given = [*given, "--policy", "tova"]
    budget = ["--budget", "32", "--interval", "8"] if drawing.policies else []
    return ["plot", name, *traces, *given, *budget]


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_written(run, paths, tmp_path, name):
    """One file of the format that its name asks for, and one line that says where."""
    out = tmp_path / "new" / "figure.svg"

    status, said, err = run(*arguments(name, paths), "--out", out)

    assert (status, said, err) == (0, f"Written to {out}.\n", "")
    assert out.read_text("utf-8").startswith("<?xml")
    assert [one.name for one in out.parent.iterdir()] == ["figure.svg"]


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("PDF", b"%PDF")])
def test_equal_figures_are_equal_files_in_every_format(run, paths, tmp_path, suffix, start):
    """No date and no random name is in them."""
    files = [tmp_path / f"{i}.{suffix}" for i in "ab"]
    svgs = [tmp_path / f"{i}.svg" for i in "ab"]
    before = dict(mpl.rcParams)

    for out in (*files, *svgs):
        assert run(*arguments("overlap_curves", paths), "--out", out)[0] == 0

    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].read_bytes().startswith(start)
    assert svgs[0].read_bytes() == svgs[1].read_bytes()
    assert dict(mpl.rcParams) == before


def test_help_lists_the_figures(run):
    """By name."""
    status, said, _ = run("plot", "--help")

    assert status == 0
    assert all(re.search(rf"\b{name}\b", said) for name in FIGURES)


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("parteo --policy tova --budget 8", "'parteo'; did you mean 'pareto'?; figures: over_b"),
        ("pareto --budget 8", "--policy is ''"),
        ("pareto --policy tova", "--budget is ''"),
        ("pareto --policy tofa --budget 8", "tofa"),
        ("pareto --policy tova --budget x", "budget is 'x'"),
        ("pareto --policy tova --budget 8 --layer 0", "--layer was given, but pareto has none"),
        ("pareto --policy tova --budget 8 --set nothing=1", "nothing"),
        ("overlap_curves --policy tova", "overlap_curves shows no policies"),
        ("overlap_curves --layer 99", "--layer is 99; a has 0 to"),
        ("token_text --policy tova,h2o --budget 8", "shows one policy at one budget, but 2"),
        ("token_text --policy tova --budget 8 --head 99", "--head is 99; a has 0 to"),
        ("mass_curve --policy tova --budget 8", "has no segments of layer 0"),
        ("middle_coverage --policy full --budget 8", "nothing left the cache"),
        ("iou_by --policy tova --budget 8 --by task --by colour", "--by is 'colour'"),
        ("iou_by --policy tova --budget 8 --by level", "no retained_iou by level"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(run, paths, tmp_path, command, complaint):
    """Status 2."""
    name, *options = command.split()

    status, said, err = run("plot", name, paths[0], *options, "--out", tmp_path / "out.png")

    assert (status, said) == (2, "")
    assert complaint in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(run, paths, tmp_path):
    """What is there stays, whatever it is."""
    out = tmp_path / "out.png"
    out.write_text("mine")

    status, said, err = run("plot", "overlap_curves", paths[0], "--out", out)

    assert (status, said) == (2, "")
    assert "out.png exists; give another --out, nothing was changed" in err
    assert out.read_text() == "mine"


def test_files_and_traces_that_do_not_fit(run, paths, tmp_path):
    """An unknown format, two traces for a figure of one, a trace that is none."""
    _, _, other = run("plot", "overlap_curves", paths[0], "--out", tmp_path / "out.jpg")
    _, _, two = run(*arguments("token_text", paths), paths[1], "--out", tmp_path / "out.png")
    status, _, none = run("plot", "pareto", tmp_path / "no", "--policy", "tova", "--budget", "8",
                          "--out", tmp_path / "out.png")  # fmt: skip

    assert "expected a file that ends in .png, .svg or .pdf" in other
    assert "token_text shows one trace, but 2 were given" in two
    assert status == 2
    assert "no" in none
    assert list(tmp_path.iterdir()) == []
