"""Cost of a command before it computes: bytes, files, memory, FLOPs and time; and what it was.

Sizes follow from shapes. A time is FLOPs and bytes at the speed of this machine, which a tenth of a
second measures, and half or twice as much is as likely as not on a busy machine.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from kvsim.core.flops import attention_flops
from kvsim.core.lazy import torch
from kvsim.errors import MemoryLimitError, OutputError
from kvsim.store.layout import StoredArray

#: Bits that a number of an array takes on the disk, by its dtype in the model: its sign and
#: fraction hardly compress. Means of values vary less. Measured on tiny and SmolLM2.
_BITS = {"float32": 29.0, "float64": 58.0, "bfloat16": 13.0, "float16": 15.0}
_LESS = {"v": 1.0, "attn_out": 4.0}

#: Most times that a planned time is too short, or too long.
RANGE = 2.0

#: Bytes of a process with torch and transformers, before it has loaded anything.
PROCESS = 400 << 20


@dataclass(frozen=True)
class Rates:
    """Speed of a device now: FLOPs of a matrix product and bytes that are read, per second.

    attention: FLOPs of a kernel of attention over a mask. call: seconds of an operation on a few
    numbers.
    """

    products: float
    attention: float
    stream: float
    call: float

    @classmethod
    @cache
    def measured(cls, device: str = "cpu") -> Rates:
        """Measure a product of 1,024 x 1,024, one of 16 MiB by a vector, and small additions.

        Attention is that of 256 rows and 2 heads of dimension 128 over 2,048 positions.
        """
        square, wide = torch.ones(1024, 1024, device=device), torch.ones(2048, 2048, device=device)
        few = torch.ones(64, device=device)
        rows, keys = (torch.ones(1, 2, n, 128, device=device) for n in (256, 2048))
        kernel = torch.nn.functional.scaled_dot_product_attention
        mask = torch.ones(256, 2048, dtype=torch.bool, device=device)

        def seconds(compute: Callable[[], object], times: int = 1) -> float:
            took = []
            for _ in range(6):  # the median leaves out the first, and where others took over
                began = time.perf_counter()
                for _ in range(times):
                    compute()
                if square.is_cuda:
                    torch.cuda.synchronize()
                took.append((time.perf_counter() - began) / times)
            return median(took)

        return cls(
            2 * 1024**3 / seconds(lambda: square @ square),
            attention_flops(mask.numel(), 2, 256) / seconds(lambda: kernel(rows, keys, keys, mask)),
            wide.nbytes / seconds(lambda: wide @ wide[0]),
            seconds(lambda: few + 1, 100),
        )


@dataclass(frozen=True)
class Forecast:
    """What a command will take.

    arrays: of each array on the disk its usual bytes, and those before compression, which are the
    most. written: usual bytes of all files. read: bytes of traces as they lie on the disk. files:
    how many are written. memory: bytes of the process at its peak; device_memory: of a GPU.
    """

    written: float = 0
    files: int = 0
    memory: float = 0
    device_memory: float = 0
    flops: float = 0
    seconds: float = 0
    read: int = 0
    arrays: Mapping[str, tuple[float, int]] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """The numbers, ready for JSON."""
        return {
            "bytes": round(self.written),
            "bytes_at_most": round(self.written + sum(b - a for a, b in self.arrays.values())),
            "bytes_to_read": self.read,
            "files": self.files,
            "memory": round(self.memory),
            "device_memory": round(self.device_memory),
            "flops": self.flops,
            "seconds": round(self.seconds, 2),
            "seconds_range": [round(self.seconds / RANGE, 2), round(self.seconds * RANGE, 2)],
            "arrays": {name: round(usual) for name, (usual, _) in self.arrays.items()},
        }

    def check(self, folder: Path | None, memory: int | None) -> None:
        """Raise OutputError for a disk without room, and MemoryLimitError above `memory` bytes."""
        if folder is not None and self.written > (free := free_bytes(folder)):
            raise OutputError(
                f"{folder} has {free / 1e9:.3g} GB free, expected {self.written / 1e9:.3g} GB for "
                "what is recorded; free some space, give another --out, or --force"
            )
        if memory is not None and self.memory > memory:
            raise MemoryLimitError(
                f"the plan takes {self.memory / 1e9:.3g} GB of memory, expected at most "
                f"{memory / 1e9:.3g} GB (--memory); give shorter prompts, more memory, or --force"
            )


def by_array(arrays: Iterable[StoredArray]) -> dict[str, tuple[float, int]]:
    """Return the usual bytes of arrays on the disk by name, and those before compression."""
    sums: dict[str, tuple[float, int]] = {}
    for array in arrays:
        before, most = sums.get(array.name, (0.0, 0))
        bits = _BITS.get(array.source_dtype or "", 8 * array.dtype.itemsize)
        bits = min(bits, 8 * array.dtype.itemsize - 1) - _LESS.get(array.name, 0)
        numbers = math.prod(array.shape)
        sums[array.name] = before + numbers * bits / 8, most + array.nbytes
    return sums


def free_bytes(folder: Path) -> int:
    """Return the bytes that can be written to a folder, or to where it will be."""
    places = (folder, *folder.absolute().parents)
    return shutil.disk_usage(next(each for each in places if each.exists())).free


class Meter:
    """What a command takes, from now on."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def actual(self, outputs: Iterable[Path] = ()) -> dict[str, Any]:
        """Return seconds, the peak memory so far, and bytes and files of outputs, if there are."""
        seconds = round(time.perf_counter() - self._began, 2)
        files = [path for each in outputs for path in (each, *each.rglob("*")) if path.is_file()]
        sizes = {"bytes": sum(path.stat().st_size for path in files), "files": len(files)}
        return {"seconds": seconds, "memory": memory_of("VmHWM"), **(sizes if files else {})}


def memory_of(kind: str) -> int | None:
    """Return the memory of this process in bytes: VmRSS now, VmHWM at its peak; None off Linux."""
    try:
        lines = Path(f"/proc/{os.getpid()}/status").read_text("ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(kind)), None)
