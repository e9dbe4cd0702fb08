"""The command line: `kvsim COMMAND ...`, one command per line of `COMMANDS` or entry point.

Commands import what they need when they run, so that `--help` loads none of the large libraries.
Results go to standard output, everything else to standard error. Exit status: 0 done, 1 an
unexpected error, some cells of a sweep failed, or sets that `conform` compares differ, 2 bad input,
130 interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from types import FrameType, FunctionType
from typing import Annotated, Any, NoReturn

import typer

import kvsim
from kvsim.cli import (
    comparing,
    dashboard,
    inspecting,
    listing,
    plotting,
    recording,
    replaying,
)
from kvsim.cli.shared import OptionError, Stop
from kvsim.cli.show import echo_error, one_line
from kvsim.errors import KvsimError, PackageError, missing_extra
from kvsim.registry import Registry

__all__ = ["COMMANDS", "app", "main"]

Command = Callable[..., None]

_COMMANDS: dict[str, Command] = {
    "capture": recording.capture,
    "info": inspecting.info,
    "replay": replaying.replay,
    "live": replaying.live,
    "compare": comparing.compare,
    "report": plotting.report,
    "plot": plotting.plot,
    "dashboard": dashboard.dashboard,
    "policies": listing.policies,
    "metrics": listing.metrics,
}
#: Every command, in the order of `kvsim --help`.
COMMANDS: Registry[Command] = Registry(
    "command", "kvsim.commands", (FunctionType,), _COMMANDS, reserved=("study",)
)
#: Commands of one study, `kvsim study NAME`.
STUDIES: Registry[Command] = Registry("study", "kvsim.studies", (FunctionType,), {})
#: Removed commands and options of kvsim 0.1.0, also `trace NAME`, and their replacements.
GONE = {
    "trace compact": "record with kvsim capture --rows response",
    "trace discard": "remove the hidden folder; kvsim capture --resume records missing traces",
    "trace pack": "use `zip -0 -r ../x.zarr.zip .` in the folder of a trace",
    "trace recover": "use kvsim capture --resume",
    "trace unpack": "use unzip; every command reads a zip that is not compressed",
    "recompute": "kvsim live runs the same prefill, and decodes after it",
    "table": "use kvsim compare RUN --by stage,task, or --metric with several names",
    "traces": "use kvsim info FOLDER",
    "verify": "use kvsim info TRACE --deep",
    "fidelity": "compare `kvsim replay --judge` with `kvsim live`; see docs/fidelity.md",
    "layers": "it is Python code, see docs/across-layers.md",
    "learn": "kvsim 0.1.0 has it; docs/optimum.md has its results",
    "match": "kvsim 0.1.0 has it; docs/optimum.md has its results",
    "price": "kvsim 0.1.0 has it; docs/optimum.md has its results",
    "sweep": "`kvsim replay` takes the file of a grid, and all options",
    "--figure": "kvsim plot over_budgets RUN --out FILE",
    "--target": "the table of kvsim compare has the mean of each budget with its interval",
    "--attention": "Trace.attention(layer, rows) computes it from a trace",
    "--zoom": "kvsim plot draws the whole sequence; in Python, set the limits of its axes",
    "--records": "--out keeps records; `records: true` in the file of a grid",
    "--prompts": "kvsim capture records prompts, and kvsim live takes their traces",
    "--record-to": "kvsim capture records prompts, and kvsim live takes their traces",
    "--resume": "the same command continues",
    "--own-schedule": "--interval paper",
    "--regret": "--metric regret,regret_gap",
    "--sink": "--set protect.sink=N",
    "--recent": "--set protect.recent=N",
    "--protect-prompt": "--set protect.prompt=true",
    "--prefill": "--set prefill=true",
    "--no-prefill": "--set prefill=false",
    "--prefill-chunk": "--set prefill_chunk=ROWS",
    "--layers": "--set layers=0,4-7",
    "--memory": "--set memory=SIZE",
    "--events": "--set events=true",
    "--fit": "--policy NAME@scaled, or --set fit=true",
    "--model": "kvsim replay takes --judge=MODEL, kvsim study cost --model-config PATH",
    "--batch": "--batch-size N",
    **{name: f"it is kvsim study {name}" for name in STUDIES},
}
#: Text below the options in the help of a command.
EPILOGS = {"plot": plotting.listing}
# click's class of usage errors, or typer's own copy of it
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"kvsim {kvsim.__version__}")
        raise typer.Exit


def _kvsim(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Record a model's attention once, replay any KV-cache eviction policy over it, offline.

    `kvsim help COMMAND` shows the options of a command, `kvsim study --help` lists cost and masks.
    """


def _app(names: Iterable[str], commands: Registry[Command] = COMMANDS) -> typer.Typer:
    """Return `kvsim` with only some commands, because reading all signatures is slow."""
    out = typer.Typer(
        name="kvsim",
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    for name in names:
        if name == "study":
            studies = _app(STUDIES, STUDIES)
            out.add_typer(studies, name=name, hidden=True, help="Costs, and masks for training.")
            continue
        command = _command(name, commands)
        first = " ".join(str(command.__doc__).split("\n\n")[0].split())  # whole, not cut short
        out.command(name=name, short_help=first, epilog=EPILOGS.get(name, str)())(command)
    if commands is COMMANDS:
        out.callback()(_kvsim)
    return out


def _command(name: str, commands: Registry[Command]) -> Command:
    """Return a command, or one that reports that its package is broken, also in the list."""
    try:
        return commands[name]
    except PackageError as error:
        broken = error

    def command() -> None:
        raise broken

    command.__doc__ = str(broken)
    return command


@cache
def app() -> typer.Typer:
    """Return `kvsim` with all commands."""
    return _app([*COMMANDS, "study"])


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its status; SIGTERM ends it as Ctrl-C does."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names may not fit its encoding
            with contextlib.suppress(OSError):  # its reader has exited
                stream.reconfigure(errors="backslashreplace")
    with _interruptible(), _plain_warnings():
        status = _status(list(sys.argv[1:] if argv is None else argv))
    sys.exit(status)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt as Ctrl-C does, so that finished work is kept."""
    usual: dict[int, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
    }
    alone = threading.current_thread() is threading.main_thread()
    replaced = [x for x in usual if alone and signal.getsignal(x) is usual[x]]
    for number in replaced:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, usual[number])


def _interrupt(_: int, frame: FrameType | None) -> NoReturn:
    """Raise KeyboardInterrupt; end the process in an import, where libraries catch it."""
    while frame is not None:
        if "importlib._bootstrap" in frame.f_code.co_filename:
            os.write(sys.stderr.fileno(), b"interrupted\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print a warning of a library as one line, without its file and its line of source code."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda text, *_, **__: f"warning: {' '.join(str(text).split())}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before


def _status(argv: list[str]) -> int:
    """Run one command and return its status; an expected error is one line on standard error."""
    try:
        if halves := [x for x in argv if x.encode(errors="ignore").decode() != x]:
            raise OptionError(f"an argument is {halves[0]!a}, expected text in UTF-8; convert it")
        if argv[:1] == ["help"]:
            argv = [*argv[1:], "--help"]
        argv = ["--judge=true" if each == "--judge" else each for each in argv]
        alone = argv[:1] if argv and argv[0] in (*COMMANDS, "study") else None
        for name in (" ".join(argv[:2]), *argv[:1]):
            if name in GONE and name not in COMMANDS:
                raise OptionError(f"kvsim {name} was removed: {GONE[name]}")
        command = typer.main.get_command(_app(alone) if alone else app())
        done = command.main(argv or ["--help"], prog_name="kvsim", standalone_mode=False)
        sys.stdout.flush()
    except Stop as stop:
        return _end(str(stop), stop.status)
    except (KvsimError, _UsageError) as error:
        message = str(error) if isinstance(error, KvsimError) else _usage(error)
        return _end(f"error: {one_line(message)}", 2)
    except (KeyboardInterrupt, typer.Abort):
        done = 130
    except OSError as error:
        return _system(error)
    except ModuleNotFoundError as error:
        extra = missing_extra(error)
        if extra is None:
            raise
        return _end(f"error: {extra}", 2)
    if done == 130:  # typer returns the status that shells use for an interrupt
        return _end("interrupted; finished results are kept", 130)
    return done if isinstance(done, int) else 0


def _end(line: str, status: int) -> int:
    with contextlib.suppress(BrokenPipeError):
        echo_error(line)
    return status


def _usage(error: Exception) -> str:
    """Return one line: what is wrong with the command, and how to see its help."""
    context, option = getattr(error, "ctx", None), getattr(error, "option_name", "")
    command = context.command_path if context is not None else "kvsim"
    message = " ".join(str(error.format_message()).split())  # type: ignore[attr-defined]  # click's
    if option in GONE:
        return f"{option} was removed: {GONE[option]}"
    return f"{message.rstrip('.')}; see {command} --help"


def _system(error: OSError) -> int:
    """Return the status after an error of the system, which needs no traceback."""
    if error.errno == errno.EPIPE:
        # the reader of the output has gone; Python's own flush at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return _end(f"error: {error.strerror}: {error.filename}", 2)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.ENOTDIR):
        return _end(f"error: {error.strerror}: {error.filename or 'output'}", 1)
    raise error
