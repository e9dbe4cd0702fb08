"""Deferral of interrupts while files are written."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


def unbroken(do: Callable[[], T]) -> T:
    """Call `do` and return its result; an interrupt meanwhile is raised when it has ended.

    A file is then whole, and a trace that is being replaced is either old or new. Python interrupts
    the main thread only, so other threads just call `do`.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        return do()
    pending: list[int] = []

    def later(number: int, _: FrameType | None) -> None:
        pending.append(number)

    signal.signal(signal.SIGINT, later)
    try:
        return do()
    finally:
        signal.signal(signal.SIGINT, before)
        if pending:
            signal.raise_signal(signal.SIGINT)
