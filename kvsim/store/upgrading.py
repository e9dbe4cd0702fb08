"""Upgrades of stored traces to the current version of the format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from kvsim.core.digest import text_checksum
from kvsim.errors import TraceError
from kvsim.files import write_file
from kvsim.schema import FORMAT_VERSION
from kvsim.store.binding import bind, sealed
from kvsim.store.chunks import read_crc
from kvsim.store.metadata import find_document, whole_attributes
from kvsim.store.place import Folder
from kvsim.store.reader import StoredTrace
from kvsim.store.recovery import discard, find_drafts
from kvsim.store.verification import verify_stored


def upgrade(path: str | Path, *, progress: Callable[[int, int], None] | None = None) -> bool:
    """Bind the trace in the folder `path` as the current format does, once all of it is verified.

    Only the metadata of the group is replaced, in one rename; the digest stays.

    Returns:
        Whether the trace was of an older format.

    Raises:
        TraceError: the trace cannot be opened, does not verify, or is not a folder.
        OutputError: it cannot be written.
    """
    stored = StoredTrace(path)
    place = stored.place
    if isinstance(place, Folder):
        for draft in find_drafts(place.path):  # of an upgrade that was killed
            if not draft.writing:
                discard(draft.path)
    if stored.format >= FORMAT_VERSION:
        return False
    if not isinstance(place, Folder):
        raise TraceError(
            f"{stored.where} is not a folder, expected one; "
            "upgrade the folder and pack or copy it again"
        )
    chunks = {
        name: b"".join(read_crc(array, index, place) for index in array.indices())
        for name, array in stored.arrays.items()
    }
    # what is verified is then what is listed, even if a file is replaced meanwhile
    stored.arrays = bind(stored.arrays, chunks)
    problems = verify_stored(stored, progress=progress).problems
    if problems:
        raise TraceError(f"{problems[0]}; nothing was changed")
    checksums = dict(stored.attributes["checksums"])
    if stored.token_text is not None:  # the first traces had no checksum of it
        checksums["token_text"] = [text_checksum(stored.token_text)]
    attributes = whole_attributes(stored.header, stored.shapes["q"][2], checksums, stored.digest)
    root = {**(find_document(place, "zarr.json") or {})}
    root["attributes"] = sealed(attributes, stored.arrays, chunks)
    write_file(place.path / "zarr.json", json.dumps(root, indent=2), overwrite=True)
    return True
