"""Several turns on a running model: events after questions, answers of their own, by turn."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

import kvsim
from kvsim.analysis.measuring import choose
from kvsim.core.policy import Schedule
from kvsim.recorder.choice import Choice
from kvsim.recorder.prompts import Prompt, Turn
from kvsim.runner.closed import ClosedLoop, Writing
from kvsim.runner.decoding import Decoding, RunningModel
from live_runs import live_policies
from small_model import small, words_tokenizer

CONTEXT = " ".join(f"w{(7 * i) % 50 + 10}" for i in range(60))
TURNS = [Turn("w4 w5", answer="w1"), Turn("w6 w2 w1", answer="w3", max_new_tokens=5)]
NEW = 8


@functools.cache
def trace():
    """Three turns on one context."""
    prompt = Prompt("p", "w1 w2 w3", answer="w5", context=f"{CONTEXT} ", turns=TURNS)
    return kvsim.capture(small(), words_tokenizer(), prompt, max_new_tokens=NEW)


@functools.cache
def running():
    """The model of the trace."""
    return RunningModel(small())


def loop(new_tokens=NEW):
    """A closed loop over the trace."""
    writing = Writing(new_tokens, Choice(small(), ())) if new_tokens else None
    return ClosedLoop(running(), trace(), words_tokenizer(), writing)


@pytest.mark.parametrize("name", ["snapkv", "tova", "h2o", "expected_attention", "adakv+snapkv"])
@pytest.mark.parametrize("compress", ["questions", "context+questions"])
def test_a_layer_that_alone_evicts_is_its_replay(name, compress):
    """Events after every question evict what the replay of the recorded turns evicts."""
    policy = live_policies()[name]
    schedule = Schedule(5, compress=compress)

    record, _ = loop(0).run(policy, 40, schedule, layers=[0])

    options = {"interval": 5, "prefill": True, "compress": compress, "layers": [0]}
    expected = kvsim.replay(trace(), policy, 40, **options)
    assert np.array_equal(record.evicted_at, expected.evicted_at)
    ends = [stop - 1 for _, stop in trace().header.questions]
    assert {*ends, trace().prompt_len - 1} <= {*expected.events}


def test_the_full_cache_writes_the_recorded_answers():
    """Turn after turn over one cache, each compared with its own answer."""
    record, outcome = loop().run(kvsim.policy("full"), 40, Schedule(5, compress="questions"))

    spans = trace().header.answers(trace().n_pos)
    recorded = [tuple(trace().tokens[a:b].tolist()) for a, b in spans]
    written = [outcome.generated, *outcome.later]
    assert [each.tokens for each in written] == recorded
    checks = [turn["answer_check"]["right"] for turn in trace().meta["turns"]]
    assert [each.right for each in written] == checks
    assert [each.full_right for each in written] == checks
    assert record.response.tokens == record.response.full_tokens == sum(recorded, ())
    assert record.response.right == all(checks)


def test_answers_of_other_lengths_move_the_events_after_questions():
    """A free run is the forced run of what it wrote, its questions where they then are."""
    policy, schedule = kvsim.policy("tova"), Schedule(None, compress="questions")
    short = 3

    _, outcome = loop(short).run(policy, 30, schedule)
    answers = [outcome.generated, *outcome.later]

    questions = [trace().tokens[a:b].tolist() for a, b in trace().header.questions]
    tokens = trace().tokens[: trace().prompt_len].tolist()
    spans = []
    for question, written in zip([[], *questions], answers, strict=True):
        spans += [(len(tokens), len(tokens) + len(question))] if question else []
        tokens += [*question, *written.tokens]
        assert len(written.tokens) == short
    options = {"prompt_len": trace().prompt_len, "n_pos": len(tokens), "context_len": 60}
    policy = replace(policy, schedule=schedule)
    with Decoding(running(), policy, 30, **options, questions=spans) as forced:
        logits = forced.feed(tokens, logits=len(tokens))
    assert forced.record().events == [stop - 1 for _, stop in [(0, trace().prompt_len), *spans]]
    for span, written in zip([(0, trace().prompt_len), *spans], answers, strict=True):
        rows = logits[span[1] - 1 : span[1] - 1 + short]
        assert rows.argmax(-1).tolist() == list(written.tokens)


def test_values_of_a_live_run_are_by_turn(tmp_path):
    """`answer_right`, the divergence and the output error have a value for each turn.

    That of tokens has the mean of its turn, and none of a question.
    """
    run = kvsim.live(
        small(),
        trace(),
        ["tova", "snapkv"],
        40,
        tokenizer=words_tokenizer(),
        max_new_tokens=4,
        compress="questions",
        interval=6,
        metrics=[*choose(None, live=True), "response_kl_tokens"],
        out=tmp_path / "run",
    )

    for name in ("answer_right", "response_kl", "output_error", "response_tokens"):
        values = run.table.filter(metric=name, policy="tova").drop_nulls("value")
        assert values["turn"].unique().sort().to_list() == [1, 2, 3], name
    tokens = run.table.filter(metric="response_kl_tokens", variant="", policy="tova")
    kl = run.table.filter(metric="response_kl", policy="tova")["value"]
    means = tokens.group_by("turn", maintain_order=True).agg(pl.col("value").mean())
    assert means["value"].to_list() == pytest.approx(kl.to_list(), rel=1e-12)
    answers = [p for span in trace().header.answers(trace().n_pos) for p in range(*span)]
    assert tokens["event"].to_list() == answers[1:]
    assert run.responses.height == 2
    means = kvsim.averages(run.table, "turn", metrics="answer_right")
    assert means.height == 6
