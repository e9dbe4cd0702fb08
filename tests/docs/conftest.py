"""A `kvsim` for shells that starts at once."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

SERVER = Path(__file__).with_name("command_server.py")
CLIENT = """#!{python} -IS
import json, os, socket, sys

with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    command = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)])
    socket.send_fds(server, [command.encode()], [0, 1, 2])
    server.shutdown(socket.SHUT_WR)
    sys.exit(int(server.recv(16) or 1))
"""


@pytest.fixture(scope="session")
def warm_kvsim(tmp_path_factory):
    """A folder for PATH: its `kvsim` runs in a process of its own that has imported everything."""
    folder = tmp_path_factory.mktemp("bin")
    address = str(folder / "socket")
    program = folder / "kvsim"
    program.write_text(CLIENT.format(python=sys.executable, address=address), "utf-8")
    program.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        descriptor = listener.fileno()
        command = [sys.executable, str(SERVER), str(descriptor)]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[descriptor])
    yield folder
    server.communicate(timeout=60)
    assert server.returncode == 0
