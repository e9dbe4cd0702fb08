"""The sets that an implementation kept, the pages that it read and the bits that it stored.

An `.npz` file has a table of each and may have the queries, keys and values that the implementation
computed; docs/conform.md describes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.core.attention import Rope
from kvsim.core.policy import Schedule
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.errors import DumpError, KvsimError, error_line, local_path
from kvsim.files import published, read_input
from kvsim.schema import NEVER
from kvsim.store.inputs import decode_arrays, encode_arrays

#: Columns of the tables of a file (docs/kvsim_dump.py): a line for each entry that stays after an
#: event, for each page that a row reads (`read_`), and for each stored entry (`stored_`).
KEPT = ("layer", "head", "row", "pos")
READ = ("layer", "head", "row", "page")
STORED = ("layer", "head", "row", "pos", "key_bits", "value_bits")

#: A table by column.
Table = Mapping[str, NDArray[Any]]

#: Most bytes of the sets of a dump, one for each entry after each event: of any dump; for each line
#: of its table; and of a dump with few lines.
_LARGEST, _PER_LINE, _FEW = 2 << 30, 4096, 64 << 20

_ROPE = {"attention_scaling": float, "rotary_dim": int, "layout": str}


@dataclass(frozen=True, eq=False)
class Dump:
    """Entries that an implementation kept after its events, read in rows, or stored in few bits.

    kept: by the row that an event follows, bool [layer, head, row + 1]; in a layer without an
    event there, what it kept before and all later positions. layers: their numbers in the model.
    whole: a layer of the trace that is not among them is compared, too: it does nothing.
    trace: q, k and v that the implementation itself computed; None where the file has no such
    arrays. budget, schedule: of the implementation, if recorded. read: pages of `page` entries;
    stored: bits of numbers; columns as `kvsim_dump` has them, None for no table.

    Raises DumpError for sets that do not fit the arrays.
    """

    kept: Mapping[int, NDArray[np.bool_]]
    layers: tuple[int, ...]
    name: str = "memory"
    trace: Trace | None = None
    budget: int | None = None
    schedule: Schedule | None = None
    read: Table | None = None
    page: int = 1
    stored: Table | None = None
    whole: bool = False

    def __post_init__(self) -> None:
        tables = (self.kept, self.read, self.stored)
        _require(any(tables), f"{self.name}: no event; expected one after which entries left")
        trace, last = self.trace, self.last
        if trace is not None:
            heads = {x.shape[1] for x in self.kept.values()}
            heads |= set() if self.stored is None else {int(self.stored["head"].max()) + 1}
            n_heads = max(heads - {trace.n_heads}, default=trace.n_heads)
            _require(
                n_heads == trace.n_heads
                and last < trace.n_pos
                and {*self.layers} <= {*trace.layer_ids},
                f"{self.name}: the sets are of layers {list(self.layers)}, {n_heads} heads and "
                f"rows up to {last}; expected layers of {list(trace.layer_ids)}, {trace.n_heads} "
                f"heads and at most {trace.n_pos} rows, as its q, k and v",
            )

    @property
    def last(self) -> int:
        """The last row of any table."""
        tables = (self.read, self.stored)
        return max([*self.kept, *(int(x["row"].max()) for x in tables if x is not None)])

    def on(self, trace: Trace) -> Dump:
        """The dump with the states of a trace, and the layers without lines that are compared."""
        if not self.whole or not {*self.layers} < {*trace.layer_ids}:
            return replace(self, trace=trace)
        of_lines, kept = [trace.layer_ids.index(x) for x in self.layers], {}
        for row, sets in self.kept.items():
            kept[row] = np.ones((trace.n_layers, *sets.shape[1:]), bool)
            kept[row][of_lines] = sets
        return replace(self, trace=trace, layers=trace.layer_ids, kept=kept)

    def evicted_at(self, n_heads: int, n_pos: int) -> NDArray[np.int32]:
        """After which row each entry left, int32 [layer, head, n_pos], as a Record has it."""
        out = np.full((len(self.layers), n_heads, n_pos), NEVER, np.int32)
        for row in sorted(self.kept):
            before = out[..., : row + 1]
            before[(before == NEVER) & ~self.kept[row]] = row
        return out

    @classmethod
    def of_table(cls, table: Mapping[str, Any], name: str = "memory", **more: Any) -> Dump:
        """Return the dump of columns, as `kvsim_dump` names them.

        Raises DumpError for a table that no implementation can have written.
        """
        _require(
            any(np.size(table.get(x + "layer", ())) for x in ("", "read_", "stored_")),
            f"{name}: nothing was dumped; expected entries that are kept or stored, or pages",
        )
        for kind, prefix, names in (("read", "read_", READ), ("stored", "stored_", STORED)):
            if any(prefix + column in table for column in names):
                more[kind] = _columns(table, names, name, prefix)
        of_lines = [more[kind]["layer"] for kind in ("read", "stored") if kind in more]
        kept_lines = None
        if not of_lines or {*KEPT} & {*table}:
            kept_lines = _columns(table, KEPT, name)
            of_lines.append(kept_lines["layer"])
        numbers = np.unique(np.concatenate(of_lines))
        if not more.setdefault("whole", "layers" not in table):
            declared = np.unique(table["layers"])
            _require(
                declared.dtype.kind in "iu" and np.isin(numbers, declared).all(),
                f"{name}: lines of layers {numbers.tolist()}; expected of {declared.tolist()}",
            )
            numbers = declared.astype(np.int64)
        if kept_lines is None:
            return cls({}, tuple(numbers.tolist()), name, **more)
        layer, head, row, pos = kept_lines.values()
        n_heads, rows = int(head.max()) + 1, np.unique(row)
        size = len(numbers) * n_heads * int((rows + 1).sum())
        most = min(_LARGEST, _FEW + _PER_LINE * len(row))
        _require(
            size <= most,
            f"{name}: {len(rows)} events up to row {rows[-1]} of {len(numbers)} layers and "
            f"{n_heads} heads take {size:,} bytes; expected at most {most:,} for {len(row):,} "
            "lines; dump fewer events or layers",
        )
        kept: dict[int, NDArray[np.bool_]] = {}
        before = np.ones((len(numbers), n_heads, 0), bool)
        order = np.argsort(row, kind="stable")
        places = np.split(order, np.searchsorted(row[order], rows[1:]))
        for event, here in zip(rows.tolist(), places, strict=True):
            sets = np.zeros((len(numbers), n_heads, event + 1), bool)
            sets[np.searchsorted(numbers, layer[here]), head[here], pos[here]] = True
            heads = sets.any(-1)
            silent = ~heads.any(-1)
            _require(
                sets.sum() == len(here) and (heads.all(-1) | silent).all(),
                f"{name}: after row {event} an entry is listed twice, or a head of a layer with an "
                f"event keeps nothing; expected entries of all {n_heads} heads once",
            )
            sets[silent] = True
            sets[silent, :, : before.shape[-1]] = before[silent]
            kept[event] = before = sets
        return cls(kept, tuple(numbers.tolist()), name, **more)

    @classmethod
    def of_record(cls, record: Record, trace: Trace | None = None) -> Dump:
        """Return the kept sets of a replay or a live run, without reads. trace: its q, k and v."""
        kept = {row: record.retained(row)[..., : row + 1] for row in record.events}
        return cls(kept, record.layer_ids, record.trace, trace, record.budget, record.schedule)

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write a `.npz` file; returns the path. Raises OutputError where none can be written."""
        target = local_path(path, DumpError)
        parts = []
        for row, sets in self.kept.items():
            layer, head, pos = np.nonzero(sets)
            parts.append((np.array(self.layers)[layer], head, np.full_like(pos, row), pos))
        layers = {} if self.whole else {"layers": np.array(self.layers)}
        arrays: dict[str, Any] = {"page": self.page, **layers}
        if parts:
            columns = np.concatenate(parts, axis=1).astype(np.int32)
            arrays |= zip(KEPT, columns, strict=True)
        for prefix, table in (("read_", self.read), ("stored_", self.stored)):
            arrays |= {prefix + column: x for column, x in (table or {}).items()}
        if self.budget is not None:
            arrays["budget"] = self.budget
        if self.schedule is not None:
            arrays |= {"interval": self.schedule.interval or 0, "prefill": self.schedule.prefill}
        if (trace := self.trace) is not None:
            _require(
                trace.header.uniform,
                f"{self.name}: layers differ in scale or RoPE, or have a softcap, a window or "
                "sinks, for which .npz has no place; write the dump without its trace",
            )
            arrays |= {name: trace.read(name).float().cpu().numpy() for name in "qkv"}
            arrays |= {"prompt_len": trace.prompt_len, "scale": trace.formulas[0].scale}
            names = ("inv_freq", *_ROPE)
            arrays |= {name: np.array(getattr(trace.ropes[0], name)) for name in names}
            if trace.layer_ids != tuple(range(trace.n_layers)):
                arrays["layer_ids"] = np.array(trace.layer_ids)
        with published(target, overwrite=overwrite) as draft:
            draft.write_bytes(encode_arrays(arrays))
        return target


def read_dump(path: str | Path) -> Dump:
    """Read a `.npz` file. Raises DumpError for one that is damaged, or lacks an array."""
    target = local_path(path, DumpError)
    more: dict[str, Any] = {}
    try:
        arrays = decode_arrays(read_input(target, _LARGEST))
        if "budget" in arrays:
            more["budget"] = index(arrays["budget"][()])
        if "page" in arrays:
            more["page"] = index(arrays["page"][()])
        if "interval" in arrays:
            interval = index(arrays["interval"][()]) or None
            more["schedule"] = Schedule(interval, bool(arrays.get("prefill", interval is None)))
        if {"q", "k", "v"} & {*arrays}:
            rope = {each: kind(arrays[each]) for each, kind in _ROPE.items() if each in arrays}
            more["trace"] = Trace.from_arrays(
                *(arrays[each] for each in "qkv"),
                prompt_len=index(arrays["prompt_len"][()]),
                rope=Rope(arrays["inv_freq"].tolist(), **rope),
                scale=float(arrays["scale"]) if "scale" in arrays else None,
                layer_ids=arrays["layer_ids"].tolist() if "layer_ids" in arrays else None,
                name=target.name,
            )
    except (KvsimError, KeyError, OSError, TypeError, ValueError) as error:
        raise DumpError(
            f"{target}: cannot be read ({error_line(error)}); expected the .npz file of a dump "
            "(docs/conform.md)"
        ) from error
    return Dump.of_table(arrays, target.name, **more)


def _require(condition: object, problem: str) -> None:
    if not condition:
        raise DumpError(problem)


def _columns(
    table: Mapping[str, Any], names: Sequence[str], name: str, prefix: str = ""
) -> dict[str, NDArray[Any]]:
    """The columns of a table; whole numbers but for bits."""
    columns = {column: np.asarray(table.get(prefix + column, ())) for column in names}
    found = ", ".join(f"{x} is {y.dtype} {list(y.shape)}" for x, y in columns.items())
    whole = all(
        x.ndim == 1
        and x.size
        and x.dtype.kind in ("iuf" if column.endswith("bits") else "iu")
        and 0 <= x.min() <= x.max() < NEVER
        for column, x in columns.items()
    )
    _require(
        whole and len({x.shape for x in columns.values()}) == 1,
        f"{name}: {found}; expected whole numbers from 0 to below {NEVER}, one of each for "
        "each entry that stays after an event",
    )
    columns = {x: y if x.endswith("bits") else y.astype(np.int64) for x, y in columns.items()}
    at = columns[names[3]]  # pos or page
    late = f"{name}: {(at > columns['row']).sum()} positions stay after rows before them; expected"
    advice = "positions up to the row, both from 0 in prompt and response"
    _require((at <= columns["row"]).all(), f"{late} {advice}")
    return columns
