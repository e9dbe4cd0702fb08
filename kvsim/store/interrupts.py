"""What an interrupt may not break in two."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


def unbroken(do: Callable[[], T]) -> T:
    """What `do` gives; an interrupt that comes meanwhile is raised when it has ended, not before.

    A trace that is moved aside for another one is back, or replaced; and where zarr writes, in
    threads of its own, none of them goes on in a folder that is removed. Only the main thread is
    ever interrupted.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        return do()
    asked: list[int] = []

    def later(number: int, _: FrameType | None) -> None:
        asked.append(number)

    signal.signal(signal.SIGINT, later)
    try:
        return do()
    finally:
        signal.signal(signal.SIGINT, before)
        if asked:
            signal.raise_signal(signal.SIGINT)
