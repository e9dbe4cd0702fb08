"""Output projections, once per model next to its traces, by digest (docs/trace-format.md)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from reprlib import repr as short_repr
from typing import Any, Self

import numpy as np

from kvsim.core.checks import DTYPES, as_stored, check_finite, stored_dtype
from kvsim.core.digest import ContentDigest, document_digest
from kvsim.core.lazy import Tensor, torch
from kvsim.errors import TraceError, TraceNotFoundError
from kvsim.files import sync_tree
from kvsim.schema import PROJECTIONS, axes_of, is_url, object_at, projections_folder
from kvsim.store.group import create_array, create_group, damaged, open_group, reading, seal_group

ARRAY = "o_proj"

#: The key of `meta` under which a trace names its projections.
KEY = "projections"


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
    def of(cls, **content: Any) -> Self:
        """Return the facts with their digest; content: the facts in the digest."""
        return cls(document_digest(content), **content)

    @classmethod
    def named(cls, meta: Mapping[str, Any], where: str) -> Self | None:
        """Return the facts in the provenance of a trace, None without; TraceError if they vary."""
        if meta.get(KEY) is None:
            return None
        content = {key: x for key, x in object_at(meta, KEY).items() if key != "digest"}
        with suppress(TypeError):
            facts = cls.of(**content)
            if asdict(facts) == meta[KEY] and PROJECTIONS.fullmatch(facts.folder):
                return facts
        raise TraceError(
            f"{where}: meta.{KEY} is {short_repr(meta[KEY])}, expected shape, types and checksums "
            "with their digest; record the trace again"
        )

    @property
    def folder(self) -> str:
        """The name of the folder."""
        return projections_folder(self.digest)


class StoredProjections:
    """The output projections that a trace names; TraceError where the folder has others."""

    def __init__(self, facts: Facts, path: Path | str) -> None:
        self.facts, self.where = facts, str(path)
        self.store, root, arrays = open_group(path, KEY)
        self.array = arrays[ARRAY]
        found = root["attributes"].get(KEY), self.array.shape, self.array.dtype.name
        if found != (asdict(facts), tuple(facts.shape), facts.dtype):
            what = f"{self.array.dtype} {self.array.shape}"
            raise damaged(f"{path}: {what} are not the output projections of the trace")

    def read(self, layers: slice) -> Tensor:
        """Return some layers [layer, qhead, dim, hidden] as stored."""
        with reading(self.where):
            out = torch.from_numpy(np.asarray(self.array[layers]))
        check_finite(ARRAY, out, self.where, layer=range(self.facts.shape[0])[layers].start)
        return out

    def check(self, layer: int) -> None:
        """Raise TraceError where a layer has another checksum than the trace names."""
        digest = ContentDigest()
        digest.update(ARRAY, 0, self.read(slice(layer, layer + 1))[0].numpy())
        if digest.checksums()[ARRAY] != [self.facts.checksums[layer]]:
            raise damaged(f"{self.where}: layer {layer} has another checksum than the trace names")


def find_projections(
    path: Path | str, meta: Mapping[str, Any], where: str
) -> StoredProjections | None:
    """Return the projections next to a trace at `path`, or None; TraceError for a damaged one."""
    facts = Facts.named(meta, where)
    if facts is None:
        return None
    real = str(path).rstrip("/") if is_url(path) else Path(os.path.realpath(path)).as_posix()
    with suppress(TraceNotFoundError):
        return StoredProjections(facts, f"{real.rpartition('/')[0]}/{facts.folder}")
    return None


def store_projections(
    folder: Path,
    draft: Path,
    shape: Sequence[int],
    read: Callable[[int], Tensor],
    source_dtype: str,
    dtype: str | None = None,
) -> Facts:
    """Write output projections of `folder` into a draft, unless they exist; return their facts.

    shape: [layer, qhead, dim, hidden]. read: returns one layer. source_dtype: in the model. dtype:
    as stored; exact by default. `move_projections` moves them. Raises TraceError for numbers that
    are not finite or too large for `dtype`, and OSError where the disk refuses.
    """
    name = dtype or DTYPES[stored_dtype(source_dtype)]

    def layer(number: int) -> Any:
        stored = as_stored(ARRAY, read(number), getattr(torch, name), str(folder), layer=number)
        return stored.numpy()

    digest = ContentDigest()
    for number in range(shape[0]):
        digest.update(ARRAY, number, layer(number))
    checksums = digest.checksums()[ARRAY]
    facts = Facts.of(shape=[*shape], dtype=name, source_dtype=source_dtype, checksums=checksums)
    if not _whole(folder / facts.folder):
        path, chunks = draft / facts.folder, (1, *shape[1:])
        group = create_group(path)
        array = create_array(group, ARRAY, tuple(shape), name, chunks, axes_of(ARRAY))
        for number in range(shape[0]):
            array[number] = layer(number)
        seal_group(path, {KEY: asdict(facts)})
    return facts


def _whole(path: Path) -> bool:
    """Whether a folder has projections, with all their files in full length."""
    try:
        open_group(path, KEY)
    except TraceError:
        return False
    return True


def move_projections(draft: Path, folder: Path) -> None:
    """Move the projections in a draft to the folder of its trace, unless they exist undamaged."""
    for path in filter(lambda path: PROJECTIONS.fullmatch(path.name), list(draft.iterdir())):
        target = folder / path.name
        sync_tree(path)
        if target.exists() and not _whole(target):  # by a copy that broke off, or a loss of power
            with suppress(FileNotFoundError):  # another process was faster
                target.rename(draft / f"damaged-{path.name}")
        try:
            path.rename(target)
        except OSError:
            if not target.exists():  # else another process was faster
                raise
