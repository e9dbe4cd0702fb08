"""`kvsim report` of traces: numbers with intervals, figures, and what is refused."""

import html
from dataclasses import replace

import numpy as np
import pytest

import kvsim
from kvsim.analysis.folder import read_run
from kvsim.analysis.summaries import Interval
from kvsim.cli import _status
from kvsim.core.trace import derived
from kvsim.errors import OutputError, PolicyError, TraceError
from kvsim.report import page, write_report
from kvsim.studies.expectation.expectation import STEPS, expected_and_observed
from kvsim.studies.language.tasks import prompts
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


TRACES = "What the traces say"


def test_a_page_has_what_its_traces_say_beside_the_run(beside):
    """Numbers of both, and claims that a run alone cannot answer."""
    found, trace = Reader(beside), kvsim.open_trace(kvsim.sample_trace())

    assert "Where this comes from" in found.text
    assert found.text.index("Results") < found.text.index(TRACES)
    assert found.text.index(TRACES) < found.text.index("What the papers say")
    assert trace.digest in found.row(TRACES, "sample")
    table = kvsim.measure(trace, metrics=["expectation", "normal_distance"])
    claim = found.row("What the papers say", "E1")
    layer = table.filter(metric="expectation", layer=1)["value"].mean()
    assert f"{layer:+.3f}" in claim[-1]
    distance = table.filter(metric="normal_distance")
    row = found.row(TRACES, "normal_distance")
    assert row[2:] == [f"{distance['value'].mean():.3f}", f"{distance['chance'].mean():.3f}"]


def test_several_traces_have_intervals_and_are_counted(alone, several):
    """Over prompts; a trace without a response has no expectation, and is counted as one."""
    found = Reader(alone)
    by_step = np.array(
        [expected_and_observed(t, t.prompt_len).spearman.mean((1, 2)) for t in several[:2]]
    )
    for i, step in enumerate(STEPS):
        row = found.row(TRACES, "expectation_steps", step)
        assert row[2] == f"{Interval.of_each([by_step[:, i]])[0].text('.3f')} (2 of 3)"
    assert "means over prompts" in found.text
    assert "kvsim report: 3 traces" in found.text


def test_a_page_has_what_was_recorded_of_its_traces_alone(tmp_path):
    """Not other traces of the run, nor metrics of rows that a trace left out."""
    traces = [changed(settling(3, 90, seed=seed), name=f"t{seed}") for seed in range(2)]
    run = replay_all(traces, ["tova"], [40], metrics=["wipeout", "layer_entropy"])
    found = Reader(page([read_run(run.save(tmp_path / "run"))], traces=traces[:1]))
    alone = kvsim.measure(traces[0], metrics="layer_entropy")["value"].mean()
    assert found.row(TRACES, "layer_entropy")[2] == f"{alone:.3f}"
    assert found.row(TRACES, "sparsity")

    (prompt,) = prompts(1, task="walk", facts=160, lines=3, kinds=3)
    few = kvsim.capture("tiny", None, prompt.prompt, max_new_tokens=16, rows="response+16")
    assert few.header.left_out is not None
    assert "repetition" in page([], traces=[few])


def test_names_and_texts_of_traces_are_escaped(alone):
    """Whatever a trace is called."""
    found = Reader(alone)
    assert "script" not in {tag for tag, _ in found.tags}
    assert "<script" not in alone
    assert HOSTILE in html.unescape(alone)


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
