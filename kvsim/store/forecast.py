"""What a command takes before it computes: bytes, files and memory, which follow from shapes."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvsim.errors import OutputError
from kvsim.store.layout import StoredArray

#: Bits that a number of an array takes on the disk, by its dtype in the model: its sign and
#: fraction hardly compress. Means of values vary less. Measured on tiny and SmolLM2.
_BITS = {"float32": 29.0, "float64": 58.0, "bfloat16": 13.0, "float16": 15.0}
_LESS = {"v": 1.0, "attn_out": 4.0}

#: Bytes of a process with torch and transformers, before it has loaded anything.
PROCESS = 400 << 20


@dataclass(frozen=True)
class Forecast:
    """What a command will take.

    arrays: of each array on the disk its usual bytes, and those before compression, which are the
    most. written: usual bytes of all files. files: how many are written, 0 where that is not
    known. memory: bytes of the process at its peak; device_memory: of a GPU.
    """

    written: float = 0
    files: int = 0
    memory: float = 0
    device_memory: float = 0
    arrays: Mapping[str, tuple[float, int]] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """The numbers, ready for JSON."""
        return {
            "bytes": round(self.written),
            "bytes_at_most": round(self.written + sum(b - a for a, b in self.arrays.values())),
            "files": self.files,
            "memory": round(self.memory),
            "device_memory": round(self.device_memory),
            "arrays": {name: round(usual) for name, (usual, _) in self.arrays.items()},
        }

    def check(self, folder: Path) -> None:
        """Raise OutputError for a disk without room."""
        if self.written > (free := free_bytes(folder)):
            raise OutputError(
                f"{folder} has {free / 1e9:.3g} GB free, expected {self.written / 1e9:.3g} GB for "
                "what is recorded; free some space, give another --out, or --force"
            )


def by_array(arrays: Iterable[StoredArray]) -> dict[str, tuple[float, int]]:
    """Return the usual bytes of arrays on the disk by name, and those before compression."""
    sums: dict[str, tuple[float, int]] = {}
    for array in arrays:
        before, most = sums.get(array.name, (0.0, 0))
        bits = _BITS.get(array.source_dtype, 8 * array.dtype.itemsize)
        bits = min(bits, 8 * array.dtype.itemsize - 1) - _LESS.get(array.name, 0)
        numbers = math.prod(array.shape)
        sums[array.name] = before + numbers * bits / 8, most + array.nbytes
    return sums


def free_bytes(folder: Path) -> int:
    """Return the bytes that can be written to a folder, or to where it will be."""
    places = (folder, *folder.absolute().parents)
    return shutil.disk_usage(next(each for each in places if each.exists())).free


def resident_bytes() -> int | None:
    """Return the memory of this process in bytes; None where it is not Linux."""
    try:
        lines = Path(f"/proc/{os.getpid()}/status").read_text("ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS")), None)
