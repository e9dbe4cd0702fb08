"""Benchmarks run at their smallest size; their figures are printed, not asserted."""

import importlib.util
import sys
from pathlib import Path

import pytest

import kvsim
from kvsim.runner.decoding import Decoding, RunningModel


def load(name):
    """A benchmark script as a module."""
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_replay_benchmark_prints_its_ratios(capsys):
    """The replay benchmark runs and prints a ratio for every policy that it names."""
    replay = load("replay")

    ratios, lines = replay.run(replay.SMALLEST, replay.SMALLEST_ROWS)

    with capsys.disabled():
        print("", *lines, sep="\n")
    assert set(ratios) == {"tova", "snapkv", "bare", "tova row", "h2o row"}
    assert all(value > 0 for value in ratios.values())


def test_policy_benchmark_prints_its_ratios(capsys):
    """Choosing beats nothing at this size, but equals its loop; every policy has a cost."""
    policies = load("policies")

    ratios, lines = policies.run(policies.SMALLEST_CHOICE, policies.SMALLEST)

    with capsys.disabled():
        print("", *lines, sep="\n")
    assert {"ams", "adakv", "expected_attention", "gkv", "adakv+tova"} <= set(ratios)
    assert all(value > 0 for value in ratios.values())


def test_layer_benchmark_prints_its_ratios(capsys):
    """ASL's test is measured against one layer's attention, in all layers and in one."""
    layers = load("layers")

    ratios, lines = layers.run(layers.SMALLEST)

    with capsys.disabled():
        print("", *lines, sep="\n")
    assert set(ratios) == {"all layers", "one layer", "of all attention"}
    assert all(value > 0 for value in ratios.values())


def test_metric_benchmark_prints_its_ratios(capsys):
    """Every kind of metric is measured against one replay, for one record and for twelve."""
    metrics = load("metrics")

    ratios, lines = metrics.run(metrics.SMALLEST)

    with capsys.disabled():
        print("", *lines, sep="\n")
    assert set(ratios) == set(metrics.PARTS)
    assert all(value > 0 for value in ratios.values())


def test_reading_benchmark_prints_its_ratios(capsys):
    """Each reader is measured on rows that share pages and on rows that do not."""
    reading = load("reading")

    ratios, lines = reading.run(reading.SMALLEST)

    with capsys.disabled():
        print("", *lines, sep="\n")
    assert len(ratios) == len(reading.READERS) * len(reading.DRIFTS)
    assert all(value > 0 for value in ratios.values())


def test_benchmark_of_the_optimum_prints_its_gap(capsys):
    """The optimum has no gap at any size, and its cost has a slope against events and tokens."""
    optimum = load("optimum")

    figures, lines = optimum.run(optimum.SMALLEST)

    with capsys.disabled():
        print("", *lines, sep="\n")
    assert set(figures) == {"events", "tokens", "gap"}
    assert abs(figures["gap"]) < 1e-9


def test_benchmark_of_cells_prints_its_ratios(capsys):
    """Cells that are replayed and measured together beside the ideal of their output errors."""
    cells = load("cells")

    ratios, lines = cells.run(cells.SMALLEST, (64,))

    with capsys.disabled():
        print("", *lines, sep="\n")
    parts = {"replays", "output errors", "other metrics"}
    assert set(ratios) == parts | {"all", "ms on the sample"}
    assert all(value >= 0 for value in ratios.values())


def test_sweep_benchmark_prints_its_ratios(capsys):
    """A sweep is measured beside one replay after another, and gives the same Table."""
    sweep = load("sweep")

    ratios, lines = sweep.run(sweep.SMALLEST, processes=False)

    with capsys.disabled():
        print("", *lines, sep="\n")
    assert set(ratios) == {
        f"smallest: {way}" for way in ("cell after cell", "one process, one thread")
    }
    assert "values equal" in lines[1]


def test_slope_benchmark_prints_its_slopes(capsys):
    """The cost of a sweep is fitted over the sizes of each range."""
    slopes = load("slopes")

    measured, lines = slopes.run(slopes.SMALLEST)

    with capsys.disabled():
        print("", *lines, sep="\n")
    assert set(measured) == {"errors, outputs recorded, tokens"}
    assert [size for size, _ in slopes.AIM[0].shapes()] == [1024 << n for n in range(6)]


@pytest.mark.peers
def test_kvpress_benchmark_runs_the_same_grid_live(capsys):
    """kvpress writes what a live run of kvsim writes, without a budget too; both are timed."""
    pytest.importorskip("kvpress")
    live = load("kvpress_live")
    shape, model = live.SMALLEST, live.load_model("tiny")[0]
    prompt = list(range(40, 40 + shape.prompt))

    ratios, lines = live.run(shape)

    with capsys.disabled():
        print("", *lines, sep="\n")
    assert set(ratios) == {"wall", "cpu", "ten times the cells"}
    assert all(value > 0 for value in ratios.values())
    for budget in (24, 200):
        response = live.generation(model, shape, prompt, "KnormPress", budget)
        decoding = Decoding(
            RunningModel(model),
            kvsim.policy("knorm"),
            budget,
            prompt_len=shape.prompt,
            n_pos=shape.prompt + shape.new,
            interval=shape.interval,
            prefill=True,
        )
        with decoding:
            logits = [decoding.feed(prompt)[-1]]
            logits += [decoding.feed([token])[-1] for token in response[:-1]]
        assert [int(row.argmax()) for row in logits] == response


def test_capture_benchmark_prints_its_ratios(capsys, monkeypatch, warm_python):
    """Time, memory and bytes of a capture are measured beside the model alone."""
    capture = load("capture")
    monkeypatch.setattr(capture.sys, "executable", warm_python)

    ratios, lines = capture.run(capture.SMALLEST)

    with capsys.disabled():
        print("", *lines, sep="\n")
    assert set(ratios) == {"generation", "prompt", "memory in blocks", "bytes"}
    assert ratios["bytes"] > 1


def test_binding_benchmark_prints_its_ratio(capsys):
    """Opening, and reading with and without the listed checksums, are measured in pairs."""
    load("binding").main(["--rounds", "2", "--tokens", "300"])

    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[:2]] == [
        "opening the sample",
        "reading, bound over unbound",
    ]


def test_live_benchmark_prints_its_ratios(capsys):
    """Every policy decodes beside plain generation, and the bounded ones hold their budget."""
    live = load("live")

    ratios, lines = live.run(live.SMALLEST)

    with capsys.disabled():
        print("", *lines, sep="\n")
    assert set(ratios) == {f"{name} 128" for name, _, _ in live.RUNS}
    assert all(value > 0 for value in ratios.values())


def test_paged_benchmark_prints_what_compaction_frees(capsys):
    """Blocks are freed in every layout, and only a table for all heads of a layer has pads."""
    paged = load("paged")

    figures, lines = paged.run(paged.SMALLEST)

    with capsys.disabled():
        print("", *lines, sep="\n")
    assert all(each["blocks"] > 0 for each in figures.values())
    assert figures["head ragged 1"]["empty"] == 0 < figures["layer ragged 1"]["empty"]


def test_judge_benchmark_prints_its_ratios(capsys):
    """Next to the forward pass of the response, and to a live run."""
    judge = load("judge")

    ratios, lines = judge.run(judge.SHAPES["smallest"])

    with capsys.disabled():
        print("", *lines, sep="\n")
    assert set(ratios) == {"judged", "live"}
    assert all(value > 0 for value in ratios.values())


def test_command_benchmark_names_the_large_libraries(capsys):
    """A comparison reads tables with polars and loads no torch."""
    commands = load("commands")

    loaded, lines = commands.run(commands.SMALLEST, ("compare",))

    with capsys.disabled():
        print("", *lines, sep="\n")
    assert loaded == {"compare": {"polars"}}
