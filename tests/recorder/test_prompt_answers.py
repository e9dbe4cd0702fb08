"""Answers in a file of prompts: those that no response can be checked against are refused."""

import json

import pytest

from kvsim.errors import CaptureError
from kvsim.recorder import read_prompts


@pytest.mark.parametrize("answer", ["", "  ", True, {"code": 48213}])
def test_an_answer_that_cannot_be_checked_is_refused(answer, tmp_path):
    """One line with its place, before a model is loaded."""
    source = tmp_path / "prompts.jsonl"
    source.write_text('{"prompt": "a"}\n' + json.dumps({"prompt": "a", "answer": answer}))

    with pytest.raises(CaptureError, match=r"line 2: answer is .*, expected") as caught:
        read_prompts(source)

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("answer", "text"), [("48213", "48213"), (7, "7"), (0.5, "0.5")])
def test_answers_are_text_or_numbers(answer, text, tmp_path):
    """A number is checked as it is written."""
    source = tmp_path / "prompts.jsonl"
    source.write_text(json.dumps({"prompt": "a", "answer": answer}))

    assert read_prompts(source)[0].answer == text
