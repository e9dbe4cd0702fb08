"""Predictions of rows of the prompt behind an event: judged, live, and by a masked forward."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvsim
from families import FAMILIES
from kvsim.analysis.live.metrics import JUDGED
from kvsim.analysis.live.table import measure_live
from kvsim.core.policy import Schedule
from kvsim.runner.closed import ClosedLoop
from kvsim.runner.judging import Judge
from kvsim.runner.model import RunningModel

CONTEXT, PROMPT, LENGTH, BUDGET = 60, 80, 100, 32
TOKENS = torch.randperm(256, generator=torch.Generator().manual_seed(0))[:LENGTH].tolist()
QUEST = {"page": 4, "dense_layers": 0, "share": 0.4}
AFTER_CONTEXT = {"compress": "context"}, {"rows=question": (CONTEXT, PROMPT)}
FIELDS = ("nll", "full_nll", "kl", "agreement", "stream_error")
#: Policies, and schedules with the rows that each variant has.
CASES = [
    ("h2o", {}, *AFTER_CONTEXT),
    ("adakv+snapkv", {"window": 8}, *AFTER_CONTEXT),
    ("quest", QUEST, *AFTER_CONTEXT),
    ("h2o+quest", {**QUEST, "heads": "kv"}, *AFTER_CONTEXT),
    ("int4", {}, *AFTER_CONTEXT),
    ("h2o+kivi", {"group": 4, "window": 8}, *AFTER_CONTEXT),
    ("snapkv", {"window": 8}, {"prefill_chunk": 30}, {"rows=prompt": (30, PROMPT)}),
    ("tova", {}, {"prefill_chunk": 25, "compress": "both"},
     {"rows=context": (25, CONTEXT), "rows=question": (CONTEXT, PROMPT)}),
    ("h2o", {}, {"compress": "prompt"}, {}),
]  # fmt: skip
IDS = ["-".join([name, *map(str, terms.values())]) for name, _, terms, _ in CASES]


@functools.cache
def running():
    """A small random model."""
    family = FAMILIES["llama"]
    family = replace(family, changes={**family.changes, "vocab_size": 256})
    return RunningModel(family.build(family.kernels[0], torch.float32))


@functools.cache
def trace():
    """A context, a question on it and a response."""
    return kvsim.capture(
        running().model, None, TOKENS[:PROMPT], response=TOKENS[PROMPT:], context=CONTEXT
    )


def both(name, parameters, terms):
    """The outcome of a live run, and of the judge on the same decisions; and their record."""
    policy, schedule = kvsim.policy(name, **parameters), Schedule(interval=8, **terms)
    record, live = ClosedLoop(running(), trace(), None, None).run(policy, BUDGET, schedule)
    record = replace(record, closed=False)
    (judged,) = Judge(running(), trace()).outcomes([record])
    return record, live, judged


class Naive:
    """Attention of each row to the entries that a record says it reads, one by one, in float64."""

    def __init__(self, record):
        self.record = record

    def sees(self, layer, qhead, row, group):
        """Whether a row reads each entry up to its own."""
        record, reads = self.record, self.record.reads
        seen = record.evicted_at[layer, qhead // group, : row + 1] >= row
        if reads is not None and row >= reads.first:
            place = seen.cumsum() - 1
            head = qhead * reads.bits.shape[1] // (group * record.evicted_at.shape[1])
            pages = np.unpackbits(reads.bits[layer, head, row - reads.first])
            seen &= pages[place // reads.page] == 1
        return seen

    def __call__(self, module, q, k, v, mask, scaling, **rest):
        """q [1, qhead, n, d], k and v [1, head, n, d] -> out [1, n, qhead, d]."""
        n, group = q.shape[2], q.shape[1] // k.shape[1]
        out = torch.zeros(1, n, q.shape[1], v.shape[3])
        for qhead in range(q.shape[1]):
            for row in range(n):
                seen = torch.from_numpy(self.sees(module.layer_idx, qhead, row, group))
                keys, values = (x[0, qhead // group, : row + 1][seen].double() for x in (k, v))
                weights = (keys @ q[0, qhead, row].double() * scaling).softmax(0)
                out[0, row, qhead] = (weights @ values).float()
        return out, None


def predictions(monkeypatch, record):
    """Log-likelihoods of all rows [T, V], in float64, under a record and with the full cache."""
    whole = replace(
        record, evicted_at=np.full_like(record.evicted_at, np.iinfo(np.int32).max), reads=None
    )
    for each in (record, whole):
        with monkeypatch.context() as patch, torch.inference_mode():
            patch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", Naive(each))
            yield running().model(torch.tensor([TOKENS])).logits[0].double().log_softmax(-1)


@pytest.mark.parametrize(("name", "parameters", "terms", "parts"), CASES, ids=IDS)
def test_rows_of_the_prompt_have_the_predictions_of_their_live_run(name, parameters, terms, parts):
    """Of every row behind an event: what it evicts, reads and rounds is live what is judged."""
    record, live, judged = both(name, parameters, terms)

    mine, expected = judged.forced, live.forced
    assert (mine.before is None) == (expected.before is None) == (not parts)
    pairs = [(mine, expected)]
    if parts:
        count = PROMPT - min(start for start, _ in parts.values())
        assert mine.before.stream_error.shape[1] == count == len(mine.before.kl) + 1
        assert expected.output.before.error.shape[-1] == count
        assert mine.before.kl.max() > 1e-4
        pairs.append((mine.before, expected.before))
    for one, other in pairs:
        for field in FIELDS:
            of_one, of_other = (getattr(x, field) for x in (one, other))
            assert of_one.shape == of_other.shape
            assert np.allclose(of_one, of_other, rtol=1e-3, atol=2e-5), field
    plain = replace(record, reads=None, storage=None)
    if parts and (record.reads, record.storage) != (None, None):  # what is read and rounded matters
        (other,) = Judge(running(), trace()).outcomes([plain])
        assert np.abs(other.forced.before.kl - mine.before.kl).max() > 1e-4


@pytest.mark.parametrize(
    ("name", "parameters", "terms", "parts"),
    [x for x in CASES if "kivi" not in x[0] and "int4" not in x[0]],
)
def test_tables_have_the_means_of_a_masked_forward(name, parameters, terms, parts, monkeypatch):
    """A forward of the whole sequence, whose rows attend one by one to what they read."""
    record, _, judged = both(name, parameters, terms)
    own, full = predictions(monkeypatch, record)

    table = measure_live(trace(), [record], [judged], JUDGED)

    assert {*table["variant"]} == {"", *parts}
    for variant, (start, stop) in parts.items():
        rows = np.arange(start, min(stop, PROMPT - 1))
        tokens = torch.tensor(TOKENS)[rows + 1]
        nll, full_nll = (-x[rows, tokens] for x in (own, full))
        kl = (full.exp() * (full - own)).sum(-1)[rows]
        same = (own.argmax(-1) == full.argmax(-1))[rows].double()
        expected = {"response_kl": kl, "nll_increase": nll - full_nll, "top_agreement": same}
        for metric, values in expected.items():
            (value,) = table.filter(metric=metric, variant=variant)["value"]
            assert value == pytest.approx(float(values.mean()), rel=1e-3, abs=1e-5), metric


def test_rows_that_would_take_too_much_memory_are_left_out(monkeypatch):
    """Those of chunks first, then the question's; the response stays, judged and live alike."""
    name, parameters, terms, parts = CASES[7]
    _, live, judged = both(name, parameters, terms)
    config = running().model.config
    of_layer = config.hidden_size + trace().n_qheads * trace().value_dim
    row = 4 * (3 * 256 + trace().n_layers * of_layer)

    for rows, variants in ((0, set()), (PROMPT - CONTEXT, {"rows=question"}), (99, {*parts})):
        monkeypatch.setattr("kvsim.runner.full._KEPT", rows * row)
        record, of_live, of_judge = both(name, parameters, terms)
        for outcome, expected in ((of_live, live), (of_judge, judged)):
            table = measure_live(trace(), [record], [outcome], JUDGED)
            assert {*table["variant"]} == {"", *variants}
            assert np.allclose(outcome.forced.kl, expected.forced.kl, atol=2e-5)
            if variants:
                mine, other = (x.forced.before.kl for x in (outcome, expected))
                assert np.allclose(mine, other[-len(mine) :], atol=2e-5)
