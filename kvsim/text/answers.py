"""The check of a response in free text against the right answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvsim.errors import GoldError, TextError
from kvsim.registry import Registry

__all__ = ["LANGUAGES", "Language", "is_right", "language_of"]


def _no_facts(_: Sequence[str], name: str) -> list[int]:
    raise GoldError(f"{name}: nothing says what its answer is made from; give gold positions")


@dataclass(frozen=True)
class Language:
    """A kind of prompts whose right responses are known otherwise than by a text in them.

    check: returns, of a prompt, a response and what the prompt file or the trace's `answer_check`
    says of the answer (`expected`, `scorer`, `metadata`), what a trace stores as `answer_check`;
    `right` is None where the prompt is not of the language. facts: returns, of the words of a
    prompt and the name of the trace, the places of the words that the answer is made from; raises
    GoldError where nothing says so.
    """

    check: Callable[[str, str, Mapping[str, Any]], dict[str, Any]]
    facts: Callable[[Sequence[str], str], list[int]] = _no_facts


#: Languages by the `kind` of their checks.
LANGUAGES: Registry[Language] = Registry("language", "kvsim.languages", (Language,), {})


def language_of(scorer: str) -> Language:
    """Return the language of a scorer ``KIND:NAME``; TextError for an unknown kind."""
    kind, _, name = scorer.partition(":")
    if name and kind in LANGUAGES:
        return LANGUAGES[kind]
    expected = " or ".join(f"{each}:NAME" for each in LANGUAGES if each != "ledger")
    raise TextError(f"scorer is {scorer!r}, expected {expected}; leave it out to find the answer")


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
