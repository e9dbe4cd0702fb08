"""The table of a prompt in chunks in benchmarks.md."""

from __future__ import annotations

import chunks


def test_the_page_has_the_values_so_far():
    """The table follows from the stored values: each prompt under each policy and chunk, once."""
    text, rows = chunks.PAGE.read_text("utf-8"), chunks.results()

    assert chunks.page(text) == text
    cells = {(row["task"], row["index"], row["policy"], row["chunk"]) for row in rows}
    prompts = {(row["task"], row["index"]) for row in rows}
    assert len(rows) == len(cells) == len(prompts) * len(chunks.POLICIES) * len(chunks.CHUNKS)
