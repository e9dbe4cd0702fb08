"""Runs `kvsim` commands without the seconds that each needs to import torch and transformers.

    python command_server.py DESCRIPTOR

This process imports them once and listens on a socket that it inherits. A client (CLIENT in
conftest.py) stands in for the installed `kvsim`: it sends its arguments, folder, environment and
standard streams here, where a fork of this process runs the command, and ends with the command's
status. The server ends when its standard input is closed.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import sys
from pathlib import Path

import typer

import kvsim
from kvsim.cli import app, main

sys.path.append(str(Path(__file__).parents[1]))

from plain_figures import leave_out_layouts

#: What commands import when they need it.
LATER = (
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
    "pydantic",
    "scipy.ndimage",
    "scipy.optimize",
    "scipy.stats",
    "zarr",
)


def serve(listener: socket.socket) -> None:
    """Fork a process for each command until standard input is closed."""
    # no threads run yet: those that a library starts when it is used would not survive a fork
    for module in pkgutil.walk_packages(kvsim.__path__, "kvsim."):
        importlib.import_module(module.name)
    for name in LATER:
        importlib.import_module(name)
    typer.main.get_command = functools.cache(typer.main.get_command)
    typer.main.get_command(app)
    leave_out_layouts(setattr)  # those of the gallery are whole (test_docs_figures.py)
    gc.freeze()  # the first collection in a fork would copy every page that holds an object
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system clears away forks that end
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            run(connection)
        connection.close()


def run(connection: socket.socket) -> None:
    """Run one command in this fork, and send its status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, streams, *_ = socket.recv_fds(connection, 1 << 16, 3)
    while part := connection.recv(1 << 16):
        message += part
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    arguments, folder, environment = json.loads(message)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    status = 1
    try:
        main(arguments)
    except SystemExit as end:
        status = end.code or 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send(str(status).encode())
        os._exit(status)  # tearing torch down takes longer than most commands


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
