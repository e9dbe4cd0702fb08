"""Metrics of a running model: outcomes by hand, repetition, and what is refused where."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

import kvsim
from kvsim.analysis.live.table import measure_live
from kvsim.analysis.measuring import choose
from kvsim.analysis.registry import METRICS
from kvsim.core.outcome import Forced, Generated, Outcome, OutputDeviation
from kvsim.errors import PolicyError
from traces import random_trace


def outcome():
    """A response of three tokens, and a right answer of four tokens with half of the cache."""
    shape = (2, 4, 3)
    forced = Forced(
        nll=np.array([3.0, 1.0, 2.0]),
        full_nll=np.full(3, 0.5),
        kl=np.array([0.1, 0.2, 0.3]),
        agreement=np.array([1.0, 0.0, 1.0]),
        stream_error=np.array([[0.0, 0.0, 0.0], [0.2, 0.3, 0.4]]),
        output=OutputDeviation(
            np.full(shape, 0.25, np.float32),
            np.full(shape, np.nan, np.float32),
            added=np.full((2, 3), 2.0, np.float32),
        ),
    )
    generated = Generated(
        tokens=(5, 6, 7, 8),
        right=True,
        answered=2,
        full_right=True,
        seconds=0.5,
    )
    return Outcome(forced, generated, peak_bytes=512, full_bytes=1024)


def live(*metrics, of=None):
    """The Table of a live run of tova at 8 entries."""
    trace = random_trace(n=24, prompt_len=21)
    record = kvsim.replay(trace, kvsim.policy("tova"), 8)
    closed = [replace(record, closed=True)]
    return measure_live(trace, closed, [of or outcome()], [*metrics] or None)


def values(table):
    """The value of each metric without a layer."""
    rows = table.filter(pl.col("layer").is_null()).select("metric", "value").rows()
    return dict(rows)


def test_likelihoods_are_means_over_the_response_after_its_first_token():
    """Of three tokens, in nats; the last row of the prompt predicts the first."""
    table = live()

    assert values(table)["response_kl"] == pytest.approx(0.25)
    assert values(table)["nll_increase"] == pytest.approx((1.0 + 2.0 - 2 * 0.5) / 2)
    assert values(table)["top_agreement"] == pytest.approx(1 / 2)
    tokens = live("response_kl_tokens")
    assert values(tokens.filter(metric="response_kl")) == {"response_kl": pytest.approx(0.25)}
    tokens = tokens.filter(metric="response_kl_tokens")
    rows = [(22, "", 0.2), (23, "", 0.3), (22, "changed", 1.0), (23, "changed", 0.0)]
    assert tokens["event", "variant", "value"].rows() == rows
    assert tokens["unit"].to_list() == ["nats", "nats", "share", "share"]
    residual = table.filter(metric="stream_error").select("layer", "value").rows()
    assert residual == [(0, 0.0), (1, pytest.approx(0.3))]
    assert set(table["fidelity"]) == {"closed"}


def test_what_the_model_wrote_is_judged():
    """A right answer after two of four tokens, half of the bytes."""
    found = values(live())

    assert found["answer_right"] == found["answer_kept"] == 1.0
    assert found["tokens_to_answer"] == 2.0
    assert found["response_tokens"] == 4.0
    assert found["peak_share"] == 0.5


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"right": None, "answered": None}, {"answer_right", "answer_kept", "tokens_to_answer"}),
        ({"right": False, "answered": None}, {"tokens_to_answer"}),
        ({"full_right": False}, {"answer_kept"}),
        ({"full_right": None}, {"answer_kept"}),
    ],
)
def test_what_is_not_known_has_no_row(changes, missing):
    """An answer that nothing checks is neither right nor wrong."""
    usual = outcome()
    other = replace(usual, generated=replace(usual.generated, **changes))

    found = values(live(of=other))

    assert values(live()).keys() - found.keys() == missing


def test_rows_have_the_errors_of_the_live_run():
    """output_error and layer_error come from the outcome, not from recorded attention."""
    table = live("output_error", "layer_error")

    of_output = table.filter(metric="output_error")
    assert of_output.height == 2 * 4  # layers, query heads
    assert of_output["value"].to_list() == pytest.approx([0.25] * 8)
    assert table.filter(metric="layer_error")["value"].to_list() == pytest.approx([2.0, 2.0])


def test_metrics_of_one_kind_of_run_are_refused_for_the_other():
    """A replay runs no model, and a live run has no recorded attention."""
    given = random_trace(n=24, prompt_len=21)
    record = kvsim.replay(given, kvsim.policy("tova"), 8)
    with pytest.raises(PolicyError, match="response_kl is about a running model"):
        kvsim.measure(given, record, ["response_kl"])
    with pytest.raises(PolicyError, match="retained_mass is computed from recorded attention"):
        choose(["retained_mass"], live=True)
    with pytest.raises(PolicyError, match="did you mean"):
        choose(["response_k"], live=True)
    live = {name for name, entry in METRICS.items() if entry.kind == "live"}
    assert live - choose(None, live=True).keys() == {"response_kl_tokens"}
    assert live.isdisjoint(kvsim.measure(given, record)["metric"])
