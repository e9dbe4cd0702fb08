"""A response that is given: recorded in one pass after the prompt, with its log-likelihood."""

import copy
import functools
import json

import pytest
import torch
from interrupted_captures import ids

from kvsim.cli import app
from kvsim.errors import CaptureError
from kvsim.recorder import Prompt, capture, capture_many, load_model, read_prompts
from kvsim.recorder.modules import attention_modules
from kvsim.store.verification import describe, verify
from kvsim.studies.language.tasks import prompts as pages
from small_model import small, words_tokenizer


@functools.cache
def test_response_is_one_teacher_forced_forward(tmp_path):
    """Arrays are those of prompt and response in one prefill; likelihoods are the model's own."""
    prompt, response = ids(300), ids(520)[300:]
    calls = []
    attention_modules(small())  # measured once for a model
    handle = small().register_forward_pre_hook(lambda *_: calls.append(1))

    options = {"out": tmp_path / "a.zarr", "sensitivity": False}
    trace = capture(small(), None, prompt, response=response, **options)

    handle.remove()
    assert len(calls) == 2  # one of two tokens shows whether there are gates
    whole = capture(small(), None, prompt + response, max_new_tokens=0)
    assert (trace.prompt_len, trace.n_pos) == (300, 520)
    assert trace.tokens.tolist() == prompt + response
    for name in ("q", "k", "v", "attn_out", "lse"):
        assert torch.equal(trace.read(name), whole.read(name)), name
    with torch.no_grad():
        logits = small()(torch.tensor([prompt + response])).logits[0].double()
    expected = [
        float(logits[at - 1].log_softmax(-1)[token]) for at, token in enumerate(response, 300)
    ]
    assert trace.header.response_logprobs == pytest.approx(expected, abs=1e-6)
    assert verify(trace.path, deep=True).ok
    generation = trace.meta["generation"]
    assert generation == {"new_tokens": 220, "stopped": "given"}


def test_a_generated_response_given_back_has_the_same_trace():
    """What the model wrote greedily is its most likely text, and attention is the same."""
    model, tokenizer = load_model("tiny")
    prompt = pages(1, 0)[0].prompt
    free = capture(model, tokenizer, prompt, max_new_tokens=40)

    given = capture(model, tokenizer, prompt, response=free.tokens[free.prompt_len :].tolist())

    assert given.tokens.tolist() == free.tokens.tolist()
    assert given.meta["text"]["response"] == free.meta["text"]["response"]
    assert torch.allclose(given.full()[0], free.full()[0], atol=1e-4)
    assert sum(given.header.response_logprobs) / 40 > -0.5


def test_lines_of_a_file(tmp_path):
    """Text and ids are recorded, a line without is generated; resuming compares the response."""
    source, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    rows = [
        {"prompt": "w1 w2", "response": "w3 w4 w5"},
        {"tokens": [1, 2], "response": [3, 4, 5]},
        {"prompt": "w1"},
    ]
    source.write_text("\n".join(map(json.dumps, rows)))
    prompts = read_prompts(source)
    short = [Prompt(**{**vars(p), "response": p.response or "w9"}) for p in prompts]

    text, tokens, generated = capture_many(small(), words_tokenizer(), short, out)

    assert text.tokens.tolist() == tokens.tokens.tolist() == [1, 2, 3, 4, 5]
    assert text.header.response_logprobs == tokens.header.response_logprobs
    assert text.meta["text"]["response"] == "w3 w4 w5"
    assert generated.tokens.tolist() == [1, 9]
    assert describe(text.path)["response_logprobs"] == list(text.header.response_logprobs)
    again = capture_many(small(), words_tokenizer(), short, out, resume=True)
    assert [trace.digest for trace in again] == [x.digest for x in (text, tokens, generated)]
    other = [Prompt(**{**vars(short[0]), "response": "w3 w4 w6"})]
    with pytest.raises(CaptureError, match="its prompt is"):
        capture_many(small(), words_tokenizer(), other, out, resume=True)
    free = [Prompt(**{**vars(short[0]), "response": None})]
    with pytest.raises(CaptureError, match="its prompt is"):
        capture_many(small(), words_tokenizer(), free, out, resume=True)


def broken(row, value):
    """A model with a logit of this value in one row: 2 + 200 tokens have four blocks of rows."""
    model = copy.deepcopy(small())

    def mark(_, __, output):
        rows = output.last_hidden_state
        first = model.seen if rows.shape[1] == 1 else 0
        model.seen = first + rows.shape[1]
        if first <= row < model.seen:
            rows[0, row - first] = 1e3

    def spoil(_, args, logits):
        logits[0, (args[0][0] == 1e3).all(-1), 7] = value

    model.model.register_forward_hook(mark)
    model.lm_head.register_forward_hook(spoil)
    return model


@pytest.mark.parametrize(("row", "value"), [(1, "nan"), (2, "inf"), (60, "-inf"), (201, "nan")])
def test_logits_that_are_not_finite_are_refused(row, value):
    """Of a response that is written or given, in any row that was computed, which is named."""
    message = rf"^row {row} has NaN or infinity in its logits \(1 of 64\), expected finite numbers"

    for options in ({"max_new_tokens": 200}, {"response": ids(200)}):
        with pytest.raises(CaptureError, match=message) as caught:
            capture(broken(row, float(value)), None, [1, 2], **options)
        assert "\n" not in str(caught.value)


def test_a_given_response_is_compared_with_the_answer_of_a_known_writer():
    """Whether a response is right says something of what wrote it; unknown, of nothing."""
    words = {"tokenizer": words_tokenizer(), "answer": "w2"}

    given = capture(small(), prompt="w1 w3", response="w2 w4", **words)
    written = capture(small(), prompt="w1 w3", max_new_tokens=2, **words)
    foreign = capture(small(), prompt="w1 w3", response="w2 w4", writer="vLLM", **words)

    assert given.meta["answer_check"] is None
    assert written.meta["answer_check"]["kind"] == "text"
    assert foreign.meta["answer_check"]["right"] is True


WRITER = {"engine": "llama.cpp b4500", "model": "m.gguf", "seed": 2**64 - 1}


@pytest.mark.parametrize(("changed", "chunk"), [(None, None), (0, 64), (20, 64)])
def test_agreement_is_that_of_a_loop_over_tokens(changed, chunk):
    """The share of tokens that greedy decoding of the prefix gives, and the first other one."""
    model, prompt = small(), ids(50)
    response = capture(model, None, prompt, max_new_tokens=30).tokens[50:].tolist()
    if changed is not None:
        response[changed] = (response[changed] + 1) % 64

    found = capture(model, None, prompt, response=response, chunk=chunk).meta["agreement"]

    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0]
    same = [int(logits[49 + at].argmax()) == token for at, token in enumerate(response)]
    first = None if changed is None else 50 + changed
    assert found == {"share": sum(same) / 30, "first": first}
    assert first is None or not same[changed]


def test_the_trace_says_who_wrote_the_response(tmp_path, capsys):
    """Header and `kvsim info` have the writer and the agreement; a resumed capture compares it."""
    source, out = tmp_path / "p.jsonl", tmp_path / "out"
    rows = [
        {"id": "a", "prompt": "w1 w2", "response": "w3 w4", "writer": WRITER},
        {"id": "b", "tokens": [1, 2], "response": [3, 4], "writer": "vLLM \u001b[0m"},
    ]
    source.write_text("\n".join(map(json.dumps, rows)))
    prompts = read_prompts(source)

    text, tokens = capture_many(small(), words_tokenizer(), prompts, out)

    assert text.meta["generation"]["writer"] == WRITER
    assert describe(text.path)["agreement"] == text.meta["agreement"]
    app()(["info", str(text.path), str(tokens.path)], standalone_mode=False)
    printed = " ".join(capsys.readouterr().out.split())
    assert f'writer engine "{WRITER["engine"]}"' in printed
    assert 'writer "vLLM \\u001b[0m"' in printed
    assert printed.count("agreement share") == 2
    again = capture_many(small(), words_tokenizer(), prompts, out, resume=True)
    assert [trace.digest for trace in again] == [text.digest, tokens.digest]
    other = [Prompt(**{**vars(each), "writer": "another"}) for each in prompts]
    with pytest.raises(CaptureError, match="its writer is"):
        capture_many(small(), words_tokenizer(), other, out, resume=True)
