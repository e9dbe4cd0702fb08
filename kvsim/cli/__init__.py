"""The command line: `kvsim COMMAND ...`.

    values      what the user typed, as values
    show        tables, JSON and progress
    prompting   prompts
    recording   capture, info, verify
    tracing     trace recover
    indexing    traces
    replaying   replay
    reporting   report
    tracing     trace pack, trace unpack, of `sharing`
    plotting    plot, of the figures in `figures`
    recomputing recompute
    costing     cost
    layers      layers
    dashboard   dashboard
    listing     policies, metrics
    demo        demo

Commands import what they need when they run, so that `--help` loads none of the large libraries.
Results go to standard output, everything else to standard error. Exit status: 0 done, 1 an
unexpected error or some cells of a sweep failed, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

import kvsim
from kvsim.cli import (
    costing,
    dashboard,
    demo,
    indexing,
    layers,
    listing,
    plotting,
    prompting,
    recomputing,
    recording,
    replaying,
    reporting,
    tracing,
)
from kvsim.cli.show import echo_text, one_line
from kvsim.cli.values import Stop
from kvsim.errors import KvsimError

__all__ = ["app", "main"]

app = typer.Typer(
    name="kvsim",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command()(prompting.prompts)
app.command()(recording.capture)
app.command()(recording.info)
app.command()(recording.verify)
app.command()(indexing.traces)
app.add_typer(tracing.app, name="trace")
app.command()(replaying.replay)
app.command()(reporting.report)
app.command()(plotting.plot)
app.command()(recomputing.recompute)
app.command()(costing.cost)
app.command()(layers.layers)
app.command()(dashboard.dashboard)
app.command()(listing.policies)
app.command()(listing.metrics)
app.command(name="demo")(demo.run)
app.add_typer(tracing.app, name="trace")

# click's, or typer's own copy of it: the class that says a command was used wrongly
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvsim {kvsim.__version__}")
        raise typer.Exit


@app.callback()
def _kvsim(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Record a model's attention once, replay any KV-cache eviction policy over it, offline."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its status."""
    sys.exit(_status(list(sys.argv[1:] if argv is None else argv)))


def _status(argv: list[str]) -> int:
    """Run one command; what goes wrong in a known way is one line on standard error."""
    try:
        command = typer.main.get_command(app)
        done = command.main(argv or ["--help"], prog_name="kvsim", standalone_mode=False)
        sys.stdout.flush()
    except Stop as stop:
        return _say(str(stop), stop.status)
    except (KvsimError, _UsageError) as error:
        told = str(error) if isinstance(error, KvsimError) else _usage(error)
        return _say(f"error: {one_line(told)}", 2)
    except (KeyboardInterrupt, typer.Abort):
        done = 130
    except OSError as error:
        return _system(error)
    if done == 130:  # typer turns an interrupt into the status that a shell gives it
        return _say("interrupted, nothing was written", 130)
    return done if isinstance(done, int) else 0


def _say(line: str, status: int) -> int:
    with contextlib.suppress(BrokenPipeError):
        echo_text(line, err=True)
    return status


def _usage(error: Exception) -> str:
    """One line: what was wrong with the command, and where its help is."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "kvsim"
    message = " ".join(str(error.format_message()).split())  # type: ignore[attr-defined]  # click's
    return f"{message.rstrip('.')}; see {command} --help"


def _system(error: OSError) -> int:
    """What the system refused: no bug of ours, so no traceback."""
    if error.errno == errno.EPIPE:
        # who reads our output has stopped; Python's own flush at exit must not complain again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.ENOTDIR):
        return _say(f"error: {error.strerror}: {error.filename or 'output'}", 1)
    raise error
