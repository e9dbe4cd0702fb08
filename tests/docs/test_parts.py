"""docs/parts.py: the tables of the page are of the results in the repository."""

from __future__ import annotations

import parts

from apps.tiny.card import fill


def test_the_page_is_of_its_results():
    """docs/access.md has what `python docs/parts.py --write-only` writes, of every policy."""
    text = parts.PAGE.read_text("utf-8")

    assert fill(text, parts.tables()) == text
    assert {row["name"] for row in parts.read(parts.RESULTS)} == {*parts.READERS, *parts.MERGED}
