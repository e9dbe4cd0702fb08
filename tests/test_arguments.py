"""What the command line accepts, Python accepts: names, paths, folders, shares, single values."""

import numpy as np
import polars as pl
import pytest

import kvsim
from kvsim.core.policy import Policy, Schedule
from kvsim.errors import KvsimError
from kvsim.store.opening import as_traces
from kvsim.sweeps import replay_all
from traces import random_trace
from user_script import Values, answers


def make_trace(name, seed=0):
    """A random trace of 40 tokens, 7 layers and 2 KV heads."""
    return random_trace(layers=7, n=40, seed=seed, prompt_len=20, name=name)


@pytest.fixture
def folder(tmp_path):
    """A folder with two traces, and files that are none."""
    for place, name in enumerate(("a", "b")):
        kvsim.save_trace(make_trace(name, place), tmp_path / f"{name}.zarr")
    (tmp_path / "notes.txt").write_text("no trace", encoding="utf-8")
    (tmp_path / "empty").mkdir()
    return tmp_path


def test_a_users_script(folder):
    """Names, paths, a folder, a share and single values give what objects and lists give."""
    trace, other = kvsim.open_trace(folder / "a.zarr"), kvsim.open_trace(folder / "b.zarr")

    record, run, comparison, means, figure = answers(folder)

    expected = kvsim.replay(trace, kvsim.policy("tova"), 10, interval=8)
    assert np.array_equal(record.evicted_at, expected.evicted_at)
    assert (record.budget, record.facts.share, expected.facts.share) == (10, "25%", None)
    custom = Policy("Values", Values(), schedule=Schedule(interval=128))
    tables = [
        kvsim.measure(each, kvsim.replay(each, one, 10, interval=8, prefill=True), ["output_error"])
        for each in (trace, other)
        for one in (kvsim.policy("tova"), custom, kvsim.policy("h2o"))
    ]
    assert run.table["value"].to_list() == pl.concat(tables)["value"].to_list()
    assert comparison.table.equals(kvsim.compare(run.table).table)
    assert comparison.traces == ("a", "b")
    assert means["stage"].unique().to_list() == ["early", "middle", "late"]
    early = run.table.filter(pl.col("layer") < 2, policy="tova")["value"].mean()
    shown = means.filter(stage="early", policy="tova")["mean"].item()
    assert shown == pytest.approx(early)
    assert figure.axes


def test_a_sample_is_opened_by_its_name(tmp_path, monkeypatch):
    """A name of a sample is that of what ships, unless a trace of this name is there."""
    monkeypatch.chdir(tmp_path)
    shipped = kvsim.open_trace("sample")

    kvsim.save_trace(make_trace("mine"), tmp_path / "sample")

    assert shipped.digest == kvsim.open_trace(kvsim.sample_trace()).digest
    assert kvsim.open_trace("sample").name == "mine"


def test_a_folder_and_wildcards_stand_for_traces(folder):
    """All traces of a folder by name, as the command line and configurations take them."""
    names = [trace.name for trace in as_traces([folder, make_trace("c")])]

    assert names == ["a", "b", "c"]
    assert [trace.name for trace in as_traces(str(folder / "[b-z].zarr"))] == ["b"]


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (kvsim.replay, (3, "tova", 4), "trace is 3; expected a Trace"),
        (kvsim.replay, ("{}/a.zarr", 3, 4), "policy is 3; expected a name, a Scorer"),
        (kvsim.replay, ("{}/a.zarr", "tovo", 4), "unknown policy 'tovo'; did you mean"),
        (kvsim.replay, ("{}/a.zarr", "tova", "x%"), "budget is 'x%'; expected entries"),
        (kvsim.replay, ("{}/empty", "tova", 4), "empty is not a kvsim trace"),
        (as_traces, ("{}/no*.zarr",), r"no path is like \S*no\*\.zarr"),
        (kvsim.averages, (3,), "table is 3; expected a Table, a run, or the folder"),
        (kvsim.compare, ([],), r"table is \[\]; expected a Table"),
        (kvsim.compare, ("{}",), "is no run folder"),
        (replay_all, ("{}", "tova", "0%"), "budget is 0%"),
    ],
)
def test_what_no_argument_can_be_is_one_line(folder, function, arguments, message):
    """An argument of another kind is named with what was expected."""
    given = [x.replace("{}", str(folder)) if isinstance(x, str) else x for x in arguments]

    with pytest.raises(KvsimError, match=message) as caught:
        function(*given)

    assert "\n" not in str(caught.value)
