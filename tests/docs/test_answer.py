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


def test_the_figure_shows_both_answers():
    """Each panel has every piece of question and answer; what was written later has no box."""
    model, tokenizer = small(vocab_size=300), bytes_tokenizer()
    question = "the box is in the room " * 12
    rows = [
        {"policy": "full", "prompt": question, "response": "\\boxed{3}", "answer": "3"},
        {"policy": "snapkv", "response": "the room 7 is the room \\boxed{7}"},
        {"policy": "expected_attention", "response": "the room is the room \\boxed{3}"},
    ]

    figure = answer.figure(model, tokenizer, rows)

    for axes, row in zip(figure.axes, rows[1:], strict=True):
        shown = [text.get_text() for text in axes.texts]
        boxed = [text.get_bbox_patch() is not None for text in axes.texts]
        assert len(shown) > len(tokenizer(row["response"])["input_ids"])
        assert boxed == sorted(boxed, reverse=True)
        assert 0 < sum(boxed) < len(boxed)
    assert [axes.get_title()[-1] for axes in figure.axes] == ["7", "3"]
