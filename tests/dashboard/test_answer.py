"""The first page: the newest run's verdict and chart, or what two policies leave of a text."""

import json
import os

import pytest

import kvsim
from kvsim.analysis.folder import read_run
from kvsim.analysis.results import labelled
from kvsim.analysis.sentences import answer, tabulated
from kvsim.analysis.summaries import averages
from kvsim.samples import sample_trace
from kvsim.sweeps.driver import replay_all
from tests.dashboard.test_retention import said
from traces import random_trace


def made(seed, texts=None):
    """A small trace of two layers."""
    facts = {"prompt_len": 40, "name": f"made-{seed}", "token_text": texts}
    return random_trace(n=100, seed=seed, size=1.0, **facts)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A folder of two runs, of which that of the name that sorts last is the older one."""
    root = tmp_path_factory.mktemp("answer")
    policies = [kvsim.policy(name) for name in ("streaming_llm", "tova")]
    metrics = ["wipeout", "output_error"]
    for name, seed, written in (("newer", 0, 2000), ("older", 1, 1000)):
        run = replay_all([made(seed)], policies, [32, 64], interval=16, metrics=metrics)
        run.save(root / name)
        os.utime(root / name / "results.parquet", (written, written))
    return root


@pytest.mark.parametrize("name", ["newer", "older"])
def test_a_run_opens_with_its_verdict_and_chart(opened, ran, name):
    """The newest by default, another one by the link; the table is that of the report."""
    app = opened(ran, **({} if name == "newer" else {"run": name}))
    table = labelled(read_run(ran / name).table)
    expected = averages(table.filter(metric="output_error"))

    assert not app.exception
    assert app.header[0].value == "Answer"
    assert app.selectbox(key="run").value == name
    comparison, sentences = answer(table, ["output_error"])
    _, rows = tabulated(comparison)
    assert app.text[0].value == "\n".join(sentences)
    assert app.dataframe[0].value.to_numpy().tolist() == rows
    (chart,) = app.get("plotly_chart")
    lines = {one["name"]: one["y"] for one in json.loads(chart.proto.spec)["data"]}
    for policy, means in lines.items():
        assert means == pytest.approx(expected.filter(policy=policy)["mean"].to_list())


def test_an_empty_folder_shows_two_texts_and_what_they_miss(opened, tmp_path):
    """Of the sample with a text, at its last event; the sentence is that of a plain count."""
    app = opened(tmp_path)
    trace = kvsim.open_trace(sample_trace("smollm2"))
    weights = trace.attention(0, slice(0, trace.n_pos))[6:9].amax(0)
    (first, stop), = trace.header.spans["needle"]  # fmt: skip

    assert not app.exception
    texts = [one.proto.body for one in app.get("html") if one.proto.body.startswith("<pre")]
    assert len(texts) == 2
    for name, text in zip(("snapkv@scaled", "streaming_llm"), texts, strict=True):
        record = kvsim.replay(trace, kvsim.policy(name), 128, interval=32, prefill=True, layers=[0])
        gone, last = record.evicted_at[0, 2].tolist(), max(record.events)
        evicted = [p for p in range(last + 1) if gone[p] <= last]
        missed = {p for p in evicted if (weights[gone[p] + 1 :, p] >= 0.05).any()}
        needle = set(range(first, stop))
        assert f"{name} keeps 128 of {last + 1} tokens and misses {len(missed)}" in said(app)
        kept = len(needle - set(evicted))
        assert f"{name} keeps {kept} and misses {len(needle & missed)}" in said(app)
        assert ('title="missed"' in text) == bool(missed)
    before = said(app)
    app.number_input(key="budget").set_value(300).run()
    assert said(app) != before


def test_a_run_without_a_ranking_says_so(opened, ran, tmp_path):
    """Nothing that has a better direction was measured; the page names what shows the rest."""
    run = replay_all([made(0)], [kvsim.policy("tova")], [32], interval=16, metrics=["entries_seen"])
    run.save(tmp_path / "run")
    app = opened(tmp_path)

    assert not app.exception
    assert "no metric that ranks policies" in app.info[0].value
    assert "another run" in app.info[0].value
