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
    "policies": (lambda script: (script.SMALLEST,), {"ams", "gkv", "adakv+tova"}),
    "against": (lambda script: (script.SMALLEST, script.HERE), {"tova after every row"}),
    "capture": (lambda script: (script.SMALLEST,), {"generation", "memory in blocks", "bytes"}),
    "verdict_rates": (lambda script: (2, script.PROMPTS[:1]), {"as measured, results 32, size, 6"}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.deep) if x == "against" else x for x in FIGURES]
)
def test_benchmark_prints_its_figures(capsys, monkeypatch, warm_python, name):
    """Each script runs at its smallest size, and has a figure of everything that it names."""
    module, (arguments, expected) = load(name), FIGURES[name]
    if name in ("capture", "against"):
        monkeypatch.setattr(module.sys, "executable", warm_python)

    figures, lines = module.run(*arguments(module))

    with capsys.disabled():
        print("", *lines, sep="\n")
    assert expected <= set(figures)
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
