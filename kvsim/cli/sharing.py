"""`kvsim trace pack` and `kvsim trace unpack`, and outputs that are URLs."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import Annotated

import typer

from kvsim.cli.show import echo_text
from kvsim.cli.values import locate, path_argument, path_option
from kvsim.schema import is_url

Out = Annotated[
    Path | None, path_option("PATH", "Where to write it; next to the trace by default.")
]


def pack(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE", help="The folder of a recorded trace, or 'sample', which ships."
        ),
    ],
    out: Out = None,
) -> None:
    """Write a trace as one file, TRACE.zip, which every command reads like a folder.

    Chunks are checked first. The same trace has the same bytes.
    """
    from kvsim.store import packing

    if trace == "sample" and out is None:
        out = Path("sample.zarr.zip")  # not next to the sample, inside the package
    packed = packing.pack(locate(trace), out)
    typer.echo(f"{packed}: {packed.stat().st_size / 1e6:.1f} MB")


def unpack(
    file: Annotated[Path, path_argument("FILE", "A local packed trace.")],
    out: Out = None,
) -> None:
    """Write a packed trace as a folder again.

    A file that is not a complete packed trace is refused before anything is written.
    """
    from kvsim.store import packing

    typer.echo(str(packing.unpack(file, out)))


def stage(context: typer.Context, out: str) -> Path:
    """Return where to record: `out`, or for a URL a local folder that is removed at the end.

    Traces that could not be uploaded and drafts of interrupted captures stay there.
    """
    if not is_url(out):
        return Path(out)
    folder = Path(mkdtemp(prefix="kvsim-"))
    context.call_on_close(lambda: _leave(folder))
    return Path(folder, out.rstrip("/").rpartition("/")[2])


def _leave(folder: Path) -> None:
    """Remove a staging folder without files, or print where the files are."""
    if any(path.is_file() for path in folder.rglob("*")):
        echo_text(f"files that were not uploaded are kept in {folder}", err=True)
    else:
        shutil.rmtree(folder)


def check_outputs(paths: list[Path], staged: Path, out: str, overwrite: bool) -> None:
    """Raise TraceExistsError unless traces may be written to all of these paths.

    staged: the local path that stands for `out`.
    """
    from kvsim.store import check_target

    for path in paths:
        check_target(path, overwrite=overwrite)
        if is_url(out):
            from kvsim.store.remote import check_free

            check_free(final(path, staged, out), overwrite=overwrite)


def publish(paths: list[Path], staged: Path, out: str) -> None:
    """Upload the traces that exist, if `out` is a URL."""
    if is_url(out):
        from kvsim.store.remote import upload

        for path in paths:
            if path.is_dir():
                upload(path, final(path, staged, out))
                shutil.rmtree(path)


def final(path: Path, staged: Path, out: str) -> str:
    """Return the final path or URL of a trace that was recorded at `path`."""
    return str(path) if not is_url(out) else out.rstrip("/") + str(path).removeprefix(str(staged))
