"""`kvsim trace pack` and `kvsim trace unpack`, and outputs that are URLs."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import Annotated

import typer

from kvsim.cli.show import echo_text
from kvsim.cli.values import local_path, locate
from kvsim.schema import is_url

Out = typer.Option(
    parser=local_path, metavar="PATH", help="Where to write it; beside the trace by default."
)


def pack(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE", help="The folder of a recorded trace, or 'sample', which ships."
        ),
    ],
    out: Annotated[Path | None, Out] = None,
) -> None:
    """Write a trace as one file, TRACE.zip, which every command reads as it reads a folder.

    Its chunks are checked first. The same trace gives the same bytes.
    """
    from kvsim.store.packing import pack as write

    if trace == "sample" and out is None:
        out = Path("sample.zarr.zip")  # and not into the package
    packed = write(locate(trace), out)
    typer.echo(f"{packed}: {packed.stat().st_size / 1e6:.1f} MB")


def unpack(
    file: Annotated[
        Path,
        typer.Argument(parser=local_path, metavar="FILE", help="A packed trace on this machine."),
    ],
    out: Annotated[Path | None, Out] = None,
) -> None:
    """Write a packed trace as a folder again.

    A file that is anything else than a whole packed trace is refused before anything is written.
    """
    from kvsim.store.packing import unpack as write

    typer.echo(str(write(file, out)))


def stage(context: typer.Context, out: str) -> Path:
    """Where to record: `out` itself, or for a URL a folder that is removed when a command ends.

    What could not be uploaded, and what an interrupted capture has left, stays there.
    """
    if not is_url(out):
        return Path(out)
    folder = Path(mkdtemp(prefix="kvsim-"))
    context.call_on_close(lambda: _leave(folder))
    return Path(folder, out.rstrip("/").rpartition("/")[2])


def _leave(folder: Path) -> None:
    """Remove a staging folder without files, or say where what was not uploaded is."""
    if any(path.is_file() for path in folder.rglob("*")):
        echo_text(f"what was not uploaded is kept in {folder}", err=True)
    else:
        shutil.rmtree(folder)


def check_outputs(paths: list[Path], staged: Path, out: str, overwrite: bool) -> None:
    """Raise TraceExistsError unless traces may be written to all of these paths.

    staged: what stands for `out` on this machine.
    """
    from kvsim.store import check_target

    for path in paths:
        check_target(path, overwrite=overwrite)
        if is_url(out):
            from kvsim.store.remote import check_free

            check_free(final(path, staged, out), overwrite=overwrite)


def publish(paths: list[Path], staged: Path, out: str) -> None:
    """Upload those traces that are there, if `out` is a URL."""
    if is_url(out):
        from kvsim.store.remote import upload

        for path in paths:
            if path.is_dir():
                upload(path, final(path, staged, out))
                shutil.rmtree(path)


def final(path: Path, staged: Path, out: str) -> str:
    """Where a trace that was recorded at `path` is when a command ends."""
    return str(path) if not is_url(out) else out.rstrip("/") + str(path).removeprefix(str(staged))
