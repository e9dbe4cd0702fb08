"""The outcome of a replay: when each entry left, and of which policy on which trace."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.core.propagation import Selection
from kvsim.errors import OutputError
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
    #: layers behind a selection were computed again and not read from the trace
    recomputed: bool = False
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
            raise IndexError(f"row is {row}; expected 0..{self.n_pos - 1}")
        return later & (np.arange(self.n_pos) <= row)


def write_records(path: str | Path, records: Sequence[Record]) -> None:
    """Store records as a zarr group of groups 0, 1, 2, ...; internals are not stored.

    Raises OutputError where `path` exists.
    """
    import zarr  # noqa: PLC0415  a Record in memory needs no zarr

    if Path(path).exists():
        raise OutputError(f"{path} exists; give a path where nothing is yet")
    version = {"kvsim_records": RECORD_VERSION}
    root = zarr.create_group(store=str(path), zarr_format=3, attributes=version)
    for i, record in enumerate(records):
        # all at once: zarr would rewrite the document for every attribute
        attributes = {name: getattr(record, name) for name in _STORED}
        attributes["params"] = dict(record.params)
        if record.selection is not None:
            attributes["selection"] = asdict(record.selection)
        group = root.create_group(str(i), attributes=attributes)
        group.create_array(
            "evicted_at",
            data=record.evicted_at,
            chunks=(1, *record.evicted_at.shape[1:]),
            dimension_names=AXES["evicted_at"],
            attributes={"never": NEVER},
        )


def read_records(path: str | Path) -> list[Record]:
    """Return the records that `write_records` stored. Raises OutputError without any."""
    import zarr  # noqa: PLC0415

    try:
        root = zarr.open_group(store=str(path), mode="r")
    except (FileNotFoundError, ValueError) as error:
        raise OutputError(f"{path} holds no records: {error}") from error
    version = root.attrs.get("kvsim_records")
    if version != RECORD_VERSION:
        raise OutputError(f"{path} has records of version {version}; expected {RECORD_VERSION}")
    records = []
    for i in range(len(list(root.group_keys()))):
        group = root.require_group(str(i))
        stored: dict[str, Any] = {
            name: group.attrs[name] for name in _STORED if name in group.attrs
        }
        stored["layers"] = tuple(stored["layers"])
        if "selection" in group.attrs:
            chosen: Any = group.attrs["selection"]
            pairs = {name: tuple(chosen[name]) for name in ("dropped", "counts")}
            stored["selection"] = Selection(**{**chosen, **pairs})
        array: Any = group["evicted_at"]
        records.append(Record(evicted_at=np.asarray(array[...]), **stored))
    return records


#: Version of the stored form of a Record.
RECORD_VERSION = 1

_STORED = tuple(
    f.name for f in fields(Record) if f.name not in ("evicted_at", "internals", "selection")
)
