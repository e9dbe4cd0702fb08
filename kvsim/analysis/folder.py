"""Run folders: `run.json`, `results.parquet` and `records.zarr`, bound to each other by digests.

`run.json` has its own digest and the digests of `results.parquet` and of the metadata of
`records.zarr`, which has those of its files. A folder is untrusted input: a file is parsed only
after its type, its size and its digest are checked.
"""

from __future__ import annotations

import io
import json
import math
import reprlib
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import polars as pl

from kvsim.analysis.results import by_model, results
from kvsim.analysis.table import COLUMNS, TYPES, in_order
from kvsim.core.arguments import listed
from kvsim.core.record import Record
from kvsim.errors import OutputError, PolicyError, local_path
from kvsim.files import sync, sync_tree, unbroken
from kvsim.schema import is_url, plural, schedule
from kvsim.store.inputs import damaged, digests, read_document, read_file, sealed, unsealed
from kvsim.store.records import write_records

RUN, RESULTS, RECORDS = "run.json", "results.parquet", "records.zarr"
#: The description of a run, written at its start.
CONFIG = "grid.json"

#: Largest difference of two judged values of a cell, relative to the larger one, or to `_LEAST`:
#: logits of float32 are rounded by 1e-6, which moves a KL of 1e-3 nats by some 1e-8.
TOLERANCE, _LEAST = 1e-5, 1e-3

#: Start of a remark: the policies of a run share a schedule, which no option gave.
ONE_SCHEDULE = "all policies act on one schedule"

_AGAIN = "give the command that wrote it again, which continues"

#: Size limit of the results in bytes, which also bounds the decoded table.
_RESULTS = 8 << 30


#: Row limit: a number for each byte of the file (real ones have 1/4), and one for any size.
_ROWS_PER_BYTE, _ROWS = 4, 250_000


def encode_table(table: pl.DataFrame) -> bytes:
    """Return a table as Parquet that `decode_table` reads."""
    data = io.BytesIO()
    table.write_parquet(data)
    if table.height > _limit(data.getvalue()):  # many rows of equal values
        data = io.BytesIO()
        table.write_parquet(data, compression="uncompressed")
    return data.getvalue()


def decode_table(data: bytes, names: Collection[str] = TYPES.keys()) -> pl.DataFrame:
    """Return the columns with these names that Parquet can hold; their types may be others.

    Raises ValueError for damaged data, and for more rows than files of this size have.
    """
    try:
        table = pl.scan_parquet(io.BytesIO(data))
        schema = table.collect_schema()
        columns = [name for name in names if name in schema]
        for name in columns:
            if schema[name].is_nested() or schema[name] == pl.Binary:
                raise ValueError(f"column {name} has type {schema[name]}")
        rows = table.select(pl.len()).collect().item()
        if rows > _limit(data):
            raise ValueError(f"it has {rows} rows in {len(data)} bytes, at most {_limit(data)} fit")
        return table.select(columns).collect()
    except (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise ValueError(str(error)) from error


def _limit(data: bytes) -> int:
    return _ROWS + _ROWS_PER_BYTE * len(data)


@dataclass(frozen=True)
class Saved:
    """A run folder as it was read: its parameters and its Table."""

    path: Path
    parameters: dict[str, Any]
    table: pl.DataFrame

    def __repr__(self) -> str:
        return f"Saved({str(self.path)!r}{lacking(self.parameters, ', ')})"

    @property
    def remarks(self) -> list[str]:
        """Remarks on the results; of a partial run first the missing cells."""
        remarks: Sequence[str] = self.parameters.get("remarks", ())
        partial = lacking(self.parameters, f"{self.path} is ")
        return [f"{partial}; {_AGAIN}", *remarks] if partial else [*remarks]


def lacking(parameters: Mapping[str, Any], lead: str = "") -> str:
    """Describe how many cells a partial run lacks, after `lead`; empty for a whole run."""
    cells, done, missing = (parameters.get(name) for name in ("cells", "done", "missing"))
    if not (isinstance(cells, int) and isinstance(done, int) and isinstance(missing, int)):
        return ""
    missing = min(missing, cells - done)  # without the task of values of only the trace
    counts = {"missing": missing, "failed": cells - done - missing}
    words = " and ".join(f"{count} {what}" for what, count in counts.items() if count > 0)
    return f"{lead}partial: {words} of {plural(cells, 'cell')}" if words else ""


def is_run(path: str | Path) -> bool:
    """Whether a path is a run, finished or not, and not a trace; False for a URL."""
    return not is_url(path) and any((Path(path) / name).is_file() for name in (RUN, CONFIG))


def write_run(
    folder: Path, description: Mapping[str, Any], records: Sequence[Record], table: pl.DataFrame
) -> None:
    """Write the files of a run into a folder without them; without records, no file of records."""
    if records:
        write_records(folder / RECORDS, records)
    (folder / RESULTS).write_bytes(encode_table(table))  # the errors of a full disk are Python's
    bind(folder, description)


def replace_run(folder: Path, write: Callable[[Path], None]) -> None:
    """Replace the run in a folder by the files that `write` puts into an empty one.

    For a process that has locked the folder; the draft of one that was killed is removed.
    """
    draft = folder / ".run"
    remove(draft)
    draft.mkdir()
    try:
        write(draft)
        sync_tree(draft)
        (folder / RUN).unlink(missing_ok=True)  # the older file, before the files that it binds
        names = sorted((path.name for path in draft.iterdir()), key=RUN.__eq__)
        if RECORDS not in names:
            remove(folder / RECORDS)  # those of an older run
        for name in names:
            remove(folder / name)
            (draft / name).rename(folder / name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    sync(folder)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def writing(where: str, kept: str, again: str) -> Iterator[None]:
    """Raise OutputError where the system refuses; kept: remaining content, again: how to resume."""
    try:
        with unbroken():
            yield
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(
            f"{where} cannot be written ({error.strerror or error}), {kept}; make room or change "
            f"the permissions, and {again}"
        ) from error


def bind(folder: Path, description: Mapping[str, Any]) -> None:
    """Write `run.json` with the digests of the other files; older digests are replaced."""
    content = {name: x for name, x in description.items() if name not in ("digest", "files")}
    names = [name for name in (RESULTS, f"{RECORDS}/zarr.json") if (folder / name).exists()]
    files = digests(folder, *names)
    text = json.dumps(sealed({**content, "files": files}), indent=2)
    (folder / RUN).write_bytes(text.encode("ascii") + b"\n")


def read_run(path: str | Path) -> Saved:
    """Return the run that `kvsim replay --out` wrote, or a Table that was saved as Parquet.

    Args:
        path: a folder, or a file `*.parquet`, which has no parameters.

    Raises:
        OutputError: there is no run folder, or it is damaged or not finished.

    Example:
        >>> run = kvsim.sweep(traces="sample", policies="tova", budgets=64, out="runs/example")
        >>> kvsim.read_run("runs/example").table.equals(run.table)
        True
    """
    folder = local_path(path, OutputError)
    try:
        if folder.suffix == ".parquet" and not folder.is_dir():
            return Saved(folder, {}, _table(folder, folder, read_file(folder, _RESULTS)))
        parameters, files = _description(folder)
        # a missing entry matches no file
        data = read_file(folder / RESULTS, _RESULTS, files.get(RESULTS) or {})
    except FileNotFoundError as error:
        if (folder / CONFIG).is_file():
            done = len([*folder.glob("parts/*.parquet")])
            raise OutputError(
                f"{folder} is not finished: {plural(done, 'task')} done, no results yet; {_AGAIN}"
            ) from None
        raise OutputError(
            f"{folder} is no run folder: {error} is missing; expected a folder of `kvsim "
            "replay ... --out DIR`"
        ) from None
    return Saved(folder, parameters, _table(folder, folder / RESULTS, data))


def _description(folder: Path) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Return the content of `run.json` without digests, and the digests of the other files."""
    path = folder / RUN
    document = unsealed(read_document(path), path)
    files, shapes = document.pop("files", None), {"traces": dict, "remarks": list, "models": dict}
    typed = all(isinstance(document.get(name, kind()), kind) for name, kind in shapes.items())
    texts = [*document.get("remarks", ()), *document.get("models", {}).values()] if typed else [0]
    if not isinstance(files, dict) or not all(isinstance(text, str) for text in texts):
        raise damaged(path, "its files, traces, models or remarks are of another type")
    return document, files


def _table(folder: Path, file: Path, data: bytes) -> pl.DataFrame:
    """Return the Table in the bytes of a file; folder: the run, or the file."""
    try:
        table = decode_table(data)
    except ValueError as error:
        raise damaged(file, str(error)) from error
    missing = ", ".join(name for name in COLUMNS if name not in table.columns)
    reason = f"no columns {missing}"
    try:
        if not missing:
            return in_order([table])
    except (ValueError, pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        reason = f"values that no result has: {' '.join(str(error).split())[:200]}"
    raise OutputError(
        f"{folder} has {reason}: another version of kvsim wrote it; replay it again"
    ) from None


class Measured(Protocol):
    """An object that has a Table: a run in memory, or one that was read from a folder."""

    @property
    def table(self) -> pl.DataFrame:
        """The Table."""


#: A Table, a run, or run folders by path.
Tabular = pl.DataFrame | Measured | str | Path | Iterable[str | Path]


def as_table(given: Tabular) -> pl.DataFrame:
    """Return a Table: itself, that of a run, or that of run folders together; see `runs_of`."""
    return together(runs_of(given))[0]


def together(runs: Sequence[Saved]) -> tuple[pl.DataFrame, list[str]]:
    """The Table of runs, and their remarks."""
    return (runs[0].table, _remarks(runs)) if len(runs) == 1 else joined(runs)


def runs_of(given: Tabular) -> list[Saved]:
    """Return a Table or a run, or run folders, as runs.

    Raises PolicyError for other objects, OutputError for paths that are no run folders.
    """
    if isinstance(given, Saved):
        return [given]
    table = getattr(given, "table", given)
    if isinstance(table, pl.DataFrame):
        facts = {"remarks": getattr(given, "remarks", ()), "traces": getattr(given, "digests", {})}
        return [Saved(Path(), facts, table)]
    places = listed(given)
    paths = [place for place in places if isinstance(place, str | Path)]
    if not paths or len(paths) < len(places):
        raise PolicyError(
            f"table is {reprlib.repr(given)}; expected a Table, a run, or the folder of one"
        )
    return [read_run(path) for path in paths]


def _remarks(runs: Sequence[Saved]) -> list[str]:
    """The remarks of runs, and one on prompts that were recorded under several names."""
    names: dict[str, list[str]] = {}
    traces = dict(chain(*(run.parameters.get("traces", {}).items() for run in runs)))
    for name, digest in traces.items():
        names.setdefault(str(digest).partition("+")[0], []).append(name)
    again = [", ".join(x) for digest, x in names.items() if digest and len(x) > 1]
    of_runs = [remark for run in runs for remark in run.remarks]
    return [*of_runs, *(f"{x} are the same prompt, which counts more than once" for x in again)]


def _differing_schedules(table: pl.DataFrame) -> str:
    """A remark on policies that act at different rows; empty if all act at the same."""
    by_schedule: dict[str, dict[str, None]] = {}
    for result in results(table).values():
        after = schedule(result.interval, prefill=bool(result.prefill))
        by_schedule.setdefault(after, {})[result.policy] = None
    if len(by_schedule) < 2:
        return ""
    each = "; ".join(f"{', '.join(names)}: {after}" for after, names in by_schedule.items())
    return f"schedules differ ({each}), which changes all values; replay with one --interval"


def joined(runs: Sequence[Saved]) -> tuple[pl.DataFrame, list[str]]:
    """Return the Table of several runs, without duplicate rows, and their remarks.

    Of judged values that differ by at most `TOLERANCE` the first is kept, and a remark names the
    largest difference.

    Raises:
        PolicyError: runs have different values for the same row, or replayed different traces of
            one name.
    """
    remarks = _remarks(runs)
    sources: dict[str, tuple[str, Saved]] = {}
    for run in runs:
        for name, digest in run.parameters.get("traces", {}).items():
            expected, other = sources.setdefault(name, (digest, run))
            if "" not in (expected, digest) and expected != digest:  # in memory a trace has none
                raise PolicyError(
                    f"{other.path} and {run.path} replayed different traces, both called {name!r}; "
                    "expected one name per trace: take the runs one by one, or record one trace "
                    "again under another id and replay it"
                )
    of_runs = (run.parameters.get("models", {}).items() for run in runs)
    table = by_model(in_order(run.table for run in runs), dict(chain(*of_runs)))
    table = table.unique(
        [name for name in table.columns if name != "model"], keep="first", maintain_order=True
    )
    of_value = ("model", "value", "chance", "fidelity")
    place = [name for name in table.columns if name not in of_value]
    kept = table.unique(place, keep="first", maintain_order=True)
    if len(runs) > 1 and (remark := _differing_schedules(table)):
        remarks = [remark, *(x for x in remarks if not x.startswith(ONE_SCHEDULE))]
    if kept.height == table.height:
        return table, remarks
    pairs = table.join(kept, on=place, suffix="_first", nulls_equal=True)
    same = [pl.col(name).eq_missing(pl.col(f"{name}_first")) for name in of_value[1:]]
    a, b = pl.col("value"), pl.col("value_first")
    gap = (a - b).abs() / pl.max_horizontal(a.abs(), b.abs(), _LEAST)
    judged = pl.col("fidelity").eq_missing("judged") & same[1] & same[2]
    gap = pl.when(*same).then(0.0).when(judged).then(gap).fill_nan(None).fill_null(math.inf)
    worst = pairs.with_columns(gap=gap).sort("gap", descending=True).row(0, named=True)
    about = "values of {metric} for {policy} on {trace}, {value_first} and {value}".format(**worst)
    if worst["gap"] > TOLERANCE:
        raise PolicyError(
            f"two of the runs have different {about}, with the same parameters and schedule; take "
            "them one by one"
        )
    rounded = f"judged values of the same cells differ by rounding, most of all the {about}"
    return kept, [*remarks, f"{rounded}; values of the first run count"]
