"""Page *Compare* without a browser: its numbers are the Table's, whatever runs are called."""

import dataclasses
import json
import shutil

import polars as pl
import pytest

import kvsim
from kvsim.analysis.folder import read_run
from kvsim.analysis.output.metrics import REGRET
from kvsim.analysis.results import labelled
from kvsim.analysis.sentences import answer
from kvsim.analysis.summaries import averages, stages
from kvsim.samples import sample_trace
from kvsim.sweeps.driver import replay_all
from traces import random_trace

MEASURED = ("output_error", "wipeout", "entries_seen", "bytes_held", "retained_iou", "sparsity")
POLICIES = ("streaming_llm", "tova", "random")


def made(seed, n=110):
    """A small trace of three layers."""
    return random_trace(layers=3, n=n, seed=seed, size=1.0, prompt_len=40, name=f"made-{seed}")


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A folder of runs: of three prompts in two domains, of one, a broken and a hostile one."""
    root = tmp_path_factory.mktemp("compare")
    kvsim.save_trace(made(0), root / "trace.zarr")
    policies = [kvsim.policy(name) for name in POLICIES]
    several = replay_all(
        [made(seed) for seed in range(3)], policies, [32, "50%"], interval=16,
        metrics=[*MEASURED, *REGRET],
    )  # fmt: skip
    domains = {"made-0": "paint", "made-1": "tea", "made-2": "paint"}
    table = several.table.with_columns(domain=pl.col("trace").replace_strict(domains))
    dataclasses.replace(several, table=table).save(root / "several")
    first = several.table.filter(trace="made-0", metric="output_error")
    dataclasses.replace(several, table=first, records=several.records[:1]).save(root / "one")
    (root / "worse").mkdir()
    (root / "worse" / "run.json").write_text("{")
    return root


def table_of(root, name="several", policies=POLICIES, **same):
    """Values of a run with labels of results."""
    found = labelled(read_run(root / name).table)
    return found.filter(pl.col("policy").is_in(list(policies))).filter(**same)


def numbers(frame):
    """Policy, budget and mean in the order of a table."""
    columns = [frame[name] for name in ("policy", "requested", "mean")]
    return list(zip(*(list(one) for one in columns), strict=True))


def drawn(app, place):
    """The lines of a picture: name to values, those that are listed in the legend."""
    spec = json.loads(app.get("plotly_chart")[place].proto.spec)
    return {one["name"]: one for one in spec["data"] if one.get("showlegend")}


def test_means_are_those_of_the_table(opened, ran):
    """Of the main variant of the output error at first: the table and the lines, without bars."""
    app = opened(ran, "compare", run="several")
    expected = averages(table_of(ran, metric="output_error"))

    assert not app.exception
    shown = app.dataframe[0].value
    assert numbers(shown) == numbers(expected)
    for name in ("n", "of"):
        assert shown[name].to_list() == expected[name].to_list()
    assert "low" not in shown  # of three prompts
    lines = drawn(app, 0)
    assert list(lines) == list(POLICIES)
    for policy in POLICIES:
        part = expected.filter(policy=policy)
        assert lines[policy]["y"] == pytest.approx(part["mean"].to_list())
        assert "array" not in lines[policy].get("error_y", {})
    assert any("3 prompts: no interval" in one.value for one in app.caption)
    verdict = answer(table_of(ran), ["output_error"])[1]
    assert len(verdict) == 3
    assert app.text[0].value == "\n".join(verdict)


@pytest.mark.parametrize("by", ["stage", "domain"])
def test_a_split_has_a_panel_for_each_part(opened, ran, by):
    """Stages of the model from each trace's layers, labels where prompts differ."""
    app = opened(ran, "compare", run="several")
    app.selectbox(key="by").select(by).run()
    expected = averages(stages(table_of(ran, metric="output_error")), [by])
    spec = json.loads(app.get("plotly_chart")[0].proto.spec)
    titles = [one["text"] for one in spec["layout"]["annotations"]]

    assert not app.exception
    assert numbers(app.dataframe[0].value) == numbers(expected)
    assert titles == [f"{by} {one}" for one in expected[by].unique().sort()]
    assert app.selectbox(key="by").options == ["nothing", "stage", "domain"]


def test_a_damaged_run_is_a_message(opened, ran):
    """Not a traceback, and another run can be chosen."""
    app = opened(ran, "compare", run="worse")

    assert not app.exception
    assert "cannot be read" in app.error[0].value
    app.selectbox(key="run").select("several").run()
    assert not app.error
    assert len(app.dataframe) == 3


def test_without_a_run_the_chosen_trace_is_replayed(opened, tmp_path):
    """Numbers of a sweep on the same terms; the page says how a run is made."""
    trace = made(0)
    kvsim.save_trace(trace, tmp_path / "trace.zarr")
    app = opened(tmp_path, "compare", replay=["tova", "random"], budgets=["32", "64"])
    run = replay_all(
        [trace], [kvsim.policy(name) for name in ("tova", "random")], [32, 64], interval=32
    )
    expected = averages(run.table.filter(metric="output_error", policy="tova"))

    assert not app.exception
    assert any("kvsim replay" in one.value for one in app.code)
    shown = app.dataframe[0].value
    own = shown[shown["policy"] == "tova"]
    assert dict(zip(own["requested"], own["mean"], strict=True)) == pytest.approx(
        dict(zip(expected["requested"], expected["mean"], strict=True))
    )
    app.toggle(key="regret").set_value(True).run()
    assert len(app.dataframe) == 3
    app.multiselect(key="replay").set_value([]).run()
    assert any("at least one policy" in one.value for one in app.info)


def test_the_recorded_model_judges_on_request(opened, tmp_path):
    """The switch is there for a trace of a whole model; its divergence is a metric then."""
    shutil.copytree(sample_trace(), tmp_path / "sample.zarr")
    app = opened(tmp_path, "compare", replay=["tova", "h2o"], budgets=["64"])
    assert "response_kl" not in app.selectbox(key="metric").options
    app.toggle(key="judge").set_value(True).run()

    assert not app.exception
    assert "response_kl" in app.selectbox(key="metric").options
    assert any("judged" in one.value for one in app.caption)
