"""The table of answers by turn in turns.md."""

from __future__ import annotations

import turns


def test_the_page_has_the_answers_so_far():
    """The table follows from the stored answers, three for each prompt, schedule and policy."""
    text, answers = turns.PAGE.read_text("utf-8"), turns.results()

    assert turns.page(text) == text
    cells = {(x["index"], x["compress"], x["policy"], x["turn"]) for x in answers}
    prompts = {each["index"] for each in answers}
    assert len(cells) == len(answers) == 6 * len(turns.POLICIES) * len(prompts)
    assert {each["value"] for each in answers} <= {0.0, 1.0}


def test_cells_are_shares_with_wilsons_interval():
    """None of twelve says little; a cell without an answer is empty."""
    assert turns.cell([0.0] * 12) == "0/12 (0-24 %)"
    assert turns.cell([]) == "-"
