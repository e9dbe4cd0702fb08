"""Stored traces, damaged or changed in place."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvsim.store.group import seal_group


def edit(path: Path, change: Callable[[Any], object]) -> None:
    """Change a JSON document in place."""
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def edit_header(trace: Path, change: Callable[[Any], object]) -> None:
    """Change the attributes of a trace in a folder."""
    edit(trace / "zarr.json", lambda root: change(root["attributes"]))


def assign(document: Any, way: tuple[Any, ...], value: Any) -> None:
    """Put a value at a place of a JSON document."""
    *keys, last = way
    for key in keys:
        document = document[key]
    document[last] = value


def change_byte(path: Path, rng: np.random.Generator) -> None:
    """Change a byte of a file, drawn by `rng`."""
    data = bytearray(path.read_bytes())
    data[rng.integers(len(data))] ^= int(rng.integers(1, 256))
    path.write_bytes(data)


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(bytes(data))


def reseal(trace: Path) -> None:
    """Give a changed trace the manifest and the seal that fit it."""
    attributes = json.loads((trace / "zarr.json").read_text())["attributes"]
    seal_group(trace, {x: y for x, y in attributes.items() if x not in ("files", "seal")})
