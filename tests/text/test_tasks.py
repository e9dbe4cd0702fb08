"""Tasks on real text: lengths, depths, needles and answers of every task."""

import re
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.errors import TextError
from kvsim.text.answers import REASONING, is_right, open_reasoning, score
from kvsim.text.haystack import prose
from kvsim.text.tasks import DEPTHLESS, TASKS, sample

WITH_DEPTH = [task for task in TASKS if task not in DEPTHLESS]


@cache
def _pieces(text):
    return len(re.findall(r"\w{1,4}|\W", text))


def count(prompt):
    """Tokens of a made-up tokenizer: pieces of words, and three more for each message."""
    if isinstance(prompt, str):
        return 1 + _pieces(prompt)
    return sum(3 + _pieces(message["content"]) for message in prompt)


def text_of(prompt):
    """The text of a prompt, messages joined."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(message["content"] for message in prompt)


@given(
    task=st.sampled_from(TASKS),
    length=st.integers(200, 1500),
    seed=st.integers(0, 99),
    depth=st.floats(0, 1),
)
def test_prompts_have_the_requested_length_and_one_needle(task, length, seed, depth):
    """Prompts have `length` tokens or up to 25 fewer; needles and the answer are there once."""
    at = None if task in DEPTHLESS else depth
    drawn = sample(seed, 0, count, task=task, length=length, depth=at)
    text = text_of(drawn.prompt)

    assert drawn.tokens == count(drawn.prompt)
    assert length - 25 <= drawn.tokens <= length
    assert [text.count(needle) for needle in drawn.needles] == [1] * len(drawn.needles)
    if task in WITH_DEPTH:
        (needle,) = drawn.needles
        assert is_right(needle, drawn.answer)
        assert not is_right(text.replace(needle, ""), drawn.answer)


@pytest.mark.parametrize("task", WITH_DEPTH)
@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_the_needle_is_at_its_depth(task, depth):
    """The share of the context's words before it, to within half of the longest sentence."""
    longest = max(len(sentence.split()) for paragraph in prose() for sentence in paragraph)

    for seed in range(10):
        drawn = sample(seed, 0, count, task=task, length=4000, depth=depth)
        before, _, after = text_of(drawn.context).partition(drawn.needles[0])
        words = len(before.split()), len(after.split())
        assert words[0] == pytest.approx(depth * sum(words), abs=longest / 2 + 40)


def test_fewshot_asks_for_a_word_that_is_not_among_the_examples():
    """The answer is the group of its kind in every example, and differs from seed to seed."""
    answers = set()
    for seed in range(20):
        drawn = sample(seed, 0, count, task="fewshot", length=900)
        pairs = dict(line.split(" -> ") for line in drawn.context.splitlines())
        word = drawn.question.removesuffix(" ->").strip()
        assert word not in pairs
        assert drawn.answer in pairs.values()
        assert len(set(pairs.values())) == 3
        answers.add(drawn.answer)
    assert len(answers) > 2


def test_a_response_of_text_continues_its_prompt():
    """Prompt and response are one piece of the documentation."""
    drawn = sample(3, 0, count, task="text", length=600)

    whole = " ".join((drawn.prompt + drawn.response).split())
    everything = " ".join(" ".join(paragraph) for paragraph in (*prose(), *prose()))
    assert whole in everything
    assert len(drawn.response.split()) > 60
    assert drawn.answer is None


@pytest.mark.parametrize("split", [False, True])
def test_rows_of_a_prompt_file(split):
    """Text is `prompt`, or `context` and `prompt`; a chat `messages`, and how many are context."""
    plain = sample(0, 0, count, task="needle", length=300, depth=0.25)
    chat = sample(0, 0, count, task="chat", length=300)
    row, chat_row = (each.row("a", split=split) for each in (plain, chat))

    assert row.get("context", "") + row["prompt"] == plain.prompt
    assert ("context" in row) == split
    assert row["needle"] == list(plain.needles)
    labels = {key: row[key] for key in ("id", "answer", "task", "length", "depth")}
    expected = {"id": "a", "answer": plain.answer, "task": "needle", "length": 300, "depth": 0.25}
    assert labels == expected
    assert chat_row["messages"] == chat.prompt
    assert chat_row.get("context") == (len(chat.prompt) - 1 if split else None)
    assert chat_row["messages"][-1]["content"] == chat.question


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"task": "sort"}, "task is 'sort', expected one of needle, needles"),
        ({"task": "text", "depth": 0.5}, "depth is 0.5, but text has no needle"),
        ({"depth": 1.5}, "depth is 1.5, expected a number from 0 to 1"),
        ({"depth": float("nan")}, "depth is nan, expected a number from 0 to 1"),
        ({"length": 20}, "length is 20, expected at least 128 tokens"),
        ({"length": 10**6}, "length is 1000000, expected at most"),
    ],
)
def test_what_cannot_be_written_is_refused(wrong, message):
    """One line that says what is expected."""
    with pytest.raises(TextError, match=f"^{message}"):
        sample(0, 0, count, **{"task": "needle", "length": 300, **wrong})


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        (" 48213.", "48213", True),
        ("148213", "48213", False),
        ("482 13", "48213", False),
        ("It is PARIS!", "Paris", True),
        ("then the\n  mirror falls", "Then the mirror falls", True),
        ("<think>48213</think> no idea", "48213", False),
        ("anything", " ", False),
        ("The answer is 12.5", "12", False),
        ("It is 12.", "12", True),
        ("It is 1,234", "234", False),
        ("It is 1,234", "1", False),
        ("7,8 and 9", "8", True),
        ("x = -7", "7", False),
        ("x = -7", "-7", True),
        ("from 3-7", "7", True),
        ("42km", "42", False),
        ("US$5", "$5", False),
        ("1.Paris", "Paris", False),
        ("caf\u00e9", "cafe", False),
        ("cafe\u0301", "caf\u00e9", True),
        # Chinese and Japanese, with full-width digits, decimals, thousands and ten thousands
        ("\u7b54\u6848\u662f42\u3002", "42", True),
        ("\u7b54\u6848\u662f142", "42", False),
        ("\u7b54\u6848\u662f-42", "42", False),
        ("\u7b2c40-42\u9875", "42", True),
        ("\uff14\uff12\u3067\u3059", "42", True),
        ("42\uff0c100\u4e2a", "42", True),
        ("42.5\u5ea6", "42", False),
        ("4,200\u4e2a", "4", False),
        ("42\u4e07", "42", False),
        ("\u5728\u5df4\u9ece\u3002", "\u5df4\u9ece", True),
        ("\u662fParis\u3002", "Paris", True),
        ("Comparis\u306e", "Paris", False),
        # Korean with an ending, Thai
        ("42\uc785\ub2c8\ub2e4", "42", True),
        ("\ud30c\ub9ac\uc785\ub2c8\ub2e4", "\ud30c\ub9ac", True),
        ("\u0e04\u0e37\u0e2d42\u0e04\u0e23\u0e31\u0e1a", "42", True),
        # Arabic: a prefix, digits and signs of its own; Hebrew: a prefix; Hindi: a vowel sign
        ("\u064842", "42", True),
        ("\u0664\u0662", "42", True),
        ("\u0664\u0662\u066b\u0665", "42", False),
        ("\u062f\u0627\u0631", "\u0627\u0631", False),
        ("\u05d1-42", "42", True),
        ("\u0926\u093f\u0932\u094d\u0932\u0940", "\u0926\u093f\u0932", False),
    ],
)
def test_answers_are_whole_words_and_numbers(response, answer, right):
    """Case, spaces and line ends make no difference; thoughts do not count.

    Digits and Latin letters are parts of one word; next to a script without spaces a word ends.
    """
    assert is_right(response, answer) is right


@pytest.mark.parametrize(("opens", "ends"), REASONING.items())
def test_reasoning_that_does_not_end_has_no_answer(opens, ends):
    """Of each pair of marks; one that is quoted begins no thought."""
    assert not is_right(f"{opens} is it 42?", "42")
    assert not is_right(f"{opens} is it 42? {ends} No.", "42")
    assert is_right(f"{opens} is it 41? {ends} No, 42.", "42")
    assert is_right(f"is it 41? {ends} No, 42.", "42")
    assert is_right(f"42\n{opens} or 41?", "42")
    assert is_right(f"The mark `{opens}` is of 42 models", "42")
    assert score(f"{opens} is it 42?", ["42"], "string_match_part") == 0
    assert (open_reasoning(f"{opens} so"), open_reasoning(f"{opens} so {ends}")) == (opens, "")
