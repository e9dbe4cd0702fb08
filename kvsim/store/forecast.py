"""Forecasts of the bytes, files and memory that a command will take, from shapes."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsim.errors import OutputError

#: Bytes of a process with torch and transformers loaded.
PROCESS = 400 << 20


@dataclass(frozen=True)
class Forecast:
    """Forecast of a command.

    written: usual bytes of all files. files: their number, 0 if unknown. memory: bytes of the
    process at its peak; device_memory: of a GPU.
    """

    written: float = 0
    files: int = 0
    memory: float = 0
    device_memory: float = 0

    def describe(self) -> dict[str, Any]:
        """The numbers, ready for JSON."""
        return {
            "bytes": round(self.written),
            "files": self.files,
            "memory": round(self.memory),
            "device_memory": round(self.device_memory),
        }

    def check(self, folder: Path) -> None:
        """Raise OutputError for a disk without room."""
        if self.written > (free := free_bytes(folder)):
            raise OutputError(
                f"{folder} has {free / 1e9:.3g} GB free, expected {self.written / 1e9:.3g} GB for "
                "the recording; free some space, give another --out, or --force"
            )


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk of a folder, which need not exist yet."""
    places = (folder, *folder.absolute().parents)
    return shutil.disk_usage(next(each for each in places if each.exists())).free


def resident_bytes() -> int | None:
    """Return the memory of this process in bytes; None except on Linux."""
    try:
        lines = Path(f"/proc/{os.getpid()}/status").read_text("ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS")), None)
