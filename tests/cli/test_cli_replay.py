"""`kvsim replay`: its tables, its files, its settings, what it refuses."""

import json
import re
import signal

import polars as pl
import pytest
from command_line import OWN, one_line

import kvsim
from kvsim.store.records import read_records


def test_replay_prints_one_table(printed, trace):
    """A line per policy and budget, with the fidelity of the numbers."""
    arguments = "--policy full,tova --policy h2o --budget 16,50% --interval 8"

    out = printed("replay", trace, *arguments.split())

    table = [
        line.split()[:2] for line in out.splitlines() if line.startswith(("full", "tova", "h2o"))
    ]
    half = str(kvsim.open_trace(trace).n_pos // 2)
    assert table == [["full", "-"], ["tova", "16"], ["tova", half], ["h2o", "16"], ["h2o", half]]
    assert "exact" in out
    assert "recorded queries, keys and values" in out


def test_a_policy_whose_rows_only_read_less_evicts_never(printed, trace):
    """Beside its budget, which bounds what rows read."""
    terms = ["--policy", "quest", "--budget", 16, "--interval", 8, "--metric", "output_error"]
    out = printed("replay", trace, *terms)
    assert re.search(r"^quest +16 +never ", out, re.MULTILINE), out
    both = printed("replay", trace, "--policy", "tova,full", *terms[:1], "quest", *terms[2:])
    assert "Every policy evicts" not in both
    assert re.search(r"^quest +16 +never ", both, re.MULTILINE), both


def test_replay_writes_a_run_and_json(printed, trace, tmp_path):
    """`--out` holds parameters, records and results; `--json` is one document with the cells."""
    out = tmp_path / "runs" / "x"
    arguments = ["--policy", "snapkv", "--budget", "16", "--set", "window=4"]
    arguments += ["--set", "prefill=false", "--set", "events=true"]

    text = printed("replay", trace, *arguments, "--interval", "8", "--out", out, "--json")

    document = json.loads(text)
    (cell,) = document["cells"]
    assert (cell["policy"], cell["budget"], cell["prefill"]) == ("snapkv", 16, False)
    assert cell["params"]["window"] == 4
    assert 0 < cell["output_error"] < 2
    assert sum(document["fidelity"].values()) == pytest.approx(1)
    assert json.loads((out / "run.json").read_text())["traces"] == document["traces"]
    (record,) = read_records(out / "records.zarr")
    results = pl.read_parquet(out / "results.parquet")
    wiped = results.filter((pl.col("metric") == "wipeout") & (pl.col("layer") == 0))
    assert sorted(wiped["event"].unique()) == record.events


def test_every_policy_protects_what_is_asked_for(printed, trace, tmp_path):
    """`--set protect.sink=N` and its like add to each policy."""
    own = kvsim.open_trace(trace)
    arguments = ["replay", trace, "--policy", "random,snapkv", "--set", "window=4"]
    extra = ["--set", "protect.sink=3", "--set", "protect.recent=6", "--interval", "8"]

    text = printed(*arguments, *extra, "--budget", "16", "--out", tmp_path / "a", "--json")

    protect = {"sink": 3, "recent": 6, "prompt": False}
    assert [cell["params"]["protect"] for cell in json.loads(text)["cells"]] == [protect] * 2
    for record in read_records(tmp_path / "a" / "records.zarr"):
        assert record.params["protect"] == protect
        assert (record.evicted_at[..., :3] > own.n_pos).all()
        left = record.evicted_at - range(own.n_pos)
        assert left.min() >= 6  # an entry among the last six rows stays

    budget, prompt = str(own.prompt_len + 8), ("--set", "protect.prompt=true")
    text = printed(*arguments, *prompt, "--budget", budget, "--interval", "8", "--json")
    assert [cell["params"]["protect"]["prompt"] for cell in json.loads(text)["cells"]] == [True] * 2


def test_an_error_that_repeats_is_printed_once(run, trace, own):
    """With the number of other cells, whether others work or not; numbers make no other error."""
    leak = "if view.setting.budget != 40:\n            view.queries(range(999))\n        return"
    (own / "leak.py").write_text(OWN.replace("return view", f"{leak} view"))
    replayed = ["replay", trace, "--interval", "8", "--policy", "leak:odd", "--budget"]

    status, _, err = run(*replayed, "16,24,32")
    some, _, others = run(*replayed, "16,24,40")

    assert (status, some) == (2, 1)
    assert one_line(err).startswith("error: odd: reads row ")
    assert err.endswith("see docs/add-a-policy.md (and so in 2 more cells)\n")
    assert [line.partition(":")[0] for line in others.splitlines()] == ["failed", "error"]
    assert "(and so in 1 more cell)" in others


def test_a_policy_that_exits_is_no_success(run, trace, own):
    """`sys.exit(0)` in a module, in a function or in a scorer ends neither kvsim nor its errors."""
    (own / "scorer.py").write_text(OWN.replace("raise KeyboardInterrupt", "raise SystemExit(0)"))
    (own / "module.py").write_text("raise SystemExit(0)")
    (own / "function.py").write_text("def odd():\n    raise SystemExit(0)")
    cells = ["--budget", "16,24", "--set", "stops_at=24", "--out", "x"]

    status, _, err = run("replay", trace, "--policy", "scorer:odd", *cells)
    assert status == 1
    assert "SystemExit (0) in scorer.py, line 22" in err
    assert err.splitlines()[-1] == "error: 1 of 2 cells failed, the others are kept in x"
    for name in ("module:odd", "function:odd"):
        status, out, err = run("replay", trace, "--policy", name, "--budget", "16")
        assert (status, out) == (2, "")
        assert "SystemExit" in one_line(err)


def test_a_run_is_replaced_on_request(run, trace, tmp_path):
    """By what is written in its place: an error before that leaves it; and no other folder is."""
    arguments = ["replay", trace, "--policy", "tova", "--out", tmp_path / "x"]
    run(*arguments, "--budget", "16")
    before = (tmp_path / "x" / "run.json").read_bytes()

    assert run(*arguments, "--budget", "0", "--overwrite")[0] == 2
    assert (tmp_path / "x" / "run.json").read_bytes() == before
    assert run(*arguments, "--budget", "24", "--overwrite")[0] == 0
    assert json.loads((tmp_path / "x" / "run.json").read_bytes())["budgets"] == ["24"]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    (tmp_path / "x" / "run.json").unlink()  # an unfinished run
    assert run(*arguments, "--budget", "24", "--overwrite")[0] == 0
    (tmp_path / "x" / "run.json").unlink()
    (tmp_path / "x" / "grid.json").unlink()
    status, _, err = run(*arguments, "--budget", "24", "--overwrite")
    assert (status, "exists and is no run" in err) == (2, True)


def test_failed_cells_leave_the_others(run, trace, own):
    """Some cells fail: status 1, the failures on standard error, the others kept."""
    arguments = ["--policy", "tova,mine:odd", "--set", "fails_at=16", "--budget", "16,24"]

    status, out, err = run("replay", trace, *arguments, "--out", "x", "--json")

    assert status == 1
    assert len(json.loads(out)["cells"]) == 3
    assert [f["budget"] for f in json.loads(out)["failures"]] == [16]
    assert "odd, budget 16: odd: the trace has no gate" in err
    assert err.splitlines()[-1] == "error: 1 of 4 cells failed, the others are kept in x"
    assert len(read_records(own / "x" / "records.zarr")) == 3


@pytest.mark.parametrize("how", ["interrupted", "terminated"])
def test_interrupted_sweep_keeps_what_is_done(run, trace, own, how, monkeypatch):
    """Ctrl-C and SIGTERM: status 130; what was replayed is measured, shown and written."""
    if how == "terminated":
        monkeypatch.setenv("TERMINATED", "1")
    before = signal.getsignal(signal.SIGTERM)
    arguments = ["--policy", "tova,mine:odd", "--set", "stops_at=24", "--budget", "16,24"]

    status, out, err = run("replay", trace, *arguments, "--out", "x", "--json")

    assert status == 130
    assert one_line(err) == (
        "interrupted, 3 of 4 cells are done and kept in x; the same command continues"
    )
    assert json.loads(out)["interrupted"] is True
    assert len(json.loads(out)["cells"]) == 3
    assert pl.read_parquet(own / "x" / "results.parquet").height > 0
    assert signal.getsignal(signal.SIGTERM) == before


def test_interrupt_before_the_first_cell(run, trace, own):
    """Ctrl-C with nothing done writes nothing and says so."""
    arguments = ["--policy", "mine:odd", "--set", "stops_at=16", "--budget", "16", "--out", "x"]

    status, out, err = run("replay", trace, *arguments)

    assert (status, out) == (130, "")
    assert one_line(err) == "interrupted, no cell was done and nothing was written"
    assert not (own / "x").exists()


def test_a_setting_is_of_one_policy_or_of_all_that_have_it(run, trace):
    """That of one policy wins, lists are tried, and a bare name is of all."""
    asked = ["--policy", "ams+knorm,snapkv,tova", "--budget", "12", "--interval", "8", "--json"]
    sets = ["--set", "snapkv.window=3,5", "--set", "window=4", "--set", "ams.recent=2"]
    status, out, err = run("replay", trace, *asked, *sets)
    cells = [(x["policy"], x["params"]) for x in json.loads(out)["cells"]]

    assert status == 0
    assert err == ""
    assert [x["window"] for name, x in cells if name == "snapkv"] == [3, 5]
    assert [(x["window"], x["recent"]) for name, x in cells if name == "ams+knorm"] == [(4, 2)]


def test_a_setting_of_a_part_reaches_it_wherever_it_stands(run, trace):
    """Wrapped, inside one with the same key, before a quantizer; a whole name is one policy."""
    names = ["snapkv", "adakv+snapkv", "ams+snapkv", "snapkv+kivi", "snapkv@kvpress"]
    asked = ["--policy", ",".join(names), "--budget", "12", "--interval", "8", "--json"]
    sets = ["--set", "adakv+snapkv.window=5", "--set", "snapkv.window=3"]
    sets += ["--set", "snapkv@kvpress.window=6", "--set", "window=7"]
    status, out, _ = run("replay", trace, *asked, *sets)
    document = json.loads(out)
    windows = [
        (x["policy"], [value for key, value in x["params"].items() if key.endswith("window")])
        for x in document["cells"]
    ]

    assert status == 0
    assert windows == list(zip(names, [[3], [5], [7, 3], [3, 128], [6]], strict=True))
