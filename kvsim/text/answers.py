"""The check of a response in free text against the right answer."""

from __future__ import annotations

import re

__all__ = ["is_right"]


def is_right(response: str, answer: str) -> bool:
    """Return whether a response has the answer in it.

    As whole words, in upper or lower case, after the last ``</think>``; runs of spaces and line
    ends count as one space. An empty answer is never right.
    """
    final, expected = (" ".join(text.split()) for text in (final_part(response), answer))
    pattern = rf"(?<!\w){re.escape(expected)}(?!\w)"
    return bool(expected) and re.search(pattern, final, re.IGNORECASE) is not None


def final_part(response: str) -> str:
    """Return what follows the last ``</think>``."""
    return response.rpartition("</think>")[2]
