"""Output projections, once per model beside its traces, by digest (docs/trace-format.md, 9)."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from reprlib import repr as short_repr
from typing import Any, Self

from kvsim.core.checks import DTYPES, as_stored, check_finite, stored_dtype
from kvsim.core.digest import ContentDigest, document_digest
from kvsim.core.lazy import Tensor, torch
from kvsim.errors import OutputError, TraceError, TraceExistsError
from kvsim.files import published
from kvsim.schema import is_url, object_at, projections_folder
from kvsim.store.binding import are_checksums
from kvsim.store.chunks import read_part
from kvsim.store.draft import Group
from kvsim.store.layout import FLOATS, StoredArray, parse_array
from kvsim.store.metadata import find_document
from kvsim.store.place import Folder, Place, damaged
from kvsim.store.remote import find_remote, upload

ARRAY = "o_proj"

#: The key of `meta` under which a trace names its projections.
KEY = "projections"

#: Names of the folders.
NAME = re.compile("projections-[0-9a-f]{16}")


@dataclass(frozen=True)
class Facts:
    """Facts that a trace stores about its output projections.

    digest: of the other facts. shape: [layer, qhead, dim, hidden]. dtype: as stored. source_dtype:
    in the model. checksums: SHA-256 in hex of each layer, as those of a trace's arrays.
    """

    digest: str
    shape: Sequence[int]
    dtype: str
    source_dtype: str
    checksums: Sequence[str]

    @classmethod
    def of(
        cls, shape: Sequence[int], dtype: str, source_dtype: str, checksums: Sequence[str]
    ) -> Self:
        """Return the facts with their digest."""
        content = {"shape": [*shape], "dtype": dtype, "source_dtype": source_dtype}
        digest = document_digest({**content, "checksums": [*checksums]})
        return cls(digest, [*shape], dtype, source_dtype, [*checksums])

    @classmethod
    def named(cls, meta: Mapping[str, Any], where: str) -> Self | None:
        """Return the facts in the provenance of a trace, None without; TraceError if they vary."""
        document, given = meta.get(KEY), object_at(meta, KEY)
        if document is None:
            return None
        shape: Any = given.get("shape")
        checksums: Any = given.get("checksums")
        valid = (
            given.keys() == cls.__dataclass_fields__.keys()
            and given["dtype"] in FLOATS
            and given["source_dtype"] in DTYPES.values()
            and isinstance(shape, list)
            and [type(n) for n in shape] == [int] * 4
            and isinstance(checksums, list)
            and len(checksums) == shape[0]
            and are_checksums(checksums)
        )
        if valid:
            facts = cls.of(shape, given["dtype"], given["source_dtype"], checksums)
            if facts.digest == given["digest"]:
                return facts
        raise damaged(
            f"{where}: meta.{KEY} is {short_repr(document)}, expected shape, types and checksums "
            "with their digest"
        )

    @property
    def folder(self) -> str:
        """The name of the folder."""
        return projections_folder(self.digest)


class StoredProjections:
    """The output projections that a trace names; TraceError where the folder has others."""

    def __init__(self, facts: Facts, place: Place) -> None:
        self.facts, self.place = facts, place
        self.where = str(place.path)
        document = find_document(place, f"{ARRAY}/zarr.json")
        if document is None:
            raise self._changed(f"{ARRAY}/zarr.json is missing")
        self.array: StoredArray = parse_array(ARRAY, document, self.where)
        actual = [*self.array.shape], self.array.dtype.name, self.array.source_dtype
        expected = [*facts.shape], facts.dtype, facts.source_dtype
        if actual != expected:
            raise self._changed(f"they are {actual}, expected {expected}")

    def read(self, layers: slice) -> Tensor:
        """Return some layers [layer, qhead, dim, hidden] as stored, each with its checksum."""
        numbers = range(self.array.shape[0])[layers]
        dtype = getattr(torch, self.array.dtype.name)
        out = torch.empty((len(numbers), *self.array.shape[1:]), dtype=dtype)
        for place, layer in enumerate(numbers):
            part = read_part(self.array, [slice(layer, layer + 1)], self.place)[0]
            digest = ContentDigest()
            digest.update(ARRAY, 0, part)
            if digest.checksums()[ARRAY] != [self.facts.checksums[layer]]:
                raise self._changed(f"layer {layer} has another checksum than the trace names")
            out[place] = torch.from_numpy(part)
            check_finite(ARRAY, out[place : place + 1], self.where, layer=layer)
        return out

    def _changed(self, what: str) -> TraceError:
        return TraceError(
            f"{self.where}: {what}, so these are not the output projections of the trace; copy the "
            "folder again, or remove it and record a trace of the model again"
        )


def find_projections(
    path: Path | str, meta: Mapping[str, Any], where: str
) -> StoredProjections | None:
    """Return the projections beside a trace at `path`, or None; TraceError where one is damaged."""
    facts = Facts.named(meta, where)
    if facts is None:
        return None
    if isinstance(path, str) and is_url(path):
        place: Place = find_remote(f"{path.rstrip('/').rpartition('/')[0]}/{facts.folder}")
        here = find_document(place, "zarr.json") is not None
    else:
        folder = Path(os.path.realpath(path)).parent / facts.folder
        place, here = Folder(folder), folder.is_dir()
    return StoredProjections(facts, place) if here else None


def store_projections(
    folder: Path,
    shape: Sequence[int],
    read: Callable[[int], Tensor],
    source_dtype: str,
    dtype: str | None = None,
    *,
    draft: Path | None = None,
) -> Facts:
    """Write output projections into `folder`, unless they are there, and return their facts.

    shape: [layer, qhead, dim, hidden]. read: returns one layer. source_dtype: in the model. dtype:
    as stored; exact by default. draft: a folder to write to instead, from which `move_projections`
    moves them.

    Raises TraceError for numbers that are not finite or too large for `dtype`, and OutputError
    (with `draft` OSError) where the disk refuses.
    """
    name = dtype or DTYPES[stored_dtype(source_dtype)]

    def layer(number: int) -> Any:
        stored = as_stored(ARRAY, read(number), getattr(torch, name), str(folder), layer=number)
        return stored.numpy()

    digest = ContentDigest()
    for number in range(shape[0]):
        digest.update(ARRAY, number, layer(number))
    facts = Facts.of(shape, name, source_dtype, digest.checksums()[ARRAY])

    def write(path: Path) -> None:
        group = Group(path)
        group.create(ARRAY, tuple(shape), name, source_dtype)
        for number in range(shape[0]):
            group.write(ARRAY, layer(number)[None], layer=number)
        group.set(**{KEY: asdict(facts)})  # last: without it, the rest of a kill

    target = folder / facts.folder
    if target.exists():
        return facts
    if draft is not None:
        write(draft / facts.folder)
        return facts
    try:
        with published(target) as path:
            write(path)
    except OutputError:
        if not target.exists():  # else another process was faster
            raise
    return facts


def move_projections(draft: Path, folder: Path) -> None:
    """Move the projections in a draft to the folder of its trace, unless they are there."""
    for path in filter(lambda path: NAME.fullmatch(path.name), list(draft.iterdir())):
        target = folder / path.name
        try:
            path.rename(target)
        except OSError:
            if not target.exists():
                raise
            shutil.rmtree(path)  # another process was faster


def copy_projections(projections: StoredProjections | None, folder: Path) -> None:
    """Store projections next to a copy of their trace, in `folder`, unless they are there."""
    if projections is not None:
        facts = projections.facts
        store_projections(
            folder,
            facts.shape,
            lambda layer: projections.read(slice(layer, layer + 1))[0],
            facts.source_dtype,
            facts.dtype,
        )


def upload_projections(folder: Path, url: str) -> None:
    """Upload the projections in a folder to the folder behind `url`, unless they are there."""
    for path in sorted(folder.iterdir()):
        if NAME.fullmatch(path.name):
            with suppress(TraceExistsError):
                upload(path, f"{url.rstrip('/')}/{path.name}")
