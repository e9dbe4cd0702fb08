"""Grids: configurations, lists of parameters, and what is refused."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import kvsim
from kvsim.cli import shared
from kvsim.core.sources import Loaded
from kvsim.errors import KvsimError, TraceError
from kvsim.sweeps import tasks
from kvsim.sweeps.driver import Plan
from kvsim.sweeps.grid import grid_of
from kvsim.sweeps.tasks import _loaded, layer_bytes
from traces import random_trace

LEAST = {"traces": "sample", "policies": "tova", "budgets": 64}


def test_a_configuration_crosses_lists_of_parameters(tmp_path):
    """Lists of values are as many policies, wildcards as many traces; keywords replace keys."""
    for name in ("b", "a"):
        (tmp_path / f"{name}.zarr").mkdir()
    (tmp_path / "grid.yaml").write_text(
        "traces: ['*.zarr']\n"
        "policies: [tova, {snapkv: {window: [8, 16], pool_kernel: [5, 7]}}, {gkv: {decay: 1e-2}}]\n"
        "budgets: [64, 25%]\ninterval: [32, paper]\nmemory: 1GiB\nprotect: {sink: 4}\nlayers:\n"
        "records: yes\n"
    )

    grid = grid_of(tmp_path / "grid.yaml")

    assert grid.traces == (str(tmp_path / "a.zarr"), str(tmp_path / "b.zarr"))
    assert grid.budgets == ("64", "25%")
    assert grid.options["interval"] == (32, "paper")
    assert (grid.options["records"], grid.options["layers"], grid.options["memory"]) == (
        True,
        None,
        1 << 30,
    )
    assert [(p.name, *map(p.params.get, ("window", "pool_kernel"))) for p in grid.policies] == [
        ("tova", None, None),
        *(("snapkv", window, pool) for window in (8, 16) for pool in (5, 7)),
        ("gkv", 16, 5),
    ]
    assert grid.policies[-1].params["decay"] == 0.01
    assert all(policy.protect.sink == 4 for policy in grid.policies)
    other = grid_of(tmp_path / "grid.yaml", budgets=8, layers="0,2-3")
    assert (other.budgets, other.options["layers"]) == (("8",), (0, 2, 3))


@pytest.mark.parametrize(("gpu", "device"), [(False, "cpu"), (True, "cuda")])
def test_a_grid_names_the_device_that_auto_stands_for(monkeypatch, gpu, device):
    """What is stored, and what runs are compared by, is the device that computes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)

    assert grid_of({**LEAST, "device": "auto"}).options["device"] == device
    assert shared.parse_device(SimpleNamespace(params={"plan": True}), "auto") == device


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"polices": "tova"}, "unknown key 'polices'; did you mean 'policies'"),
        ({"traces": None}, "traces is missing"),
        ({"traces": "no/*.zarr"}, "no path is like "),
        ({"traces": 3}, "traces is 3"),
        ({"budgets": [True]}, "budgets is .True"),
        ({"budgets": []}, "budgets is ..;"),
        ({"policies": [["tova"]]}, "policies is"),
        ({"policies": {"snapkv": {"window": {}}}}, "policies is"),
        ({"interval": [0]}, "interval is .0"),
        ({"layers": "x"}, "layers is 'x'"),
        ({"memory": "lots"}, "memory is 'lots'"),
        ({"events": "yes"}, "events is 'yes'"),
        ({"compress": "all"}, "compress is 'all'"),
        ({"protect": {"sinks": 4}}, "protect is"),
        ({"protect": {"sink": -1}}, "sink is -1"),
        ({"device": "tpu"}, "tpu"),
    ],
)
def test_what_is_no_grid_is_refused_in_one_line(more, message):
    """The message names the key and what was given."""
    with pytest.raises(KvsimError, match=message) as error:
        grid_of(LEAST | more)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("traces: [", "is no YAML"),
        ("- 1\n- 2", "a list; expected keys"),
        ("\x00", "is no YAML"),
        ("{[a]: 1}", "is no YAML"),
        ("a: &a {b: 1}\nc:\n  <<: *a", "it has an alias, expected the value itself.* line 3"),
        ("budgets: 0x" + "f" * 60_000, "traces is missing"),
        ("[" * 100_000, "is no YAML"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(text, message, tmp_path):
    """Broken YAML, values larger than their text, and other documents: one line."""
    if text is not None:
        (tmp_path / "grid.yaml").write_text(text)
    with pytest.raises(KvsimError, match=message) as error:
        grid_of(tmp_path / "grid.yaml")
    assert "\n" not in str(error.value)


def test_layers_apart_are_held_in_memory_with_those_between(paths):
    """Their order does not matter, and the memory limit counts all of them."""
    (task,) = Plan.of(grid_of({**LEAST, "traces": paths[:1], "layers": [3, 0]})).tasks
    size = 4 * 4 * layer_bytes(kvsim.open_trace(paths[0]))

    assert task.layers == (0, 3)
    for memory, loaded in ((size, True), (size - 1, False)):
        trace = _loaded(replace(task, options={**task.options, "memory": memory}))
        assert isinstance(trace.source, Loaded) == loaded


def test_a_trace_is_opened_once_to_plan_and_once_to_compute(tmp_path, monkeypatch):
    """However many tasks it has; a trace that is written anew is opened again."""
    opened, open_trace = [], tasks.open_trace
    monkeypatch.setattr(tasks, "open_trace", lambda path: opened.append(1) or open_trace(path))
    monkeypatch.setattr(tasks, "_BLOCK", 1)
    path = kvsim.save_trace(random_trace(layers=6, n=60), tmp_path / "a.zarr")
    plan = Plan.of(grid_of({"traces": path, "policies": ["tova", "knorm"], "budgets": [8, 16]}))
    assert len(plan.tasks) >= 3

    plan.finish(plan.begin())

    assert len(opened) == 1
    kvsim.save_trace(random_trace(layers=6, n=60, seed=1), path, overwrite=True)
    with pytest.raises(TraceError, match="is another trace than when the sweep began"):
        _loaded(plan.tasks[0])
