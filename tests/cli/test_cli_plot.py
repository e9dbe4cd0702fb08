"""`kvsim plot`: every figure by name, and what it refuses."""

import re

import matplotlib as mpl
import pytest

import kvsim
from kvsim.core.attention import Formula
from kvsim.plots.registry import FIGURES
from kvsim.studies.language.tasks import prompts
from traces import random_trace

pytestmark = pytest.mark.usefixtures("no_layout")


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Two small traces of the shipped model."""
    folder = tmp_path_factory.mktemp("traces")
    made = prompts(2, task="walk", facts=6, lines=6, kinds=3)
    for name, one, depth in zip("ab", made, (0.2, 0.8), strict=True):
        out = folder / f"{name}.zarr"
        labels = {"task": "walk", "length": 100, "depth": depth}
        needle = one.prompt.split(" . ")[1]  # a fact
        options = {"max_new_tokens": 48, "labels": labels, "needle": needle}
        kvsim.capture("tiny", None, one.prompt, out=out, **options)
    return [folder / "a.zarr", folder / "b.zarr"]


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("PDF", b"%PDF")])
def test_equal_figures_are_equal_files_in_every_format(run, paths, tmp_path, suffix, start):
    """No date and no random name is in them."""
    files = [tmp_path / f"{i}.{suffix}" for i in "ab"]
    svgs = [tmp_path / f"{i}.svg" for i in "ab"]
    before = dict(mpl.rcParams)

    for out in (*files, *svgs):
        assert run("plot", "overlap_curves", *paths, "--out", out)[0] == 0

    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].read_bytes().startswith(start)
    assert svgs[0].read_bytes() == svgs[1].read_bytes()
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize(
    ("command", "count"),
    [
        ("middle_coverage --policy ams+tova,tova --budget 16,24 --interval 8", 1),
        ("mass_curve --policy ams+tova --budget 16 --interval 8", 1),
    ],
)
def test_remarks_of_records_go_to_standard_error(run, paths, tmp_path, command, count):
    """Each once, whatever the number of traces; standard output has the file alone."""
    name, *options = command.split()
    traces = paths[:1] if FIGURES[name].single else paths
    out = tmp_path / "out.png"

    status, said, err = run("plot", name, *traces, *options, "--out", out)

    assert (status, said) == (0, f"Written to {out}.\n")
    notes = err.splitlines()
    cut = [note for note in notes if "lengths exceed half of budget" in note]
    assert len(cut) == count
    assert all(note.startswith("Note: ams+tova: lengths ") for note in cut)
    assert len(set(notes)) == len(notes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, paths):
    """Runs of both traces: three policies at two budgets, and one of them with a parameter."""
    folder = tmp_path_factory.mktemp("runs")
    traces = [kvsim.open_trace(path) for path in paths]
    from kvsim.sweeps.driver import replay_all

    metrics = ["output_error", "retained_mass", "wipeout", "entries_seen", "retained_iou"]
    metrics += ["weighted_error", "layer_error", "sparsity", "sparsity_compressed"]
    metrics += ["middle_coverage", "needle_recall"]
    named = [kvsim.policy(name) for name in ("tova", "h2o", "random")]
    replay_all(traces, named, ["16", "40%"], interval=8, metrics=metrics).save(folder / "three")
    other = kvsim.policy("tova", heads="group")
    replay_all(traces, [other], ["16", "40%"], interval=8, metrics=metrics).save(folder / "other")
    return folder


RUNS = [name for name in FIGURES if FIGURES[name].runs and not FIGURES[name].single]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_drawn(run, finished, tmp_path, name):
    """Without replaying anything."""
    out = tmp_path / "run.svg"

    assert run("plot", name, finished / "three", "--out", out) == (0, f"Written to {out}.\n", "")


def test_a_text_by_kl_is_that_of_a_run(run, tmp_path):
    """Of one trace with a text; a run without the KL of tokens says what has it."""
    policies = ["--policy", "h2o", "--budget", "64", "--interval", "32"]
    more = {"judged": ["--judge", "--metric", "response_kl_tokens"], "plain": ["--judge"]}
    for name, options in more.items():
        run("replay", "sample", *policies, *options, "--out", tmp_path / name)

    judged = tmp_path / "judged"
    assert run("plot", "kl_text", "sample", judged, "--out", tmp_path / "run.svg")[0] == 0
    refused = {
        ("sample", tmp_path / "plain"): "the table has no response_kl_tokens of the tokens of sam",
        ("sample", "sample-smollm2", judged): "kl_text shows one trace, but 2 were",
        (judged,): "kl_text shows one trace, but 0 were given",
    }
    for sources, message in refused.items():
        status, _, err = run("plot", "kl_text", *sources, "--out", tmp_path / "none.png")
        assert status == 2
        assert message in err


def test_layers_with_a_window_are_passed_over(run, tmp_path):
    """A figure of one layer takes one that was replayed, and one that was not is refused."""
    formulas = [Formula(0.3, window=9), Formula(0.3), Formula(0.3, window=9)]
    path = kvsim.save_trace(
        random_trace(layers=3, group=1, n=80, prompt_len=40, formulas=formulas, name="memory"),
        tmp_path / "mixed.zarr",
    )
    asked = [path, "--policy", "tova", "--budget", "20", "--interval", "8"]

    for figure in ("retention_map", "bursts", "middle_coverage"):
        status, _, err = run("plot", figure, *asked, "--out", tmp_path / f"{figure}.png")
        assert status == 0, figure
        assert re.fullmatch(r"Note: 2 of 3 layers do not see the whole text.*\n", err), figure
    status, _, err = run("plot", "bursts", *asked, "--layer", "2", "--out", tmp_path / "x.png")
    assert status == 2
    assert "layer is 2; the record of tova on memory has layers 1" in err
