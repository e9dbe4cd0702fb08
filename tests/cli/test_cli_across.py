"""The command line of policies that drop rows: what replay says of them, and recompute."""

import json
import re

import pytest

import kvsim
from kvsim.studies.language.tasks import prompts

SETTINGS = ("--set", "tau=1.01", "--set", "window=8", "--set", "rows=60", "--set", "least=5")


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """The path of a small trace with the residual stream."""
    path = tmp_path_factory.mktemp("traces") / "small.zarr"
    sample = prompts(1, task="walk", facts=16, lines=6, kinds=3)[0]
    kvsim.capture("tiny", None, sample.prompt, max_new_tokens=8, out=path, residual=True)
    return path


def test_replay_says_after_which_layer_rows_were_dropped(run, trace):
    """One line per policy and budget; where the budget means nothing, one line."""
    policies = "asl,fastkv,gemfilter,pyramidinfer,asl_2pass,snapkv"
    _, out, _ = run("replay", trace, "--policy", policies, "--budget", "40,48", *SETTINGS)
    n = kvsim.open_trace(trace).prompt_len
    said = [line for line in out.splitlines() if line.startswith(tuple(policies.split(",")))]
    lines = [line for line in said if ":" in line]

    assert f"asl, budget 40: from layer 2 on layers work on 40 of {n} tokens." in lines
    assert f"fastkv, budget 48: from layer 2 on layers work on 60 of {n} tokens." in lines
    gem = f"gemfilter, budget 40: 40 of {n} tokens, selected after layer 0, are read from the start"
    assert any(line.startswith(gem) for line in lines)
    assert sum(line.startswith("pyramidinfer:") for line in lines) == 1
    assert not any(line.startswith("snapkv:") or "snapkv, budget" in line for line in lines)
    assert re.search("Note: asl.*: ranks are compared over 2 layers instead of 8", out)


def test_replay_says_that_nothing_was_selected(run, trace):
    """A threshold of 0 is never passed."""
    _, out, _ = run("replay", trace, "--policy", "asl", "--budget", "40", "--set", "tau=0")

    assert "asl, budget 40: no rows are dropped, every layer works on the whole prompt." in out


def test_replay_gives_selections_as_json(run, trace):
    """Layers, rows and what was found, for every cell that has them."""
    command = ("replay", trace, "--policy", "asl,tova", "--budget", "40,48", "--json")
    _, out, _ = run(*command, *SETTINGS[:4])
    found = json.loads(out)["selections"]

    assert [(one["policy"], one["budget"], one["dropped"]) for one in found] == [
        ("asl", 40, [1]),
        ("asl", 48, [1]),
    ]
    assert [one["counts"][-1] for one in found] == [40, 48]
    assert found[0]["notes"]["look_back"] == 2
    assert {one["fidelity"] for one in found} == {"exact"}


def test_full_caches_before_the_selection_are_a_row_per_budget(run, trace):
    """The budget says how many rows go on, although it does not bind the first layers."""
    command = ("replay", trace, "--policy", "asl", "--budget", "40,48", "--set", "kv_before=full")
    _, out, _ = run(*command, *SETTINGS[:4])

    assert sum(line.startswith("asl  ") for line in out.splitlines()) == 2


def test_recompute_prints_what_moved(run, trace):
    """A row per policy and budget, and what its fidelity means."""
    policies = "asl,fastkv,gemfilter,pyramidinfer"
    status, out, err = run(
        "recompute", trace, "--model", "tiny", "--policy", policies, "--budget", "40,48", *SETTINGS
    )
    rows = [
        line.split() for line in out.splitlines() if line.startswith(tuple(policies.split(",")))
    ]

    assert status == 0
    assert "--set window=8 changes asl, fastkv" in err
    assert len(rows) == 8
    assert rows[0][:5] == ["asl", "40", "layer", "1", "40"]
    assert all(row[-1] in ("same", "other") for row in rows)
    assert "Fidelity semi" in out


def test_recompute_without_a_selection_has_nothing_behind_it(run, trace):
    """Where no row is dropped the table says so."""
    command = ("recompute", trace, "--model", "tiny", "--policy", "asl", "--budget", "40")
    _, out, _ = run(*command, "--set", "tau=0")
    row = next(line for line in out.splitlines() if line.startswith("asl"))

    assert row.split()[2] == "nowhere"
    assert "0.0000" in row
    assert row.split()[-1] == "same"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("TRACE", "--policy", "snapkv", "--budget", "40"), "drops rows of the prompt"),
        (("TRACE", "--policy", "asl", "--budget", "8"), "smallest budget that works is 33"),
        (("TRACE", "--policy", "asl", "--budget", "x"), "expected entries"),
        (("TRACE", "--policy", "fastkv", "--budget", "40", "--set", "layer=5"), "layers 0..2"),
        (("TRACE", "--policy", "asl", "--budget", "40", "--device", "tpu"), "expected cpu, cuda"),
    ],
)
def test_recompute_refuses_what_it_cannot_do(run, trace, arguments, message):
    """One line on standard error, status 2."""
    asked = [trace if one == "TRACE" else one for one in arguments]
    status, out, err = run("recompute", *asked, "--model", "tiny")

    assert (status, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
