"""Distillation under eviction: what the student sees, the loss, and where gradients go."""

from math import exp

import pytest
import torch

import kvsim
from kvsim.runner.decoding import RunningModel
from kvsim.schema import NEVER
from kvsim.studies.interop.distillation import divergence, evicted
from kvsim.studies.interop.masks import Masks
from small_model import small
from tests.reference.masked import masked_logits

PROMPT, N, BUDGET, INTERVAL = 30, 60, 20, 8
IDS = [*range(1, 61)]


@pytest.fixture(scope="module")
def record():
    """G-KV's record of the small model, with sets that differ by layer and head."""
    policy = kvsim.policy("gkv", window=4)
    running = RunningModel(small())
    return evicted(running, IDS, PROMPT, policy, BUDGET, interval=INTERVAL, prefill=True)


def test_the_student_sees_what_a_live_run_keeps(record):
    """The record is that of `kvsim.live` on the same tokens, event by event."""
    trace = kvsim.capture(small(), None, IDS[:PROMPT], response=IDS[PROMPT:])
    policy = kvsim.policy("gkv", window=4)
    run = kvsim.live(small(), [trace], [policy], [BUDGET], interval=INTERVAL, prefill=True)
    assert record.events == [29, 37, 45, 53]
    assert (record.evicted_at == run.records[0].evicted_at).all()
    assert (record.evicted_at[0] != record.evicted_at[1]).any()


def test_the_loss_is_the_divergence_from_the_teacher(record):
    """Each value is the sum over the vocabulary of p log(p / q), of the masked model's rows."""
    ids = torch.tensor(IDS)
    student = masked_logits(small(), ids, [record])[0, :-1].double().softmax(-1).tolist()
    targets = torch.randn(N - PROMPT, 64, generator=torch.Generator().manual_seed(2))
    loss = divergence(small(), IDS, targets, Masks.of(record))
    for row, of_student in zip(range(N - PROMPT), student, strict=True):
        weights = [exp(value) for value in targets[row].tolist()]
        teacher = [weight / sum(weights) for weight in weights]
        terms = (
            p * (torch.tensor(p).log() - torch.tensor(q).log())
            for p, q in zip(teacher, of_student, strict=True)
        )
        assert loss[row].item() == pytest.approx(float(sum(terms)), abs=1e-4)
    with torch.no_grad():
        own = small()(ids[None]).logits[0, PROMPT - 1 : -1]
        assert float(divergence(small(), IDS, own, None).abs().max()) < 1e-6
        assert float(divergence(small(), IDS, own, Masks.of(record)).max()) > 1e-4


@pytest.mark.parametrize("gone", [True, False])
def test_no_gradient_reaches_an_evicted_entry(gone):
    """An entry that is evicted before the response everywhere does not change; others do."""
    at, model = 10, small()
    last_row = torch.full((2, 2, N), NEVER, dtype=torch.int32)
    last_row[..., at] = at if gone else NEVER
    masks = Masks(last_row, (0, 1), {})
    targets = torch.zeros(N - PROMPT, 64)
    try:
        divergence(model, IDS, targets, masks).sum().backward()
        gradient = model.model.embed_tokens.weight.grad
        assert bool(gradient[IDS[at]].any()) is not gone
        assert bool(gradient[IDS[at + 1]].any())
    finally:
        model.zero_grad()


@pytest.mark.parametrize("shape", [(N - PROMPT, 63), (N, 64), (0, 64), (64,)])
def test_targets_of_another_shape_are_refused(shape):
    """The error says what was found and what was expected."""
    with pytest.raises(ValueError, match=r"targets has shape .*; expected \[R, 64\]"):
        divergence(small(), IDS, torch.zeros(shape), None)
