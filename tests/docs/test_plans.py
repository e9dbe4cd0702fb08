"""docs/plans.py: the table of the page is of the results in the repository."""

from __future__ import annotations

import plans

from apps.tiny.card import fill


def test_the_page_is_of_its_results():
    """docs/policies.md has what `python docs/plans.py --write-only` writes, of every policy."""
    text = plans.PAGE.read_text("utf-8")

    assert fill(text, {"plans": plans.table()}) == text
    names = {plans.label(scorer, x) for scorer, group in plans.GROUPS.items() for x in group}
    assert {row["name"] for row in plans.read(plans.RESULTS)} == names
