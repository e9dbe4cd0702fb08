"""Every command that writes, on a disk that is full at any of its writes.

    mount -t tmpfs -o size=16m tmpfs /mnt/small   # as root; any small disk will do
    python tests/benchmarks/full_disk.py /mnt/small --steps 30

Each command runs again and again with an earlier output in its place, where it replaces one, and
with so many blocks free: from none up to just what it takes. Where it fails, it has to end with one
line that names its path, and the earlier output has to be there byte for byte; nothing else may be
left but drafts of traces, which `kvsim trace recover` takes.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from kvsim.cli import main
from kvsim.studies.language.tasks import prompts

BLOCK = 4096


@dataclass(frozen=True)
class Command:
    """A command, the name of its output, and the option that replaces an earlier one."""

    arguments: tuple[str, ...]
    output: str
    overwrite: tuple[str, ...] | None = None
    option: str = "--out"
    slow: bool = False


PROMPT = prompts(1, task="walk")[0].prompt
CAPTURE = ("capture", "--model", "tiny", "--prompt", PROMPT, "--max-new-tokens", "300", "--force")
COMMANDS = {
    "prompts": Command(("prompts", "--n", "60"), "p.jsonl", ("--overwrite",)),
    "report": Command(("report", "RUN"), "r.html", ("--overwrite",), slow=True),
    "plot": Command(("plot", "pareto", "RUN"), "f.svg"),
    "layers": Command(
        ("layers", "sample", "--budget", "64"), "figures", option="--figures", slow=True
    ),
    "heads": Command(("heads", "sample", "--budget", "64"), "h.json", ("--overwrite",), slow=True),
    "masks": Command(("masks", "RUN"), "m.safetensors", ("--overwrite",)),
    "pack": Command(("trace", "pack", "sample"), "t.zarr.zip"),
    "unpack": Command(("trace", "unpack", "PACKED"), "t.zarr"),
    "compact": Command(
        ("trace", "compact", "sample", "--rows", "response+0"), "t.zarr", ("--overwrite",)
    ),
    "capture": Command(CAPTURE, "c.zarr", ("--overwrite",), slow=True),
    "demo": Command(("demo",), "demo", (), slow=True),
    "tune": Command(
        ("tune", "sample", "--policy", "snapkv", "--budget", "64", "--trials", "1"),
        "tuned.json",
        slow=True,
    ),
    "learn": Command(
        ("learn", "sample", "--budget", "64", "--rounds", "1"),
        "s.safetensors",
        ("--overwrite",),
        slow=True,
    ),
}


def call(arguments: Sequence[str]) -> tuple[int, str]:
    """Run a command in this process; return its status and standard error."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main(list(arguments))
    except SystemExit as end:
        return int(end.code or 0), err.getvalue()
    raise AssertionError("a command ends the process")


def content(path: Path) -> dict[str, bytes]:
    """Return every file below a path, or the file itself, with its bytes."""
    files = [path] if path.is_file() else [p for p in sorted(path.rglob("*")) if p.is_file()]
    return {str(p.relative_to(path)): p.read_bytes() for p in files}


def free_blocks(disk: Path) -> int:
    """Return how many blocks can be written."""
    return os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize // BLOCK


def fill(disk: Path, free: int) -> Path:
    """Write a file that leaves so many blocks free; return it."""
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(max(0, free_blocks(disk) - free) * BLOCK))
    return ballast


def attempt(name: str, places: dict[str, str], disk: Path, steps: int) -> Counter[str]:
    """Run one command at each number of free blocks; return how it ended."""
    command, outcomes = COMMANDS[name], Counter[str]()
    folder = disk / "work"
    folder.mkdir()
    out = folder / command.output
    arguments = [*(places.get(each, each) for each in command.arguments), command.option, str(out)]
    before = free_blocks(disk)
    status, err = call(arguments)
    assert status == 0, err
    needed, earlier = before - free_blocks(disk), content(out)
    if command.overwrite is None:
        shutil.rmtree(out) if out.is_dir() else out.unlink()
        earlier = {}
    else:
        arguments += command.overwrite
    steps = min(steps, 8) if command.slow else steps
    for free in sorted({round(needed * 1.1 * i / (steps - 1)) for i in range(steps)}):
        ballast = fill(disk, free)
        status, err = call(arguments)
        ballast.unlink()
        where = f"{name} with {free} of {needed} blocks: {err}"
        line = err.strip().splitlines()[-1] if err.strip() else ""
        if status:
            assert status in (1, 2), where
            assert line.startswith("error: "), where
            assert str(folder) in line, where
            assert "Traceback" not in err, where
            assert (content(out) if out.exists() else {}) == earlier, where
            outcomes["refused, the earlier output is unchanged"] += 1
        else:
            outcomes["written"] += 1
            if command.overwrite is None:
                shutil.rmtree(out) if out.is_dir() else out.unlink()
            elif name not in ("prompts", "capture"):
                earlier = content(out)  # with times or dates in it
        for left in folder.iterdir():
            if left != out:
                assert left.name.startswith(f".{out.name}.tmp-"), f"{where}: {left}"
                assert name == "capture", f"{where}: {left}"
                shutil.rmtree(left)
                outcomes["drafts kept"] += 1
        if name == "capture" and not status:
            earlier = content(out)
    shutil.rmtree(folder)
    return outcomes


def run(disk: Path, steps: int, names: Sequence[str]) -> None:
    """Run all commands and print how they ended."""
    with tempfile.TemporaryDirectory() as elsewhere:
        places = {"RUN": f"{elsewhere}/run", "PACKED": f"{elsewhere}/sample.zip"}
        replay = ["replay", "sample", "--policy", "tova", "--budget", "64", "--interval", "64"]
        for arguments in (
            [*replay, "--out", places["RUN"]],
            ["trace", "pack", "sample", "--out", places["PACKED"]],
        ):
            status, err = call(arguments)
            assert status == 0, err
        for name in names:
            outcomes = attempt(name, places, disk, steps)
            print(f"{name:8}", ", ".join(f"{n} {what}" for what, n in sorted(outcomes.items())))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("disk", type=Path, help="an empty folder on a small disk")
    parser.add_argument("--steps", type=int, default=30, help="numbers of free blocks to try")
    parser.add_argument("--command", action="append", choices=[*COMMANDS], help="default: all")
    options = parser.parse_args()
    sys.exit(run(options.disk, options.steps, options.command or [*COMMANDS]))
