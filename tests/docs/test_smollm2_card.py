"""docs/smollm2_card.py: intervals, and the page in the repository is of its results."""

import math

import pytest

import smollm2_card as card


def rows(**right):
    """Results of one length: how many right and wrong answers each task has."""
    return [
        {"task": task, "length": 512, "depth": 0.5, "right": i < good}
        for task, (good, bad) in right.items()
        for i in range(good + bad)
    ]


@pytest.mark.parametrize(("good", "n"), [(0, 30), (5, 9), (24, 30), (30, 30)])
def test_intervals_are_those_of_wilson(good, n):
    """By the formula (Wilson 1927); a share from 80 % on is in bold."""
    z, p = 1.959964, good / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))

    cell = card.table(rows(needle=(good, n - good)), "length", ["needle"]).splitlines()[-1]

    bold = "**" if p >= 0.8 else ""
    text = f"{p:.0%} ({abs(centre - half):.0%} to {centre + half:.0%}; {n})"
    assert cell == f"| `needle` | {bold}{text}{bold} |"


def test_cells_cover_tasks_and_depths_evenly():
    """Each task has `n` prompts of each length, at all depths; prompts of all tasks take turns."""
    cells = list(card.cells([512], ["needle", "fewshot"], 10))

    assert cells[:2] == [(512, "needle", 0.1), (512, "fewshot", None)]
    assert [cells.count((512, "needle", depth)) for depth in card.DEPTHS] == [2] * 5
    assert cells.count((512, "fewshot", None)) == 10


def test_the_page_is_of_its_results():
    """docs/smollm2.md has what `python docs/smollm2_card.py write` writes."""
    text = card.PAGE.read_text()

    assert card.page(text, card.read(card.RESULTS)) == text


def test_results_have_each_prompt_once():
    """A resumed measurement adds what is missing."""
    keys = [
        (row["task"], row["length"], row["depth"], row["index"]) for row in card.read(card.RESULTS)
    ]

    assert len(set(keys)) == len(keys)
