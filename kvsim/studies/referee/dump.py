"""The sets that an implementation kept, as a table of (layer, head, row, pos), and their files.

An `.npz` file also holds the queries, keys and values that the implementation computed; a
`.parquet` file holds the table alone. docs/conform.md describes both.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from kvsim.analysis.parquet import decode_table, encode_table
from kvsim.core.attention import Rope
from kvsim.core.parameters import integer
from kvsim.core.policy import Schedule
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.errors import DumpError, KvsimError, error_line, local_path
from kvsim.files import published, read_input
from kvsim.schema import NEVER
from kvsim.store.archive import decode_arrays, encode_arrays

#: Columns of the table: one line for each entry that stays after the event after a row.
COLUMNS = ("layer", "head", "row", "pos")

#: Most bytes of the sets of a dump, one for each entry after each event: of any dump; for each line
#: of its table; and of a dump with few lines.
_LARGEST, _PER_LINE, _FEW = 2 << 30, 4096, 64 << 20

_ROPE = ("inv_freq", "attention_scaling", "rotary_dim", "layout")


@dataclass(frozen=True, eq=False)
class Dump:
    """Entries that an implementation kept after each of its events.

    kept: by the row that an event follows, bool [layer, head, row + 1]; in a layer without an
    event there, what it kept before and all later positions. layers: their numbers in the model.
    trace: q, k and v that the implementation itself computed; None where the file has no such
    arrays.
    budget, schedule: of the implementation, if recorded.

    Raises DumpError for a table that no implementation can have written.
    """

    kept: Mapping[int, NDArray[np.bool_]]
    layers: tuple[int, ...]
    name: str = "memory"
    trace: Trace | None = None
    budget: int | None = None
    schedule: Schedule | None = None

    @classmethod
    def of_table(cls, table: Mapping[str, Any], name: str = "memory", **more: Any) -> Dump:
        """Return the dump of columns of whole numbers: layer, head, row and pos."""
        columns = [_whole_numbers(table, column, name) for column in COLUMNS]
        if len({len(column) for column in columns}) > 1 or not len(columns[0]):
            sizes = ", ".join(f"{x} {len(y)}" for x, y in zip(COLUMNS, columns, strict=True))
            raise DumpError(
                f"{name}: the columns have {sizes} values; expected equally many, at least one; "
                "write one line for each entry that stays after an event"
            )
        layer, head, row, pos = columns
        later = np.flatnonzero(pos > row)
        if later.size:
            place = later[0]
            raise DumpError(
                f"{name}: layer {layer[place]}, head {head[place]} keeps position {pos[place]} "
                f"after row {row[place]}; expected positions up to the row; count both from 0 in "
                "prompt and response"
            )
        n_heads = int(head.max()) + 1
        numbers = tuple(int(number) for number in np.unique(layer))
        _check_size(name, np.unique(head), np.unique(row), len(numbers), len(row))
        kept: dict[int, NDArray[np.bool_]] = {}
        before = np.ones((len(numbers), n_heads, 0), bool)
        order = np.argsort(row, kind="stable")
        events, starts = np.unique(row[order], return_index=True)
        for event, here in zip(events.tolist(), np.split(order, starts[1:]), strict=True):
            sets = np.zeros((len(numbers), n_heads, event + 1), bool)
            index = np.searchsorted(numbers, layer[here]), head[here], pos[here]
            sets[index] = True
            if sets.sum() != len(here):
                raise DumpError(
                    f"{name}: after row {event} an entry is listed twice; expected each (layer, "
                    "head, row, pos) once"
                )
            heads = sets.any(-1)
            silent: Any = ~heads.any(-1)
            for place, missing in np.argwhere(~heads & ~silent[:, None]):
                raise DumpError(
                    f"{name}: layer {numbers[place]} has no entry in head {missing} after row "
                    f"{event}; expected all {n_heads} heads of a layer that has an event"
                )
            sets[silent] = True
            sets[silent, :, : before.shape[-1]] = before[silent]
            kept[event] = before = sets
        return cls(kept, numbers, name, **more).checked()

    @classmethod
    def of_record(cls, record: Record, trace: Trace | None = None) -> Dump:
        """Return the kept sets of a replay or a live run. trace: its q, k and v."""
        kept = {row: record.retained(row)[..., : row + 1] for row in record.events}
        dump = cls(kept, record.layer_ids, record.trace, trace, record.budget, record.schedule)
        return dump.checked()

    def checked(self) -> Dump:
        """Return the dump; raise DumpError unless its sets fit its arrays."""
        if not self.kept:
            raise DumpError(
                f"{self.name}: no event; expected at least one after which entries left"
            )
        trace, last, n_heads = self.trace, max(self.kept), self.shape[2]
        if trace is None:
            return self
        if n_heads != trace.n_heads or last >= trace.n_pos or {*self.layers} - {*trace.layer_ids}:
            raise DumpError(
                f"{self.name}: the sets are of layers {list(self.layers)}, {n_heads} heads and "
                f"rows up to {last}; expected layers of {list(trace.layer_ids)}, {trace.n_heads} "
                f"heads and at most {trace.n_pos} rows, as its q, k and v"
            )
        return self

    @property
    def shape(self) -> tuple[int, int, int]:
        """Events, layers and KV heads."""
        layers, heads, _ = next(iter(self.kept.values())).shape
        return len(self.kept), layers, heads

    def table(self) -> pl.DataFrame:
        """Return one row for each entry that stays after an event: layer, head, row and pos."""
        parts = []
        for row, sets in self.kept.items():
            layer, head, pos = np.nonzero(sets)
            parts.append((np.array(self.layers)[layer], head, np.full_like(pos, row), pos))
        columns = np.concatenate(parts, axis=1)
        return pl.DataFrame(dict(zip(COLUMNS, columns.astype(np.int32), strict=True)))

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write a `.npz` file, or the table alone as `.parquet`; returns the path.

        Raises OutputError where nothing can be written, DumpError for another ending.
        """
        target = local_path(path, DumpError)
        if target.suffix not in (".npz", ".parquet"):
            raise DumpError(f"the path is {target}; expected one that ends in .npz or .parquet")
        with published(target, overwrite=overwrite) as draft:
            table = target.suffix == ".parquet"
            data = encode_table(self.table()) if table else encode_arrays(self._arrays())
            draft.write_bytes(data)
        return target

    def _arrays(self) -> dict[str, Any]:
        table = self.table()
        arrays: dict[str, Any] = {name: table[name].to_numpy() for name in COLUMNS}
        if self.budget is not None:
            arrays["budget"] = self.budget
        if self.schedule is not None:
            arrays |= {"interval": self.schedule.interval or 0, "prefill": self.schedule.prefill}
        if self.trace is not None:
            trace, rope = self.trace, self.trace.rope
            if any(not each.plain for each in trace.formulas):
                raise DumpError(
                    f"{self.name}: its attention has a softcap, a window or sinks, for which .npz "
                    "has no place; expected plain attention; write .parquet, and give the trace"
                )
            arrays |= {name: getattr(trace, name).float().cpu().numpy() for name in "qkv"}
            arrays |= {"prompt_len": trace.prompt_len, "scale": trace.scale}
            arrays |= {name: np.array(getattr(rope, name)) for name in _ROPE}
            if trace.layer_ids != tuple(range(trace.n_layers)):
                arrays["layer_ids"] = np.array(trace.layer_ids)
        return arrays


def read_dump(path: str | Path) -> Dump:
    """Read a `.npz` or `.parquet` file. Raises DumpError for one that is damaged."""
    target = local_path(path, DumpError)
    if not target.is_file():
        raise DumpError(f"{target}: no such file; expected a dump, see docs/conform.md")
    try:
        data = read_input(target, _LARGEST)
        if target.suffix == ".parquet":
            frame = decode_table(data, COLUMNS)
            if others := [x for x in frame.columns if not frame[x].dtype.is_numeric()]:
                raise ValueError(f"column {others[0]} has type {frame[others[0]].dtype}")  # noqa: TRY301  one message
            arrays = {x: frame[x].to_numpy() for x in frame.columns}
        else:
            arrays = decode_arrays(data)
    except (OSError, ValueError) as error:
        raise DumpError(
            f"{target}: cannot be read ({error_line(error)}); expected a .npz or .parquet file "
            "with layer, head, row and pos; write it with numpy.savez or polars"
        ) from error
    dump = Dump.of_table(arrays, target.name)
    try:
        more: dict[str, Any] = {"trace": _trace(arrays, target.name)}
        if "budget" in arrays:
            more["budget"] = _whole(arrays, "budget")
        if "interval" in arrays:
            interval = _whole(arrays, "interval") or None
            more["schedule"] = Schedule(interval, bool(arrays.get("prefill", interval is None)))
    except (KvsimError, TypeError, ValueError) as error:
        raise DumpError(f"{target.name}: {error_line(error)}") from error
    return replace(dump, **more).checked()


def _trace(arrays: Mapping[str, NDArray[Any]], name: str) -> Trace | None:
    if not {"q", "k", "v"} & set(arrays):
        return None
    missing = [each for each in ("q", "k", "v", "prompt_len", "inv_freq") if each not in arrays]
    if missing:
        raise DumpError(f"no {', '.join(missing)} beside its tensors; expected them too")
    kinds: dict[str, Any] = {"attention_scaling": float, "rotary_dim": int, "layout": str}
    rope = {each: kind(arrays[each]) for each, kind in kinds.items() if each in arrays}
    return Trace.from_arrays(
        *(arrays[each] for each in "qkv"),
        prompt_len=_whole(arrays, "prompt_len"),
        rope=Rope(arrays["inv_freq"].tolist(), **rope),
        scale=float(arrays["scale"]) if "scale" in arrays else None,
        layer_ids=arrays["layer_ids"].tolist() if "layer_ids" in arrays else None,
        name=name,
    )


def _check_size(
    name: str, heads: NDArray[np.int64], rows: NDArray[np.int64], layers: int, lines: int
) -> None:
    """Raise DumpError unless every head has lines, and the sets of all events fit into memory."""
    missing = np.flatnonzero(heads != np.arange(len(heads)))
    if missing.size:
        raise DumpError(
            f"{name}: head {heads[-1]} has entries and head {missing[0]} none; expected all heads, "
            "counted from 0"
        )
    size = layers * len(heads) * sum(row + 1 for row in rows.tolist())
    largest = min(_LARGEST, _FEW + _PER_LINE * lines)
    if size > largest:
        raise DumpError(
            f"{name}: {len(rows)} events up to row {rows[-1]} of {layers} layers and {len(heads)} "
            f"heads take {size:,} bytes; expected at most {largest:,} for {lines:,} lines; dump "
            "fewer events or layers"
        )


def _whole(arrays: Mapping[str, NDArray[Any]], name: str) -> int:
    """Return a whole number of a file. Raises DumpError for another value."""
    value = arrays[name]
    number = integer(value[()]) if value.ndim == 0 else None
    if number is None:
        raise DumpError(f"{name} is {reprlib.repr(value.tolist())}; expected a whole number")
    return number


def _whole_numbers(table: Mapping[str, Any], column: str, name: str) -> NDArray[np.int64]:
    if column not in table:
        have = ", ".join(sorted(table)) or "nothing"
        raise DumpError(f"{name}: has {have}; expected {column!r} too, see docs/conform.md")
    values = np.asarray(table[column])
    whole = values.ndim == 1 and values.dtype.kind in "iu"
    if not whole or (values.size and not 0 <= values.min() <= values.max() < NEVER):
        raise DumpError(
            f"{name}: {column} is {values.dtype} {list(values.shape)}; expected one whole number "
            f"for each entry, from 0 to below {NEVER}"
        )
    return values.astype(np.int64, copy=False)
