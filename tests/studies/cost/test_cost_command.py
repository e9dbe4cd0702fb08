"""`kvsim study cost`."""

import json

import pytest
from cost_models import LLAMA, LLAMA_8B


@pytest.fixture
def config(tmp_path):
    """The path of a configuration."""
    path = tmp_path / "llama.json"
    path.write_text(json.dumps(LLAMA), "utf-8")
    return path


def test_command_prints_a_table(printed, config):
    """The command prints the model, a line per policy, budget and context, and what it assumes."""
    out = printed(
        *("study", "cost", "--model-config", config, "--policy", "full,asl,snapkv"),
        *("--budget", "2048,25%", "--context", "131072"),
    )

    assert "8,030,261,248 parameters, 14.96 GiB" in out
    assert "Full cache at 131072 tokens: 16 GiB" in out
    lines = [line.split() for line in out.splitlines()]
    assert [line[0] for line in lines if line[:1] and line[0] in ("full", "asl", "snapkv")] == [
        "full",
        "asl",
        "asl",
        "snapkv",
        "snapkv",
    ]
    asl_line = next(line for line in lines if line[:1] == ["asl"])
    assert {"2048", "131072", "0.25", "1.6%", "0.779", "0.491"} <= {*asl_line}
    assert "Note: asl: selection layer 23.9 of 32 is assumed" in out


def test_command_prints_json(printed, config):
    """--json has every number per layer."""
    out = printed(
        *("study", "cost", "--model-config", config, "--policy", "pyramidkv", "--budget", "512"),
        *("--context", "8192", "--json"),
    )
    document = json.loads(out)
    (cost,) = document["costs"]

    assert document["model"]["parameters"] == LLAMA_8B.parameters
    assert len(cost["kv_bytes_per_layer"]) == 32
    assert sum(cost["kv_bytes_per_layer"]) == cost["kv_bytes"]
    assert cost["scoring_prompt"] > 0


def test_command_takes_a_trace(printed):
    """A trace gives model, context, prompt, and a measured selection layer."""
    out = printed(
        "study", "cost", "--trace", "sample", "--policy", "asl", "--budget", "64", "--json"
    )
    (cost,) = json.loads(out)["costs"]

    assert (cost["context"], cost["prompt"]) == (472, 226)
    assert (cost["selection"], cost["selection_layer"]) == ("measured on sample", None)
    assert cost["fidelity"] == "exact"
    assert any("never selects on sample" in said for said in cost["assumptions"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--policy", "asl"], ["none (measured on sample)"]),
        (["--policy", "asl", "--set", "tau=1.5"], ["1 (measured on sample)"]),
        (["--policy", "asl", "--selection-layer", "0.5"], ["0.5 (given)"]),
        (["--policy", "gemfilter,tova"], ["0 (the policy's)", " - "]),
        (
            ["--policy", "asl", "--budget", "80,300", "--context", "500"],
            ["none (measured on sample)", "1.378 (assumed)"],
        ),
    ],
)
def test_command_prints_the_selection_layer(printed, arguments, told):
    """Measured, given, assumed or the policy's own, with the fidelity of the numbers."""
    budget = [] if "--budget" in arguments else ["--budget", "64"]
    out = printed("study", "cost", "--trace", "sample", *budget, *arguments)

    lines = [x for x in out.splitlines() if x.startswith(("asl ", "gemfilter ", "tova "))]
    assert all(text in line for text, line in zip(told, lines, strict=True))
    assert "Fidelity of sizes and FLOPs: exact" in out
