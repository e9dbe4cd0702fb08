"""docs/price.py: the tables of the page are of the results in the repository."""

from __future__ import annotations

import price


def test_the_page_is_of_its_results(tmp_path):
    """docs/optimum.md has what `python docs/price.py --write-only` writes, once for each key."""
    page = tmp_path / "optimum.md"
    page.write_text(price.PAGE.read_text("utf-8"), "utf-8")
    rows = price.measured()
    price.write(rows, page)

    assert page.read_text("utf-8") == price.PAGE.read_text("utf-8")
    assert all(any(key.items() <= row.items() for row in rows) for key, _ in price.steps())
