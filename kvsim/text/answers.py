"""The check of a response in free text against the right answer."""

from __future__ import annotations

import re

__all__ = ["is_right"]


# Words end where no letter or digit follows, numbers where no decimals and no thousands do. A minus
# sign belongs to its number, a hyphen between words does not.
_MINUS = r"(?<!(?<!\w)[-\u2212](?=\d))"
_BEFORE = rf"(?<!\w)(?<!\d\.)(?!(?<=\d,)\d{{3}}(?!\d)){_MINUS}"
_AFTER = r"(?!\w)(?!\.\d)(?!,\d{3}(?!\d))"


def is_right(response: str, answer: str) -> bool:
    """Return whether a response has the answer in it.

    As whole words and whole numbers (12 is not in 12.5, 12,000 or -12), in upper or lower case,
    after the last ``</think>``; runs of spaces and line ends count as one space. An empty answer is
    never right.
    """
    final, expected = (" ".join(text.split()) for text in (final_part(response), answer))
    pattern = rf"{_BEFORE}{re.escape(expected)}{_AFTER}"
    return bool(expected) and re.search(pattern, final, re.IGNORECASE) is not None


def final_part(response: str) -> str:
    """Return the text after the last ``</think>``."""
    return response.rpartition("</think>")[2]
