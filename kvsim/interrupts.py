"""What an interrupt may not break in two."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")


def unbroken(do: Callable[[], T]) -> T:
    """What `do` gives; an interrupt that comes meanwhile is raised when it has ended, not before.

    zarr writes in threads of its own. An interrupted caller that removes the folder at once races
    with them: they go on, and what they write stays.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="kvsim-unbroken") as pool:
        running = pool.submit(do)
        try:
            return running.result()
        finally:
            wait([running])
