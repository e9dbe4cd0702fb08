"""Prompts, options and lines of files that are refused: one line each, before anything runs."""

import pytest

from kvsim.errors import CaptureError, TraceError
from kvsim.recorder import Prompt, capture, capture_many, read_prompts
from kvsim.recorder.modules import attention_modules
from kvsim.testing.strategies import make_case
from small_model import TEMPLATE, small, words_tokenizer
from traces import changed

LONG = b"x" * 5000


def chat(content, role="user"):
    """A chat of one message; a list is one in parts, whose words are parts of text."""
    if isinstance(content, list):
        content = [{"type": "text", "text": x} if isinstance(x, str) else x for x in content]
    return [{"role": role, "content": content}]


def nested(depth):
    """Lists in lists."""
    value = []
    for _ in range(depth - 1):
        value = [value]
    return value


def refused(content, given, message, *, tokenizer=None, out=None):
    """Check that two prompts, of which the second is bad, are refused by one line."""
    ran: list[int] = []
    attention_modules(small())  # measured by a forward
    handle = small().register_forward_pre_hook(lambda *_: ran.append(1))
    try:
        with pytest.raises(CaptureError, match=message) as caught:
            capture_many(small(), tokenizer, [Prompt("a", [1]), Prompt("b", content, **given)], out)
    finally:
        handle.remove()
    assert "\n" not in str(caught.value)
    assert (ran, out.exists()) == ([], False)


@pytest.mark.parametrize(
    ("prompt", "given", "name"),
    [
        ("w1 w2", {"needle": "w3"}, "needle 'w3' is not in the prompt"),
        ("w1 w2 w1", {"needle": "w1"}, "needle 'w1' is more than once in the prompt"),
        ("w1", {"needle": [[0, 1]]}, r"needle is \(\(0, 1"),
        ([1, 2], {"needle": "w1"}, r"needle is \('w1'"),
        ([1, 2], {"needle": [[1, 3]]}, "within the 2 tokens"),
        ("w1 w2", {"needle": ["w1", 3]}, "needle"),
        ("w1 w2", {"needle": ""}, "needle is ''"),
        ("w1", {"context": "  "}, "its context of 2 characters"),
        ("w1", {"context": 3}, "context is 3"),
        ([1, 2], {"context": "w1"}, "context is 'w1'"),
        ([1, 2], {"context": 3}, "context is 3"),
        ([1, 2], {"context": True}, "context is True"),
        (chat("w1"), {"context": 2}, "context is 2"),
        ("w1", {"response": [3, 64]}, "token id 64"),
        ("w1", {"response": "w3 hello"}, "'hello'"),
        ("w1", {"response": []}, "the response is"),
        ("w1", {"response": [[1], [2]]}, "the response is"),
        ("w1 w2", {"response": [1] * 899}, "899 tokens of response .* context of 900"),
        (chat("w1", "tool"), {}, r"no such role"),
        (chat(["w1", {"type": "image_url"}]), {}, "message 0"),
        (chat([{"text": "w1"}]), {}, "message 0"),
        (chat({}), {}, "message 0"),
        ([*chat("w1", "system"), *chat("w2")], {"system": "w3"}, "system message"),
        ("w1", {"metadata": [float("inf")]}, "metadata"),
        ("w1", {"metadata": nested(2000)}, "metadata"),
        ("w1", {"answer": "a" * 2**23}, "answer cannot be .*more than 8388608 bytes"),
        ("w1", {"writer": {"p": float("nan")}, "response": "w2"}, "writer"),
    ],
)
def test_prompts_that_are_refused(prompt, given, name, tmp_path):
    """The message names what is wrong, and none of the prompts is recorded."""
    refused(prompt, given, name, tokenizer=words_tokenizer(TEMPLATE), out=tmp_path / "o")


@pytest.mark.parametrize(
    ("prompt", "tokenizer", "options", "name"),
    [
        (" ", TEMPLATE, {"chat": True}, "the prompt is empty"),
        ("w1", None, {"chat": True}, "no chat template"),
        ("w1", None, {"system": "w2"}, "no chat template"),
        (chat(["w1"]), None, {}, "no chat template"),
        ("w1", "none", {}, "no tokenizer"),
        ("w1", "none", {"chat": True}, "no tokenizer"),
        (chat(["w1"]), "none", {}, "no tokenizer"),
    ],
)
def test_text_without_a_tokenizer_or_a_template(prompt, tokenizer, options, name, tmp_path):
    """One line says what the prompt lacks."""
    words = None if tokenizer == "none" else words_tokenizer(tokenizer)
    with pytest.raises(CaptureError, match=name) as caught:
        capture(small(), words, prompt, out=tmp_path / "a.zarr", **options)

    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (b'{"prompt": "a", "messages": []}', "prompt and messages"),
        (b'{"messages": [{"content": "x"}]}', "message 0"),
        (b'{"messages": [{"role": "user", "content": [{"type": "audio"}]}]}', "message 0"),
        (b'{"tokens": [1, true]}', "the prompt is"),
        (b'{"tokens": 3}', "no prompt"),
        (b'{"prompt": "a", "level": [1]}', "level is"),
        (b'{"prompt": "a", "answer": "  "}', "answer is"),
        (b'{"prompt": "a", "answers": ["a", {}]}', "answer is {}"),
        (b'{"prompt": "a", "answer": "a", "answers": ["a"]}', "'answers'"),
        (b'{"prompt": "a", "max_new_tokens": 0}', "max_new_tokens is 0"),
        (b'{"prompt": "a", "needle": [3]}', "needle is"),
        (b'{"prompt": "a", "context": [1]}', "context is"),
        (b'{"prompt": "a", "response": 3}', "response is 3"),
        (b'{"prompt": "a", "id": " "}', "id is ' '"),
        (b'{"prompt": "a", "id": "%s"}' % (b"x" * 201), "id is 'xxx"),
        (b'{"prompt": "a", "task": ["%s"]}' % LONG, "task is"),
        (b'{"prompt": "a", "scorer": "%s"}' % LONG, "scorer is 'xxx"),
        (b'{"turns": [{"question": "q", "%s": 2}]}' % LONG, "turn 1: 'xxx"),
        (b'{"prompt": "\\ud800"}', "surrogates not allowed"),
        (b'[{"prompt": "a"}]', "expected an object"),
        (b'{"prompt": "a', "Unterminated string starting at"),
        (b'{"a":' * 100_000, "expected an object"),
    ],
    ids=lambda value: value[:30] if isinstance(value, bytes) else None,
)
def test_lines_that_are_refused(line, name, tmp_path):
    """A line that is no prompt is named by file and number."""
    source = tmp_path / "p.jsonl"
    source.write_bytes(b'{"prompt": "a"}\n\n' + line + b"\n")

    with pytest.raises(CaptureError, match=name) as caught:
        read_prompts(source)

    assert str(caught.value).startswith(f"{source}, line 3: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"context_len": length}, "context_len") for length in (0, 21, True)),
        *(({"meta": {"spans": {"needle": x}}}, "span") for x in ([[3, 21]], [[3, 3]], [[1.0, 3]])),
        ({"meta": {"spans": [[3, 4]]}}, "span"),
        *(
            ({"prompt_len": 58, "meta": {"response_logprobs": values}}, "expected 2 finite numbers")
            for values in ([-0.5], [-0.5, float("nan")], ["a", "b"])
        ),
    ],
)
def test_facts_of_a_trace_that_are_refused(changes, message):
    """Contexts and spans outside the prompt, and likelihoods that are none of the response."""
    trace = make_case("normal", n=60, prompt_len=20).trace()

    with pytest.raises(TraceError, match=message):
        changed(trace, **changes)
