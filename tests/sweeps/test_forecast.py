"""Plans of sweeps, replays and live runs, against what these take."""

import itertools
import json

import pytest
import torch
from recorder_models import small

import kvsim
from families import ids
from kvsim.errors import PolicyError
from kvsim.policies.catalogue import CATALOGUE
from kvsim.recorder import Prompt, Turn
from kvsim.recorder.forecast import ModelWork
from kvsim.recorder.models import load_outline
from kvsim.store.forecast import Meter
from kvsim.sweeps.closed_loop import plan_live
from kvsim.sweeps.forecast import forecast
from kvsim.sweeps.planning import Plan, grid_from
from kvsim.sweeps.shards import kept_in
from traces import random_arrays, random_trace


@pytest.mark.parametrize(
    ("sizes", "policies", "budgets"),
    [
        ({"layers": 2, "heads": 2, "group": 2, "dim": 16, "n": 120}, ["tova", "knorm"], [24, 48]),
        ({"layers": 4, "heads": 4, "group": 1, "dim": 8, "n": 90}, ["snapkv@scaled"], [32]),
    ],
)
@pytest.mark.parametrize("records", [True, False])
def test_a_plan_has_the_bytes_and_files_of_the_run(tmp_path, sizes, policies, budgets, records):
    """Files are those that are written, bytes within 30 percent."""
    path = random_trace(computed=True, **sizes).save(tmp_path / "trace.zarr")
    grid = {"traces": path, "policies": policies, "budgets": budgets, "records": records}
    plan = Plan.of(grid_from(grid))

    planned = forecast(plan, kept_in(tmp_path / "run"))
    run = kvsim.sweep(**grid, out=tmp_path / "run")

    actual = Meter().actual([tmp_path / "run"])
    assert planned.files == actual["files"]
    assert planned.written == pytest.approx(actual["bytes"], rel=0.3)
    saved = json.loads((tmp_path / "run" / "run.json").read_text())["plan"]
    assert saved["files"] == planned.files
    assert saved["actual"].keys() == {"seconds", "memory"}
    assert run.parameters["plan"]["actual"]["files"] == actual["files"]


def test_every_policy_can_be_planned():
    """A plan never fails: policies without formulas count the attention of their outputs alone."""
    trace = random_trace(layers=2, heads=2, group=2, dim=16, n=120)
    names = [*CATALOGUE, "criticalkv+knorm", "adakv+snapkv", "global+tova", "union+knorm"]
    planned = 0
    for name, interval in itertools.product(names, ("own", 1)):
        grid = {"traces": trace, "policies": name, "budgets": 64, "intervals": interval}
        try:
            plan = Plan.of(grid_from(grid))
        except PolicyError:
            continue  # no policy by itself
        facts = forecast(plan, kept_in(None))
        assert min(facts.flops, facts.seconds, facts.memory, facts.read) > 0
        assert facts.files == 0
        planned += 1
    assert planned > 2 * len(CATALOGUE) - 15


def test_a_live_run_is_planned_without_weights(tmp_path):
    """FLOPs hold those of the model's forward, and nothing of the model runs."""
    tokens = list(range(40, 100))
    trace = kvsim.capture("tiny", None, tokens[:40], response=tokens[40:], out=tmp_path / "a.zarr")
    outline, _ = load_outline("tiny", dtype="float32", on_cpu=True)

    plan, _ = plan_live(outline, trace, ["tova", "knorm"], 24)
    planned = forecast(plan, kept_in(tmp_path / "run"))

    matrices = sum(each.numel() for each in outline.parameters() if each.dim() > 1)
    embedding = outline.get_input_embeddings().weight.numel()
    layers = 2 * (matrices - embedding)  # of a row
    rows = trace.n_pos + 2 * (trace.n_pos - trace.prompt_len)
    assert planned.flops == pytest.approx(rows * (layers + 2 * embedding), rel=0.5)
    assert planned.flops > rows * layers


def test_rows_of_the_question_are_planned(tmp_path):
    """Behind an event after the context each policy runs them, and their predictions are read."""
    tokens = list(range(40, 100))
    trace = kvsim.capture("tiny", None, tokens[:40], response=tokens[40:], context=30)
    outline, _ = load_outline("tiny", dtype="float32", on_cpu=True)

    prompt, context = (
        forecast(plan_live(outline, trace, ["tova", "knorm"], 24, compress=x)[0], kept_in(None))
        for x in ("prompt", "context")
    )

    work = ModelWork(outline)
    more = 2 * (40 - 30) * (work.row + work.logits)
    assert more < context.flops - prompt.flops < 1.5 * more


def test_turns_that_fill_the_context_of_the_model(tmp_path):
    """A live run of turns that the model has just room for is planned, as it was recorded."""
    model = small("llama", max_position_embeddings=40 + 8 + 4 + 8)
    prompt = Prompt("a", ids(40), turns=(Turn([1, 2, 3, 4]),))
    trace = kvsim.capture(model, None, prompt, max_new_tokens=8, out=tmp_path / "a.zarr")

    plan, _ = plan_live(model, trace, ["tova"], 24, max_new_tokens=8)

    assert trace.n_pos == 60
    assert len(plan.cells) == 1


def test_traces_of_bfloat16_models_are_swept(tmp_path):
    """Bytes of a task are counted as they are stored, in a precision that numpy lacks too."""
    arrays = random_arrays(layers=2, heads=2, group=2, dim=16, n=80)
    halves = {name: torch.as_tensor(each).bfloat16() for name, each in arrays.items()}
    made = kvsim.Trace.from_arrays(**halves, prompt_len=40, rope=kvsim.Rope.default(16))
    trace = kvsim.open_trace(made.save(tmp_path / "a.zarr"))

    plan = Plan.of(grid_from({"traces": trace, "policies": "tova", "budgets": 24}))

    assert plan.bytes_of(plan.tasks[0]) == sum(
        trace.stored(name).nbytes for name in ("q", "k", "v")
    )
    assert kvsim.sweep(traces=trace, policies="tova", budgets=24).parameters["done"] == 1
