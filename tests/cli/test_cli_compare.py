"""`kvsim compare`: what it prints in every format, and what it refuses."""

import csv
import io
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import polars as pl

import kvsim
from kvsim.analysis.folder import TOLERANCE, as_table, bind
from kvsim.core.trace import derived


def test_the_table_says_who_is_best_and_how_sure(run, printed, runs):
    """Each policy at each budget, over what the means are, what columns mean, the fidelity."""
    out = printed("compare", runs / "many")
    lines = out.splitlines()
    document = json.loads(run("compare", runs / "many", "--json")[1])
    best = {cell["requested"]: cell["policy"] for cell in document["cells"] if cell["rank"] == 1}

    assert [line for line in lines[:3] if line] == document["verdict_text"]
    assert [line.split()[1] for line in lines[:2]] == [f"{size}:" for size in best]
    assert lines[2].startswith("Ranked by output_error; kvsim replay --judge ranks by")
    assert [one["first"][0] for one in document["verdict"]] == [*best.values()]
    assert lines[4] == (
        "output_error (relative, lower is better): mean over 7 prompts, of layers, heads and "
        "events within a prompt first, in brackets the 95 % interval over prompts."
    )
    rows = [re.split(r"\s{2,}", line) for line in lines[7:13]]
    assert [(row[0], row[1]) for row in rows if row[2] == "1"] == [*best.items()]
    assert [row[1] for row in rows if row[2] == "-"] == ["full", "full"]
    assert "the policies marked yes hold the best one with 95 %" in out
    assert "Fidelity of the values:" in out
    assert "Note: full: listed without a rank" in out
    assert "(Holm)" not in out
    assert "corrected for 2 comparisons (Holm)" in printed(
        "compare", runs / "many", "--against", "tova"
    )


def test_json_has_every_number(run, runs):
    """Cells with their parameters, prompts, margin, fidelity, remarks."""
    document = json.loads(run("compare", runs / "many", "--json")[1])
    table = kvsim.compare(pl.read_parquet(runs / "many" / "results.parquet")).table

    assert document["margin"] == 0.1
    assert document["prompts"] == [str(place) for place in range(7)]
    assert document["better"] == "lower"
    assert set(document["fidelity"]) == {"exact", "open"}
    assert [cell["mean"] for cell in document["cells"]] == table["mean"].to_list()
    assert document["cells"][0]["params"].keys() == kvsim.policy(table["policy"][0]).params.keys()


def test_csv_is_the_table(run, runs):
    """Every column and row, as a reader of CSV has them; nothing else is printed."""
    _, out, _ = run("compare", runs / "many", "--format", "csv", "--metric", "wipeout")
    rows = list(csv.DictReader(io.StringIO(out)))
    table = kvsim.compare(pl.read_parquet(runs / "many" / "results.parquet"), "wipeout").table

    assert list(rows[0]) == table.columns
    assert [row["policy"] for row in rows] == table["policy"].to_list()
    assert [float(row["mean"]) for row in rows] == table["mean"].to_list()


def test_policies_and_budgets_are_chosen(run, runs):
    """By name; a Parquet file is a source too."""
    source = runs / "many" / "results.parquet"
    options = ["--policy", "tova,streaming_llm", "--budget", "24", "--against", "tova", "--json"]
    document = json.loads(run("compare", source, *options)[1])
    against = {cell["policy"]: cell["against"] for cell in document["cells"]}

    assert against == {"tova": None, "streaming_llm": "tova"}


def test_runs_are_ranked_by_the_best_evidence_that_all_have(run, runs, tmp_path):
    """A better metric of one of them hides no budget of the other; it is named, and can be had."""
    table = pl.read_parquet(runs / "many" / "results.parquet")
    more = table.filter(pl.col("budget") == 24, metric="output_error")
    more = pl.concat([table, more.with_columns(metric=pl.lit("layer_error"))])
    for name, part in (("less", table), ("more", more.filter(pl.col("budget") == 24))):
        shutil.copytree(runs / "many", tmp_path / name)
        part.write_parquet(tmp_path / name / "results.parquet")
        bind(tmp_path / name, json.loads((tmp_path / name / "run.json").read_text()))

    both = tmp_path / "less", tmp_path / "more"
    document = json.loads(run("compare", *both, "--json")[1])
    named = json.loads(run("compare", *both, "--json", "--metric", "layer_error")[1])

    assert document["metric"] == kvsim.compare(both).metric == "output_error"
    assert {cell["requested"] for cell in document["cells"]} == {"24", "48"}
    assert "1 of 2 have layer_error (--metric layer_error)" in document["remarks"][0]
    assert kvsim.compare(both).remarks[0] == document["remarks"][0]
    assert named["metric"] == "layer_error"
    assert "1 budget without a value of layer_error: 48" in named["remarks"]
    assert json.loads(run("compare", both[1], "--json")[1])["metric"] == "layer_error"


def test_models_of_one_name_are_told_apart_by_their_weights(run, tmp_path):
    """Two rows of a table, no mean over both; a trace that names no weights has the plain name."""
    sample, paths = kvsim.open_trace(kvsim.sample_trace()), []
    for name, digit in {"a": "1", "b": "2", "c": "2", "d": ""}.items():
        model = {
            "name": "runs/checkpoint-500",
            **({"weights": f"sha256:{digit * 64}"} if digit else {}),
        }
        meta = {**sample.meta, "model": model}
        trace = derived(sample, sample.source, replace(sample.header, name=name, meta=meta))
        paths.append(kvsim.save_trace(trace, tmp_path / f"{name}.zarr"))
    runs = []
    for part in (paths[:1], paths[1:]):
        runs.append(tmp_path / f"run{len(runs)}")
        options = ["--policy", "tova", "--budget", 48, "--metric", "wipeout", "--out", runs[-1]]
        assert run("replay", *part, *options)[0] == 0

    out = run("compare", *runs, "--by", "model")[1]
    ones, twos = (f"checkpoint-500 ({digit * 8})" for digit in "12")
    rows = re.findall(r"^(checkpoint-500(?: \(\d+\))?) +tova +48 ", out, re.MULTILINE)
    assert sorted(rows) == sorted([ones, twos, "checkpoint-500"])
    for command in (["compare", *runs], ["report", *paths[:2]]):
        status, _, err = run(*command)
        assert status == 2
        assert f"several models: {ones} (a), {twos} (b" in err


def test_runs_of_several_models_are_compared_one_by_one(run, runs, tmp_path):
    """Commands refuse them in a line; `info` and `compare --by model` have rows of each."""
    table = pl.read_parquet(runs / "many" / "results.parquet")
    other = pl.when(pl.col("trace") == "0").then(pl.lit("other")).otherwise("model")
    assert table["model"].unique().to_list() == ["tiny"]
    mixed = tmp_path / "mixed"
    shutil.copytree(runs / "many", mixed)
    table.with_columns(model=other).write_parquet(mixed / "results.parquet")
    bind(mixed, json.loads((mixed / "run.json").read_text()))

    for command in ("compare", "report"):
        status, out, err = run(command, mixed)
        assert (status, out) == (2, "")
        assert "several models: other (0), tiny (1, 2, 3 and 3 more); expected one" in err
    _, out, _ = run("info", mixed)
    assert "No verdict: traces of several models" in out
    assert len(re.findall(r"^tova +24 +(other|tiny) ", out, re.MULTILINE)) == 2
    assert len(re.findall(r"^full +- +(other|tiny) ", out, re.MULTILINE)) == 2
    _, out, _ = run("compare", mixed, "--by", "model")
    assert {*re.findall(r"^(other|tiny) +tova +24 ", out, re.MULTILINE)} == {"other", "tiny"}
    assert re.search(r"^other .* 1 of 1 ", out, re.MULTILINE), out


def test_schedules_that_differ_between_runs_are_named(run, tmp_path):
    """A policy that was replayed by itself has its own, and no run speaks for the others."""
    one, two = tmp_path / "one", tmp_path / "two"
    for out, policies in ((one, "tova,h2o"), (two, "keydiff")):
        terms = ["--budget", 48, "--metric", "output_error", "--out", out]
        assert run("replay", "sample", "--policy", policies, *terms)[0] == 0

    alone, both = run("compare", one)[1], run("compare", one, two)[1]

    assert "all policies act on one schedule (the prompt, every 32 rows)" in alone
    assert "all policies" not in both
    schedules = "(tova, h2o: the prompt, every 32 rows; keydiff: the prompt)"
    assert f"Note: schedules differ {schedules}, which changes all values" in both
    remarks = [kvsim.compare(runs).remarks for runs in (one, [one, two])]
    assert [sum("schedule" in line for line in each) for each in remarks] == [1, 1]
    assert f"Note: {remarks[1][-1]}." in both


def test_a_prompt_under_two_names_is_said_to_count_twice(run, tmp_path):
    """By the command and in Python, of one run and of several."""
    trace = kvsim.open_trace("sample")
    for name in ("one", "two"):
        copy = derived(trace, trace.source, replace(trace.header, name=name), path=None)
        kvsim.save_trace(copy, tmp_path / f"{name}.zarr")
    terms = ["--policy", "tova,h2o", "--budget", 48, "--metric", "output_error", "--out"]
    runs = {"both": ["one", "two"], "first": ["one"], "second": ["two"]}
    for out, names in runs.items():
        run("replay", *(tmp_path / f"{x}.zarr" for x in names), *terms, tmp_path / out)

    said = "one, two are the same prompt, which counts more than once"
    assert f"Note: {said}." in run("compare", tmp_path / "both")[1]
    for given in ([tmp_path / "both"], [tmp_path / "first", tmp_path / "second"]):
        assert said in kvsim.compare(given).remarks
    assert said not in kvsim.compare(tmp_path / "first").remarks


def test_a_policy_that_is_judged_later_joins_the_others(run, tmp_path):
    """Its run has the values of the first one, in all commands; rounding is named, more is not."""
    one, two = tmp_path / "one", tmp_path / "two"
    terms = ["--budget", 48, "--interval", 32, "--metric", "output_error", "--judge"]
    for out, policies in ((one, "adakv+snapkv,h2o+quest"), (two, "adakv+snapkv,pyramidkv")):
        assert run("replay", "sample", "--policy", policies, *terms, "--out", out)[0] == 0
    tables = [pl.read_parquet(each / "results.parquet") for each in (one, two)]
    shared = [x.filter(policy="adakv+snapkv").drop("model") for x in tables]
    moved = (shared[0]["value"] / shared[1]["value"] - 1).abs()
    assert moved.max() < TOLERANCE / 10

    def moving(metric, share):
        wide = pl.when(metric=metric).then(pl.col("value") * (1 + share)).otherwise("value")
        tables[1].with_columns(value=wide).write_parquet(two / "results.parquet")
        bind(two, json.loads((two / "run.json").read_text()))

    for metric, share in (("response_kl", 3e-5), ("output_error", 3e-6)):
        moving(metric, share)
        status, _, err = run("compare", one, two)
        assert status == 2
        assert f"different values of {metric} for adakv+snapkv on sample" in err
    moving("response_kl", 3e-6)
    remark = r"differ by rounding, most of all the values of response_kl for adakv[+]snapkv on "
    page, picture = tmp_path / "page.html", tmp_path / "picture.png"
    for command, *out in (
        ["compare"],
        ["plot ranking", "--out", picture],
        ["report", "--out", page],
    ):
        status, text, err = run(*command.split(), one, two, *out)
        assert status == 0, err
        text += page.read_text() if command == "report" else ""
        assert re.search(remark, text + err), command
    assert {"h2o+quest", "pyramidkv"} < {*as_table([one, two])["policy"]}


def test_commands_that_read_tables_load_no_torch(runs, tmp_path):
    """Nor transformers or scipy.stats, and those that describe policies and metrics."""
    run = str(runs / "many")
    commands = [
        *(["policies"], ["policies", "ams"], ["metrics"]),
        *(["compare", run], ["compare", run, "--by", "layer"], ["info", run]),
        ["plot", "pareto", run, "--out", str(tmp_path / "a.png")],
        ["report", run, "--out", str(tmp_path / "a.html")],
    ]
    code = (
        "import sys; from kvsim.cli import main\n"
        f"for command in {commands!r}:\n"
        "    try: main(command)\n"
        "    except SystemExit as end: assert not end.code, (command, end.code)\n"
        "print(*{'scipy.stats', 'torch', 'transformers'} & {*sys.modules}, sep=',')"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert done.stdout.splitlines()[-1] == ""
