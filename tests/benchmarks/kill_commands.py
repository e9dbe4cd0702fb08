"""Kills of commands with their options at random moments, and what is left of their outputs.

    python tests/benchmarks/kill_commands.py /tmp/kills --kills 250   # about half an hour

Each command runs in a process that has imported everything, and is ended by SIGKILL, SIGTERM or
SIGINT after a random part of the time that it takes undisturbed. Then its folder is looked at. What
was there before is there byte for byte, unless the new output is there whole: a trace verifies and
has the digest of the undisturbed one, a run has its results, a file its bytes or its last line.
Everything else is hidden, and `kvsim traces` names it: a draft with tokens is recovered as a prefix
of the undisturbed trace, whatever remains is discarded by the command that is named. An unfinished
run is refused and resumed. Kill i has the seed `--seed` + i; kills that the log in the folder has
are not repeated, so the script continues where it ended.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from full_disk import call, content

import kvsim
from kvsim.analysis.folder import read_run
from kvsim.errors import KvsimError, OutputError
from kvsim.store import discard, find_drafts, open_trace, recover, verify
from kvsim.studies.language.tasks import prompts
from kvsim.sweeps import tasks

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
#: Code of a child: it imports a module, says so, and runs a command.
CHILD = """
import importlib, sys, torch, kvsim.cli
torch.set_num_threads(1)
importlib.import_module(sys.argv[1])
print("ready", flush=True)
kvsim.cli.main(sys.argv[2:])
"""
IMPORTED = {
    "capture": "kvsim.recorder",
    "replay": "kvsim.sweeps.driver",
    "report": "kvsim.report",
    "plot": "kvsim.plots",
    "prompts": "kvsim.studies.language.tasks",
}

ARRAYS = ("q", "k", "v", "attn_out", "lse")


@dataclass(frozen=True)
class Command:
    """A command: its arguments, its output in the folder, and what lies there before.

    again: the output of the command itself lies there; partial: it is continued with --resume;
    inputs: copied there first, by the name of the fixture. In arguments, names in capitals are
    those of fixtures, and OUT is the output.
    """

    arguments: tuple[str, ...]
    output: str
    again: bool = False
    partial: bool = False
    draft: bool = False


def _capture(*options: str, **facts: bool) -> Command:
    text = ("--prompts", "PROMPTS") if "--limit" in options else ("--prompt", "TEXT")
    basic = ("capture", "--model", "tiny", *text, "--max-new-tokens", "200", "--out", "OUT")
    return Command((*basic, *options), "d" if "--limit" in options else "t.zarr", **facts)


REPLAY = ("replay", "sample", "--policy", "tova,snapkv,random", "--budget", "32,64,25%")
SHOWN = ("replay", "sample", "--policy", "tova,random", "--budget", "32,64", "--interval", "64")
COMMANDS = {
    "capture": _capture(),
    "capture, all arrays": _capture("--o-proj", "--residual", "--attention", "full"),
    "capture, float16": _capture("--store-dtype", "float16", "--layers", "0,1"),
    "capture, drawn": _capture("--temperature", "0.7", "--seed", "3"),
    "capture, overwrite": _capture("--overwrite", again=True),
    "capture, several": _capture("--limit", "3"),
    "capture, several, resume": _capture("--limit", "3", "--resume", partial=True),
    "replay": Command((*REPLAY, "--interval", "64", "--out", "OUT"), "r"),
    "replay, resume": Command(
        (*REPLAY, "--interval", "64", "--events", "--out", "OUT", "--resume"), "r", partial=True
    ),
    "replay, two processes": Command(
        (*REPLAY, "--interval", "64", "--jobs", "2", "--out", "OUT", "--resume"), "r", partial=True
    ),
    "report": Command(("report", "RUN", "--out", "OUT", "--overwrite"), "r.html", again=True),
    "plot": Command(("plot", "pareto", "RUN", "--out", "OUT"), "f.svg"),
    "prompts": Command(
        ("prompts", "--n", "800", "--seed", "1", "--out", "OUT", "--overwrite"),
        "p.jsonl",
        again=True,
    ),
    "pack": Command(("trace", "pack", "SAMPLE", "--out", "OUT"), "t.zarr.zip"),
    "unpack": Command(("trace", "unpack", "PACKED", "--out", "OUT"), "t.zarr"),
    "recover": Command(("trace", "recover", "OUT"), "t.zarr", draft=True),
}


class Fixtures:
    """What commands read, and their undisturbed outputs, made once in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        text = max((prompt.prompt for prompt in prompts(20, task="walk")), key=len)
        self.places = {
            "RUN": str(folder / "run"),
            "PACKED": str(folder / "s.zip"),
            "SAMPLE": str(folder / "s.zarr"),
            "PROMPTS": str(folder / "prompts.jsonl"),
            "TEXT": text,
        }
        if not (folder / "seconds.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            self._make()
        self.seconds: dict[str, float] = json.loads((folder / "seconds.json").read_text())

    def _make(self) -> None:
        folder = self.folder
        folder.mkdir(parents=True)
        sample = kvsim.open_trace(kvsim.sample_trace())
        sample.save(folder / "s.zarr")
        _done("trace", "pack", str(folder / "s.zarr"), "--out", self.places["PACKED"])
        _done("prompts", "--n", "3", "--task", "walk", "--out", self.places["PROMPTS"])
        _done(*SHOWN, "--out", self.places["RUN"])
        self._interrupt(folder / "t.zarr")
        seconds = {}
        for name, command in COMMANDS.items():
            work = folder / "whole" / name
            work.mkdir(parents=True)
            self.prepare(command, work)
            begin = time.perf_counter()
            _done(*self.arguments(command, work))
            seconds[name] = time.perf_counter() - begin
        (folder / "seconds.json").write_text(json.dumps(seconds))

    def _interrupt(self, path: Path) -> None:
        """Leave the draft of a capture that was interrupted at its end."""

        def stop(done: int, _: int) -> None:
            if done > 270:
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            kvsim.capture(
                "tiny", None, self.places["TEXT"], max_new_tokens=280, out=path, progress=stop
            )
        (draft,) = find_drafts(path.parent)
        assert draft.tokens, "nothing was committed"

    def arguments(self, command: Command, work: Path) -> list[str]:
        """Return the arguments of a command on a folder."""
        places = {**self.places, "OUT": str(work / command.output)}
        return [places.get(each, each) for each in command.arguments]

    def prepare(self, command: Command, work: Path) -> None:
        """Copy what a command finds in its folder, but for its own output."""
        if command.draft:
            (source,) = [draft.path for draft in find_drafts(self.folder)]
            shutil.copytree(source, work / source.name)


def _done(*arguments: str) -> None:
    status, err = call(arguments)
    assert status == 0, err


def child(arguments: Sequence[str], sent: signal.Signals, after: float) -> int:
    """Run a command in another process, end it after so many seconds, and return its status."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, IMPORTED.get(arguments[0], "kvsim.store"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()  # everything is imported
        time.sleep(after)
        process.send_signal(sent)
        _, err = process.communicate()
    assert b"Traceback" not in err, err.decode()
    assert process.returncode in (0, 130, 143, -sent), f"status {process.returncode}, {err!r}"
    return process.returncode


def kill(name: str, seed: int, fixtures: Fixtures, root: Path) -> str:
    """Kill one command and look at what it has left; return what that was."""
    draw = random.Random(seed)  # noqa: S311  no cryptography
    command, work = COMMANDS[name], root / f"kill-{seed}"
    whole = fixtures.folder / "whole" / name / command.output
    work.mkdir()
    out = work / command.output
    fixtures.prepare(command, work)
    if command.again:
        shutil.copytree(whole, out) if whole.is_dir() else shutil.copy(whole, out)
    sent, arguments = SIGNALS[seed % 3], fixtures.arguments(command, work)
    if command.partial:  # an earlier one was killed
        first = [x for x in arguments if x != "--resume"]
        child(first, SIGNALS[draw.randrange(3)], draw.uniform(0.2, 1) * fixtures.seconds[name])
        _look(command, work, whole, {})
    before = content(out) if out.exists() else {}
    # a new process is slower than the one that took the time
    child(arguments, sent, draw.uniform(0, 1.6) * fixtures.seconds[name])
    outcome = _look(command, work, whole, before)
    shutil.rmtree(work)
    return f"{outcome}, {sent.name}"


def _look(command: Command, work: Path, whole: Path, before: dict[str, bytes]) -> str:
    """Check a folder after a child has ended; return what is in it."""
    out, kind = work / command.output, command.arguments[0]
    drafts = [*find_drafts(work), *(find_drafts(out) if out.is_dir() else ())]
    hidden = [path for folder in (work, out) if folder.is_dir() for path in folder.glob(".*")]
    hidden = [path for path in hidden if path.name != ".run"]  # of a run: resumed
    assert {draft.path for draft in drafts} == set(hidden), "something hidden is no draft"
    if kind == "replay":
        return _look_at_run(out, whole, work)
    named = call_output(["traces", str(work)])
    for draft in drafts:
        at_root = draft.path.parent == work or command.output == "d"
        assert not at_root or str(draft.path) in named, f"{draft} is not named"
    outcome = "nothing" if not out.exists() else _whole(command, out, whole, before)
    left = sum(_recovered(draft.path, whole, work / "recovered.zarr") for draft in drafts)
    return f"{outcome}{', draft' * bool(drafts)}{', recovered' * bool(left)}"


def _whole(command: Command, out: Path, whole: Path, before: dict[str, bytes]) -> str:
    """Check that an output is what it was, or whole."""
    now = content(out)
    if before and now == before:
        return "unchanged"
    if command.output == "d":
        visible = [path for path in out.iterdir() if not path.name.startswith(".")]
        for path in visible:
            _same_trace(path, whole / path.name)
        return f"{len(visible)} of {len(list(whole.iterdir()))}"
    if out.suffix == ".zarr":
        _same_trace(out, whole)
    elif out.suffix in (".html", ".svg"):  # with dates in it
        assert next(iter(now.values())).rstrip().endswith(f"</{out.suffix[1:]}>".encode())
    else:
        assert now == content(whole)
    return "whole"


def _same_trace(path: Path, whole: Path) -> None:
    assert verify(path).ok
    trace, expected = open_trace(path), open_trace(whole)
    assert trace.digest == expected.digest
    assert trace.source.shapes == expected.source.shapes


def _recovered(draft: Path, whole: Path, target: Path) -> bool:
    """Recover or discard a draft; whether it was recovered, as a prefix of the whole trace."""
    if whole.name == "d":
        whole /= draft.name[1:].partition(".tmp")[0]
    try:
        recover(draft, out=target, overwrite=True)
    except KvsimError as error:
        assert "discard" in str(error), error  # noqa: PT017  no test of the error
        discard(draft)
        return False
    trace, expected = open_trace(target), open_trace(whole)
    assert verify(target).ok
    for name in ARRAYS:
        part = getattr(expected, name)[:, :, : trace.n_pos]
        assert torch.equal(getattr(trace, name), part), name
    shutil.rmtree(target)
    return True


def _look_at_run(out: Path, whole: Path, work: Path) -> str:
    """Check a run folder: refused, or with rows that the undisturbed run has, or with all."""
    if not out.exists():
        return "nothing"
    expected = read_run(whole).table
    try:
        table = read_run(out).table
    except OutputError as error:
        return f"unfinished{'' if '--resume' in str(error) else ', not named: FINDING'}"
    assert table.join(expected, on=table.columns, how="anti", nulls_equal=True).is_empty()
    if read_run(out).parameters["missing"]:
        return "partial"
    assert table.equals(expected)
    return "whole"


def call_output(arguments: Sequence[str]) -> str:
    """Return the standard output of a command that succeeds."""
    from kvsim.cli import main

    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            main(list(arguments))
    except SystemExit as end:
        assert not end.code  # noqa: PT017  no test of the error
    return out.getvalue()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="for fixtures, the log, and what is killed")
    parser.add_argument("--kills", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tasks._TOGETHER = 3
    fixtures = Fixtures(options.folder.resolve() / "fixtures")
    log = options.folder / "kills.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    outcomes = {entry["seed"]: entry for entry in map(json.loads, lines)}
    for seed in range(options.seed, options.seed + options.kills):
        if seed in outcomes:
            continue
        name = list(COMMANDS)[seed % len(COMMANDS)]
        work = options.folder.resolve() / f"kill-{seed}"
        shutil.rmtree(work, ignore_errors=True)  # this script was ended there
        try:
            outcome = kill(name, seed, fixtures, options.folder.resolve())
        except (AssertionError, KvsimError, OSError) as error:
            outcome = "FINDING"
            print(f"seed {seed}, {name}: {type(error).__name__}: {error}; see {work}", flush=True)
        outcomes[seed] = {"seed": seed, "command": name, "outcome": outcome}
        with log.open("a") as file:
            file.write(json.dumps(outcomes[seed]) + "\n")
    counts = Counter((entry["command"], entry["outcome"]) for entry in outcomes.values())
    for (name, outcome), count in sorted(counts.items()):
        print(f"{count:4} {name}: {outcome}")
    sys.exit(1 if any("FINDING" in entry["outcome"] for entry in outcomes.values()) else 0)


if __name__ == "__main__":
    main()
