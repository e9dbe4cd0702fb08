"""Plans of sweeps, replays and live runs, against what these take."""

import itertools

import pytest
import torch
from recorder_models import small
from sized_models import sized

import kvsim
from families import ids
from kvsim.errors import PolicyError
from kvsim.policies.catalogue import CATALOGUE
from kvsim.recorder import Prompt, Turn
from kvsim.sweeps.closed_loop import plan_live
from kvsim.sweeps.driver import Plan
from kvsim.sweeps.grid import grid_of
from traces import random_arrays, random_trace


@pytest.mark.parametrize("records", [True, False])
def test_a_plan_has_the_bytes_of_the_run(tmp_path, records):
    """Of all its files, within 30 percent."""
    trace = random_trace(computed=True, layers=2, heads=2, group=2, dim=16, n=120)
    grid = {"traces": kvsim.save_trace(trace, tmp_path / "trace.zarr"), "records": records}
    grid |= {"policies": ["tova", "knorm"], "budgets": [24, 48]}
    plan = Plan.of(grid_of(grid, out=tmp_path / "run"))

    planned = plan.forecast(plan.tasks)
    kvsim.sweep(**grid, out=tmp_path / "run")

    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert planned.written == pytest.approx(sum(path.stat().st_size for path in files), rel=0.3)


def test_every_policy_can_be_planned():
    """A plan never fails."""
    trace = random_trace(layers=2, heads=2, group=2, dim=16, n=120)
    names = [*CATALOGUE, "criticalkv+knorm", "adakv+snapkv", "global+tova", "union+knorm"]
    planned = 0
    for name, interval in itertools.product(names, ("paper", 1)):
        grid = {"traces": trace, "policies": name, "budgets": 64, "interval": interval}
        try:
            plan = Plan.of(grid_of(grid))
        except PolicyError:
            continue  # no policy by itself
        facts = plan.forecast(plan.tasks)
        assert facts.memory > 0
        planned += 1
    assert planned > 2 * len(CATALOGUE) - 15


def test_layers_of_several_sizes_are_planned_replayed_and_drawn():
    """Those that a policy acts on, which have one size."""
    trace = kvsim.capture(sized("llama"), None, ids(40), max_new_tokens=6)
    grid = {"traces": trace, "policies": "tova", "budgets": 16, "records": True}
    plan = Plan.of(grid_of(grid, defaults={"jobs": None}))

    assert plan.forecast(plan.tasks).memory > 0
    run = plan.finish(plan.begin())
    figure = kvsim.plots.position_density(trace, run.records)
    assert figure.axes[0].get_legend_handles_labels()[1] == ["tova"]


def test_turns_that_fill_the_context_of_the_model(tmp_path):
    """A live run of turns that the model has just room for is planned, as it was recorded."""
    model = small("llama", max_position_embeddings=40 + 8 + 4 + 8)
    prompt = Prompt("a", ids(40), turns=(Turn([1, 2, 3, 4]),))
    trace = kvsim.capture(model, None, prompt, max_new_tokens=8, out=tmp_path / "a.zarr")

    plan = plan_live(
        lambda _: (model, None), traces=trace, policies="tova", budgets=24, max_new_tokens=8
    )

    assert trace.n_pos == 60
    assert len(plan.cells) == 1


def test_traces_of_bfloat16_models_are_swept(tmp_path):
    """In a precision that numpy lacks too."""
    arrays = random_arrays(layers=2, heads=2, group=2, dim=16, n=80)
    halves = {name: torch.as_tensor(each).bfloat16() for name, each in arrays.items()}
    made = kvsim.Trace.from_arrays(**halves, prompt_len=40, rope=kvsim.Rope.default(16))
    trace = kvsim.open_trace(kvsim.save_trace(made, tmp_path / "a.zarr"))

    assert kvsim.sweep(traces=trace, policies="tova", budgets=24).parameters["done"] == 1
