"""Responses of several prompts that are written in a batch, and recorded one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvsim.errors import CaptureError, MemoryLimitError
from kvsim.recorder import Prompt, Turn, capture_many, capturing
from kvsim.store.verification import describe, verify
from small_model import small, words_tokenizer

LENGTHS = (12, 40, 3, 25)
PROMPTS = [
    Prompt(f"p{n}", " ".join(f"w{(7 * i + i * i + n) % 60}" for i in range(n)), answer="w3")
    for n in LENGTHS
]
IN_BATCH = {each.id for each in PROMPTS[:3]}
GIVEN = Prompt("given", "w1 w2 w3", response="w4 w5")


def both(tmp_path, prompts, model, batch=3, **options):
    """The traces of prompts, written in batches and one by one."""
    each = {"in batches": {"batch": batch}, "alone": {}}
    return [
        capture_many(model, words_tokenizer(), prompts, tmp_path / name, **how, **options)
        for name, how in each.items()
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_traces_of_a_batch_are_those_of_one_by_one(tmp_path, temperature):
    """Tokens, arrays within 1e-5, ends and answers; a given response needs no batch."""
    model = small(vocab_size=64, eos_token_id=9)
    options = {
        "temperature": temperature,
        "seed": 5,
        "max_new_tokens": 16,
        "stop": ["w11", "w20", "w31", "w45"],
    }
    options |= {"o_proj": False}
    prompts = [PROMPTS[0], GIVEN, *PROMPTS[1:]]

    together, alone = both(tmp_path, prompts, model, **options)

    ends = set()
    for ours, theirs in zip(together, alone, strict=True):
        assert torch.equal(ours.tokens, theirs.tokens)
        for name in ("q", "k", "v", "attn_out", "lse", "residual_norm"):
            a, b = ours.read(name), theirs.read(name)
            assert float((a - b).abs().max() / b.abs().max()) < 1e-5
        likelihoods = "response_logprobs", "mean_logprobs"
        for name in likelihoods:
            assert ours.meta[name] == pytest.approx(theirs.meta[name], rel=1e-5)
        measured = dict.fromkeys(("agreement", "capture_check", *likelihoods))
        assert {**ours.meta, **measured} == {**theirs.meta, **measured}
        ends.add(ours.meta["generation"]["stopped"])
    assert verify(together[0].path, deep=True).ok
    assert len(ends) > 1
    if not temperature:  # the last of four is alone
        shares = [each.meta["agreement"]["share"] for each in together if each.name in IN_BATCH]
        assert shares == [1, 1, 1]


def test_what_a_batch_cannot_hold_is_written_alone_with_a_note(tmp_path):
    """A sliding window that masks out entries, and several turns."""
    window, turns = small(kind="Mistral", sliding_window=20), [Turn("w4 w5")]
    asked = [replace(each, id=f"t{each.id}", turns=turns) for each in PROMPTS[:2]]
    for model, prompts, reason in [
        (window, PROMPTS[:3], "a window of 20 tokens masks out"),
        (small(), asked, "it has several turns"),
    ]:
        together, alone = both(tmp_path, prompts, model, max_new_tokens=12)

        for ours, theirs in zip(together, alone, strict=True):
            assert torch.equal(ours.tokens, theirs.tokens)
            note = f"the response was written by itself, not in a batch: {reason}"
            assert any(note in text for text in describe(str(ours.path))["notes"])


def test_a_prompt_that_fails_in_a_batch_is_named_by_itself(tmp_path, monkeypatch):
    """Those before it are recorded, one by one."""
    run = capturing.prefilled
    bad = words_tokenizer()(PROMPTS[1].content)["input_ids"]

    def failing(model, ids, *more):
        if [*ids] == bad:
            raise CaptureError("NaN in layer 1")
        return run(model, ids, *more)

    monkeypatch.setattr(capturing, "prefilled", failing)
    traces = capture_many(
        small(), words_tokenizer(), PROMPTS[:2], tmp_path, batch=2, max_new_tokens=4
    )
    assert [trace.name for trace in traces] == [prompt.id for prompt in PROMPTS[:2]]
    assert "a prompt of its batch failed" in describe(str(traces[0].path))["notes"][-1]


def test_a_batch_beyond_the_memory_is_refused_in_a_line(tmp_path, monkeypatch):
    """It says what to make smaller; nothing is recorded."""

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(capturing, "write", full)
    with pytest.raises(MemoryLimitError, match=r"^.*3 responses at once take.*--batch-size\)$"):
        capture_many(small(), words_tokenizer(), PROMPTS, tmp_path, batch=3)
    assert not [*tmp_path.glob("*.zarr")]
