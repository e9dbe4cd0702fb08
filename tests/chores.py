"""A task for processes of their own. It imports nothing large, so that they start at once."""

import os
import time
from pathlib import Path


def work_on(task):
    """Return a value; or print it, hang, raise, die once, or die always."""
    kind, value = task
    if kind in ("says", "hangs"):
        print(value, os.getpid(), flush=True)
        time.sleep(3600 * (kind == "hangs"))
    if kind == "raises":
        raise ValueError("of its own")
    if kind == "dies" or (kind == "dies once" and not Path(value).exists()):
        if kind == "dies once":
            Path(value).write_text("")
        os._exit(1)
    return value
