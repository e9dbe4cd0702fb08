"""`kvsim dashboard`: a folder of traces and runs in the browser."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from kvsim.cli.shared import OptionError, Stop, path_argument
from kvsim.errors import EXTRAS

_PACKAGE = Path(__file__).parent.parent

#: Only for this machine and this user, and silent: loopback address, no statistics, no question for
#: an e-mail address, no links to other sites. The app's own server prints the address, with its
#: token, and opens it.
_OPTIONS = {
    "server.address": "127.0.0.1",
    "server.enableCORS": "true",
    "server.enableXsrfProtection": "true",
    "server.headless": "true",
    "logger.hideWelcomeMessage": "true",
    "browser.gatherUsageStats": "false",
    "server.showEmailPrompt": "false",
    "client.showErrorLinks": "false",
    "client.toolbarMode": "minimal",
    "server.fileWatcherType": "none",
    # controls are blue, because red marks evicted entries
    "theme.light.primaryColor": "#0072b2",
    "theme.dark.primaryColor": "#56b4e9",
    # a length that follows the budget is set and has a default
    "global.disableWidgetStateDuplicationWarning": "true",
}

#: Ctrl-C ends the server without click's "Aborted!".
_RUN = """
import sys
from click.exceptions import Abort
from streamlit.web.cli import main
try:
    main(prog_name="streamlit", standalone_mode=False)
except (Abort, KeyboardInterrupt):
    sys.exit(130)
"""


def dashboard(
    folder: Annotated[
        Path, path_argument("[DIR]", "Where traces and runs lie; default: here.")
    ] = Path(),
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="By default the first free one from 8501 on."),
    ] = None,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Print the address and open nothing.")
    ] = False,
) -> None:
    """Look at traces, retained tokens, segments and runs in the browser; Ctrl-C ends it."""
    if not folder.is_dir():
        raise OptionError(f"{folder} is no folder; expected one that holds traces or runs")
    for name in EXTRAS["dashboard"]:
        if find_spec(name) is None:
            raise ModuleNotFoundError(name=name)
    options = _OPTIONS if port is None else _OPTIONS | {"server.port": str(port)}
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    command = [sys.executable, "-c", _RUN, "run", str(server_file()), *flags]
    command += ["--", str(folder.resolve()), *(["--no-browser"] if no_browser else [])]
    # the server takes this process over, so that it gets every signal that is sent here
    os.execv(sys.executable, command)  # noqa: S606


def server_file() -> Path:
    """Return the file that streamlit runs: inside the package in a wheel, else under `apps/`."""
    places = (_PACKAGE / "_dashboard", _PACKAGE.parent / "apps" / "dashboard")
    for server in (place / "server.py" for place in places):
        if server.is_file():
            return server
    where = " nor ".join(map(str, places))
    raise Stop(f"error: the dashboard is at neither {where}; install kvsim again", 2)
