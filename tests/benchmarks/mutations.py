"""Changes of stored traces that a reader has to notice, and what a careless script renews."""

from __future__ import annotations

import json
from pathlib import Path

from kvsim.core.digest import content_digest
from kvsim.store.binding import BINDING, sealed
from kvsim.store.layout import DIMENSIONS, StoredArray, parse_array
from kvsim.store.metadata import read_header
from kvsim.store.place import Folder

Files = dict[str, bytes]


def read_files(path: Path) -> Files:
    """Return the files of a trace in a folder by their keys."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


def reseal(files: Files) -> None:
    """List the checksums that chunks end with and seal the header again, as a forger would."""
    root = json.loads(files["zarr.json"])
    arrays = _arrays(files)
    chunks = {
        name: b"".join(
            files.get(array.key(index), b"")[-4:].rjust(4, b"\0") for index in array.indices()
        )
        for name, array in arrays.items()
    }
    root["attributes"] = sealed(root["attributes"], arrays, chunks)
    files["zarr.json"] = json.dumps(root).encode()


def reseal_folder(path: Path) -> None:
    """Reseal the trace in a folder."""
    files = read_files(path)
    reseal(files)
    (path / "zarr.json").write_bytes(files["zarr.json"])


def renew_digest(path: Path) -> None:
    """Write the digest that the header and the checksums of a trace in a folder give."""
    document = json.loads((path / "zarr.json").read_bytes())
    attributes, arrays = document["attributes"], _arrays(read_files(path))
    header = read_header(attributes, arrays, Folder(path))
    shapes = {name: array.shape for name, array in arrays.items()}
    dtypes = {name: array.dtype.name for name, array in arrays.items()}
    attributes["digest"] = content_digest(header, shapes, dtypes, attributes["checksums"])
    (path / "zarr.json").write_text(json.dumps(document))


def as_version(path: Path, version: int) -> Path:
    """Rewrite the header of a trace in a folder as an older format version has it."""
    document = json.loads((path / "zarr.json").read_bytes())
    attributes = document["attributes"]
    for key in BINDING:
        attributes.pop(key)
    attributes["kvsim_format"] = version
    if version == 1:
        (attributes["rope"],) = attributes.pop("ropes")
        (attributes["scale"],) = {layer["scale"] for layer in attributes.pop("attention")}
        attributes["mask"] = {"kind": "causal"}
    (path / "zarr.json").write_text(json.dumps(document))
    return path


def _arrays(files: Files) -> dict[str, StoredArray]:
    keys = {name: f"{name}/zarr.json" for name in DIMENSIONS}
    return {
        name: parse_array(name, json.loads(files[key]), "files")
        for name, key in keys.items()
        if key in files
    }
