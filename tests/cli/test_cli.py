"""The command line: what it prints, what it refuses, what it leaves behind."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections import Counter
from contextlib import chdir, redirect_stderr, redirect_stdout, suppress
from itertools import product
from pathlib import Path

import polars as pl
import pytest
import torch
import zarr
from hypothesis import given
from hypothesis import strategies as st

import kvsim
from kvsim.analysis.table import REGRET
from kvsim.cli import COMMANDS, app, main, prompting
from kvsim.cli import demo as demo_module
from kvsim.cli.values import OptionError, parse_memory, parse_set
from kvsim.store.records import read_records
from kvsim.tiny import ledger
from kvsim.tiny.tasks import TASKS, prompts
from kvsim.tiny.vocabulary import DOMAINS
from mutations import reseal_folder

OWN = """
import os
import signal
from dataclasses import dataclass

from kvsim import Policy
from kvsim.core.policy import Protection, Schedule, Scorer
from kvsim.errors import NeedsError


@dataclass(frozen=True)
class Odd(Scorer):
    fails_at: int = 0
    stops_at: int = 0

    def score(self, view):
        if view.setting.budget == self.fails_at:
            raise NeedsError("odd: the trace has no dense attention; record it with --attention")
        if view.setting.budget == self.stops_at:
            if os.environ.get("TERMINATED"):
                signal.raise_signal(signal.SIGTERM)
            raise KeyboardInterrupt
        return view.pos.float()


def odd(**parameters):
    return Policy("odd", Odd(**parameters), schedule=Schedule(interval=8))


not_a_policy = 3
"""


@pytest.fixture(scope="module")
def prompt():
    """A prompt that tiny answers in a moment."""
    return prompts(1, task="walk", facts=6, lines=6, kinds=3)[0].prompt


@pytest.fixture(scope="module")
def trace(tmp_path_factory, prompt):
    """The path of a small trace."""
    path = tmp_path_factory.mktemp("traces") / "small.zarr"
    kvsim.capture("tiny", None, prompt, max_new_tokens=64, out=path)
    return path


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with a policy of the user's own, which is the working folder."""
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path


def one_line(text):
    """The only line of a text."""
    lines = text.splitlines()
    assert len(lines) == 1, text
    return lines[0]


# ------------------------------------------------------------------------------------- listings


def test_version(run):
    """The version is printed and nothing else."""
    assert run("--version") == (0, f"kvsim {kvsim.__version__}\n", "")


def test_no_command_shows_help(run):
    """Without arguments there is help, and that is no error."""
    status, out, err = run()

    assert (status, err) == (0, "")
    assert "Commands:" in out


def test_help_lists_each_command_once(run):
    """The commands of `--help` are those of `COMMANDS`, each once and in that order."""
    _, out, _ = run("--help")
    lines = out.partition("Commands:\n")[2].splitlines()
    listed = [line.split()[0] for line in lines if line[2] != " "]

    assert listed == list(COMMANDS)
    assert not any("..." in line for line in lines)  # each description is whole
    assert len(app.registered_groups) == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(run, command):
    """`--help` names the command and describes its options."""
    status, out, err = run(command, "--help")

    assert (status, err) == (0, "")
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
    """`help COMMAND` is `COMMAND --help`, alone that of kvsim; an unknown name is one line."""
    assert run("help", "replay") == run("replay", "--help")
    assert run("help") == run("--help")
    assert "No such command 'nonsense'" in run("help", "nonsense")[2]


def test_a_command_is_built_alone(run, monkeypatch):
    """At the start signatures of no other command are read, and completion has all."""
    built = []
    monkeypatch.setattr(kvsim.cli, "_app", lambda names: built.append([*names]) or app)

    run("metrics", "--help")
    run("--help")

    assert built == [["metrics"]]
    assert "--install-completion" in run("--help")[1]
    monkeypatch.setenv("_KVSIM_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "kvsim re")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert run()[1].split() == ["replay", "report", "recompute"]


def test_a_metric_in_full_says_what_stands_for_it(run):
    """Names given to `metrics`, with what the list has no room for; unknown ones are refused."""
    _, out, _ = run("metrics", "wipeout", "expectation")
    (wipeout,) = json.loads(run("metrics", "wipeout", "--json")[1])

    assert "main variant: length=32,threshold=0\n" in out
    assert "measured:     on request, with --metric expectation\n" in out
    assert wipeout["name"] == "wipeout"
    assert "did you mean 'wipeout'" in run("metrics", "wipout")[2]


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
    first, second = out.split("asl[+SCORER]: ")

    assert "  window=64      an integer of at least 1\n  pool=avg       'max', 'avg' or" in first
    assert "listing 1" in first
    assert "tau=0.3" in second
    assert "SCORER:       snapkv, if none is named" in second
    assert "V_l = mean over U" in second
    (asl,) = json.loads(document)
    assert (asl["name"], asl["params"]["tau"]) == ("asl", 0.3)
    assert asl["accepts"]["tau"] == "a number of at least 0"


def test_readers_and_codecs_are_listed_and_shown_in_full(run):
    """They have a table of their own; in full, with the rule of their own class."""
    _, listed, _ = run("policies")
    _, out, _ = run("policies", "rocketkv", "quest@release")
    first, second = out.split("[EVICTION+]quest@release: ")

    evictions, behind = listed.split("alone or behind a policy: snapkv+quest+kivi")
    assert "\nquest " not in evictions
    assert "\nquest@release " in behind
    assert "\nkivi " in behind
    assert first.startswith("[EVICTION+]rocketkv: reads pages by a few channels")
    assert "EVICTION:     snapkv, if none is named" in first
    assert "hybrid sparse attention" in first
    assert "evicts after" not in out
    assert "upper bound of q . k" in second


def test_presets_stand_beside_the_policy(run):
    """What else there is of a name."""
    _, out, _ = run("policies", "snapkv")

    assert "presets:      snapkv@kvpress, snapkv@gkv, snapkv@original" in out


@pytest.mark.parametrize("name", ["snapvk", "ams+tova"])
def test_a_policy_that_is_not_listed_is_refused(run, name):
    """One line with the closest name, or what is expected."""
    status, out, err = run("policies", name)

    assert (status, out) == (2, "")
    assert ("did you mean 'snapkv'" if name == "snapvk" else "has several parts") in one_line(err)


def test_a_policy_of_ones_own_and_a_scaled_preset_are_shown_in_full(run, own):
    """Their schedule and parameters, the docstring of one's own, and lengths as shares."""
    status, out, err = run("policies", "mine:odd", "snapkv@scaled")
    _, document, _ = run("policies", "mine:odd", "--json")
    (odd,) = json.loads(document)

    assert (status, err) == (0, "")
    assert out.startswith("mine:odd: a policy of your own\nevicts after: the prompt, every 8 rows")
    assert "  fails_at=0" in out
    assert "  window=32 * budget / 1024 if 32 > budget / 2  an integer of at least 1" in out
    assert (odd["name"], odd["interval"], odd["params"]["fails_at"]) == ("mine:odd", 8, 0)


# -------------------------------------------------------------------------------------- prompts


def rows_of(text):
    """The objects of JSON lines."""
    return [json.loads(line) for line in text.splitlines()]


def test_prompts_of_every_task_and_domain(run):
    """Without options all tasks and domains take turns; each row has its right response."""
    status, out, err = run("prompts", "--n", "28")
    rows = rows_of(out)

    assert (status, err) == (0, "")
    assert [row["task"] for row in rows[:7]] == list(TASKS)
    assert {(row["task"], row["domain"]) for row in rows} == {
        (task, domain) for task in TASKS for domain in DOMAINS
    }
    assert len({row["id"] for row in rows}) == 28
    for row in rows:
        assert row["reference"] == ledger.solve(row["prompt"]).response
        assert row["answer"] == ledger.check(row["prompt"], row["reference"]).answer


def test_prompts_of_one_level(run):
    """The id says task, level, domain and seed; the same command gives the same prompts."""
    command = ["prompts", "--task", "walk", "--level", "2", "--domain", "paint", "--n", "4"]
    _, out, _ = run(*command)
    _, again, _ = run(*command)
    _, other, _ = run(*command, "--seed", "1")
    rows = rows_of(out)

    assert [row["id"] for row in rows] == [f"walk-2-paint-s0-{i:03d}" for i in range(4)]
    assert {(row["task"], row["domain"], row["level"]) for row in rows} == {("walk", "paint", 2)}
    assert again == out
    assert rows_of(other)[0]["id"] == "walk-2-paint-s1-000"
    assert rows_of(other)[0]["prompt"] != rows[0]["prompt"]


def test_prompts_of_given_sizes(run):
    """Every size reaches the page; without a level the id has none."""
    sizes = ["--facts", "9", "--lines", "7", "--filler", "2", "--kinds", "3", "--report", "2"]
    _, out, _ = run("prompts", "--task", "walk", "--n", "1", *sizes, "--cycle", "3")
    (row,) = rows_of(out)
    facts, _, rest = row["prompt"].partition(" key : ")
    key, _, question = rest.partition(" question : ")

    assert row["id"] == "walk-paint-s0-000"
    assert row["level"] is None
    assert facts.split().count(".") == 9 + 2 * 9
    assert key.count(",") == 3
    assert question.split()[1] == "#6"
    assert question.split("report ")[1].count("#") == 2
    assert len({line.split()[0] for line in row["reference"].split(" ; ")[:7]}) == 3


def test_prompts_of_several_tasks_levels_and_domains(run):
    """Spread evenly over their combinations, with ids of their own; the same command, the same."""
    command = ["prompts", "--task", "walk,get", "--task", "needle", "--level", "1,2",
               "--domain", "paint,ore", "--n", "26", "--seed", "3"]  # fmt: skip

    status, out, err = run(*command)
    again = run(*command)[1]
    other = run(*command[:-1], "4")[1]

    assert (status, err) == (0, "")
    assert again == out
    rows = rows_of(out)
    assert len({row["id"] for row in rows}) == len({row["prompt"] for row in rows}) == 26
    assert {row["prompt"] for row in rows_of(other)}.isdisjoint(row["prompt"] for row in rows)
    labels = [(row["task"], row["level"], row["domain"]) for row in rows]
    counts = Counter(labels)
    assert sorted(counts) == sorted(product(("get", "needle", "walk"), (1, 2), ("ore", "paint")))
    assert sorted(counts.values()) == [2] * 10 + [3] * 2
    assert set(labels[:12]) == set(counts)
    for place in range(3):  # early on too, each value has its share
        assert max(Counter(label[place] for label in labels[:6]).values()) <= 3
    for row in rows:
        assert row["id"].startswith(f"{row['task']}-{row['level']}-{row['domain']}-s3-")
        assert row["reference"] == ledger.solve(row["prompt"]).response


@given(st.lists(st.integers(1, 7), min_size=1, max_size=4))
def test_every_combination_has_one_turn(sizes):
    """All of them once, and in as many turns as there are values of the first each has one."""
    turns = prompting._turns(*map(range, sizes))

    assert sorted(turns) == sorted(product(*map(range, sizes)))
    assert sorted(turn[0] for turn in turns[: sizes[0]]) == list(range(sizes[0]))


def test_what_is_not_given_is_all_there_is(run):
    """Several levels, and every task and domain in turn."""
    _, out, err = run("prompts", "--level", "1,2", "--n", "56")
    assert err == ""
    _, _, err = run("prompts", "--level", "1,2", "--n", "28")
    assert "28 prompts for 56 combinations (7 tasks x 2 levels x 4 domains)" in one_line(err)

    counts = Counter((row["task"], row["level"], row["domain"]) for row in rows_of(out))
    assert len(counts) == 7 * 2 * 4
    assert set(counts.values()) == {1}


def test_prompts_in_a_file(run, tmp_path):
    """`--out` writes what would be printed; what is there is kept unless it may be replaced."""
    out = tmp_path / "new" / "prompts.jsonl"
    command = ["prompts", "--task", "get", "--level", "1", "--n", "3"]
    _, printed, _ = run(*command)

    status, text, err = run(*command, "--out", out)
    assert (status, err) == (0, "")
    assert one_line(text).startswith(f"{out}: 3 prompts, with their responses ")
    assert out.read_text() == printed

    status, _, err = run("prompts", "--out", out)
    assert status == 2
    assert "exists; give another --out, or --overwrite" in one_line(err)
    assert out.read_text() == printed

    status, _, _ = run("prompts", "--n", "1", "--out", out, "--overwrite")
    assert status == 0
    assert len(rows_of(out.read_text())) == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--task", "run"], "task is 'run', expected one of walk, get, join"),
        (["--domain", "sea"], "domain is 'sea', expected one of paint, ore"),
        (["--task", "walk,run", "--n", "1"], "task is 'run', expected one of walk, get, join"),
        (["--task", "walk,"], "--task is 'walk,'; expected names"),
        (["--level", "two"], "--level is 'two'; expected numbers from 1 to 5"),
        (["--level", "1,7", "--n", "1"], "level is 7, expected 1 to 5"),
        (["--level", "1,2", "--facts", "9"], "level 1 sets all sizes itself, but facts is given"),
        (["--level", "6"], "level is 6, expected 1 to 5"),
        (["--level", "2", "--facts", "9"], "level 2 sets all sizes itself, but facts is given too"),
        (["--level", "2", "--filler", "0", "--report", "1"], "but filler, report are given too"),
        (["--facts", "500"], "facts is 500, expected 2 to 160"),
        (["--n", "0"], "see kvsim prompts --help"),
        (["--overwrite"], "give --out FILE.jsonl too"),
        (["--out", "folder", "--overwrite"], "folder exists and is not a file"),
        (["--out", "file/prompts.jsonl"], "file is a file; expected a folder"),
    ],
)  # fmt: skip
def test_prompts_refuses(run, tmp_path, monkeypatch, arguments, expected):
    """What cannot be is one line, status 2, and leaves nothing behind."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")

    status, out, err = run("prompts", *arguments)

    assert (status, out) == (2, "")
    assert one_line(err).startswith("error: ")
    assert expected in err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]


# ---------------------------------------------------------------------------- capture, info, verify


def test_capture_prints_what_was_recorded(run, tmp_path, prompt):
    """A captured trace is described in one line, with the verdict on the answer."""
    out = tmp_path / "new" / "t.zarr"

    status, text, err = run("capture", "--model", "tiny", "--prompt", prompt, "--out", out)

    assert (status, err) == (0, "")
    assert one_line(text).startswith(f"{out}: ")
    assert text.rstrip().endswith(" right")
    assert kvsim.open_trace(out).meta["answer_check"]["right"]


@pytest.mark.parametrize(("limit", "cut"), [(4, True), (0, False), (200, False)])
def test_capture_says_that_a_response_was_cut(run, tmp_path, prompt, limit, cut):
    """One line with the option, and `info` says so; not of a response that ended, or of none."""
    out = tmp_path / "t.zarr"

    status, text, err = run(
        "capture", "--model", "tiny", "--prompt", prompt, "--max-new-tokens", limit, "--out", out
    )

    assert (status, err) == (0, "")
    line = "The response reached 4 tokens without an end; a larger --max-new-tokens records more.\n"
    assert text.endswith(line) == cut
    assert text.count("\n") == 1 + cut
    assert (", cut by --max-new-tokens)" in text) == cut
    assert ("response 4, cut by --max-new-tokens)" in run("info", out)[1]) == cut


def test_capture_counts_the_responses_that_were_cut(run, tmp_path):
    """Of several prompts, in one line."""
    samples = [*prompts(2, task="walk", facts=4, lines=1, kinds=2, report=1),
               *prompts(1, task="walk", facts=4, lines=9, kinds=2, report=1)]  # fmt: skip
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(s.row(str(i))) + "\n" for i, s in enumerate(samples)))
    limit = len(samples[0].response.split()) + 1

    status, text, _ = run("capture", "--model", "tiny", "--prompts", file, "--max-new-tokens",
                          limit, "--out", tmp_path / "many")  # fmt: skip

    assert status == 0
    assert text.splitlines()[3] == (
        f"1 of 3 responses reached {limit} tokens without an end; a larger --max-new-tokens "
        "records more."
    )


def test_capture_with_output_projections(run, tmp_path, prompt, trace):
    """They lie next to the trace, `info` shows their size; with `--no-o-proj` there are none."""
    out = tmp_path / "t.zarr"
    arguments = ["--prompt", prompt, "--max-new-tokens", "2"]

    status, _, err = run("capture", "--model", "tiny", *arguments, "--out", out)

    assert (status, err) == (0, "")
    own = kvsim.open_trace(out)
    assert own.o_proj.shape[:3] == (own.n_layers, own.n_qheads, own.dim)
    _, text, _ = run("info", out)
    (line,) = (line for line in text.splitlines() if line.startswith("projections "))
    assert " x ".join(map(str, own.o_proj.shape)) in line
    assert run("verify", out, "--deep")[0] == 0
    (folder,) = tmp_path.glob("projections-*")
    assert f"{folder.name} next to the trace" in line
    shutil.rmtree(folder)
    assert "which is not next to the trace; copy it there too" in run("info", out)[1]
    without = tmp_path / "without.zarr"
    run("capture", "--model", "tiny", *arguments, "--no-o-proj", "--out", without)
    assert not kvsim.open_trace(without).has("o_proj")
    assert "projections" not in run("info", without)[1]


def test_capture_of_a_file_of_prompts(run, tmp_path):
    """Several prompts give a folder of traces; `--limit` takes the first; JSON describes them."""
    file = tmp_path / "prompts.jsonl"
    samples = prompts(3, task="walk", facts=4, lines=2, kinds=2)
    file.write_text(
        "".join(
            json.dumps({"id": f"p{i}", "prompt": s.prompt}) + "\n" for i, s in enumerate(samples)
        )
    )
    arguments = ["capture", "--model", "tiny", "--prompts", file, "--max-new-tokens", "4", "--json"]

    status, out, err = run(*arguments, "--limit", "2", "--out", tmp_path / "many")

    assert (status, err) == (0, "")
    assert [t["name"] for t in json.loads(out)["traces"]] == ["p0", "p1"]
    assert sorted(p.name for p in (tmp_path / "many").glob("*.zarr")) == ["p0.zarr", "p1.zarr"]
    assert len(list((tmp_path / "many").iterdir())) == 3  # and the projections of both

    status, out, _ = run(*arguments, "--limit", "1", "--out", tmp_path / "one.zarr")

    assert status == 0
    assert json.loads(out)["traces"][0]["path"] == str(tmp_path / "one.zarr")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "facts : hello world"], "'hello', 'world', expected words of its"),
        (["--prompt", "walk " * 5000], "5001 tokens, expected at most the model's context of 4096"),
        ([], "`kvsim prompts > prompts.jsonl`"),
        (["--prompt", "walk", "--prompts", "p.jsonl"], "both --prompt and --prompts"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["--prompt", "walk", "--limit", "2"], "--limit is given without a file of prompts"),
        (["--prompt", "walk", "--dtype", "int8"], "dtype is 'int8', expected float32"),
        (["--prompt", "walk", "--device", "tpu"], "--device is 'tpu'; expected cpu, cuda"),
        (["--prompt", "walk", "--max-new-tokens", "-1"], "--max-new-tokens"),
        (["--prompt", "walk", "--seed", "x"], "see kvsim capture --help"),
    ],
)  # fmt: skip
def test_capture_refuses(run, tmp_path, monkeypatch, arguments, expected):
    """A prompt or an option that cannot be is one line, status 2, and leaves nothing behind."""
    monkeypatch.chdir(tmp_path)

    status, out, err = run("capture", "--model", "tiny", "--out", "t.zarr", *arguments)

    assert (status, out) == (2, "")
    assert one_line(err).startswith("error: ")
    assert expected in err
    assert list(tmp_path.iterdir()) == []


def test_capture_refuses_a_model_that_is_not_there(run, tmp_path):
    """A folder that does not exist is not looked for on a hub."""
    status, _, err = run(
        "capture", "--model", "./no", "--prompt", "x", "--out", tmp_path / "t.zarr"
    )

    assert status == 2
    assert "no model folder at './no'" in one_line(err)


def test_capture_refuses_what_exists(run, tmp_path, trace, prompt):
    """Something at the output path is kept, unless it is a trace and may be overwritten."""
    target = tmp_path / "t.zarr"
    shutil.copytree(trace, target)
    before = kvsim.open_trace(target).digest
    (tmp_path / "file").write_text("mine")
    arguments = ["capture", "--model", "tiny", "--prompt", prompt, "--max-new-tokens", "2"]

    status, _, err = run(*arguments, "--out", target)
    assert status == 2
    assert "exists, expected a free path" in one_line(err)
    assert kvsim.open_trace(target).digest == before

    status, _, err = run(*arguments, "--out", tmp_path / "file", "--overwrite")
    assert status == 2
    assert "is not a kvsim trace" in one_line(err)
    assert (tmp_path / "file").read_text() == "mine"

    status, _, err = run(*arguments, "--out", tmp_path / "file" / "t.zarr")
    assert status == 2
    assert "is a file; expected a folder" in one_line(err)

    status, _, _ = run(*arguments, "--out", target, "--overwrite")
    assert status == 0
    assert kvsim.open_trace(target).digest != before


def test_info_describes(run, trace):
    """Text for people, the same facts as JSON for programs."""
    status, text, err = run("info", trace)
    assert (status, err) == (0, "")
    assert kvsim.open_trace(trace).digest in text

    status, out, err = run("info", trace, "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["heads"] == kvsim.open_trace(trace).n_heads


def test_info_shows_what_the_prompt_says_of_itself(run, trace, tmp_path):
    """Labels stand in one line, escaped like all text; without any there is none."""
    path = tmp_path / "t.zarr"
    shutil.copytree(trace, path)
    labels = {"task": "walk\x1b", "level": 2}
    edit(path, lambda attributes: attributes["meta"].update(labels=labels))
    reseal_folder(path)

    _, text, _ = run("info", path)
    _, bare, _ = run("info", trace)

    (line,) = (line for line in text.splitlines() if line.startswith("labels "))
    assert line.split(maxsplit=1)[1] == r'task "walk\u001b", level 2'
    assert "\nlabels " not in bare


def test_info_escapes_what_a_terminal_would_act_upon(run, trace, tmp_path):
    """Text of a trace is printed with its control characters escaped."""
    path = tmp_path / "t.zarr"
    shutil.copytree(trace, path)
    edit(path, lambda attributes: attributes["meta"]["text"].update(prompt="a\x1b[2Jb"))
    reseal_folder(path)

    _, text, _ = run("info", path)

    assert "\x1b" not in text
    assert "a\\u001b[2Jb" in text


def test_verify_says_complete(run, trace):
    """A good trace is complete, in text and in JSON."""
    status, text, err = run("verify", trace, "--deep")
    assert (status, err) == (0, "")
    assert "complete and undamaged" in text

    status, out, _ = run("verify", trace, "--deep", "--json")
    assert status == 0
    assert json.loads(out)["ok"] is True


def test_sample_is_a_trace(run):
    """`sample` names the trace that ships."""
    status, text, _ = run("info", "sample")

    assert status == 0
    assert str(kvsim.sample_trace()) in text


# ------------------------------------------------------------------------------- damaged traces


def edit(trace, change):
    """Change the attributes of a stored trace."""
    file = trace / "zarr.json"
    root = json.loads(file.read_text())
    change(root["attributes"])
    file.write_text(json.dumps(root))


def chunk(trace, name):
    """A chunk of an array of a stored trace."""
    return min(p for p in (trace / name / "c").rglob("*") if p.is_file())


def flip(file):
    """Flip the bits of a byte in the middle of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(bytes(data))


DAMAGE = {
    "incomplete": (lambda t: edit(t, lambda a: a.pop("complete")), "complete"),
    "newer": (lambda t: edit(t, lambda a: a.update(kvsim_format=99)), "99"),
    "missing chunk": (lambda t: chunk(t, "k").unlink(), "chunk"),
    "damaged chunk": (lambda t: flip(chunk(t, "k")), "k"),
    "missing array": (lambda t: shutil.rmtree(t / "v"), "no array v"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_traces_are_refused(run, tmp_path, trace, kind):
    """Verify reports what is wrong, replay refuses; both with status 2 and without a traceback."""
    path = tmp_path / "t.zarr"
    shutil.copytree(trace, path)
    damage, expected = DAMAGE[kind]
    damage(path)

    status, out, err = run("verify", path)
    assert status == 2
    assert "damaged" in out
    assert expected in out
    assert one_line(err).startswith("error: ")

    status, out, _ = run("verify", path, "--json")
    assert status == 2
    assert json.loads(out)["ok"] is False

    arguments = ["--policy", "tova,h2o", "--budget", "16", "--out", tmp_path / "run"]
    status, out, err = run("replay", path, *arguments)
    assert (status, out) == (2, "")
    assert one_line(err).startswith("error: ")
    assert expected in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.zarr"]


@pytest.mark.parametrize("command", ["info", "verify", "replay"])
@pytest.mark.parametrize("kind", ["empty", "foreign", "file", "zip"])
def test_what_is_no_trace(run, tmp_path, command, kind):
    """A folder or a file that never was a trace is called none, in one line, and not damaged."""
    given = tmp_path / "t.zarr"
    if kind == "file":
        given.write_text("no trace")
    elif kind == "zip":
        with zipfile.ZipFile(given, "w") as archive:
            archive.writestr("notes.txt", "no trace")
    else:
        zarr.create_group(given) if kind == "foreign" else given.mkdir()
    more = ["--policy", "tova", "--budget", "16"] if command == "replay" else []

    status, out, err = run(command, given, *more)

    assert (status, out) == (2, "")
    assert re.match(r"error: \S+t\.zarr is not a kvsim trace: ", one_line(err))
    assert "damaged" not in err


@pytest.mark.parametrize("command", ["info", "verify", "replay"])
def test_missing_trace(run, tmp_path, command):
    """A path where nothing is is named in one line."""
    more = ["--policy", "tova", "--budget", "16"] if command == "replay" else []

    status, out, err = run(command, tmp_path / "nowhere.zarr", *more)

    assert (status, out) == (2, "")
    assert "nowhere.zarr" in one_line(err)


# --------------------------------------------------------------------------------------- replay


def test_replay_prints_one_table(run, trace):
    """A line per policy and budget, with the fidelity of the numbers."""
    arguments = [
        "--policy",
        "full,tova",
        "--policy",
        "h2o",
        "--budget",
        "16,50%",
        "--interval",
        "8",
    ]

    status, out, err = run("replay", trace, *arguments)

    assert (status, err) == (0, "")
    table = [
        line.split()[:2] for line in out.splitlines() if line.startswith(("full", "tova", "h2o"))
    ]
    half = str(kvsim.open_trace(trace).n_pos // 2)
    assert table == [["full", "-"], ["tova", "16"], ["tova", half], ["h2o", "16"], ["h2o", half]]
    assert "exact" in out
    assert "recorded queries, keys and values" in out


def test_replay_shows_the_layer_error_of_traces_that_all_have_projections(
    run, trace, prompt, tmp_path
):
    """Summed over layers; a trace without projections takes the column away, a name is refused."""
    bare = tmp_path / "bare.zarr"
    kvsim.capture("tiny", None, prompt, max_new_tokens=64, out=bare, o_proj=False)
    words = ["--policy", "tova", "--budget", "24", "--json"]

    (cell,) = json.loads(run("replay", trace, *words)[1])["cells"]
    (mixed,) = json.loads(run("replay", trace, bare, *words)[1])["cells"]
    text = run("replay", trace, *words[:-1])[1]
    status, _, err = run("replay", trace, bare, *words, "--metric", "layer_error")

    opened = kvsim.open_trace(trace)
    record = kvsim.replay(opened, kvsim.policy("tova"), 24)
    table = kvsim.measure(opened, record, ["layer_error"])
    assert cell["layer_error"] == pytest.approx(table["value"].sum())
    assert "layer error: sum over layers" in text
    assert "layer_error" not in mixed
    assert status == 2
    assert "record it again with --o-proj" in one_line(err)


def test_replay_writes_a_run_and_json(run, trace, tmp_path):
    """`--out` holds parameters, records and results; `--json` is one document with the cells."""
    out = tmp_path / "runs" / "x"
    arguments = ["--policy", "snapkv", "--budget", "16", "--set", "window=4", "--no-prefill"]

    status, text, err = run(
        "replay", trace, *arguments, "--interval", "8", "--events", "--out", out, "--json"
    )

    assert (status, err) == (0, "")
    document = json.loads(text)
    (cell,) = document["cells"]
    assert (cell["policy"], cell["budget"], cell["prefill"]) == ("snapkv", 16, False)
    assert cell["params"]["window"] == 4
    assert 0 < cell["output_error"] < 2
    assert sum(document["fidelity"].values()) == pytest.approx(1)
    assert json.loads((out / "run.json").read_text())["traces"] == document["traces"]
    (record,) = read_records(out / "records.zarr")
    results = pl.read_parquet(out / "results.parquet")
    wiped = results.filter((pl.col("metric") == "wipeout") & (pl.col("layer") == 0))
    assert sorted(wiped["event"].unique()) == record.events


def test_summary_does_not_depend_on_events(run, trace, tmp_path):
    """`--events` adds rows to the results and changes no number of the table."""
    arguments = ["replay", trace, "--policy", "tova,random", "--budget", "16", "--interval", "8"]

    _, one, _ = run(*arguments, "--json")
    _, other, _ = run(*arguments, "--json", "--events", "--out", tmp_path / "x")

    for a, b in zip(json.loads(one)["cells"], json.loads(other)["cells"], strict=True):
        assert a.pop("params") == b.pop("params")
        assert a == pytest.approx(b)


def test_metrics_of_the_trace_have_their_own_table(run, trace):
    """A metric that belongs to no policy is shown where it is asked for."""
    arguments = ["--policy", "tova", "--budget", "16", "--metric", "window_overlap,missing_mass"]

    status, out, _ = run("replay", trace, *arguments)

    assert status == 0
    assert "window_overlap" in out
    assert "missing" in out


def test_regret_has_a_column(run, trace, tmp_path):
    """`--regret` shows by how much the optimum retains more, and writes it to the results."""
    arguments = ["replay", trace, "--policy", "full,random", "--budget", "16", "--interval", "16"]

    status, text, err = run(*arguments, "--regret")
    assert (status, err) == (0, "")
    assert "regret" in text
    assert "regret: mass that the best possible kept sets retain beyond the policy" in text
    _, without, _ = run(*arguments)
    assert "regret" not in without

    more = ["--regret", "--metric", "missing_mass", "--out", tmp_path / "x", "--json"]
    status, text, _ = run(*arguments, *more)
    assert status == 0
    full, random = json.loads(text)["cells"]
    assert full["regret"] is None
    assert 0 < random["regret"] < random["missing_mass"]
    results = pl.read_parquet(tmp_path / "x" / "results.parquet")
    assert set(results["metric"]) == {"missing_mass", *REGRET}


def test_every_policy_protects_what_is_asked_for(run, trace, tmp_path):
    """`--sink`, `--recent` and `--protect-prompt` add to each policy, and the table tells so."""
    own = kvsim.open_trace(trace)
    arguments = ["replay", trace, "--policy", "random,snapkv", "--set", "window=4"]
    extra = ["--sink", "3", "--recent", "6", "--interval", "8"]

    status, text, err = run(*arguments, *extra, "--budget", "16", "--out", tmp_path / "a", "--json")

    assert (status, err) == (0, "")
    protect = {"sink": 3, "recent": 6, "prompt": False}
    assert [cell["params"]["protect"] for cell in json.loads(text)["cells"]] == [protect] * 2
    for record in read_records(tmp_path / "a" / "records.zarr"):
        assert record.params["protect"] == protect
        assert (record.evicted_at[..., :3] > own.n_pos).all()
        left = record.evicted_at - range(own.n_pos)
        assert left.min() >= 6  # an entry among the last six rows stays

    budget = str(own.prompt_len + 8)
    status, text, _ = run(*arguments, "--protect-prompt", "--budget", budget, "--interval", "8")
    assert status == 0
    assert "Every policy also protects the prompt." in text
    status, _, err = run(*arguments, "--protect-prompt", "--budget", "16")
    assert status == 2
    assert "budget 16 is below the" in one_line(err)


def test_protection_comes_on_top_of_a_policys_own(run, trace, own):
    """A ready policy that protects something keeps that too."""
    (own / "mine.py").write_text(OWN.replace("interval=8)", "interval=8), protect=Protection(2)"))
    arguments = ["--policy", "mine:odd", "--budget", "16", "--recent", "5", "--json"]

    status, text, _ = run("replay", trace, *arguments)

    assert status == 0
    (cell,) = json.loads(text)["cells"]
    assert cell["params"]["protect"] == {"sink": 2, "recent": 5, "prompt": False}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--budget", "0"], "budget is 0; expected at least 1"),
        (["--budget", "-3"], "expected at least 1"),
        (["--budget", "150%"], "expected a share above 0%"),
        (["--budget", "many"], "budget is 'many'"),
        (["--budget", "16,,32"], "--budget is '16,,32'"),
        (["--policy", "snapkv", "--budget", "8"], "the smallest budget that works is 32"),
        (["--policy", "tovva"], "unknown policy 'tovva'; did you mean 'tova'?"),
        (["--policy", "snapkv@kvpres"], "did you mean 'kvpress'?"),
        (["--policy", "nomodule:x"], "cannot import 'nomodule'"),
        (["--policy", "mine:nothing"], "'mine' has no 'nothing'"),
        (["--policy", "mine:not_a_policy"], "expected a kvsim.Policy"),
        (["--set", "windw=3", "--policy", "tova,snapkv"], "did you mean 'window'?"),
        (["--set", "window"], "--set is 'window'; expected KEY=VALUE"),
        (["--set", "scorer.windw=3", "--policy", "ams+snapkv"], "mean 'scorer.window'?"),
        (["--policy", "adakv"], "name a scorer too, such as adakv+tova"),
        (["--policy", "qfilter"], "calibration is missing; give calibration="),
        (["--policy", "ams+full"], "nothing can be put around it"),
        (["--set", "protect_last=7.5"], "protect_last is 7.5; expected True or False"),
        (["--metric", "output_eror"], "did you mean 'output_error'?"),
        (["--metric", "retained"], "'retained_position' or 'retained_mass'?"),
        (["--metric", "regret"], "was not replayed; give --regret"),
        (["--sink", "-1"], "--sink"),
        (["--recent", "many"], "--recent"),
        (["--sink", "9", "--recent", "9"], "smallest budget that works is 18"),
        (["--memory", "lots"], "--memory is 'lots'; expected a size such as 500MB"),
        (["--memory", "1KB"], "the memory budget is"),
        (["--device", "gpu"], "--device is 'gpu'"),
        (["--interval", "0"], "--interval"),
        (["--events"], "give --out DIR as well"),
        (["--out", "mine.py"], "mine.py exists"),
        (["--polcy", "x"], "see kvsim replay --help"),
    ],
)  # fmt: skip
def test_replay_refuses(run, trace, own, arguments, expected):
    """What cannot be replayed is one line that says what to do, status 2, and changes nothing."""
    defaults = {"--policy": "tova", "--budget": "16"}
    more = [w for key, value in defaults.items() if key not in arguments for w in (key, value)]

    status, out, err = run("replay", trace, *arguments, *more)

    assert (status, out) == (2, "")
    assert one_line(err).startswith("error: ")
    assert expected in err
    assert {p.name for p in own.iterdir()} <= {"mine.py", "__pycache__"}
    assert (own / "mine.py").read_text() == OWN


def test_replay_needs_policy_and_budget(run, trace):
    """A missing option is named."""
    status, _, err = run("replay", trace, "--policy", "tova")

    assert status == 2
    assert "--budget" in one_line(err)


def test_two_traces_of_one_name_are_refused(run, trace, tmp_path):
    """A table could not tell them apart."""
    status, _, err = run("replay", trace, trace, "--policy", "tova", "--budget", "16")

    assert status == 2
    assert "both called 'small'" in one_line(err)


def test_own_policy(run, trace, own):
    """A policy in a file of the working folder is replayed by its name."""
    status, out, err = run("replay", trace, "--policy", "mine:odd", "--budget", "16")

    assert (status, err) == (0, "")
    assert "odd" in out


def test_policy_that_needs_what_the_trace_lacks(run, trace, own):
    """Where no cell can be replayed, the reason is bad input."""
    arguments = ["--policy", "mine:odd", "--set", "fails_at=16", "--budget", "16", "--out", "x"]

    status, out, err = run("replay", trace, *arguments)

    assert (status, out) == (2, "")
    assert one_line(err) == (
        "error: odd: the trace has no dense attention; record it with --attention"
    )
    assert not (own / "x").exists()


def test_an_error_that_repeats_is_printed_once(run, trace, own):
    """With the number of other cells, whether others work or not; numbers make no other error."""
    leak = "if view.setting.budget != 40:\n            view.span(0, view.row + 2)\n        return"
    (own / "leak.py").write_text(OWN.replace("return view", f"{leak} view"))
    replayed = ["replay", trace, "--interval", "8", "--policy", "leak:odd", "--budget"]

    status, _, err = run(*replayed, "16,24,32")
    some, _, others = run(*replayed, "16,24,40")

    assert (status, some) == (2, 1)
    assert one_line(err).startswith("error: odd: reads row ")
    assert err.endswith("see docs/add-a-policy.md (and so in 2 more cells)\n")
    assert [line.partition(":")[0] for line in others.splitlines()] == ["failed", "error"]
    assert "(and so in 1 more cell)" in others


def test_a_policy_that_exits_is_no_success(run, trace, own):
    """`sys.exit(0)` in a module, in a function or in a scorer ends neither kvsim nor its errors."""
    (own / "scorer.py").write_text(OWN.replace("raise KeyboardInterrupt", "raise SystemExit(0)"))
    (own / "module.py").write_text("raise SystemExit(0)")
    (own / "function.py").write_text("def odd():\n    raise SystemExit(0)")
    cells = ["--budget", "16,24", "--set", "stops_at=24", "--out", "x"]

    status, _, err = run("replay", trace, "--policy", "scorer:odd", *cells)
    assert status == 1
    assert "SystemExit (0) in scorer.py, line 22; expected scores" in err
    assert err.splitlines()[-1] == "error: 1 of 2 cells failed, the others are kept in x"
    for name in ("module:odd", "function:odd"):
        status, out, err = run("replay", trace, "--policy", name, "--budget", "16")
        assert (status, out) == (2, "")
        assert "calls sys.exit; expected" in one_line(err)


def test_a_finished_run_is_not_computed_again(run, trace, tmp_path):
    """`--resume` prints what the folder holds, and refuses another command for it."""
    arguments = ["replay", trace, "--policy", "tova", "--out", tmp_path / "x", "--resume"]
    status, text, err = run(*arguments, "--budget", "16")
    assert (status, err) == (0, "")
    before = (tmp_path / "x" / "run.json").read_bytes()

    assert run(*arguments, "--budget", "16") == (0, text, "")
    assert (tmp_path / "x" / "run.json").read_bytes() == before
    status, out, err = run(*arguments, "--budget", "24")
    assert (status, out) == (2, "")
    assert "holds a run with other budgets" in one_line(err)
    status, _, err = run("replay", trace, "--policy", "tova", "--budget", "16", "--resume")
    assert status == 2
    assert "give --out DIR as well" in one_line(err)


def test_a_run_is_replaced_on_request(run, trace, tmp_path):
    """By what is written in its place: an error before that leaves it; and no other folder is."""
    arguments = ["replay", trace, "--policy", "tova", "--out", tmp_path / "x"]
    run(*arguments, "--budget", "16")
    before = (tmp_path / "x" / "run.json").read_bytes()

    assert run(*arguments, "--budget", "0", "--overwrite")[0] == 2
    assert (tmp_path / "x" / "run.json").read_bytes() == before
    assert run(*arguments, "--budget", "24", "--overwrite")[0] == 0
    assert json.loads((tmp_path / "x" / "run.json").read_bytes())["budgets"] == ["24"]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    (tmp_path / "x" / "run.json").unlink()
    status, _, err = run(*arguments, "--budget", "24", "--overwrite")
    assert (status, "is no run folder" in err) == (2, True)
    assert "--resume continues" in run(*arguments, "--budget", "24", "--overwrite", "--resume")[2]


def test_work_in_a_pipe_prints_a_line_every_so_often(run, trace, monkeypatch):
    """What is done of how many, on standard error; nothing if the work is done before."""
    arguments = ["replay", trace, "--policy", "tova,knorm", "--budget", "16", "--interval", "8"]
    quiet = run(*arguments)
    monkeypatch.setattr("kvsim.recorder.progress.EVERY", 0.0)

    status, out, err = run(*arguments)

    assert (status, out) == quiet[:2]
    assert quiet[2] == ""
    assert re.fullmatch(r"(\d of 2 cells after 0 s: small: .*\n)+", err)


def test_failed_cells_leave_the_others(run, trace, own):
    """Some cells fail: status 1, the failures on standard error, the others kept."""
    arguments = ["--policy", "tova,mine:odd", "--set", "fails_at=16", "--budget", "16,24"]

    status, out, err = run("replay", trace, *arguments, "--out", "x", "--json")

    assert status == 1
    assert len(json.loads(out)["cells"]) == 3
    assert [f["budget"] for f in json.loads(out)["failures"]] == [16]
    assert "odd, budget 16: odd: the trace has no dense attention" in err
    assert err.splitlines()[-1] == "error: 1 of 4 cells failed, the others are kept in x"
    assert len(read_records(own / "x" / "records.zarr")) == 3


@pytest.mark.parametrize("how", ["interrupted", "terminated"])
def test_interrupted_sweep_keeps_what_is_done(run, trace, own, how, monkeypatch):
    """Ctrl-C and SIGTERM: status 130; what was replayed is measured, shown and written."""
    if how == "terminated":
        monkeypatch.setenv("TERMINATED", "1")
    before = signal.getsignal(signal.SIGTERM)
    arguments = ["--policy", "tova,mine:odd", "--set", "stops_at=24", "--budget", "16,24"]

    status, out, err = run("replay", trace, *arguments, "--out", "x", "--json")

    assert status == 130
    assert one_line(err) == (
        "interrupted, 3 of 4 cells are done and kept in x; continue with the same command and "
        "--resume"
    )
    assert json.loads(out)["interrupted"] is True
    assert len(json.loads(out)["cells"]) == 3
    assert pl.read_parquet(own / "x" / "results.parquet").height > 0
    assert signal.getsignal(signal.SIGTERM) == before


def test_interrupt_before_the_first_cell(run, trace, own):
    """Ctrl-C with nothing done writes nothing and says so."""
    arguments = ["--policy", "mine:odd", "--set", "stops_at=16", "--budget", "16", "--out", "x"]

    status, out, err = run("replay", trace, *arguments)

    assert (status, out) == (130, "")
    assert one_line(err) == "interrupted, no cell was done and nothing was written"
    assert not (own / "x").exists()


def test_bugs_show_their_traceback(monkeypatch, trace):
    """What kvsim does not expect is not swallowed: Python reports it, with status 1."""

    def broken(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr("kvsim.sweeps.replay_all", broken)
    with pytest.raises(ZeroDivisionError):
        main(["replay", str(trace), "--policy", "tova", "--budget", "16"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("window=64", ("window", 64)),
        ("a=0.5", ("a", 0.5)),
        ("a=1e-3", ("a", 1e-3)),
        ("pool=none", ("pool", None)),
        ("flag=True", ("flag", True)),
        ("pool=avg", ("pool", "avg")),
        ("path=a=b", ("path", "a=b")),
    ],
)
def test_values_of_settings(text, expected):
    """Numbers, true, false and none are values; everything else is text."""
    key, value = parse_set(text)

    assert (key, value) == expected
    assert type(value) is type(expected[1])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2GB", 2 * 10**9),
        ("1GiB", 2**30),
        ("500mb", 500 * 10**6),
        ("1.5 kB", 1500),
        ("4096", 4096),
        ("12B", 12),
    ],
)
def test_sizes(text, expected):
    """Decimal and binary units, in any case."""
    assert parse_memory(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "2 G B", "1XB", "1e9"])
def test_sizes_that_are_none(text):
    """What is no size says what one looks like."""
    with pytest.raises(OptionError, match="expected a size such as 500MB"):
        parse_memory(text)


# ----------------------------------------------------------------------------------------- demo


@pytest.fixture(scope="module")
def demo(tmp_path_factory, no_layout):
    """A folder with a demo, and what that printed."""
    folder = tmp_path_factory.mktemp("demo")
    out, err = io.StringIO(), io.StringIO()
    streams = redirect_stdout(out), redirect_stderr(err)
    with chdir(folder), streams[0], streams[1], pytest.raises(SystemExit) as end:
        main(["demo", "--out", "results/demo"])
    assert (end.value.code, err.getvalue()) == (0, "")
    return folder / "results" / "demo", out.getvalue()


#: What a terminal would act upon, what a reader would be misled by, and what UTF-8 cannot hold.
HOSTILE = "\x1b[31m\x9b2J\x07\u202e\u2066\u2028<i>[b]x[/b] $x^$\r\nsecond line\x7f\ud800 漢"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A trace whose names and texts are not to be trusted."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 90, 8) for heads in (4, 2, 2))
    words = [HOSTILE.replace("\ud800", ""), "y" * 5000, "<b>", "[/]"]
    made = kvsim.Trace.from_arrays(
        q, k, v, prompt_len=30, rope=kvsim.Rope.default(8),
        token_text=[words[i % 4] for i in range(90)],
    )  # fmt: skip
    path = tmp_path_factory.mktemp("hostile") / "t.zarr"
    made.save(path)
    stored = json.loads((path / "zarr.json").read_text())
    stored["attributes"]["name"] = f"evil {HOSTILE}"
    stored["attributes"]["meta"] = {
        "text": {"prompt": HOSTILE * 50, "response": HOSTILE},
        "labels": {"task": HOSTILE, "domain": "d"},
        "answer_check": {"answer": HOSTILE, "right": False, "expected": HOSTILE},
        "model": {"name": HOSTILE, "type": HOSTILE},
        "versions": {"kvsim": HOSTILE},
        "notes": [HOSTILE],
    }
    (path / "zarr.json").write_text(json.dumps(stored))
    reseal_folder(path)
    return path


@pytest.mark.parametrize(
    "command",
    [
        "info {0}",
        "info {0} --json",
        "verify {0}",
        "replay {0} --policy tova,h2o --budget 16",
        "replay {0} --policy tova --budget 16 --metric repetition,output_error --json",
        "replay {0} --policy tova --budget 16 --memory 1",
        "replay {0} {0} --policy tova --budget 16",
        "layers {0} --budget 16 --window 4",
        "layers {0} sample --budget 16 --window 4",
        "layers {0} --budget 16 --window 4 --gold 3 --figures figures",
        "layers {0} --budget 16 --gold-text nothing",
        "plot token_text {0} --policy tova --budget 16 --out x.png",
        "plot token_text {0} --policy tova --budget 16 --layer 9 --out x.png",
        "plot lift_bars {0} --policy tova --budget 40 --out x.svg",
        "plot bursts {0} --policy tova,h2o --budget 16 --zoom 5-40 --out x.pdf",
        "plot iou_by {0} --policy tova --budget 16 --by task --out x.png",
        "plot over_budgets {0} --policy tova --budget 16 --out x.png",
    ],
)
def test_texts_of_a_trace_are_text(run, hostile, tmp_path, monkeypatch, command):
    """No control character and no mark of direction reaches the terminal, no name makes a line."""
    monkeypatch.chdir(tmp_path)

    status, out, err = run(*command.format(hostile).split())

    assert status in (0, 2)
    for said in (out, err):
        assert all(c == "\n" or c.isprintable() for c in said)
        assert not any(line.startswith("second line") for line in said.splitlines())
        said.encode("utf-8")
    if status == 2:
        assert err.startswith("error: ")
        assert out == ""
    if "info" in command:
        assert "\\u001b[31m" in out
        assert "\\u202e" in out


def test_demo_answers_the_question(demo):
    """The demo prints one table of all policies at both budgets, how to read it, and its times.

    Then the same of the real trace, whose times of recording are not known.
    """
    folder, out = demo
    lines = out.splitlines()

    shown = 0
    for name in demo_module.POLICIES:
        rows = [line for line in lines if line.split()[:1] == [name] and line[-1] == "x"]
        assert len(rows) == (1 if name == "full" else 2)
        shown += len(rows)
    assert shown == 11
    real = lines[next(i for i, line in enumerate(lines) if line.startswith("Now a real model")) :]
    assert "layers 7, 17, 28 of SmolLM2-135M-Instruct" in real[0]
    for name in demo_module.POLICIES:
        rows = [line for line in real if line.split()[:1] == [name]]
        assert len(rows) == (1 if name == "full" else 2)
    assert "of the sentence with the code (the needle) rows see at most" in out
    document = json.loads((folder / "demo.json").read_text())
    recall = {(c["policy"], c["budget"]): c["needle_recall"] for c in document["smollm2"]["cells"]}
    assert recall["full", 64] == 1
    assert recall["streaming_llm", 64] == 0
    assert "needle_recall" not in document["cells"][0]
    assert "Measuring all 12 cells, 2 of them in the line of full, took" in out
    assert "is right." in lines[0]
    assert any(line.startswith("Fidelity of the values: ") for line in lines)
    assert any(line.startswith("Seconds: ") for line in lines)
    assert [line for line in lines if line.startswith("Budget ")] == [
        line for each in (document, document["smollm2"]) for line in each["verdict_text"][:2]
    ]
    assert {p.name for p in folder.iterdir()} == demo_module._FILES
    assert kvsim.open_trace(folder / "trace.zarr").meta["answer_check"]["right"]
    for prefix in ("", "smollm2-"):
        for figure in ("retention.png", "error.png"):
            assert (folder / f"{prefix}{figure}").read_bytes().startswith(b"\x89PNG")
        assert len(read_records(folder / f"{prefix}run" / "records.zarr")) == 12


def test_demo_replaces_an_earlier_one(run, demo, small_demo, tmp_path):
    """Run again, the demo takes the place of the folder that it made before."""
    out = tmp_path / "demo"
    shutil.copytree(demo[0], out)
    before = json.loads((out / "demo.json").read_text())

    status, text, err = run("demo", "--out", out, "--json")

    assert (status, err) == (0, "")
    assert json.loads(text)["trace"]["tokens"] != before["trace"]["tokens"]
    assert not (out / "error.png").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["demo"]


@pytest.mark.parametrize("kind", ["folder", "file", "link", "more"])
def test_demo_refuses_what_it_did_not_make(run, demo, small_demo, tmp_path, kind):
    """A folder without the demo's mark, or with anything besides, is left alone."""
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    elif kind == "link":
        out.symlink_to(demo[0])
    elif kind == "folder":
        (out / "mine").mkdir(parents=True)
    else:
        out.mkdir()
        (out / "demo.json").write_text("{}")
        (out / "notes.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))

    status, text, err = run("demo", "--out", out)

    assert (status, text) == (2, "")
    assert "nothing was changed" in one_line(err)
    assert sorted(tmp_path.rglob("*")) == before


def test_interrupted_demo_keeps_the_earlier_one(run, demo, small_demo, tmp_path, monkeypatch):
    """Ctrl-C in a second demo: status 130, and the folder of the first is unchanged."""
    out = tmp_path / "demo"
    shutil.copytree(demo[0], out)

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_module._Demo, "_draw", stop)
    status, _, err = run("demo", "--out", out)

    assert status == 130
    assert one_line(err) == f"interrupted, {out} is unchanged"
    assert {p.name for p in out.iterdir()} == demo_module._FILES
    assert [p.name for p in tmp_path.iterdir()] == ["demo"]


# ------------------------------------------------------------------------------ whole processes


def kvsim_process(program, *arguments, **options):
    """A command in a process of its own."""
    return subprocess.Popen(
        [str(program), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_output_in_a_pipe(trace, warm_kvsim):
    """In a pipe there is no progress bar, no colour, and no line is broken."""
    process = kvsim_process(
        warm_kvsim / "kvsim",
        *("replay", trace, "--policy", "tova,streaming_llm", "--budget", "16"),
        env={**os.environ, "COLUMNS": "20"},
    )
    out, err = process.communicate()

    assert (process.returncode, err) == (0, "")
    assert "\x1b" not in out
    assert sum(line.startswith(("tova", "streaming_llm")) for line in out.splitlines()) == 2


def test_reader_that_stops(trace):
    """A reader that closes the pipe early gets no traceback, also at the end of the process."""
    installed = Path(sys.executable).with_name("kvsim")
    process = kvsim_process(installed, "info", trace, "--json")
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    process.wait()

    assert err == ""


def committed(folder):
    """How many tokens a capture into the folder has committed so far."""
    with suppress(OSError, StopIteration, ValueError, KeyError):
        root = next(folder.glob(".t.zarr.*/zarr.json"))
        return json.loads(root.read_text())["attributes"]["committed_tokens"]
    return 0


def test_interrupted_capture_keeps_what_is_committed(run, tmp_path, warm_kvsim):
    """SIGINT while the model writes: status 130, one line, no trace, and how to recover it."""
    sample = prompts(1, task="walk", level=5)[0]
    out = tmp_path / "t.zarr"
    asked = ("--model", "tiny", "--prompt", sample.prompt, "--out", out)
    process = kvsim_process(warm_kvsim / "kvsim", "capture", *asked)
    deadline = time.monotonic() + 60
    while committed(tmp_path) < 512 and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    stdout, err = process.communicate(timeout=60)

    assert (process.returncode, stdout) == (130, "")
    (draft,) = tmp_path.iterdir()
    assert draft.name.startswith(".t.zarr.tmp-")
    tokens = committed(tmp_path)
    said = rf"interrupted, no trace was written; {tokens} of at most \d+ tokens are kept, `(.*)` .*"
    command = re.fullmatch(said, one_line(err))[1]
    assert command == f"kvsim trace recover {draft}"
    status, stdout, err = run(*command.split()[1:])
    assert (status, err) == (0, "")
    assert stdout.startswith(f"{out}: {tokens} tokens")
    assert list(tmp_path.glob("*.zarr")) == [out]


def test_a_setting_is_of_one_policy_or_of_all_that_have_it(run, trace):
    """That of one policy wins, lists are tried, and what a bare name changes is said."""
    asked = ["--policy", "ams+knorm,snapkv,tova", "--budget", "12", "--interval", "8", "--json"]
    sets = ["--set", "snapkv.window=3,5", "--set", "window=4", "--set", "ams.recent=2"]
    status, out, err = run("replay", trace, *asked, *sets)
    cells = [(x["policy"], x["params"]) for x in json.loads(out)["cells"]]

    assert status == 0
    assert err == (
        "Note: --set window=4 changes ams+knorm, snapkv; --set ams+knorm.window=4 would change "
        "ams+knorm alone.\n"
    )
    assert [x["window"] for name, x in cells if name == "snapkv"] == [3, 5]
    assert [(x["window"], x["recent"]) for name, x in cells if name == "ams+knorm"] == [(4, 2)]
    assert "none of tova has this parameter" in run("replay", trace, *asked, "--set", "tova.x=1")[2]


def test_a_setting_that_an_eviction_takes_from_its_reader_is_noted(run, trace):
    """A bare key goes to the eviction, and the note says which one goes to the reader."""
    asked = ["--policy", "tova+quest", "--budget", "12", "--interval", "8", "--json"]
    status, out, err = run("replay", trace, *asked, "--set", "heads=group")
    other = run("replay", trace, *asked, "--set", "scorer.heads=kv")

    assert status == 0
    assert err == (
        "Note: --set heads=group is not that of quest in tova+quest; --set scorer.heads is.\n"
    )
    params = json.loads(out)["cells"][0]["params"]
    assert (params["heads"], params["scorer__heads"]) == ("group", "query")
    assert other[2] == ""
    assert json.loads(other[1])["cells"][0]["params"]["scorer__heads"] == "kv"


def test_a_table_flags_what_sees_more_entries(run, trace):
    """With schedules of their own, a policy that acts less often is marked; with one, none is."""
    asked = ["--policy", "tova,snapkv", "--set", "window=4", "--budget", "8"]
    own = run("replay", trace, *asked, "--own-schedule")[1].splitlines()
    shared = run("replay", trace, *asked)[1]

    assert [line.split()[0] for line in own if re.search(r"\d!\s", line)] == ["snapkv"]
    assert "!: rows see over 5 % more entries" in "\n".join(own)
    assert "!" not in shared
    assert "Note: all policies act on one schedule (the prompt, every 32 rows)" in shared


def test_a_reader_is_not_flagged_for_what_it_holds(run, trace, tmp_path):
    """It evicts nothing; what is marked beside it is marked as without it, of a run folder too."""
    asked = ["--policy", "quest,tova,snapkv+quest", "--set", "window=4", "--budget", "8"]
    asked += ["--set", "dense_layers=0", "--own-schedule", "--out", str(tmp_path / "run")]
    tables = [run("replay", trace, *asked)[1], run("info", str(tmp_path / "run"))[1]]

    for table in tables:
        marked = [line.split()[0] for line in table.splitlines() if re.search(r"\d!\s", line)]
        assert marked == ["snapkv+quest"]


def test_a_cross_takes_settings_at_both_levels_and_says_what_to_know(run, trace):
    """`--set scorer.NAME` goes one part in; a budget that shortens something is remarked on."""
    asked = ["--set", "window=16", "--set", "scorer.window=8", "--budget", "20", "--interval", "8"]
    status, out, _ = run("replay", trace, "--policy", "ams+snapkv", *asked, "--json")
    found = json.loads(out)
    _, text, _ = run("replay", trace, "--policy", "ams+snapkv", *asked)

    assert status == 0
    (remark,) = found["remarks"]
    assert remark.startswith("ams+snapkv: budget 20 holds 4 of 4 sinks and 16 of 32 recent entries")
    assert "Note: ams+snapkv: budget 20 holds 4 of 4 sinks" in text


def test_policies_in_json_have_every_field(run):
    """Names with kind, schedule, parameters, needs and paper, for scripts."""
    status, out, _ = run("policies", "--json")
    found = {one["name"]: one for one in json.loads(out)}

    assert status == 0
    assert found["adakv"]["kind"] == "allocator"
    assert not found["adakv"]["own_schedule"]
    assert found["criticalkv"]["needs"] == ["o_proj"]
    assert found["qfilter"]["required"] == {"calibration": "prefix:64"}
    assert found["ams@release"]["params"]["segment_mass"] == 0.02
    assert not found["rpc"]["bounded"]
    assert found["oracle"]["clairvoyant"]
    assert found["gkv"]["paper"] == "arXiv 2512.00504"
