"""The command line of policies that drop rows: what replay says of them."""

import json

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
    """One line per policy and budget, whether or not something was selected."""
    policies = "asl,fastkv,gemfilter,pyramidinfer,asl_2pass,snapkv"
    _, out, _ = run("replay", trace, "--policy", policies, "--budget", "40,48", *SETTINGS)
    lines = [line for line in out.splitlines() if line.startswith("small: ")]

    assert "small: asl, budget 40: rows are dropped after layer 1, 40 tokens go on." in lines
    assert "small: fastkv, budget 48: rows are dropped after layer 1, 60 tokens go on." in lines
    gem = "small: gemfilter, budget 40: rows are dropped after layer 0, 40 tokens go on from the"
    assert any(line.startswith(gem) for line in lines)
    assert not any("snapkv" in line for line in lines)
    _, out, _ = run("replay", trace, "--policy", "asl", "--budget", "40", "--set", "tau=0")
    assert "asl, budget 40: no rows are dropped." in out


def test_replay_gives_selections_as_json(run, trace):
    """Layers, rows and what was found, for every cell that has them; a row per budget."""
    full = ("--set", "kv_before=full")
    command = ("replay", trace, "--policy", "asl", "--budget", "40,48", *full, "--json")
    document = json.loads(run(*command, *SETTINGS[:4])[1])
    found = document["selections"]

    assert [(x["budget"], x["dropped"], x["fidelity"]) for x in found] == [
        (40, [1], "exact"),
        (48, [1], "exact"),
    ]
    assert [each["counts"][-1] for each in found] == [40, 48]
    assert found[0]["notes"]["look_back"] == 2
    assert len(document["cells"]) == 2
