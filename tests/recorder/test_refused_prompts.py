"""Prompts, options and lines of files that are refused: one line each, before anything runs."""

import datetime as dt

import pytest

from kvsim.errors import CaptureError, TraceError
from kvsim.recorder import Prompt, Turn, capture, capture_many, read_prompts
from kvsim.recorder.modules import attention_modules
from kvsim.testing.strategies import make_case
from small_model import TEMPLATE, small, words_tokenizer
from traces import changed

LONG = b"x" * 5000
NO_SPAN = "expected a text that is in the prompt"


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


def refused(prompt, message, *, tokenizer=None, out=None, **options):
    """Check that two prompts, of which the second is bad, are refused by one line."""
    ran: list[int] = []
    attention_modules(small())  # measured by a forward
    handle = small().register_forward_pre_hook(lambda *_: ran.append(1))
    try:
        with pytest.raises(CaptureError, match=message) as caught:
            capture_many(small(), tokenizer, [Prompt("a", [1]), prompt], out, **options)
    finally:
        handle.remove()
    assert "\n" not in str(caught.value)
    assert (ran, out.exists()) == ([], False)


@pytest.mark.parametrize(
    ("prompt", "given", "message"),
    [
        ("w1 w2", {"needle": "w3"}, "needle 'w3' is not in the prompt, expected once"),
        ("w1 w2 w1", {"needle": "w1"}, "needle 'w1' is more than once in the prompt, expected"),
        ("w1", {"needle": [[0, 1]]}, r"needle is \[\[0, 1\]\] and the prompt is text, expected"),
        ([1, 2], {"needle": "w1"}, "needle is 'w1' and the prompt is token ids, expected spans"),
        ([1, 2], {"needle": [[1, 3]]}, r"the span \[1, 3\], expected .* within the 2 tokens"),
        ([1, 2], {"needle": [[1, 1]]}, r"needle has the span \[1, 1\], expected start < end"),
        ([1, 2], {"needle": [[True, 2]]}, rf"needle is \[\[True, 2\]\], {NO_SPAN}"),
        ("w1 w2", {"needle": ["w1", 3]}, rf"needle is \['w1', 3\], {NO_SPAN}"),
        ("w1 w2", {"needle": ""}, f"needle is '', {NO_SPAN}"),
        ("w1", {"context": "  "}, "the context is empty"),
        ("w1", {"context": 3}, "context is 3 and the prompt is text, expected text"),
        ([1, 2], {"context": "w1"}, "is 'w1' and the prompt is no text, expected a number"),
        ([1, 2], {"context": 3}, "3 and the prompt has 2 tokens, expected a context that ends in"),
        ([1, 2], {"context": 0}, "context is 0 and the prompt has 2 tokens"),
        ([1, 2], {"context": -2}, "context is -2 and the prompt has 2 tokens"),
        ([1, 2], {"context": True}, "context is True and the prompt has 2 tokens"),
        (chat("w1"), {"context": 2}, "context is 2 and the prompt has 1 messages"),
        ("w1", {"response": [3, 64]}, "token id 64 is not in .* encode the response with"),
        ("w1", {"response": [-1]}, "token id -1 is not in the model's vocabulary"),
        ("w1", {"response": "w3 hello"}, "the tokenizer does not know 'hello'"),
        ("w1", {"response": ""}, "the response is empty, expected text or token ids"),
        ("w1", {"response": []}, "the response is empty, expected text or token ids"),
        ("w1", {"response": [[1], [2]]}, r"the response is list of shape \(2, 1\)"),
        (
            "w1 w2",
            {"response": [1] * 899},
            "899 tokens of response after a prompt of 2 tokens, expected .* context of 900",
        ),
        (chat("w1", "tool"), {}, r"refuses the messages \(no such role"),
        (chat(["w1", {"type": "image_url"}]), {}, "message 0 has a part of type 'image_u"),
        (chat([{"text": "w1"}]), {}, "a part of type None, expected only text parts"),
        (chat([{"type": "text", "text": 1}]), {}, "message 0 has a part of type 'text'"),
        (chat([3]), {}, "message 0 has a part of type 'int'"),
        (chat({}), {}, "content of message 0 is dict, expected"),
        (
            [*chat("w1", "system"), *chat("w2")],
            {"system": "w3"},
            "the chat has a system message, and another one is given",
        ),
        ("w1", {"metadata": [float("inf")]}, "metadata cannot be stored as JSON .*not .*compliant"),
        ("w1", {"metadata": dt.date(2024, 1, 2)}, "metadata cannot be .*date is not JSON"),
        ("w1", {"metadata": nested(2000)}, "metadata cannot be stored as JSON"),
        ("w1", {"answer": "a" * 2**23}, "answer cannot be .*more than 8388608 bytes"),
        ("w1", {"writer": {"p": float("nan")}, "response": "w2"}, "writer cannot be stored"),
        ("w1", {"turns": [Turn("w2", labels={"length": 2**63})]}, "turn 2: length is 9223372036"),
    ],
)
def test_prompts_that_are_refused(prompt, given, message, tmp_path):
    """The message names the prompt, and none of the prompts is recorded."""
    prompt = Prompt("b", prompt, **given)

    refused(
        prompt, f"^prompt 'b': .*{message}", tokenizer=words_tokenizer(TEMPLATE), out=tmp_path / "o"
    )


@pytest.mark.parametrize(
    ("prompt", "tokenizer", "options", "message"),
    [
        (" ", TEMPLATE, {"chat": True}, "the prompt is empty"),
        ("w1", None, {"chat": True}, r"chat \(--chat\), and the .*has no .*, or leave --chat out"),
        ("w1", None, {"system": "w2"}, "has no chat template, .*, or leave a system message out"),
        (chat(["w1"]), None, {}, r"\(messages\), .*has no .*, or give text instead of messages"),
        ("w1", "none", {}, "the prompt is text, and there is no tokenizer, expected one that"),
        ("w1", "none", {"chat": True}, r"a chat \(--chat\), and there is no tokenizer, expected"),
        ("w1", "none", {"system": "w2"}, r"a chat \(a system message\), and there is no token"),
        (chat(["w1"]), "none", {}, r"a chat \(messages\), and .*; put its files into the model"),
    ],
)
def test_text_without_a_tokenizer_or_a_template(prompt, tokenizer, options, message, tmp_path):
    """One line says what the prompt is, what it lacks and where that goes."""
    words = None if tokenizer == "none" else words_tokenizer(tokenizer)
    with pytest.raises(CaptureError, match=message) as caught:
        capture(small(), words, prompt, out=tmp_path / "a.zarr", **options)

    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "a", "messages": []}', "'prompt' and 'messages' are given"),
        (b'{"messages": []}', r"no prompt, messages is \[\]"),
        (b'{"messages": [{"content": "x"}]}', "message 0 is .* expected an object with 'role'"),
        (b'{"messages": [{"role": "user"}]}', "message 0 has no content, expected text"),
        (b'{"messages": [{"role": "user", "content": 1}]}', "content of message 0 is int"),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "audio"}]}]}',
            "message 0 has a part of type 'audio'",
        ),
        (b'{"tokens": [1, true]}', r"no prompt, tokens is \[1, true\]"),
        (b'{"tokens": 3}', "no prompt, expected an object with 'prompt'"),
        (b'{"prompt": 3}', "no prompt"),
        (b'{"prompt": "a", "level": [1]}', r"level is \[1\], expected text or a whole"),
        (b'{"prompt": "a", "answer": "  "}', 'answer is "  ", expected text'),
        (b'{"prompt": "a", "answer": true}', "answer is true, expected"),
        (b'{"prompt": "a", "answer": {"code": 1}}', 'answer is {"code": 1}, expected'),
        (b'{"prompt": "a", "answer": []}', r"answer is \[\], expected text, several or no answer"),
        (b'{"prompt": "a", "answers": ["a", {}]}', "answers is .*, expected text, several"),
        (b'{"prompt": "a", "answer": "a", "answers": ["a"]}', "'answer' and 'answers' are given"),
        (b'{"prompt": "a", "scorer": "f1"}', "scorer is 'f1', expected one of contained, string_m"),
        (b'{"prompt": "a", "answer_prefix": 3}', "answer_prefix is 3, expected text"),
        (
            b'{"prompt": "a", "max_new_tokens": "many"}',
            "max_new_tokens is .*, expected a number of",
        ),
        (b'{"prompt": "a", "max_new_tokens": 0}', "max_new_tokens is 0, expected at least 1 token"),
        (b'{"prompt": "a", "system": 3}', "system is 3, expected text"),
        (b'{"prompt": "a", "needle": 3}', "needle is 3, expected a text"),
        (b'{"prompt": "a", "context": [1]}', r"context is \[1\], expected text before"),
        (b'{"prompt": "a", "response": 3}', "response is 3, expected text or a list"),
        (b'{"prompt": "a", "id": [1]}', r"id is \[1\], expected text or a number"),
        (b'{"prompt": "a", "id": " "}', 'id is " ", expected'),
        (b'{"prompt": "a", "id": "%s"}' % (b"x" * 201), "id has 201 characters"),
        (b'{"prompt": "a", "level": 1, "difficulty": 2}', "level is 1 and difficulty 2"),
        (b'{"prompt": "a", "level": "%s", "difficulty": 2}' % LONG, "level is 'xxx.* difficulty 2"),
        (b'{"prompt": "a", "task": ["%s"]}' % LONG, r"task is \['xxx.*, expected text or"),
        (b'{"prompt": "a", "scorer": "%s"}' % LONG, "scorer is 'xxx.*, expected one of"),
        (b'{"turns": [{"question": "q", "%s": 2}]}' % LONG, "'xxx.* is no key of a turn"),
        (b'{"prompt": "\\ud800"}', "surrogates not allowed"),
        (b'[{"prompt": "a"}]', "expected an object"),
        (b'{"prompt": "a', "Unterminated string starting at"),
        (b'{"a":' * 100_000, "expected an object"),
        (b'"a"', "expected an object"),
    ],
    ids=lambda value: value[:30] if isinstance(value, bytes) else None,
)
def test_lines_that_are_refused(line, message, tmp_path):
    """A line that is no prompt is named by file and number."""
    source = tmp_path / "p.jsonl"
    source.write_bytes(b'{"prompt": "a"}\n\n' + line + b"\n")

    with pytest.raises(CaptureError, match=message) as caught:
        read_prompts(source)

    assert str(caught.value).startswith((f"{source}, line 3: ", f"{source}, line 3, turn 1: "))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


SPANS = "within the 20 tokens of the prompt"
LOGPROBS = r"response_logprobs is .*; expected 2 finite numbers"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"context_len": length}, "context_len") for length in (0, 21, True, 1.5, "3")),
        *(
            ({"meta": {"spans": {"needle": spans}}}, SPANS)
            for spans in (
                *([[3, 21]], [[3, 3]], [[-1, 3]], [[1.0, 3]], [[True, 3]], [[1, 2, 3]]),
                *([3], 3),
            )
        ),
        ({"meta": {"spans": [[3, 4]]}}, SPANS),
        *(
            ({"prompt_len": 58, "meta": {"response_logprobs": values}}, LOGPROBS)
            for values in ([-0.5], [-0.5, 0.1], [-0.5, float("nan")], ["a", "b"], 3, [])
        ),
    ],
)
def test_facts_of_a_trace_that_are_refused(changes, message):
    """Contexts and spans outside the prompt, and likelihoods that are none of the response."""
    trace = make_case("normal", n=60, prompt_len=20).trace()

    with pytest.raises(TraceError, match=message):
        changed(trace, **changes)
