"""The outcome of a replay: when each entry left, and of which policy on which trace."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numcodecs.zstd
import numpy as np
from numpy.typing import NDArray

from kvsim.core.inputs import Digests, damaged, digests, read_document, read_file
from kvsim.core.propagation import Selection
from kvsim.errors import OutputError, PositionError, local_path
from kvsim.schema import AXES, NEVER


@dataclass(frozen=True)
class Plans:
    """Decisions of one event on a block of layers, kept on request (`internals=True`).

    layers: indices in the trace, [L]. pos [L, H, n] the entries (-1 on pads), scores [L, H, n]
    (NaN on pads), budgets [L] of the layers. quotas [L, H], or [L, H, S] by group; groups [L, H, n]
    which group an entry belongs to, eligible [L, H, n] where only some may stay. notes: arrays that
    the allocator adds by name, such as the mass of `ams`.
    """

    row: int
    layers: tuple[int, ...]
    pos: NDArray[np.int64]
    scores: NDArray[np.float64]
    budgets: NDArray[np.int64]
    quotas: NDArray[np.int64]
    groups: NDArray[np.int64] | None = None
    eligible: NDArray[np.bool_] | None = None
    notes: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def brief(self, names: Collection[str]) -> Plans:
        """Keep only the notes of these names: no entries (n is 0) and no quotas (S is 0)."""
        empty = np.empty((*self.pos.shape[:2], 0))
        return replace(
            self,
            pos=empty.astype(np.int64),
            scores=empty,
            quotas=empty.astype(np.int64),
            groups=None,
            eligible=None,
            notes={name: note for name, note in self.notes.items() if name in names},
        )


@dataclass(frozen=True, eq=False)
class Record:
    """When each entry of each head left the cache.

    evicted_at: int32 [layer, head, pos]; row r sees position p iff p <= r <= evicted_at[p]; an
    entry that never leaves has the int32 maximum. In layers that a row p of the prompt was not
    propagated to, no row sees it: evicted_at[p] = p - 1. `layers` are the trace layers that were
    replayed, in order. With `per_query_head` the head axis counts query heads.
    """

    evicted_at: NDArray[np.int32]
    policy: str
    params: Mapping[str, Any]
    budget: int
    interval: int | None
    prefill: bool
    prompt_len: int
    layers: tuple[int, ...]
    trace: str = "memory"
    digest: str = ""
    positions: str = "absolute"
    per_query_head: bool = False
    #: the budget as a share of the trace, such as "25%", if it was requested as one
    share: str | None = None
    #: whether the events follow the policy's own schedule, which was not overridden
    own_schedule: bool = True
    #: what readers of numbers at this budget should know; empty for nothing
    remark: str = ""
    #: which rows of the prompt were propagated; None where all layers have all rows
    selection: Selection | None = None
    #: what the event that ends the prefill compressed (`Schedule.compress`)
    compress: Literal["prompt", "context", "both"] = "prompt"
    #: layers behind a selection were computed again and not read from the trace
    recomputed: bool = False
    #: a running model decided on what its own evictions had made of it
    closed: bool = False
    internals: tuple[Plans, ...] = field(default=(), repr=False)

    @property
    def n_pos(self) -> int:
        """Tokens of the trace."""
        return int(self.evicted_at.shape[-1])

    @cached_property
    def gone_after(self) -> NDArray[np.int32]:
        """`evicted_at`; an entry that never entered a layer is gone after the last prompt row."""
        if self.selection is None:
            return self.evicted_at
        absent = self.evicted_at < np.arange(self.n_pos)
        out: NDArray[np.int32] = np.where(absent, self.prompt_len - 1, self.evicted_at)
        return out.astype(np.int32)

    @cached_property
    def events(self) -> list[int]:
        """Rows after which at least one entry left, ascending.

        The last row of the prompt is among them where rows were not propagated to all layers.
        """
        rows = np.unique(self.gone_after)
        return [int(r) for r in rows[rows != NEVER]]

    def kept(self, row: int) -> NDArray[np.bool_]:
        """Return which entries row `row` sees; bool [layer, head, pos]."""
        return self._staying(row, self.evicted_at >= row)

    def retained(self, row: int) -> NDArray[np.bool_]:
        """Return which entries stay after the event after row `row`; bool [layer, head, pos]."""
        return self._staying(row, self.evicted_at > row)

    def _staying(self, row: int, later: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which entries of rows up to `row` leave `later`."""
        if not 0 <= row < self.n_pos:
            raise PositionError(f"row is {row}; expected 0..{self.n_pos - 1}")
        return later & (np.arange(self.n_pos) <= row)


def write_records(path: str | Path, records: Sequence[Record]) -> None:
    """Store records as a zarr group of groups 0, 1, 2, ...; internals are not stored.

    The attributes of the group have size and SHA-256 of each file. Raises OutputError where `path`
    exists.
    """
    import zarr  # noqa: PLC0415  a Record in memory needs no zarr

    folder = local_path(path, OutputError)
    if folder.exists():
        raise OutputError(f"{path} exists; give a path where nothing is yet")
    version = {"kvsim_records": RECORD_VERSION}
    root = zarr.create_group(store=str(path), zarr_format=3, attributes=version)
    for i, record in enumerate(records):
        # all at once: zarr would rewrite the document for every attribute
        group = root.create_group(str(i), attributes=record_document(record))
        group.create_array(
            "evicted_at",
            data=record.evicted_at,
            chunks=(1, *record.evicted_at.shape[1:]),
            dimension_names=AXES["evicted_at"],
            attributes={"never": NEVER},
            config={"write_empty_chunks": True},
        )
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    root.update_attributes({"files": digests(folder, *sorted({*names} - {"zarr.json"}))})


def read_records(path: str | Path) -> list[Record]:
    """Return the records that `write_records` stored.

    Raises OutputError without any, or where a file is damaged. Records of earlier versions have no
    digests, and a warning says so.
    """
    folder = local_path(path, OutputError)
    run = folder.parent / "run.json"
    try:
        bound = read_document(run).get("files") if run.exists() else None
        # an entry that is missing, here and below, fits no file
        entry = bound.get(f"{folder.name}/zarr.json") or {} if isinstance(bound, dict) else None
        attributes = read_document(folder / "zarr.json", entry).get("attributes")
    except FileNotFoundError as error:
        raise OutputError(f"{path} holds no records: {error} is missing") from error
    attributes = attributes if isinstance(attributes, dict) else {}
    version, files = (attributes.get(name) for name in ("kvsim_records", "files"))
    if version != RECORD_VERSION:
        raise OutputError(f"{path} has records of version {version}; expected {RECORD_VERSION}")
    if files is None:
        warnings.warn(
            f"{path} was written without digests by an earlier version, so changes of its files go "
            "unnoticed",
            stacklevel=2,
        )
    try:
        names = files or [child.name for child in folder.iterdir() if child.is_dir()]
        count = len({name.partition("/")[0] for name in names})
        return [_read_record(folder, f"{number}/", files) for number in range(count)]
    except FileNotFoundError as error:
        raise damaged(folder, f"{error} is missing") from error
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise damaged(folder, f"{type(error).__name__}: {error}") from error


def _read_record(folder: Path, prefix: str, files: Digests | None) -> Record:
    """Return one record.

    Decoded here and not by zarr, so that no file makes the process allocate more than an array of
    reasonable size. Raises ValueError and its like for what `write_records` does not write.
    """

    def entry(name: str) -> Mapping[str, Any] | None:
        return None if files is None else files[prefix + name] or {}

    stored = read_document(folder / f"{prefix}zarr.json", entry("zarr.json"))["attributes"]
    array = read_document(folder / f"{prefix}evicted_at/zarr.json", entry("evicted_at/zarr.json"))
    n_layers, n_heads, n_pos = shape = tuple(array["shape"])
    order, compressor = array["codecs"]
    codecs = order["configuration"]["endian"], compressor["name"]
    form = array["data_type"], array["chunk_grid"]["configuration"]["chunk_shape"], codecs
    if form != ("int32", [1, n_heads, n_pos], ("little", "zstd")):
        raise ValueError(f"evicted_at is stored as {form}")
    size = 4 * n_heads * n_pos
    if len(stored["layers"]) != n_layers or not 0 < size <= _LARGEST:
        raise ValueError(f"evicted_at has the shape {shape} of {len(stored['layers'])} layers")
    evicted_at = []
    for layer in range(n_layers):
        name = f"evicted_at/c/{layer}/0/0"
        data = read_file(folder / (prefix + name), size + 1024, entry(name))
        chunk = np.full(n_heads * n_pos, _UNSET, "<i4")
        numcodecs.zstd.decompress(data, chunk)
        if chunk.min() <= _UNSET:
            raise ValueError(f"{prefix}{name} has values below -1, or too few")
        evicted_at.append(chunk.reshape(n_heads, n_pos))
    return record_of(stored, np.stack(evicted_at).astype(np.int32, copy=False))


def record_document(record: Record) -> dict[str, Any]:
    """Return what is stored of a record next to `evicted_at`, ready for JSON."""
    document = {name: getattr(record, name) for name in _STORED} | {"params": dict(record.params)}
    if record.selection is not None:
        document["selection"] = asdict(record.selection)
    return document


def record_of(document: Mapping[str, Any], evicted_at: NDArray[np.int32]) -> Record:
    """Return the record of a `record_document`."""
    stored: dict[str, Any] = {name: document[name] for name in _STORED if name in document}
    stored["layers"] = tuple(stored["layers"])
    if "selection" in document:
        chosen = document["selection"]
        pairs = {name: tuple(chosen[name]) for name in ("dropped", "counts")}
        stored["selection"] = Selection(**{**chosen, **pairs})
    return Record(evicted_at=evicted_at, **stored)


# Most bytes of a layer of a record: 64 heads and a million tokens.
_LARGEST = 256 << 20

# Below all values: `evicted_at` of position 0 may be -1.
_UNSET = -2

#: Version of the stored form of a Record.
RECORD_VERSION = 1

_STORED = tuple(
    f.name for f in fields(Record) if f.name not in ("evicted_at", "internals", "selection")
)
