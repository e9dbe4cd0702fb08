"""Run folders that are damaged say so, each in its way, and in one line of kvsim's."""

import json
import random
import shutil
from dataclasses import replace

import polars as pl
import pytest

import kvsim
from kvsim.analysis.folder import bind, read_run
from kvsim.core.record import record_document
from kvsim.errors import OutputError
from kvsim.store import inputs
from kvsim.store.records import read_records
from kvsim.sweeps.driver import replay_all
from traces import random_trace


@pytest.fixture(scope="module")
def run():
    """A sweep of one policy over a small trace."""
    trace = random_trace(layers=1, heads=1, n=40)
    return replay_all([trace], [kvsim.policy("tova")], [16], metrics=["wipeout", "entries_seen"])


def table(**columns):
    """Change columns of the Table, and bind it."""

    def change(folder):
        found = pl.read_parquet(folder / "results.parquet").with_columns(**columns)
        found.write_parquet(folder / "results.parquet")
        bind(folder, json.loads((folder / "run.json").read_text()))

    return change


def described(**fields):
    """Change fields of `run.json`, and renew its digest."""

    def change(folder):
        document = json.loads((folder / "run.json").read_text())
        content = {name: value for name, value in document.items() if name != "digest"} | fields
        (folder / "run.json").write_text(json.dumps(inputs.sealed(content)))

    return change


def without_a_column(folder):
    """A Table with a column less."""
    pl.read_parquet(folder / "results.parquet").drop("chance").write_parquet(
        folder / "results.parquet"
    )
    bind(folder, json.loads((folder / "run.json").read_text()))


def without_digests(name):
    """A file that could be bound to others and is not."""

    def change(folder):
        document = json.loads((folder / name).read_text())
        for place in (document, document.get("attributes", {})):
            for key in ("digest", "files"):
                place.pop(key, None)
        (folder / name).write_text(json.dumps(document))
        if name != "run.json":
            bind(folder, json.loads((folder / "run.json").read_text()))

    return change


def folder_for_a_file(folder):
    """The system's own error is told as kvsim's."""
    (folder / "run.json").unlink()
    (folder / "run.json").mkdir()


REFUSED = {
    "a fidelity that there is not": (table(fidelity=pl.lit("certain")), "no result has"),
    "values that are no numbers": (table(value=pl.lit("much")), "no result has"),
    "a column less": (without_a_column, "no columns chance"),
    "a folder": (folder_for_a_file, "damaged"),
    "no digests of the run": (without_digests("run.json"), "damaged"),
    "no digests of records": (without_digests("records.zarr/zarr.json"), "damaged"),
    "other remarks": (described(remarks=[None]), "remarks are of another type"),
    "no files": (described(files=None), "its files, traces, models or"),
    "no digest of a file": (
        described(files={"results.parquet": None}),
        "damaged: its SHA-256 is another",
    ),
    "an empty digest of a file": (
        described(files={"results.parquet": {}}),
        "damaged: its SHA-256 is another",
    ),
} | {
    f"run.json is {text}": (
        lambda folder, text=text: (folder / "run.json").write_bytes(text),
        "damaged",
    )
    for text in (b"[]", b"null", b'"run"', b"{", b"\xff")
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_run_holds_is_refused(run, tmp_path, name):
    """Other values, types and columns, and digests that are missing, whatever wrote them."""
    change, said = REFUSED[name]
    folder = run.save(tmp_path / "run")
    change(folder)

    with pytest.raises(OutputError, match=said):
        contents(folder)


def contents(folder):
    """What the readers return for a run folder, comparable."""
    saved = read_run(folder)
    records = read_records(folder / "records.zarr")
    return (
        saved.parameters,
        saved.table.to_dicts(),
        [(record_document(record), record.evicted_at.tolist()) for record in records],
    )


def flips(folder, count, seed):
    """Yield after each flip of one bit of one file, chosen at random, and undo it."""
    draw = random.Random(seed)  # noqa: S311  no cryptography
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for number in range(count):
        path = files[number % len(files)]
        data = path.read_bytes()
        place = draw.randrange(8 * len(data))
        changed = bytearray(data)
        changed[place // 8] ^= 1 << place % 8
        path.write_bytes(changed)
        yield path
        path.write_bytes(data)


def test_a_flipped_bit_is_refused_or_changes_nothing(run, tmp_path):
    """In any file of a run: one line, or exactly what was written."""
    folder = run.save(tmp_path / "run")
    expected = contents(folder)

    refused = []
    for _ in flips(folder, 300, seed=0):
        try:
            assert contents(folder) == expected
        except OutputError as error:
            refused.append(str(error))

    assert len(refused) > 190  # zarr.json of arrays is repeated above
    assert [line for line in refused if "damaged" not in line or "\n" in line] == []


def test_records_of_another_run_are_refused(run, tmp_path):
    """A folder of records is bound to the run that it lies in, file by file."""
    one, other = run.save(tmp_path / "one"), tmp_path / "other"
    replace(run, records=(replace(run.records[0], budget=99),)).save(other)
    shutil.rmtree(one / "records.zarr")
    shutil.copytree(other / "records.zarr", one / "records.zarr")

    with pytest.raises(OutputError, match="damaged"):
        read_records(one / "records.zarr")
