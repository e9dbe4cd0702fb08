"""Live runs in one batch: each sequence as it is alone."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

import kvsim
from kvsim.policies.fit import fitted
from kvsim.recorder.choice import Choice
from kvsim.runner.batch import respond, run_prompt
from kvsim.runner.decoding import Decoding, RunningModel, prefill
from small_model import small

LENGTHS, NEW, BUDGET = (30, 7, 52, 41), (70, 9, 100, 25), 20
PROMPTS = [[(5 * i + i * i + n) % 60 for i in range(n)] for n in LENGTHS]
STOP = {7, 11}
NAMES = ("adakv+snapkv", "h2o", "tova", "snapkv", "gkv", "streaming_llm@original", "fastkv", "full")
NAMES += ("h2o+lookm",)


def lanes(running, names, *, interval=8):
    """A lane of each prompt, policies in turn, and the logits behind the prompts."""
    started = []
    for number, (ids, new) in enumerate(zip(PROMPTS, NEW, strict=True)):
        window = {} if number % 2 else {"interval": interval}
        policy = fitted(kvsim.policy(names[number % len(names)]))
        length = {"prompt_len": len(ids), "n_pos": len(ids) + new}
        with Decoding(running, policy, BUDGET, **length, **window, prefill=True) as lane:
            started.append((lane, run_prompt(lane, ids, partial(prefill, running))))
    return started


def sample(logits, temperature, generator):
    """A token by the definition: the likeliest, or drawn on the CPU in double precision."""
    if not temperature:
        return int(logits.argmax())
    weights = (logits.double() / temperature).softmax(-1)
    return int(torch.multinomial(weights, 1, generator=generator))


def alone(running, names, temperature=0.0, **options):
    """The same sequences, one after the other, by the runner of one."""
    out = []
    for (lane, logits), new in zip(lanes(running, names, **options), NEW, strict=True):
        generator, tokens = torch.Generator().manual_seed(3), []
        with lane:
            tokens.append(sample(logits, temperature, generator))
            while tokens[-1] not in STOP and len(tokens) < new:
                tokens.append(sample(lane.feed([tokens[-1]])[-1], temperature, generator))
        out.append((tokens, lane))
    return out


@pytest.mark.parametrize(
    ("kind", "names", "temperature"),
    [
        *(("sdpa", names, 0.0) for names in (NAMES[:4], NAMES[4:], ("h2o",))),
        ("sdpa", NAMES[:4], 1.0),
        ("eager", NAMES[:4], 0.0),
        ("eager", NAMES[4:], 1.0),
        (torch.bfloat16, NAMES[:4], 0.0),
    ],
)
def test_a_batch_writes_what_each_sequence_alone_does(kind, names, temperature):
    """Tokens, kept sets and peaks, of prompts, budgets, policies and events of each its own.

    In 16 bits the first token alone: products of a batch may round otherwise.
    """
    how = {"attention": kind} if isinstance(kind, str) else {"dtype": kind}
    running = RunningModel(small(**how))
    expected = alone(running, names, temperature)

    started = lanes(running, names)
    choice = Choice(running.model, STOP, temperature=temperature, seed=3)
    written = respond(*zip(*started, strict=True), NEW, stop=STOP, choice=choice)

    for (tokens, other), (lane, _), each in zip(expected, started, written, strict=True):
        if kind is torch.bfloat16:
            assert each.tokens[0] == tokens[0]
            continue
        assert each.tokens == tokens
        assert each.ended == ("eos" if tokens[-1] in STOP else None)
        assert lane.tokens == other.tokens
        np.testing.assert_array_equal(lane.record().evicted_at, other.record().evicted_at)
        assert lane.decode_peak_bytes == other.decode_peak_bytes
        assert lane.peak_bytes == other.peak_bytes
    assert len({len(tokens) for tokens, _ in expected}) > 1
