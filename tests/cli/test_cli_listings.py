"""`kvsim`, `help`, `policies` and `metrics`."""

import json
import re

import pytest

import kvsim
from kvsim.cli import COMMANDS, app


def test_version(run):
    """The version is printed and nothing else."""
    assert run("--version") == (0, f"kvsim {kvsim.__version__}\n", "")


def test_help_lists_each_command_once(run):
    """The commands of `--help` are those of `COMMANDS`, each once."""
    _, out, _ = run("--help")
    lines = out.partition("Commands:\n")[2].splitlines()
    listed = [line.split()[0] for line in lines if line[2] != " "]

    assert listed == [*COMMANDS]
    assert not any("..." in line for line in lines)  # each description is whole


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(printed, command):
    """`--help` names the command and describes its options."""
    out = printed(command, "--help")

    assert out.startswith(f"Usage: kvsim {command}")


@pytest.mark.parametrize(
    ("command", "name"), [("policies", "snapkv@kvpress"), ("metrics", "wipeout")]
)
def test_listings(run, command, name):
    """Policies and metrics are listed as text, and as one JSON document."""
    _, text, _ = run(command)
    _, document, err = run(command, "--json")

    assert name in text
    assert name in [row["name"] for row in json.loads(document)]
    assert err == ""


def test_help_is_a_command_too(run):
    """`help COMMAND` is `COMMAND --help`, alone that of kvsim."""
    assert run("help", "replay") == run("replay", "--help")
    assert run("help") == run("--help")


def test_a_command_is_built_alone(run, monkeypatch):
    """At the start signatures of no other command are read, and completion has all."""
    built, whole = [], app()
    monkeypatch.setattr(kvsim.cli, "_app", lambda names: built.append([*names]) or whole)

    run("metrics", "--help")
    run("--help")

    assert built == [["metrics"]]
    assert "--install-completion" in run("--help")[1]
    monkeypatch.setenv("_KVSIM_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "kvsim re")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert run()[1].split() == ["replay", "report"]


def test_names_of_policies_are_taken_in_any_case(run, trace):
    """With presets and settings; results have the name of the catalogue."""
    asked = ["--policy", "TOVA,AMS@Release+Knorm", "--set", "AMS.window=4", "--budget", "8"]
    cells = json.loads(run("replay", trace, *asked, "--json")[1])["cells"]

    assert [cell["policy"] for cell in cells] == ["tova", "ams@release+knorm"]
    assert cells[1]["params"]["window"] == 4
    assert run("policies", "TOVA") == run("policies", "tova")


def test_a_policy_in_full_shows_parameters_and_rule(run):
    """Names given to `policies` are told with what the list has no room for."""
    _, out, _ = run("policies", "snapkv@kvpress", "asl")
    _, document, _ = run("policies", "asl", "--json")
    first, second = out.split("asl[+SCORER]")

    assert re.search(r"\nwindow +64 +an integer of at least 1\npool +avg +'max', 'avg' or", first)
    assert "listing 1" in first
    assert re.search(r"\ntau +0.3 ", second)
    assert re.search(r"\nwithout a part +snapkv\n", second)
    assert "V_l = mean over U" in second
    (asl,) = json.loads(document)
    assert (asl["name"], asl["params"]["tau"]) == ("asl", 0.3)
    assert asl["accepts"]["tau"] == "a number of at least 0"


def test_a_policy_of_ones_own_and_a_scaled_preset_are_shown_in_full(run, printed, own):
    """Their schedule and parameters, the docstring of one's own, and lengths as shares."""
    out = printed("policies", "mine:odd", "snapkv@scaled")
    _, document, _ = run("policies", "mine:odd", "--json")
    (odd,) = json.loads(document)

    assert re.match(r"name +mine:odd\n.*\nevicts after +the prompt, every 8 rows", out, re.DOTALL)
    assert re.search(r"\nfails_at +0 ", out)
    assert "32 * budget / 1024 if 32 > budget / 2  an integer of at least 1" in out
    assert (odd["name"], odd["interval"], odd["params"]["fails_at"]) == ("mine:odd", 8, 0)


def test_policies_in_json_have_every_field(printed):
    """Names with kind, schedule, parameters, needs and paper, for scripts."""
    found = {one["name"]: one for one in json.loads(printed("policies", "--json"))}

    assert found["adakv"]["kind"] == "allocator"
    assert not found["adakv"]["own_schedule"]
    assert found["criticalkv"]["needs"] == ["o_proj"]
    assert found["qfilter"]["required"] == {"calibration": "prefix:64"}
    assert found["ams@release"]["params"]["segment_mass"] == 0.02
    assert not found["rpc"]["bounded"]
    assert found["oracle"]["clairvoyant"]
    assert found["gkv"]["paper"] == "arXiv 2512.00504"
