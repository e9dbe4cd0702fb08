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


def test_ratios_are_geometric_means_over_policies():
    """Of values that double in chunks the ratio is 2, whatever the policy."""
    once = {x: n + 1.0 for n, x in enumerate(chunks.POLICIES)}
    rows = [
        {"task": task, "index": i, "policy": name, "chunk": chunk}
        | dict.fromkeys(chunks.VALUES, value)
        for task in chunks.TASKS
        for i in range(6)
        for chunk in chunks.CHUNKS
        for name, base in once.items()
        for value in [base * (1 if chunk is None else 2)]
    ]

    last = chunks.table(rows).splitlines()[-1]
    twice = "1 | 2.00 [2.00, 2.00] | 2.00 [2.00, 2.00] |"
    assert last == f"| `needle` | ratio to one event | {twice} {twice}"
