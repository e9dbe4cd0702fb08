"""`kvsim replay`: its tables, its files, its settings, what it refuses."""

import json
import re
import signal

import polars as pl
import pytest
from command_line import OWN, one_line

import kvsim
from kvsim.analysis.table import REGRET
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


def test_replay_shows_the_layer_error_of_traces_that_all_have_projections(
    run, trace, prompt, tmp_path
):
    """Summed over layers; a trace without projections takes the column away, a name is refused."""
    bare = tmp_path / "bare.zarr"
    kvsim.capture("tiny", None, prompt, max_new_tokens=64, out=bare, o_proj=False)
    words = ["--policy", "tova", "--budget", "24", "--json"]

    (cell,) = json.loads(run("replay", trace, *words)[1])["cells"]
    (mixed,) = json.loads(run("replay", trace, bare, *words)[1])["cells"]
    text = run("replay", trace, *words[:-1])[1]
    status, _, err = run("replay", trace, bare, *words, "--metric", "layer_error")

    opened = kvsim.open_trace(trace)
    record = kvsim.replay(opened, kvsim.policy("tova"), 24)
    table = kvsim.measure(opened, record, ["layer_error"])
    assert cell["layer_error"] == pytest.approx(table["value"].sum())
    assert "layer error: sum over layers" in text
    assert "layer_error" not in mixed
    assert status == 2
    assert "record it again with --o-proj" in one_line(err)


def test_replay_writes_a_run_and_json(printed, trace, tmp_path):
    """`--out` holds parameters, records and results; `--json` is one document with the cells."""
    out = tmp_path / "runs" / "x"
    arguments = ["--policy", "snapkv", "--budget", "16", "--set", "window=4", "--no-prefill"]

    text = printed(
        "replay", trace, *arguments, "--interval", "8", "--events", "--out", out, "--json"
    )

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


def test_metrics_of_the_trace_have_their_own_table(printed, trace):
    """A metric that belongs to no policy is shown where it is asked for."""
    arguments = ["--policy", "tova", "--budget", "16", "--metric", "window_overlap,missing_mass"]

    out = printed("replay", trace, *arguments)

    assert "window_overlap" in out
    assert "missing" in out


def test_regret_has_a_column(run, printed, trace, tmp_path):
    """`--regret` shows by how much the optimum retains more, and writes it to the results."""
    arguments = ["replay", trace, "--policy", "full,random", "--budget", "16", "--interval", "16"]

    text = printed(*arguments, "--regret")
    assert "regret" in text
    assert "regret: mass that the best possible kept sets retain beyond the policy" in text
    _, without, _ = run(*arguments)
    assert "regret" not in without

    more = ["--regret", "--metric", "missing_mass", "--out", tmp_path / "x", "--json"]
    full, random = json.loads(printed(*arguments, *more))["cells"]
    assert full["regret"] is None
    assert 0 < random["regret"] < random["missing_mass"]
    results = pl.read_parquet(tmp_path / "x" / "results.parquet")
    assert set(results["metric"]) == {"missing_mass", *REGRET}


def test_every_policy_protects_what_is_asked_for(printed, trace, tmp_path):
    """`--sink`, `--recent` and `--protect-prompt` add to each policy, and the table tells so."""
    own = kvsim.open_trace(trace)
    arguments = ["replay", trace, "--policy", "random,snapkv", "--set", "window=4"]
    extra = ["--sink", "3", "--recent", "6", "--interval", "8"]

    text = printed(*arguments, *extra, "--budget", "16", "--out", tmp_path / "a", "--json")

    protect = {"sink": 3, "recent": 6, "prompt": False}
    assert [cell["params"]["protect"] for cell in json.loads(text)["cells"]] == [protect] * 2
    for record in read_records(tmp_path / "a" / "records.zarr"):
        assert record.params["protect"] == protect
        assert (record.evicted_at[..., :3] > own.n_pos).all()
        left = record.evicted_at - range(own.n_pos)
        assert left.min() >= 6  # an entry among the last six rows stays

    budget = str(own.prompt_len + 8)
    text = printed(*arguments, "--protect-prompt", "--budget", budget, "--interval", "8")
    assert "Every policy also protects the prompt." in text


def test_protection_comes_on_top_of_a_policys_own(printed, trace, own):
    """A ready policy that protects something keeps that too."""
    (own / "mine.py").write_text(OWN.replace("interval=8)", "interval=8), protect=Protection(2)"))
    arguments = ["--policy", "mine:odd", "--budget", "16", "--recent", "5", "--json"]

    text = printed("replay", trace, *arguments)

    (cell,) = json.loads(text)["cells"]
    assert cell["params"]["protect"] == {"sink": 2, "recent": 5, "prompt": False}


def test_own_policy(printed, trace, own):
    """A policy in a file of the working folder is replayed by its name."""
    out = printed("replay", trace, "--policy", "mine:odd", "--budget", "16")

    assert "odd" in out


def test_an_error_that_repeats_is_printed_once(run, trace, own):
    """With the number of other cells, whether others work or not; numbers make no other error."""
    leak = "if view.setting.budget != 40:\n            view.span(0, view.row + 2)\n        return"
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
    assert "SystemExit (0) in scorer.py, line 22; expected scores" in err
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
    assert (status, "is no run folder" in err) == (2, True)
    assert "--resume continues" in run(*arguments, "--budget", "24", "--overwrite", "--resume")[2]


def test_work_in_a_pipe_prints_a_line_every_so_often(run, trace, monkeypatch):
    """What is done of how many, on standard error; nothing if the work is done before."""
    arguments = ["replay", trace, "--policy", "tova,knorm", "--budget", "16", "--interval", "8"]
    quiet = run(*arguments)
    monkeypatch.setattr("kvsim.progress.EVERY", 0.0)

    status, out, err = run(*arguments)

    assert (status, out) == quiet[:2]
    assert quiet[2] == ""
    lines = r"0 of 2 cells after 0 s\n(\d of 2 cells after \d+ s: small.*\n)+"
    assert re.fullmatch(lines, err)


def test_failed_cells_leave_the_others(run, trace, own):
    """Some cells fail: status 1, the failures on standard error, the others kept."""
    arguments = ["--policy", "tova,mine:odd", "--set", "fails_at=16", "--budget", "16,24"]

    status, out, err = run("replay", trace, *arguments, "--out", "x", "--json")

    assert status == 1
    assert len(json.loads(out)["cells"]) == 3
    assert [f["budget"] for f in json.loads(out)["failures"]] == [16]
    assert "odd, budget 16: odd: the trace has no dense attention" in err
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
        "interrupted, 3 of 4 cells are done and kept in x; continue with the same command and "
        "--resume"
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
    """That of one policy wins, lists are tried, and what a bare name changes is said."""
    asked = ["--policy", "ams+knorm,snapkv,tova", "--budget", "12", "--interval", "8", "--json"]
    sets = ["--set", "snapkv.window=3,5", "--set", "window=4", "--set", "ams.recent=2"]
    status, out, err = run("replay", trace, *asked, *sets)
    cells = [(x["policy"], x["params"]) for x in json.loads(out)["cells"]]

    assert status == 0
    assert err == (
        "Note: --set window=4 changes ams+knorm, snapkv; --set ams+knorm.window=4 would change "
        "ams+knorm alone.\n"
    )
    assert [x["window"] for name, x in cells if name == "snapkv"] == [3, 5]
    assert [(x["window"], x["recent"]) for name, x in cells if name == "ams+knorm"] == [(4, 2)]


def test_a_setting_of_a_part_reaches_it_wherever_it_stands(run, trace):
    """Wrapped, behind a wrapper with the same key, before a codec; a whole name is one policy."""
    names = ["snapkv", "adakv+snapkv", "ams+snapkv", "snapkv+kivi", "snapkv@kvpress"]
    asked = ["--policy", ",".join(names), "--budget", "12", "--interval", "8", "--json"]
    sets = ["--set", "adakv+snapkv.window=5", "--set", "snapkv.window=3"]
    sets += ["--set", "snapkv@kvpress.window=6", "--set", "window=7"]
    status, out, err = run("replay", trace, *asked, *sets)
    document = json.loads(out)
    windows = [
        (x["policy"], [value for key, value in x["params"].items() if key.endswith("window")])
        for x in document["cells"]
    ]

    assert status == 0
    assert windows == list(zip(names, [[3], [5], [7, 3], [3, 128], [6]], strict=True))
    assert (
        "Note: --set snapkv.window=3 changes snapkv, adakv+snapkv, ams+snapkv, snapkv+kivi; --set "
        "adakv+snapkv.window=3 would change adakv+snapkv alone.\n"
    ) in err
    assert "--set window=7 is not that of snapkv in ams+snapkv; --set scorer.window is." in err


def test_a_setting_that_an_eviction_takes_from_its_reader_is_noted(run, trace):
    """A bare key goes to the eviction, and the note says which one goes to the reader."""
    asked = ["--policy", "tova+quest", "--budget", "12", "--interval", "8", "--json"]
    status, out, err = run("replay", trace, *asked, "--set", "heads=group")
    other = run("replay", trace, *asked, "--set", "scorer.heads=kv")

    assert status == 0
    assert err == (
        "Note: --set heads=group is not that of quest in tova+quest; --set scorer.heads is.\n"
    )
    params = json.loads(out)["cells"][0]["params"]
    assert (params["heads"], params["scorer__heads"]) == ("group", "query")
    assert other[2] == ""
    assert json.loads(other[1])["cells"][0]["params"]["scorer__heads"] == "kv"


def test_a_table_marks_what_keeps_a_set_for_each_query_head(run, trace, tmp_path):
    """Its budget is not the one of the others, in tables of results and of ranks."""
    asked = ["--policy", "snapkv,snapkv@original", "--set", "window=4", "--budget", "8"]
    out = run("replay", trace, *asked, "--out", tmp_path / "run")[1].splitlines()
    ranks = run("compare", tmp_path / "run")[1].splitlines()

    assert [line.split()[:3] for line in out if line.startswith("snapkv@original")] == [
        ["snapkv@original", "8", "per"]
    ]
    assert any(line.startswith("8 per query head  snapkv@original") for line in ranks)
    assert sum("per query head" in line for line in (*out, *ranks)) == 2


def test_a_table_flags_what_sees_more_entries(run, trace):
    """With schedules of their own, a policy that acts less often is marked; with one, none is."""
    asked = ["--policy", "tova,snapkv", "--set", "window=4", "--budget", "8"]
    own = run("replay", trace, *asked, "--own-schedule")[1].splitlines()
    shared = run("replay", trace, *asked)[1]

    assert [line.split()[0] for line in own if re.search(r"\d!\s", line)] == ["snapkv"]
    assert "!: rows see over 5 % more entries" in "\n".join(own)
    assert "!" not in shared
    assert "Note: all policies act on one schedule (the prompt, every 32 rows)" in shared


def test_a_reader_is_not_flagged_for_what_it_holds(run, trace, tmp_path):
    """It evicts nothing; what is marked beside it is marked as without it, of a run folder too."""
    asked = ["--policy", "quest,tova,snapkv+quest", "--set", "window=4", "--budget", "8"]
    asked += ["--set", "dense_layers=0", "--own-schedule", "--out", str(tmp_path / "run")]
    tables = [run("replay", trace, *asked)[1], run("info", str(tmp_path / "run"))[1]]

    for table in tables:
        marked = [line.split()[0] for line in table.splitlines() if re.search(r"\d!\s", line)]
        assert marked == ["snapkv+quest"]


def test_a_reader_of_everything_in_many_layers_is_remarked(run):
    """With what makes it read less, in words that fit readers without pages."""
    _, text, _ = run("replay", "sample", "--policy", "magicpig", "--budget", "64")

    assert "magicpig in 1 of 3; --set dense_layers=0 lets rows read less in all layers." in text


def test_a_cross_takes_settings_at_both_levels_and_says_what_to_know(run, trace):
    """`--set scorer.NAME` goes one part in; a budget that shortens something is remarked on."""
    asked = ["--set", "window=16", "--set", "scorer.window=8", "--budget", "20", "--interval", "8"]
    found = json.loads(run("replay", trace, "--policy", "ams+snapkv", *asked, "--json")[1])
    _, text, _ = run("replay", trace, "--policy", "ams+snapkv", *asked)

    assert found["remarks"][0].startswith(
        "ams+snapkv: budget 20 holds 4 of 4 sinks and 16 of 32 recent entries"
    )
    assert "Note: ams+snapkv: budget 20 holds 4 of 4 sinks" in text


def test_a_metric_that_a_trace_cannot_have_is_named(run):
    """It is no column of the table, and a note says why."""
    given = ["--policy", "tova", "--budget", "48", "--interval", "64"]

    _, out, _ = run("replay", "sample", *given, "--metric", "output_error,needle_recall")

    assert "needle_recall cannot be computed on this trace" in out
    assert "cannot be computed" not in run("replay", "sample", *given)[1]
