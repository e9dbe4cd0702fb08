"""`kvsim plot`: every figure by name, and what it refuses."""

import re

import matplotlib as mpl
import polars as pl
import pytest

import kvsim
from kvsim import plots
from kvsim.core.attention import Formula
from kvsim.plots.registry import FIGURES, plotted
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
        ("over_budgets --policy ams+tova,tova --budget 16,24 --interval 8", 1),
        ("mass_curve --policy ams+tova --budget 16 --interval 8", 1),
        ("reconstruction_error --policy ams+tova,tova --ratio 80%", 1),
    ],
)
def test_remarks_of_records_go_to_standard_error(run, paths, tmp_path, command, count):
    """Each once, whatever the number of traces and budgets; standard output has the file alone."""
    name, *options = command.split()
    # the ratio of a trace of another length is another budget
    traces = paths[:1] if FIGURES[name].single or "--ratio" in options else paths
    out = tmp_path / "out.png"

    status, said, err = run("plot", name, *traces, *options, "--out", out)

    assert (status, said) == (0, f"Written to {out}.\n")
    notes = err.splitlines()
    cut = [note for note in notes if "the window of 128 rows is cut to the budget" in note]
    assert len(cut) == count
    assert all(note.startswith("Note: ams+tova: budget ") for note in cut)
    assert len(set(notes)) == len(notes)


def test_remarks_of_runs_go_to_standard_error(run, paths, tmp_path):
    """As the run folder has them."""
    asked = ["--policy", "ams+tova", "--budget", "16", "--interval", "8"]
    run("replay", *paths, *asked, "--out", tmp_path / "run")

    _, _, err = run("plot", "over_budgets", tmp_path / "run", "--out", tmp_path / "out.png")

    assert err.count("the window of 128 rows is cut to the budget") == 1


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


RUNS = [name for name in plotted() if FIGURES[name].runs and not FIGURES[name].single]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_drawn_as_its_traces_are(run, paths, finished, tmp_path, name):
    """The same file, without replaying anything."""
    policies = ["--policy", "tova,h2o,random", "--budget", "16,40%", "--interval", "8"]
    out = [tmp_path / "run.svg", tmp_path / "traces.svg"]

    drawn = run("plot", name, finished / "three", "--out", out[0])
    replayed = run("plot", name, *paths, *policies, "--out", out[1])

    assert drawn == (0, f"Written to {out[0]}.\n", "")
    assert replayed[0] == 0
    assert out[0].read_bytes() == out[1].read_bytes()


def shown(monkeypatch, name):
    """What a figure of `kvsim.plots` is called with, in a list that the call fills."""
    seen = []
    real = getattr(plots, name)
    monkeypatch.setattr(
        plots,
        name,
        lambda *given, **more: seen.append((*given, *more.values())) or real(*given, **more),
    )
    return seen


def test_policies_and_budgets_of_a_run_can_be_chosen(printed, finished, tmp_path, monkeypatch):
    """Those asked for; what belongs to no policy stays."""
    seen = shown(monkeypatch, "sparsity_curves")

    printed("plot", "sparsity_curves", finished / "three", "--policy", "h2o,tova",
                         "--budget", "40%", "--out", tmp_path / "out.png")  # fmt: skip

    ((table,),) = seen
    assert set(table["policy"].drop_nulls()) == {"tova", "h2o"}
    assert set(table["share"].drop_nulls()) == {"40%"}
    assert table.filter(pl.col("policy").is_null())["metric"].unique().to_list() == ["sparsity"]


def test_results_of_several_runs_are_told_apart(printed, finished, tmp_path, monkeypatch):
    """One policy with two sets of parameters has two lines."""
    seen = shown(monkeypatch, "over_budgets")

    printed("plot", "over_budgets", finished / "three", finished / "other",
                         "--metric", "middle_coverage", "--out", tmp_path / "out.png")  # fmt: skip

    (((table, metrics),)) = seen
    names = table["policy"].drop_nulls().unique().to_list()
    assert len(names) == 4
    assert {"h2o", "random"} < {*names}
    assert sum(name.startswith("tova") for name in names) == 2
    assert metrics == ["middle_coverage"]


def test_no_prefill_reaches_the_replay(run, paths, tmp_path, monkeypatch):
    """No event follows the prompt, in figures of records and of Plans."""
    maps, curves = shown(monkeypatch, "retention_map"), shown(monkeypatch, "mass_curve")
    same = [paths[0], "--budget", "32", "--interval", "8", "--no-prefill"]

    one = run("plot", "retention_map", *same, "--policy", "tova", "--out", tmp_path / "a.png")
    two = run("plot", "mass_curve", *same, "--policy", "ams+tova", "--set", "window=16",
              "--out", tmp_path / "b.png")  # fmt: skip

    assert (one[0], two[0]) == (0, 0)
    ((trace, (record,)),), ((_, planned),) = maps, curves
    for found in (record, planned):
        assert found.prefill is False
        assert found.events[0] > trace.prompt_len - 1
        assert found.interval == 8


def test_metrics_asked_for_are_measured(printed, paths, tmp_path, monkeypatch):
    """Each in a panel of its own, also one that needs the oracle."""
    seen = shown(monkeypatch, "over_budgets")

    printed("plot", "over_budgets", paths[0], "--policy", "tova", "--budget", "16,32",
                         "--metric", "regret", "--metric", "burst_length",
                         "--out", tmp_path / "out.png")  # fmt: skip

    (((table, metrics),)) = seen
    assert metrics == ["regret", "burst_length"]
    assert {*metrics} < {*table["metric"]}
    assert table.filter(metric="regret")["value"].is_not_null().all()


def test_ratios_are_shares_of_what_is_evicted(run, paths, tmp_path, monkeypatch):
    """One eviction each, of all traces, and by default from 10 % to 90 %."""
    seen = shown(monkeypatch, "reconstruction_error")
    given = ["plot", "reconstruction_error", *paths, "--policy", "knorm"]

    run(*given, "--ratio", "75%,12.5%", "--out", tmp_path / "a.png")
    run(*given, "--out", tmp_path / "b.png")

    (few,), (all_of,) = seen
    assert sorted(few["ratio"].unique()) == [0.125, 0.75]
    assert few["trace"].n_unique() == 2
    assert sorted(all_of["ratio"].unique()) == pytest.approx([i / 10 for i in range(1, 10)])
    trace = kvsim.open_trace(paths[0])
    part = few.filter(trace=trace.name, ratio=0.75)
    cut = int(trace.n_pos * 0.8)
    assert part["budget"].unique().to_list() == [int(cut * 0.25)]


def test_zoom_reaches_the_figure(run, paths, tmp_path, monkeypatch):
    """As two positions; without it the figure finds its own."""
    seen = []
    real = plots.bursts
    monkeypatch.setattr(
        plots, "bursts", lambda *given, **more: seen.append(more) or real(*given, **more)
    )
    given = ["plot", "bursts", paths[0], "--policy", "tova", "--budget", "16"]

    run(*given, "--zoom", "20-40", "--out", tmp_path / "a.png")
    run(*given, "--layer", "1", "--out", tmp_path / "b.png")

    assert seen == [{"zoom": (20, 40)}, {"layer": 1}]


def test_layers_are_drawn_in_any_format(printed, paths, tmp_path):
    """As PNG if nothing else is asked for."""
    given = ["layers", paths[0], "--budget", "32", "--window", "8", "--figures"]

    said = printed(*given, tmp_path / "svg", "--format", "svg")

    assert "variance.svg, attention.svg" in said
    assert all(one.read_text("utf-8").startswith("<?xml") for one in (tmp_path / "svg").iterdir())


def test_layers_with_a_window_are_passed_over(run, tmp_path):
    """A figure of one layer takes one that was replayed, and one that was not is refused."""
    formulas = [Formula(0.3, window=9), Formula(0.3), Formula(0.3, window=9)]
    path = random_trace(
        layers=3, group=1, n=80, prompt_len=40, formulas=formulas, name="memory"
    ).save(tmp_path / "mixed.zarr")
    asked = [path, "--policy", "tova", "--budget", "20", "--interval", "8"]

    for figure in ("retention_map", "bursts", "over_budgets"):
        status, _, err = run("plot", figure, *asked, "--out", tmp_path / f"{figure}.png")
        assert status == 0, figure
        assert re.fullmatch(r"Note: 2 of 3 layers do not see the whole text.*\n", err), figure
    status, _, err = run("plot", "bursts", *asked, "--layer", "2", "--out", tmp_path / "x.png")
    assert status == 2
    assert "--layer 2 of memory has a sliding window" in err
    assert "as 1" in err
