"""Grids: configurations, lists of parameters, and what is refused."""

from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import kvsim
from kvsim.analysis.subject import Analysis
from kvsim.cli import shared
from kvsim.core.policy import Policy, Scorer
from kvsim.core.sources import Loaded
from kvsim.errors import ConfigError, PolicyError, TraceError
from kvsim.store.group import CheckedStore
from kvsim.sweeps import replay_all as cell_by_cell
from kvsim.sweeps import tasks
from kvsim.sweeps.grid import Grid, grid_of, read_grid
from kvsim.sweeps.planning import Plan, grid_from
from kvsim.sweeps.tasks import _layer_bytes, _loaded
from traces import random_trace

LEAST = {"traces": "sample", "policies": "tova", "budgets": 64}


def test_a_configuration_crosses_lists_of_parameters(tmp_path):
    """A list of values stands for as many policies, and wildcards for as many traces."""
    for name in ("b", "a"):
        (tmp_path / f"{name}.zarr").mkdir()
    (tmp_path / "grid.yaml").write_text(
        "traces: ['*.zarr']\n"
        "policies: [tova, {snapkv: {window: [8, 16], pool_kernel: [5, 7]}}]\n"
        "budgets: [64, 25%]\nintervals: [32, own]\nmemory: 1GiB\nprotect: {sink: 4}\n"
    )

    grid = read_grid(tmp_path / "grid.yaml")

    assert grid.traces == (str(tmp_path / "a.zarr"), str(tmp_path / "b.zarr"))
    assert grid.budgets == ("64", "25%")
    assert grid.intervals == (32, None)
    assert grid.options["memory"] == 1 << 30
    built = grid.built()
    assert [(p.name, p.params.get("window"), p.params.get("pool_kernel")) for p in built] == [
        ("tova", None, None),
        *(("snapkv", window, pool) for window in (8, 16) for pool in (5, 7)),
    ]
    assert all(policy.protect.sink == 4 for policy in built)


def test_a_grid_is_written_and_read_again():
    """What is resolved is a configuration of the same grid, whatever else it says."""
    grid = grid_of({**LEAST, "intervals": ["own", 8], "layers": [0, 2]}, Path(), where="test")

    document = grid.document() | {"resolved": {"cells": 3}}

    assert grid_of(document, Path(), where="test") == grid


@pytest.mark.parametrize(("gpu", "device"), [(False, "cpu"), (True, "cuda")])
def test_a_grid_names_the_device_that_auto_stands_for(monkeypatch, gpu, device):
    """What is stored, and what keys are made of, is the device that computes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)

    grid = grid_of({**LEAST, "device": "auto"}, Path(), where="test")

    assert grid.options["device"] == grid.document()["device"] == device


def test_every_entry_takes_the_device_auto(monkeypatch, paths):
    """Without a GPU, `auto` computes what the CPU does, under the same keys."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    trace, policy = kvsim.open_trace(paths[0]), kvsim.policy("knorm")

    records = [kvsim.replay(trace, policy, 20, device=one) for one in ("auto", "cpu")]
    tables = [kvsim.measure(trace, records[0], ["wipeout"], device=x) for x in ("auto", "cpu")]
    grid = {"traces": paths[:1], "policies": ["knorm"], "budgets": [20]}
    plans = [Plan.of(grid_of({**grid, "device": x}, Path(), where="")) for x in ("auto", "cpu")]
    run = cell_by_cell([trace], [policy], [20], metrics=["wipeout"], device="auto")

    assert np.array_equal(records[0].evicted_at, records[1].evicted_at)
    assert tables[0].equals(tables[1])
    assert plans[0].keys == plans[1].keys
    assert run.parameters["device"] == Analysis(trace, device="auto").device == "cpu"
    assert shared.parse_device(SimpleNamespace(params={}), "auto") == "cpu"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"polices": "tova"}, "unknown key 'polices'; did you mean 'policies'"),
        ({"traces": None}, "traces is missing"),
        ({"traces": "no/*.zarr"}, "no path is like "),
        ({"traces": 3}, "traces has 3"),
        ({"budgets": [True]}, "budgets has True"),
        ({"budgets": []}, "budgets is missing"),
        ({"policies": [["tova"]]}, "policies has"),
        ({"policies": {"snapkv": {"window": {}}}}, "snapkv has 'window'"),
        ({"intervals": [0]}, "intervals has 0"),
        ({"intervals": "often"}, "intervals is 'often'"),
        ({"memory": "lots"}, "memory is 'lots'"),
        ({"regret": "yes"}, "regret is 'yes'"),
        ({"compress": "all"}, "compress is 'all'"),
        ({"protect": {"sinks": 4}}, "protect is"),
        ({"protect": {"sink": -1}}, "sink is -1"),
        ({"device": "tpu"}, "tpu"),
    ],
)
def test_what_is_no_grid_is_refused_in_one_line(more, message, tmp_path):
    """The message names the key, what was given and what is expected."""
    with pytest.raises((ConfigError, PolicyError), match=message) as error:
        grid_of(LEAST | more, tmp_path, where="grid.yaml")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("traces: [", "is no YAML"),
        ("- 1\n- 2", "a list; expected keys"),
        ("\x00", "is no YAML"),
        ("a: &a [*a]", "it has an alias"),
        ("a: &a {b: 1}\nc:\n  <<: *a", "it has an alias, expected the value itself.* line 3"),
        ("budgets: 0x" + "f" * 60_000, "expected"),
        ("layers: [" + "9" * 400 + "]", "expected"),
        ("memory: 1" + ":59" * 2000, "expected"),
        ("memory: 1" + ":59" * 2000 + ".5", "expected"),
        ("[" * 100_000, "is no YAML"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(text, message, tmp_path):
    """Broken YAML, values larger than their text, and other documents: one line."""
    (tmp_path / "grid.yaml").write_text(text)
    with pytest.raises((ConfigError, PolicyError), match=message) as error:
        read_grid(tmp_path / "grid.yaml")
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_grid(tmp_path / "none.yaml")


class Mine(Scorer):
    """A scorer of a user's own."""

    def score(self, view):
        """Positions."""
        return view.pos.float()


def test_objects_are_taken_and_not_written():
    """Traces and policies as objects serve Python; a file holds those that it can name."""
    trace = kvsim.open_trace(kvsim.sample_trace())
    given = {"traces": [trace], "policies": [kvsim.policy("tova")], "budgets": [64]}
    grid = grid_of(given, Path(), where="it")

    assert isinstance(grid, Grid)
    assert [cell.budget for cell in grid.cells(grid.opened())] == [64]
    again = grid_of(grid.document(), Path(), where="it")  # a path, a name and its parameters
    assert again.built() == grid.built()
    for objects in (
        {"traces": [random_trace()]},
        {"policies": [Policy("mine", Mine())]},
    ):
        document = grid_of({**given, **objects}, Path(), where="it").document()
        with pytest.raises(ConfigError, match="that were given as objects"):
            grid_of(document, Path(), where="it")


def test_layers_apart_are_held_in_memory_with_those_between(paths):
    """Their order does not matter, and the memory limit counts all of them."""
    document = {"traces": paths[:1], "policies": "tova", "budgets": 16, "layers": [3, 0]}
    (task,) = Plan.of(grid_of(document, Path(), where="x")).tasks
    size = _layer_bytes(kvsim.open_trace(paths[0]))

    assert task.layers == (0, 3)
    assert isinstance(_loaded(_with_memory(task, 4 * 4 * size)).source, Loaded)
    assert not isinstance(_loaded(_with_memory(task, 4 * 4 * size - 1)).source, Loaded)


class _Finished(AbstractSet):
    """Finished keys that are looked up and never gone through."""

    def __init__(self, keys):
        self.keys = frozenset(keys)

    def __contains__(self, key):
        return key in self.keys

    def __len__(self):
        return len(self.keys)

    def __iter__(self):
        raise AssertionError("a sweep has many finished keys")


def test_finished_cells_are_looked_up(paths):
    """Finding the rest of a task does not walk over the finished cells of the whole sweep."""
    document = {"traces": paths[:1], "policies": ["tova", "knorm"], "budgets": 16}
    (task,) = Plan.of(grid_of(document, Path(), where="x")).tasks

    assert task.without(_Finished(["other"])) is task
    assert task.without(_Finished(task.keys[:1])).cells == task.cells[1:]
    assert task.without(_Finished(task.keys)) is None


def _with_memory(task, limit):
    return replace(task, options={**task.options, "memory": limit})


def test_a_sweep_lists_the_folder_of_a_trace_twice_however_many_tasks_it_has(tmp_path, monkeypatch):
    """Once to plan and once to compute; a trace that is written anew is opened again."""
    listed = []
    read = CheckedStore.read_root
    monkeypatch.setattr(CheckedStore, "read_root", lambda self: listed.append(1) or read(self))
    monkeypatch.setattr(tasks, "_BLOCK", 1)
    path = random_trace(layers=6, n=60).save(tmp_path / "a.zarr")
    terms = {"policies": ["tova", "knorm"], "budgets": [8, 16], "metrics": ["output_error"]}
    plan = Plan.of(grid_from(None, traces=path, **terms))
    assert len(plan.tasks) >= 3
    listed.clear()

    kvsim.sweep(traces=path, **terms)

    assert len(listed) == 2
    random_trace(layers=6, n=60, seed=1).save(path, overwrite=True)
    with pytest.raises(TraceError, match="is another trace than when the sweep began"):
        _loaded(plan.tasks[0])
