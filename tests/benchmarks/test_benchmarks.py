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


#: Script: the arguments of its smallest run, and what it has figures of.
FIGURES = {
    "replay": (
        lambda script: (script.SMALLEST, script.SMALLEST_ROWS),
        {"tova", "snapkv", "bare", "tova row", "h2o row"},
    ),
    "policies": (
        lambda script: (script.SMALLEST,),
        {"ams", "expected_attention", "gkv", "adakv+tova", ...},
    ),
    "optimum": (lambda script: (script.SMALLEST,), {"events", "tokens", "gap"}),
    "against": (lambda script: (script.SMALLEST, script.HERE), {"tova after every row", ...}),
    "cells": (
        lambda script: (script.SMALLEST, (64,)),
        {"replays", "output errors", "other metrics", "all", "ms on the sample"},
    ),
    "sweep": (
        lambda script: (script.SMALLEST, False),
        {"smallest: cell after cell", "smallest: one process, one thread"},
    ),
    "slopes": (lambda script: (script.SMALLEST,), {"errors, outputs recorded, tokens"}),
    "lengths": (lambda script: script.SMALLEST, {"capture, seconds", "judge, memory", ...}),
    "study": (lambda script: script.SMALLEST, {"capture, seconds", "planned bytes", ...}),
    "capture": (
        lambda script: (script.SMALLEST,),
        {"generation", "prompt", "memory in blocks", "bytes"},
    ),
    "live": (
        lambda script: (script.SMALLEST,),
        {f"{name} 128" for name in ("full", "streaming_llm", "snapkv", "tova", "h2o", "ams")}
        | {"adakv+snapkv 128", "expected_attention 128"},
    ),
    "paged": (lambda script: (script.SMALLEST,), {"head ragged 1", "layer ragged 1", ...}),
    "judge": (lambda script: (script.SHAPES["smallest"],), {"judged", "live"}),
    "verdict_rates": (
        lambda script: (2, script.PROMPTS[:1]),
        {"set, seconds", ...},
    ),
}

#: What must hold of the figures of a script beside being there.
HOLDS = {
    "optimum": lambda figures, _: abs(figures["gap"]) < 1e-9,
    "capture": lambda figures, _: figures["bytes"] > 1,
    "sweep": lambda _, lines: "values equal" in lines[1],
    "paged": lambda figures, _: (
        all(each["blocks"] > 0 for each in figures.values())
        and figures["head ragged 1"]["empty"] == 0 < figures["layer ragged 1"]["empty"]
    ),
    "study": lambda figures, _: (
        figures["planned files"] == figures["full, files"]
        and abs(figures["planned bytes"] / figures["full, bytes"] - 1) < 0.3
    ),
}


@pytest.mark.parametrize("name", FIGURES)
def test_benchmark_prints_its_figures(capsys, monkeypatch, warm_python, name):
    """Each script runs at its smallest size, and has a figure of everything that it names."""
    module, (arguments, expected) = load(name), FIGURES[name]
    if name in ("capture", "against"):
        monkeypatch.setattr(module.sys, "executable", warm_python)

    figures, lines = module.run(*arguments(module))

    with capsys.disabled():
        print("", *lines, sep="\n")
    others = set(figures) - expected
    assert expected - {...} <= set(figures)
    assert not others or ... in expected
    if name in HOLDS:
        assert HOLDS[name](figures, lines)
    if name not in ("optimum", "slopes", "lengths", "paged"):
        assert all(value >= 0 for value in figures.values())


@pytest.mark.peers
def test_kvpress_benchmark_runs_the_same_grid_live(capsys):
    """kvpress writes what a live run of kvsim writes, without a budget too; both are timed."""
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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_device_computes_what_the_cpu_does(device):
    """Traces, kept sets outside ties and judged values are equal; rates are printed."""
    lines = load("device").run(device, "small layers")

    assert sum("tokens/s" in line for line in lines) == 4


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_batches_write_what_each_sequence_alone_does(device):
    """Of all tokens in float32; rates of each batch are printed."""
    lines = load("batch").run(device, "small layers")

    assert sum("4 of 4 responses equal" in line for line in lines) >= 2
    assert sum("tokens/s" in line for line in lines) == 9
