"""docs/answer.py: where an answer breaks, and what its cache held there."""

import answer
from small_model import bytes_tokenizer, small


def test_an_answer_breaks_at_a_number_that_nobody_gave():
    """0.70 is 0.7; a number of the question or of the right answer is none."""
    assert answer.break_of("of 160, 0.70 and 48 left", "160 mails", "0.7 of them") == 17
    assert answer.break_of("of 160", "160 mails") is None


def test_the_answer_is_in_the_last_box():
    """Marks of LaTeX around it are no part of it; without a box there is no answer."""
    texts = (r"\boxed{7}, no: $\boxed{8,\!000}$", r"\boxed{\text{pear}}", r"\boxed{x = -3}", "68")
    assert [answer.final(text) for text in texts] == ["8,000", "pear", "-3", ""]


def test_pieces_are_laid_out_in_lines():
    """A piece that does not fit begins a line, and so does what follows a newline."""
    wide = "x" * (answer.COLUMNS - 1)

    assert answer.lines_of([wide, "ab", "c\n", "d"]) == [
        (0, 0, wide), (1, 0, "ab"), (1, 2, "c"), (2, 0, "d")
    ]  # fmt: skip
    assert [answer.piece_at(["ab", "c", "de"], at) for at in range(5)] == [0, 0, 1, 2, 2]


def test_intervals_are_wilsons():
    """Of 21 and 40 right answers of 48, and of none (Newcombe 1998, table I, has 0 of 20)."""
    assert [round(100 * x) for n in (21, 40) for x in answer.wilson(n, 48)] == [31, 58, 70, 91]
    assert [round(x, 4) for x in answer.wilson(0, 20)] == [0, 0.1611]


def test_an_answer_is_shortened_between_its_break_and_its_last_line():
    """The line of the break stays whole; nothing goes where the last line follows it."""
    pieces = ["a", "b\n", "c", "d\n", "e\n", "f", "g"]

    assert answer.shortened(pieces, 0) == ["a", "b\n", "...\n", "f", "g"]
    assert answer.shortened(pieces, 2) == ["a", "b\n", "c", "d\n", "...\n", "f", "g"]
    assert answer.shortened(pieces, 5) == answer.shortened(pieces, 4) == pieces


def test_the_figure_shows_both_answers():
    """Each panel has every piece of question and answer; what was written later has no box."""
    model, tokenizer = small(vocab_size=300), bytes_tokenizer()
    question = "the box is in the room " * 12
    rows = [
        {"policy": "full", "prompt": question, "response": "\\boxed{3}", "answer": "3"},
        {"policy": "snapkv", "response": "the room 7 is the room \\boxed{7}"},
        {"policy": "expected_attention", "response": "the room is the room \\boxed{3}"},
    ]

    live = [
        {"budget": 128, "policy": row["policy"], "right": right}
        for right in (True, False, True)
        for row in rows[1:]
    ]

    figure = answer.figure(model, tokenizer, rows, live)

    *panels, bars = figure.axes
    for axes, row in zip(panels, rows[1:], strict=True):
        shown = [text.get_text() for text in axes.texts]
        boxed = [text.get_bbox_patch() is not None for text in axes.texts]
        assert len(shown) > len(tokenizer(row["response"])["input_ids"])
        assert boxed == sorted(boxed, reverse=True)
        assert 0 < sum(boxed) < len(boxed)
    assert [axes.get_title()[-1] for axes in panels] == ["7", "3"]
    assert "3, 128 entries" in bars.get_title()
    assert [point.get_data()[0] for point in bars.lines[::3]] == [2 / 3, 2 / 3]
