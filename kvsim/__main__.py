"""`python -m kvsim`, and the command `kvsim`."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run one command; Ctrl-C ends the process at once until it begins."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    from kvsim import cli  # noqa: PLC0415  it takes most of the time

    signal.signal(signal.SIGINT, before)
    cli.main()


def _end(*_: object) -> None:
    os.write(sys.stderr.fileno(), b"interrupted, nothing was written\n")
    os._exit(130)


if __name__ == "__main__":
    main()
