"""Prompts of a capture: files of them, system messages, chats; and strings that end a response."""

import json

import pytest
from recorder_models import four_layers

from families import ids
from kvsim.errors import CaptureError
from kvsim.recorder import Prompt, capture, capture_many, read_prompts
from small_model import TEMPLATE, words_tokenizer


def write(path, *rows, start=b"", end=b"\n"):
    """A file with a JSON object per line."""
    path.write_bytes(start + end.join(json.dumps(row).encode() for row in rows) + end)
    return path


def test_what_a_line_may_hold(tmp_path):
    """Text, chats and token ids, with names, answers, labels and a system message."""
    chat = [{"role": "user", "content": "w1"}]
    source = write(
        tmp_path / "p.jsonl",
        {"id": 7, "prompt": "w1", "answer": 42, "difficulty": "hard", "tokens": 100},
        {"messages": chat, "system": "w2", "level": 3, "difficulty": 3},
        {"tokens": [1, 2], "system": ""},
        {"prompt": chat},
        {"prompt": [5, 6], "other": None},
    )

    found = read_prompts(source)

    assert found == [
        Prompt("7", "w1", "42", {"level": "hard"}),
        Prompt("prompt-0001", chat, None, {"level": 3}, "w2"),
        Prompt("prompt-0002", [1, 2]),
        Prompt("prompt-0003", chat),
        Prompt("prompt-0004", [5, 6]),
    ]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        *((7.0, "7"), (-3.0, "-3"), (-0.0, "0"), (7.5, "7.5"), (0.1, "0.1"), (1e-7, "0.0000001")),
        *(
            (1e16, "1" + "0" * 16),
            (1e23, "1" + "0" * 23),
            (10**400, "1" + "0" * 400),
            ("7.0", "7.0"),
        ),
    ],
)
def test_numbers_are_those_that_a_table_means(number, text, tmp_path):
    """A whole number is one in every key, and an answer has decimals, not a power of ten."""
    turn = {"question": "q", "answer": number, "level": 2.0, "max_new_tokens": 3.0}
    rows = [{"prompt": "p", "answer": number, "metadata": {"x": 1.0}}, {"turns": [turn, turn]}]
    rows.append({"tokens": [1.0, 2.0], "id": 8.0, "needle": [[0.0, 1.0]], "answers": [number]})
    labels = {"level": 3.0, "length": 9.0, "depth": 0.5}

    first, turns, ids = read_prompts(write(tmp_path / "p.jsonl", *rows[:2], rows[2] | labels))

    assert (first.answer, first.metadata) == (text, {"x": 1.0})
    assert json.dumps(first.metadata) == '{"x": 1.0}'
    assert turns.answer == turns.turns[0].answer == text
    assert (turns.turn_labels, turns.max_new_tokens) == ({"level": 2}, 3)
    assert (ids.id, ids.content, ids.needle, ids.answer) == ("8", [1, 2], ((0, 1),), [text])
    assert json.dumps(ids.labels) == '{"level": 3, "length": 9, "depth": 0.5}'


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ('{"prompt": "p", "answer": NaN}', "line 1: the answer is nan"),
        ('{"prompt": "p", "answers": [1, -Infinity]}', "line 1: the answer is -inf"),
        ('{"prompt": "p", "level": 1e999}', "line 1: level is inf"),
        ('{"turns": [{"question": "q", "answer": NaN}]}', "line 1: turn 1: the answer is nan"),
        ('{"prompt": "p", "answer": [true]}', "line 1: the answer is True"),
        ('{"prompt": "p", "answer": [null]}', "line 1: the answer is None"),
    ],
)
def test_numbers_that_are_none_are_refused(row, name, tmp_path):
    """One line names the row and the column; a column that is not read may have any."""
    (tmp_path / "p.jsonl").write_text(row.replace("{", '{"unread": NaN, ', 1))

    with pytest.raises(CaptureError, match=name):
        read_prompts(tmp_path / "p.jsonl")


def test_misspelled_keys_are_told_once(tmp_path):
    """A key that looks like one that is read is named; others are silently ignored."""
    row = {"prompt": "w1", "anwser": "w2", "reach": 3}
    source = write(tmp_path / "p.jsonl", row, {**row, "id": "b", "dificulty": 1})
    notes = []

    read_prompts(source, note=notes.append)

    assert [note.removeprefix(str(source)) for note in notes] == [
        ", line 1: 'anwser' is not read; did you mean 'answer'?",
        ", line 2: 'dificulty' is not read; did you mean 'difficulty'?",
    ]


def test_system_messages(tmp_path):
    """A system message comes first, a line's own before the common one, and text becomes a chat."""
    prompts = [
        Prompt("text", "w1"),
        Prompt("own", "w2", system="w4"),
        Prompt("chat", [{"role": "user", "content": "w3"}]),
    ]

    traces = capture_many(
        four_layers(), words_tokenizer(TEMPLATE), prompts, tmp_path, system="w5", max_new_tokens=0
    )

    texts = [trace.meta["text"] for trace in traces]
    assert [text["prompt"] for text in texts] == [
        "w8 w5 w7 w1 w9",
        "w8 w4 w7 w2 w9",
        "w8 w5 w7 w3 w9",
    ]
    assert texts[0]["messages"] == [
        {"role": "system", "content": "w5"},
        {"role": "user", "content": "w1"},
    ]


def test_text_as_a_chat():
    """With `chat`, text is a user's message; token ids are taken as they are."""
    options = {"max_new_tokens": 0, "chat": True}

    text = capture(four_layers(), words_tokenizer(TEMPLATE), "w1 w2", **options)
    tokens = capture(four_layers(), words_tokenizer(TEMPLATE), [1, 2], **options)

    assert text.meta["text"]["prompt"] == "w7 w1 w2 w9"
    assert text.meta["text"]["messages"] == [{"role": "user", "content": "w1 w2"}]
    assert tokens.tokens.tolist() == [1, 2]


def parts(*given):
    """A chat of one message in parts; words are parts of text."""
    content = [{"type": "text", "text": one} if isinstance(one, str) else one for one in given]
    return [{"role": "user", "content": content}]


def test_text_parts_are_one_text(tmp_path):
    """A content in parts is what it is in one piece, in a file and in a call."""
    chat = [*parts("w1 ", "w2"), {"role": "user", "content": "w3"}]
    (line,) = read_prompts(write(tmp_path / "p.jsonl", {"messages": chat}))

    trace = capture(four_layers(), words_tokenizer(TEMPLATE), chat, max_new_tokens=0)

    plain = [{"role": "user", "content": "w1 w2"}, *chat[1:]]
    assert line.content == plain
    assert trace.meta["text"]["messages"] == plain
    assert trace.meta["text"]["prompt"] == "w7 w1 w2 w7 w3 w9"
    assert chat[0]["content"][0]["text"] == "w1 "  # nothing of the caller's is changed


def test_the_response_ends_with_the_token_that_completes_a_string():
    """It is the shortest response that holds one of the strings, which may span tokens."""
    free = capture(four_layers(), words_tokenizer(), ids(20), max_new_tokens=30)
    after = free.token_text[20:]
    pair = f"{after[7]} {after[8]}"
    texts = [" ".join(after[:n]) for n in range(1, 31)]
    length = next(n for n, text in enumerate(texts, start=1) if pair in text)

    stopped = capture(
        four_layers(), words_tokenizer(), ids(20), max_new_tokens=30, stop=("never", pair)
    )
    alone = capture(four_layers(), words_tokenizer(), ids(20), max_new_tokens=30, stop=pair)

    assert stopped.tokens.tolist() == free.tokens.tolist()[: 20 + length]
    assert stopped.meta["generation"]["stopped"] == "stop"
    assert stopped.meta["generation"]["stop"] == ["never", pair]
    assert stopped.meta["text"]["response"].endswith(pair)
    assert alone.digest == stopped.digest
    assert free.meta["generation"]["stopped"] == "length"
    assert free.meta["generation"]["stop"] == []
