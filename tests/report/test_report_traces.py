"""`kvsim report` of traces: numbers with intervals, figures, and what is refused."""

import base64
import html
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

import kvsim
from kvsim.analysis.folder import read_run
from kvsim.analysis.summaries import Interval
from kvsim.cli import _status
from kvsim.core.trace import derived
from kvsim.errors import OutputError, PolicyError, TraceError
from kvsim.report import page, write_report
from kvsim.studies.expectation.expectation import STEPS, expected_and_observed
from kvsim.sweeps.driver import replay_all
from traces import changed, settling_trace
from web import Reader

pytestmark = pytest.mark.usefixtures("no_layout")

HOSTILE = "<script>alert('x')</script>&\"' $\\foo$ {body}"


def settling(layers, n, **options):
    """A trace whose layers come to rank alike, with texts that are not to be trusted."""
    return settling_trace(
        layers, n, **{"prompt_len": n - 8, "token_text": [HOSTILE] * n, **options}
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of the sample."""
    trace = kvsim.open_trace(kvsim.sample_trace())
    found = replay_all([trace], [kvsim.policy("tova")], [64], interval=64, prefill=False)
    return found.save(tmp_path_factory.mktemp("runs") / "real")


@pytest.fixture(scope="module")
def beside(run, tmp_path_factory):
    """The page of the run and its trace, from the command line."""
    out = tmp_path_factory.mktemp("pages") / "beside.html"
    assert _status(["report", str(run), "sample", "--out", str(out)]) == 0
    return out.read_text("utf-8")


@pytest.fixture(scope="module")
def several():
    """Of nine layers: one with a hostile name selects, one never does, one has no response."""
    return [
        settling(9, 100, speed=3.0, seed=0, name=HOSTILE),
        settling(9, 100, speed=0.0, seed=1, name="random"),
        settling(9, 80, speed=3.0, seed=2, name="prompt", prompt_len=80),
    ]


@pytest.fixture(scope="module")
def alone(several):
    """The page of three traces without a run."""
    return page([], traces=several)


EXPECTED, LAYERS = "Expected and observed attention", "How layers rank the prompt"
QUERIES = "How queries are distributed"


def test_a_page_has_what_its_traces_say_beside_the_run(beside):
    """Sections of both, and claims that a run alone cannot answer."""
    found = Reader(beside)
    titles = [title for title in found.tables if title]

    for title in ("Results", "What the traces say", EXPECTED, LAYERS, QUERIES):
        assert title in titles
    assert "Where this comes from" in found.text
    assert found.text.index("Results") < found.text.index(EXPECTED)
    assert found.text.index(QUERIES) < found.text.index("What the papers say")
    trace = kvsim.open_trace(kvsim.sample_trace())
    assert trace.digest in found.row("What the traces say", "sample")
    claim = found.row("What the papers say", "E1")
    layer = kvsim.measure(trace, metrics=["expectation"]).filter(layer=1)["value"].mean()
    assert f"{layer:+.3f}" in claim[-1]


def test_the_numbers_are_those_of_the_analyses(beside):
    """Of one prompt, without intervals: layer by layer, and of all."""
    found, trace = Reader(beside), kvsim.open_trace(kvsim.sample_trace())
    agreement = expected_and_observed(trace, trace.prompt_len).spearman.mean(-1)  # [step, layer]
    for layer in range(3):
        values = [f"{x:.3f}" for x in agreement[:, layer]]
        assert found.row(EXPECTED, str(layer))[1:] == values
    assert found.row(EXPECTED, "all")[1:] == [f"{x:.3f}" for x in agreement.mean(-1)]

    table = kvsim.measure(trace)
    for layer in range(3):
        part = table.filter(layer=layer)
        entropy = part.filter(metric="layer_entropy")["value"].item()
        row = found.row(LAYERS, str(layer))
        assert row[1] == f"{entropy:.3f}"
        relative = part.filter(metric="rank_relative", variant="k=25%")["value"].to_list()
        assert row[3] == (f"{relative[0]:.3f}" if relative else "-")
        gaps = [part.filter(variant=f"skip={skip}")["value"].item() for skip in (4, 0)]
        row = found.row(QUERIES, str(layer))
        assert row[2:] == [f"{gap:.3f}" for gap in gaps]
        distance = part.filter(metric="normal_distance")
        assert row[1] == f"{distance['value'].mean():.3f}chance {distance['chance'].mean():.3f}"
    assert "the relative variance of layer 1 is 1 at the least" in found.text


def test_several_traces_have_intervals_and_are_counted(alone, several):
    """Over prompts; a trace without a response has no expectation, and is counted as one."""
    found = Reader(alone)
    with_response = several[:2]
    by_step = np.array(
        [expected_and_observed(t, t.prompt_len).spearman.mean((1, 2)) for t in with_response]
    )
    cells = [f"{Interval.of(by_step[:, i]).text('.3f')} (2 of 3)" for i in range(len(STEPS))]
    assert found.row(EXPECTED, "all")[1:] == cells
    entropy = pl.concat([kvsim.measure(t, metrics=["layer_entropy"]) for t in several]).filter(
        layer=4
    )
    assert found.row(LAYERS, "4")[1] == Interval.of(entropy["value"].to_numpy()).text(".3f")
    assert "9 layers" in found.text
    assert "means over prompts" in found.text
    assert "kvsim report: 3 traces" in found.text


def test_names_and_texts_of_traces_are_escaped(alone):
    """On the page and in the figures, where they are no mathematics either."""
    found = Reader(alone)
    assert "script" not in {tag for tag, _ in found.tags}
    assert "<script" not in alone
    assert HOSTILE in html.unescape(alone)
    images = [attributes["src"] for tag, attributes in found.tags if tag == "img"]
    drawn = [base64.b64decode(x.partition(",")[2]) for x in images if "svg" in x.partition(",")[0]]
    assert len(drawn) >= 3
    assert not any(b"<script" in one for one in drawn)
    kinds = {x.partition(",")[0] for x in images}
    assert kinds == {"data:image/svg+xml;base64", "data:image/png;base64"}
    (wide,) = [int(a["width"]) for tag, a in found.tags if tag == "img" and "width" in a]
    assert 300 < wide < 1200


def test_a_trace_that_the_run_did_not_replay_is_refused(run, tmp_path):
    """Another content under the same name, another name, two of one name; nothing is written."""
    sample = kvsim.open_trace(kvsim.sample_trace())
    other = changed(sample, scale=sample.formulas[0].scale)
    stranger = changed(sample, name="stranger")
    meta = {**sample.meta, "spans": {"needle": [[3, 9]]}}
    again = derived(sample, sample.source, replace(sample.header, meta=meta))  # a corrected needle
    out = tmp_path / "r.html"

    assert again.digest == sample.digest != other.digest
    for each in (other, again):
        with pytest.raises(OutputError) as refused:
            write_report([run], out, traces=[each])
        for part in (
            each.fingerprint,
            sample.fingerprint,
            str(run),
            "give the trace that was replayed",
        ):
            assert part in str(refused.value)
    with pytest.raises(OutputError, match=r"stranger .* is not among the traces of .*: sample;"):
        write_report([run], out, traces=[sample, stranger])
    with pytest.raises(TraceError, match="are both called 'sample'; expected one name"):
        write_report([], out, traces=[sample, other])
    with pytest.raises(PolicyError, match="nothing to report; give a run with values or a trace"):
        write_report([], out)
    assert not out.exists()
    assert read_run(run).parameters["traces"] == {"sample": sample.fingerprint}
