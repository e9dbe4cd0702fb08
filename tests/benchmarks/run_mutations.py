"""Mutations of run folders for `mutations.py --runs`: fields, records, tables, digests.

Fields of `run.json` and of the documents of records change one by one, values of `evicted_at` and
of the Table change and are encoded again, records of two cells are exchanged, files of an earlier
run of the same cells take their places, files are cut, removed and damaged. Then digests are
renewed in part or all. A case is refused in one line, or its Table, parameters and records are
those of the original, or it says that it is not bound. Only where every digest fits, as plain
SHA-256 of the files shows, may anything else be read: nobody can notice that without a new replay.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import polars as pl

import kvsim
import mutations as traces
from kvsim.analysis.folder import read_run
from kvsim.core.record import record_document
from kvsim.errors import KvsimError
from kvsim.store.records import read_records
from kvsim.sweeps.driver import replay_all

Files = dict[str, bytes]

RUN, RESULTS, RECORDS = "run.json", "results.parquet", "records.zarr/zarr.json"


class OriginalRun:
    """A run folder, an earlier run of the same cells on another trace, and what it reports."""

    def __init__(self, folder: Path) -> None:
        self.path, other = folder / "run", folder / "earlier"
        policies = [kvsim.policy(name) for name in ("tova", "random", "ams")]
        for seed, path in enumerate((self.path, other)):
            trace = traces.make(seed, mixed=False)
            replay_all([trace], policies, [48, 64], interval=32, metrics=["wipeout"], out=path)
        self.files, self.other = traces.read_files(self.path), traces.read_files(other)
        self.chunks = sorted(key for key in self.files if "/c/" in key)
        self.reported = reported(self.path)


def reported(path: Path) -> dict[str, Any]:
    """Return everything that a run folder says."""
    saved = read_run(path)
    return {
        "parameters": saved.parameters,
        "table": saved.table.rows(),
        "records": [
            (record_document(record), record.evicted_at.tobytes())
            for record in read_records(path / "records.zarr")
        ],
    }


# --- mutations ---


def description(rng: random.Random, case: OriginalRun, files: Files) -> None:
    """Change, remove, add or exchange one value of `run.json`."""
    _changed(rng, files, RUN)


def record_field(rng: random.Random, case: OriginalRun, files: Files) -> None:
    """Change one value of the document of a record, of its array or of the group."""
    _changed(rng, files, rng.choice([key for key in sorted(files) if key.endswith("zarr.json")]))


def _changed(rng: random.Random, files: Files, key: str) -> None:
    document = json.loads(files[key])
    traces._change(rng, document)
    files[key] = json.dumps(document).encode()


def evicted_at(rng: random.Random, case: OriginalRun, files: Files) -> None:
    """Change when entries left, and encode the layer again."""
    key = rng.choice(case.chunks)
    values = np.frombuffer(numcodecs.Zstd().decode(case.files[key]), "<i4").astype("<i8")
    values[rng.randrange(len(values))] += rng.choice((-1, 1, 32))
    files[key] = bytes(numcodecs.Zstd(level=0).encode(values.astype("<i4")))


def exchanged(rng: random.Random, case: OriginalRun, files: Files) -> None:
    """Let the records of two cells take each other's place, with or without their documents."""
    numbers = sorted({key.split("/")[1] for key in case.chunks})
    first, second = (f"records.zarr/{number}/" for number in rng.sample(numbers, 2))
    arrays = rng.random() < 0.5
    for key in sorted(case.files):
        if key.startswith(first) and ("/c/" in key or not arrays):
            other = second + key.removeprefix(first)
            files[key], files[other] = files[other], files[key]


def earlier(rng: random.Random, case: OriginalRun, files: Files) -> None:
    """Put files of an earlier run into their places: one, a record, or all records."""
    key = rng.choice(sorted(files))
    prefix = rng.choice((key, key.rpartition("/")[0], key.partition("/")[0]))
    for each in case.other:
        if each.startswith(prefix):
            files[each] = case.other[each]


def table(rng: random.Random, case: OriginalRun, files: Files) -> None:
    """Change a value of the Table, the order of its rows, or leave some out."""
    frame = pl.read_parquet(io.BytesIO(case.files[RESULTS]))
    how, at = rng.randrange(3), rng.randrange(frame.height)
    if how == 0:
        changed = pl.when(pl.int_range(pl.len()) == at).then(pl.col("value") * 1.001 + 0.01)
        frame = frame.with_columns(changed.otherwise(pl.col("value")).alias("value"))
    elif how == 1:
        frame = frame.reverse()
    else:
        frame = frame.head(at)
    data = io.BytesIO()
    frame.write_parquet(data)
    files[RESULTS] = data.getvalue()


def digests(rng: random.Random, case: OriginalRun, files: Files) -> None:
    """Exchange, take from the earlier run, or remove digests."""
    key = rng.choice((RUN, RECORDS))
    document, other = json.loads(files[key]), json.loads(case.other[key])
    at, its = (document, other) if key == RUN else (document["attributes"], other["attributes"])
    names = ["files", "digest"] if key == RUN else ["files"]
    for name in names if rng.random() < 0.3 else [rng.choice(names)]:
        if rng.random() < 0.5:
            del at[name]
        else:
            at[name] = its[name]
    files[key] = json.dumps(document).encode()


MUTATIONS: tuple[Callable[..., None], ...] = (
    *(description, description, record_field, record_field, evicted_at, evicted_at, exchanged),
    *(earlier, earlier, table, table, digests, traces.damaged, traces.removed, traces.exchange),
)

#: What a script renews: the digests of the files of records, those in `run.json`, and its own.
STEPS = ("records", "files", "digest")


def renew(files: Files, step: str) -> None:
    """Renew one of `STEPS`."""
    key = RECORDS if step == "records" else RUN
    document = json.loads(files[key])
    if step == "records":
        inner = {x.removeprefix("records.zarr/"): x for x in files if x.startswith("records.zarr/")}
        document["attributes"]["files"] = {
            name: entry(files[x]) for name, x in inner.items() if name != "zarr.json"
        }
    elif step == "files":
        document["files"] = {name: entry(files[name]) for name in (RESULTS, RECORDS)}
    else:
        document["digest"] = seal(document)
    files[key] = json.dumps(document).encode()


def entry(data: bytes) -> dict[str, Any]:
    """Return size and SHA-256 of a file."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def seal(document: dict[str, Any]) -> str:
    """Return the digest of `run.json`, as docs/cli.md defines it."""
    content = {name: x for name, x in document.items() if name != "digest"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def fits(files: Files) -> bool:
    """Return whether every digest is that of what is there."""
    try:
        run = json.loads(files[RUN])
        listed = json.loads(files[RECORDS])["attributes"]["files"]
        return (
            run["digest"] == seal(run)
            and all(run["files"][name] == entry(files[name]) for name in (RESULTS, RECORDS))
            and all(files_of == entry(files[f"records.zarr/{x}"]) for x, files_of in listed.items())
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return False


def run_case(originals: list[OriginalRun], seed: int, folder: Path) -> str:
    """Run one case and return its outcome; AssertionError for a finding."""
    rng = random.Random(seed)  # noqa: S311  repeatable on purpose
    case = rng.choice(originals)
    files = dict(case.files)
    # an earlier mutation may have left nothing to change or to renew
    unusable = (ValueError, KeyError, IndexError, TypeError, AttributeError)
    for _ in range(rng.choice((1, 1, 1, 2))):
        with contextlib.suppress(*unusable):
            rng.choice(MUTATIONS)(rng, case, files)
    for step in STEPS if rng.random() < 0.15 else [x for x in STEPS if rng.random() < 0.4]:
        with contextlib.suppress(*unusable):
            renew(files, step)
    path = folder / f"case-{seed}"
    try:
        traces.write_files(path, files)
        return _outcome(case, path, forged=fits(files))
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _outcome(case: OriginalRun, path: Path, *, forged: bool) -> str:
    try:
        now = reported(path)
    except KvsimError as error:
        return "refused" if "\n" not in str(error) else "FINDING: several lines"
    changed = [part for part in now if now[part] != case.reported[part]]
    if not changed:
        return "identical"
    assert forged, f"{', '.join(changed)} changed, and a digest does not fit"
    return "forged: every digest renewed"
