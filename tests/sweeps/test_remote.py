"""Sweeps of traces over HTTP, and into a store: the same values, and what happens without them."""

import functools
import http.server
import shutil
import threading
import uuid
from pathlib import Path

import fsspec
import pytest

import kvsim
from kvsim.errors import OutputError
from kvsim.sweeps import driver, planning
from kvsim.sweeps.planning import Plan, grid_from
from kvsim.sweeps.remote import Store, kept_in
from web import Quiet

GRID = {"policies": ["knorm", "tova"], "budgets": [12, 20], "intervals": 8, "metrics": ["wipeout"]}


@pytest.fixture
def server(paths):
    """A server of the folder of the traces on loopback."""
    handler = functools.partial(Quiet, directory=Path(paths[0]).parent)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join(10)
    server.server_close()


@pytest.fixture
def urls(server):
    """The URLs of the traces."""
    return [f"http://127.0.0.1:{server.server_port}/{name}.zarr" for name in "ab"]


@pytest.fixture
def store():
    """The URL of a folder in fsspec's memory, empty before and after."""
    system, root = fsspec.filesystem("memory"), f"/{uuid.uuid4()}"
    yield f"memory:/{root}"
    if system.exists(root):
        system.rm(root, recursive=True)


@pytest.fixture
def computed(monkeypatch):
    """The keys of the tasks that have been computed."""
    keys, compute = [], planning.replayed

    def counting(task, *report):
        keys.append(task.key)
        return compute(task, *report)

    monkeypatch.setattr(planning, "replayed", counting)
    return keys


def files(store):
    """The files in the store by their names."""
    system, root = fsspec.core.url_to_fs(store)
    return {path[len(root) + 1 :]: system.cat_file(path) for path in system.find(root)}


def test_traces_over_http_are_the_traces(urls, paths, tmp_path):
    """A configuration with URLs gives the Table, under the keys, of the same files here."""
    lines = [f"{key}: {value}" for key, value in {**GRID, "traces": urls}.items()]
    (tmp_path / "grid.yaml").write_text("\n".join(lines).replace("'", '"'))

    run = kvsim.sweep(tmp_path / "grid.yaml", out=tmp_path / "x")

    assert run.failures == ()
    assert run.table.equals(kvsim.sweep(**GRID, traces=paths).table)
    plans = [Plan.of(grid_from(None, **GRID, traces=x)) for x in (urls, paths)]
    assert plans[0].keys == plans[1].keys


def test_a_server_that_goes_away_fails_its_cells_alone(server, urls, tmp_path, computed):
    """What is done stays, each cell without its trace says so, and the sweep goes on later."""
    with pytest.MonkeyPatch.context() as gone:
        opener = driver.Shards.add

        def add(self, task, outcome):
            opener(self, task, outcome)
            server.RequestHandlerClass = functools.partial(Quiet, directory=tmp_path / "nothing")
            server.shutdown()
            server.socket.close()

        gone.setattr(driver.Shards, "add", add)
        run = kvsim.sweep(**GRID, traces=urls, out=tmp_path / "x")

    assert run.parameters["done"] == 4
    assert {failure.trace for failure in run.failures} == {"b"}
    assert len(run.failures) == 4
    assert "is not readable" in run.failures[0].error
    assert "\n" not in run.failures[0].error


def test_another_trace_at_the_url_is_no_part_of_the_sweep(urls, paths):
    """A trace that changes after the sweep was planned fails its cells, with both digests."""
    plan = Plan.of(grid_from(None, **GRID, traces=urls))
    kept, there = Path(paths[0]).with_suffix(".kept"), Path(paths[0])
    there.rename(kept)
    try:
        shutil.copytree(paths[1], there)
        run = driver.finish(plan, kept_in(None))
    finally:
        shutil.rmtree(there)
        kept.rename(there)

    assert {failure.trace for failure in run.failures} == {"a"}
    assert "is another trace than when the sweep began" in run.failures[0].error
    assert run.parameters["done"] == 4


def test_a_store_holds_what_a_folder_holds(paths, store, tmp_path, computed):
    """Shards fill the store, the whole is published, and nothing is computed twice."""
    grid = {**GRID, "traces": paths, "records": True}
    expected = kvsim.sweep(**grid, out=tmp_path / "x")
    computed.clear()

    for number in range(2):
        kvsim.sweep(**grid, out=store, shard=(number, 2))
    assert "run.json" not in files(store)
    run = kvsim.sweep(**grid, out=store)

    assert run.table.equals(expected.table)
    assert len(computed) == len(set(computed)) == len(Plan.of(grid_from(None, **grid)).tasks)
    here = {path.relative_to(tmp_path / "x").as_posix() for path in (tmp_path / "x").rglob("*")}
    assert set(files(store)) == {x for x in here if (tmp_path / "x" / x).is_file()} - {"lock"}
    for name in ("results.parquet", *(x for x in files(store) if x.endswith(".parquet"))):
        assert files(store)[name] == (tmp_path / "x" / name).read_bytes()
    more = kvsim.sweep(**{**grid, "budgets": [12, 20, 24]}, out=store)
    assert more.parameters["done"] == 12


def test_a_damaged_part_in_a_store_is_computed_again(paths, store, computed):
    """Bytes that are not those of the SHA-256, or a part without its Table, count for nothing."""
    grid = {**GRID, "traces": paths}
    expected = kvsim.sweep(**grid, out=store)
    system, root = fsspec.core.url_to_fs(store)
    first, second = sorted(x for x in files(store) if x.startswith("parts/") and "parquet" in x)
    system.pipe_file(f"{root}/{first}", files(store)[first][:-1])
    system.rm(f"{root}/{second}")
    computed.clear()

    run = kvsim.sweep(**grid, out=store)

    assert run.table.equals(expected.table)
    assert len(computed) == 2


def test_two_processes_on_one_store_count_a_task_once(paths, store):
    """Neither sees the other's work in time; the results are those of one."""
    grid = {**GRID, "traces": paths}
    plan = Plan.of(grid_from(None, **grid))
    one, other = Store(store), Store(store)
    for each in (one, other):
        each.begin(plan.document)
        each.scan()
    for task in plan.tasks:
        assert one.claim(task)
        assert other.claim(task)  # no store has locks
        one.add(task, planning.replayed(task))
        other.add(task, planning.replayed(task))

    run = kvsim.sweep(**grid, out=store)

    assert run.table.equals(kvsim.sweep(**grid).table)


def test_a_part_counts_from_its_last_file_on(paths, store, monkeypatch):
    """A store that breaks between the files of a part leaves no part, and says so."""
    grid = {**GRID, "traces": paths[:1]}
    system = type(fsspec.filesystem("memory"))
    pipe = system.pipe_file

    def breaking(self, path, *rest, **options):
        if path.endswith(".json"):
            raise OSError("the connection was reset")
        pipe(self, path, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(system, "pipe_file", breaking)
        with pytest.raises(OutputError, match=r"cannot be written \(the connection was reset"):
            kvsim.sweep(**grid, out=store)

    assert [name for name in files(store) if name.startswith("parts/")]
    assert Store(store).parts == {}
    assert kvsim.sweep(**grid, out=store).parameters["done"] == 4


def test_the_commands_take_a_store(run, paths, store):
    """--status, --collect and a comparison work on a URL; --slurm and HTTP do not."""
    sweep = (
        "sweep",
        paths[0],
        "--policy",
        "knorm,tova",
        "--budget",
        "12",
        "--metric",
        "output_error",
    )
    assert run(*sweep, "--out", store, "--shard", "0/1")[0] == 0

    assert "2 of 2 cells are done" in run("sweep", "--out", store, "--status")[1]
    assert run("sweep", "--out", store, "--collect")[0] == 0
    assert "run.json" in files(store)
    status, out, error = run("compare", store)
    assert (status, "knorm" in out, error) == (0, True, "")
    status, _, error = run("compare", f"{store}/x")
    assert (status, f"{store}/x is no run folder: {store}/x/run.json is missing" in error) == (
        2,
        True,
    )
    status, _, error = run("sweep", "--out", store, "--slurm", "2")
    assert (status, "--slurm needs a folder" in error) == (2, True)
    status, _, error = run(*sweep, "--out", "http://127.0.0.1:1/x")
    assert (status, "HTTP is read-only" in error) == (2, True)


def test_a_store_with_other_files_is_left_alone(paths, store):
    """What is no sweep is refused before anything is written."""
    system, root = fsspec.core.url_to_fs(store)
    system.pipe_file(f"{root}/mine.txt", b"mine")

    with pytest.raises(OutputError, match=r"memory://.* exists and is not the folder of a sweep"):
        kvsim.sweep(**GRID, traces=paths[:1], out=store)
    with pytest.raises(OutputError, match=r"memory://.* is no folder of a sweep"):
        Store(store).grid()

    assert list(files(store)) == ["mine.txt"]
