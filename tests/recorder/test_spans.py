"""The needle of a prompt: where its tokens are, in what is encoded and in what is stored."""

import json

import pytest

import kvsim
from kvsim.errors import CaptureError
from kvsim.recorder import capture, capture_many, read_prompts
from kvsim.recorder.encoding import located
from kvsim.store.verification import describe
from small_model import bytes_tokenizer, small, words_tokenizer

#: A token of each byte, and merges that cross words.
MERGES = (("a", "Ġ"), ("aĠ", "b"), ("Ġ", "c"))


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("xyz the code is 12345. more", "12345"),
        ("a b a", "b"),  # one token holds all of "a b"
        ("x cc", "cc"),  # a token begins with the space before it
        ("größe: ☃ und 漢字 hier", "☃"),  # a character of several tokens
        ("größe: ☃ und 漢字 hier", "漢字 hier"),
    ],
)
def test_span_is_the_shortest_that_decodes_to_the_needle(text, needle):
    """The tokens of the span have the whole needle; without the first or the last they do not."""
    tokenizer = bytes_tokenizer(MERGES)
    ids = tokenizer(text)["input_ids"]

    ((start, end),) = located([needle], text, len(ids), tokenizer, special=True)

    assert needle in tokenizer.decode(ids[start:end])
    assert needle not in tokenizer.decode(ids[start + 1 : end])
    assert needle not in tokenizer.decode(ids[start : end - 1])


def test_spans_are_those_of_the_rendered_chat(tmp_path):
    """A chat template shifts them; a file's line, Python and a stored trace say the same."""
    template = "{% for m in messages %}w7 w0 {{ m['content'] }} w8{% endfor %} w9"
    tokenizer, model = words_tokenizer(template), small()
    source = tmp_path / "prompts.jsonl"
    row = {"prompt": "w1 w2 w3 w4 w5", "needle": ["w4 w5", "w2"], "length": 5, "depth": 0.5}
    source.write_text(json.dumps(row))
    options = {"max_new_tokens": 0, "chat": True}

    (stored,) = capture_many(model, tokenizer, read_prompts(source), tmp_path / "out", **options)
    memory = capture(model, tokenizer, row["prompt"], needle=("w4 w5", "w2"), **options)

    assert memory.tokens.tolist() == [7, 0, 1, 2, 3, 4, 5, 8, 9]
    assert memory.header.spans == stored.header.spans == {"needle": ((5, 7), (3, 4))}
    assert describe(stored.path)["spans"] == stored.header.spans
    assert stored.header.labels == {"length": 5, "depth": 0.5}
    assert (
        kvsim.open_trace(kvsim.save_trace(stored, tmp_path / "copy.zarr")).header.spans
        == stored.header.spans
    )


def test_tokenizer_without_offsets():
    """A slow tokenizer is one line, with what to give instead."""
    slow = type("Slow", (), {"is_fast": False})()

    with pytest.raises(CaptureError, match=r"tokenizer \(Slow\) does not say where its tokens"):
        located(["a"], "a b", 2, slow, special=True)


def test_resume_compares_the_needle(tmp_path):
    """A trace with another needle is not kept as if it were the same."""
    model, tokenizer, out = small(), words_tokenizer(), tmp_path / "a.zarr"
    capture(model, tokenizer, "w1 w2", needle="w1", max_new_tokens=0, out=out)

    again = {"max_new_tokens": 0, "out": out, "resume": True}
    assert capture(model, tokenizer, "w1 w2", needle="w1", **again).path == out
    with pytest.raises(CaptureError, match=r"its needle is ..0, 1.., expected ..1, 2"):
        capture(model, tokenizer, "w1 w2", needle="w2", **again)
