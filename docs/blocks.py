# ruff: noqa: INP001 - lies in docs/, which is no package
"""The fenced blocks of pages, and what each says about itself."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FENCE = re.compile(r"(?ms)^(?P<fence>```+)(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=fence)\s*$")
_REASON = re.compile(r"<!-- not run: (?P<reason>[^\n]+?) -->\n+\Z")


@dataclass(frozen=True)
class Block:
    """A fenced block: `how` is "run", the reason why it is not run, or None if it says neither.

    file: the name of a file that the block is the content of, written when the page runs.
    """

    page: str
    line: int
    language: str
    how: str | None
    body: str
    file: str | None = None


def blocks(page: str, text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    out = []
    for match in _FENCE.finditer(text):
        language, _, run = match["info"].strip().partition(" ")
        reason = _REASON.search(text, 0, match.start())
        file = run.removeprefix("file=") if run.startswith("file=") else None
        runs = run == "exec" or file is not None
        how = "run" if runs else reason["reason"] if reason and not run else None
        line = text.count("\n", 0, match.start("body")) + 1
        out.append(Block(page, line, language, how, match["body"], file))
    return out
