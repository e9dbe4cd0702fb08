"""A Python that starts without the seconds that it takes to import torch and transformers.

    warm python -c CODE ARGUMENTS
    warm python -m MODULE ARGUMENTS
    warm python SCRIPT ARGUMENTS

A process imports them once, when it is first asked for anything, and listens on a socket. A client,
which stands in for the interpreter or for the installed `kvsim`, sends it its arguments, folder,
environment and standard streams; a fork of the process runs the program, and the client ends as the
fork did, by an exit status or by a signal. Interrupts and terminations of the client go to the
fork, and where the client is killed, the fork is.

What a fork has not is the end of a process (it leaves without tearing anything down) and what
the environment says to the interpreter and to libraries that are imported already: tests of those,
and of imports, start a process of their own.
"""

import functools
import gc
import importlib.util
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import NoReturn

CLIENT = """#!{python} -IS
import json, os, signal, socket, sys

with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    command = [{first!r} + sys.argv[1:], os.getcwd(), dict(os.environ)]
    socket.send_fds(server, [json.dumps(command).encode() + b"\\n"], [0, 1, 2])
    answers = server.makefile()
    process = int(answers.readline())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.kill(process, number))
    status = int(answers.readline() or 1)
if status < 0:
    if status != -signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
"""

#: What commands import when they need it.
LATER = (
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
    "pydantic.type_adapter",
    "pydantic.types",
    "scipy.ndimage",
    "scipy.optimize",
    "scipy.stats",
    "transformers.models.qwen2.modeling_qwen2",
    "zarr",
)


@contextmanager
def warm(folder: Path, address: str) -> Iterator[None]:
    """Put the clients `python` and `kvsim` into a folder, and serve them at an address."""
    for name, first in (("python", []), ("kvsim", ["-m", "kvsim"])):
        client = folder / name
        client.write_text(CLIENT.format(python=sys.executable, address=address, first=first))
        client.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        descriptor = listener.fileno()
        command = [sys.executable, __file__, str(descriptor)]
        server = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[descriptor],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    yield
    try:
        server.communicate(timeout=60)
    finally:
        server.kill()
    assert server.returncode == 0


def load() -> None:
    """Import all that programs need; no thread runs yet, as none would survive a fork."""
    import kvsim

    for module in pkgutil.walk_packages(kvsim.__path__, "kvsim."):
        optional = ("kvsim.studies.interop.kvpress", "kvsim.studies.interop.harness")
        if not module.name.startswith(("kvsim.__main__", "kvsim._dashboard", *optional)):
            importlib.import_module(module.name)
    for name in LATER:
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)

    import typer

    from kvsim.cli import app
    from plain_figures import leave_out_layouts

    typer.main.get_command = functools.cache(typer.main.get_command)
    typer.main.get_command(app())
    leave_out_layouts(setattr)  # those of the gallery are whole (test_docs_figures.py)
    sys.path.pop(0)  # of this script
    gc.freeze()  # the first collection in a fork would copy every page that holds an object


def serve(listener: socket.socket) -> None:
    """Fork a process for each program until standard input is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest
    if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
        return  # nobody asked
    load()
    ended, wake = socket.socketpair()
    wake.settimeout(0)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    clients: dict[int, socket.socket] = {}  # by the process of their fork
    while True:
        ready = select.select([listener, sys.stdin, ended, *clients.values()], [], [])[0]
        if sys.stdin in ready:
            signal.set_wakeup_fd(-1)
            for process in clients:
                os.kill(process, signal.SIGKILL)
            return
        if ended in ready:
            ended.recv(1 << 16)
        for process, client in list(clients.items()):
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                with suppress(OSError):  # it was killed
                    client.send(b"%d\n" % os.waitstatus_to_exitcode(status))
                clients.pop(process).close()
            elif client in ready:  # closed: it was killed
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)  # the next program finds no lock of it
                clients.pop(process).close()
        if listener in ready:
            client, _ = listener.accept()
            if process := start(client, (listener, ended, wake, *clients.values())):
                clients[process] = client


def start(client: socket.socket, others: Iterable[socket.socket]) -> int:
    """Fork a process for a client, 0 if it was killed; others: sockets that the fork closes."""
    message, streams, *_ = socket.recv_fds(client, 1 << 16, 3)
    while not message.endswith(b"\n") and (part := client.recv(1 << 16)):
        message += part
    process = 0
    if message.endswith(b"\n"):
        process = os.fork()
        if process == 0:
            signal.set_wakeup_fd(-1)
            for each in (client, *others):
                each.close()
            run(json.loads(message), streams)
        with suppress(OSError):  # it was killed
            client.send(b"%d\n" % process)
    for stream in streams:
        os.close(stream)
    if not process:
        client.close()
    return process


def run(command: tuple[list[str], str, dict[str, str]], streams: list[int]) -> NoReturn:
    """Run one program in this fork, and leave it with the status of the program."""
    arguments, folder, environment = command
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    status = 1
    try:
        execute(*arguments)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  as an interpreter does
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # tearing torch down takes longer than most programs


def execute(first: str, *rest: str) -> None:
    """Run the program that the arguments of an interpreter name."""
    if first == "-m":
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = [*rest]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))  # noqa: S102 - a test's
    else:
        sys.path.insert(0, str(Path(first).parent))
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
