"""Where the context of a prompt ends, in its tokens, and how a trace keeps that."""

import pytest

import kvsim
from kvsim.errors import CaptureError
from kvsim.recorder import capture
from kvsim.store.verification import describe, verify
from small_model import bytes_tokenizer, small

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
CHAT += "{% if add_generation_prompt %}<a>{% endif %}"


def tokenizer(template=CHAT):
    """A tokenizer with a token for each byte, and one for `a b`."""
    return bytes_tokenizer([("a", "Ġ"), ("aĠ", "b")], template)


def recorded(prompt, context, **options):
    """A trace, and the texts of its context and of its question."""
    words = options.pop("tokenizer", tokenizer())
    trace = capture(small(300), words, prompt, context=context, max_new_tokens=0, **options)
    ids, end = trace.tokens.tolist(), trace.header.context_len
    return trace, words.decode(ids[:end]), words.decode(ids[end:])


@pytest.mark.parametrize(
    ("context", "question", "ends"),
    [
        ("some facts. ", "which?", "some facts. "),
        ("x a", " b y", "x "),  # one token has `a b`: it belongs to the question
        ("größe ☃", "漢字", "größe ☃"),
    ],
)
def test_text_ends_with_its_last_whole_token(context, question, ends):
    """Context and question follow each other directly; a token of both is the question's."""
    trace, before, after = recorded(question, context)

    assert trace.meta["text"]["prompt"] == context + question
    assert before == ends
    assert before + after == context + question


def test_chat_has_context_and_question_in_one_message():
    """What the template puts before the message is part of the context."""
    trace, before, after = recorded("which?", "facts. ", chat=True, system="be brief")

    assert before == "<system>be brief</><user>facts. "
    assert after == "which?</><a>"
    assert len(trace.meta["text"]["messages"]) == 2


def test_template_that_strips():
    """The end is found where the template strips the message."""
    words = tokenizer("{% for m in messages %}<{{ m.content | trim }}>{% endfor %}<a>")

    _, before, after = recorded("which?\n", "\n facts. ", chat=True, tokenizer=words)

    assert (before, after) == ("<facts. ", "which?><a>")


@pytest.mark.parametrize("context", [2, -1])
def test_messages_of_a_chat(context):
    """The first messages are the context, without the system message that is given beside them."""
    chat = [
        {"role": "user", "content": "facts"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "facts"},
    ]

    _, before, after = recorded(chat, context)
    _, with_system, _ = recorded(chat, context, system="be brief")

    assert before == "<user>facts</><assistant>ok</>"
    assert after == "<user>facts</><a>"
    assert with_system == "<system>be brief</>" + before


def test_token_ids(tmp_path):
    """A number of tokens, which may be all of them; stored, copied and resumed as it is."""
    out = tmp_path / "a.zarr"
    options = {"max_new_tokens": 3, "out": out}
    trace = capture(small(300), None, [1, 2, 3], context=2, **options)

    assert trace.header.context_len == 2
    assert describe(out)["context_len"] == 2
    assert verify(out, deep=True).ok
    memory = capture(small(300), None, [1, 2, 3], context=2, max_new_tokens=3)
    assert memory.digest == trace.digest
    copy = kvsim.open_trace(kvsim.save_trace(trace, tmp_path / "copy.zarr"))
    assert (copy.header.context_len, copy.digest) == (2, trace.digest)
    assert capture(small(300), None, [1, 2, 3], context=-1, resume=True, **options).path == out
    with pytest.raises(CaptureError, match="its context is 2, expected 3"):
        capture(small(300), None, [1, 2, 3], context=3, resume=True, **options)
