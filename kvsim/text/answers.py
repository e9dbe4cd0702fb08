"""The check of a response in free text against the right answer, or several."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from kvsim.errors import GoldError, TextError
from kvsim.registry import Registry

__all__ = ["LANGUAGES", "SCORERS", "Language", "is_right", "score", "text_check"]


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

#: How a response in free text is scored against several answers. `contained`: 1 where any of them
#: is in it, as `is_right` says; the others are RULER's (arXiv 2404.06654): the share of the answers
#: that are in it, or 1 where any is, as text in upper or lower case.
SCORERS = ("contained", "string_match_all", "string_match_part")


def language_of(scorer: str) -> Language:
    """Return the language of a scorer ``KIND:NAME``; TextError for an unknown kind."""
    kind, _, name = scorer.partition(":")
    if name and kind in LANGUAGES:
        return LANGUAGES[kind]
    kinds = (f"{each}:NAME" for each in LANGUAGES if each != "ledger")
    raise TextError(f"scorer is {scorer!r}, expected one of {', '.join((*SCORERS, *kinds))}")


def check_answer(answer: str | Sequence[str] | None, scorer: str | None) -> None:
    """Raise TextError for an unknown scorer, or an answer of which it cannot score responses."""
    if scorer is not None and scorer not in SCORERS:
        language_of(scorer).check("", "", {"scorer": scorer})
    elif answer is not None:
        text_check("", answer, scorer)


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


def answer_text(answer: object) -> str:
    """Return an answer as text, a number in decimals: 7.0 is "7". TextError for anything else."""
    if isinstance(answer, str):
        return answer
    if isinstance(answer, int) and not isinstance(answer, bool):
        return str(answer)
    if isinstance(answer, float) and math.isfinite(answer):
        return format(Decimal(str(answer)), "f").removesuffix(".0") if answer else "0"
    raise TextError(f"the answer is {answer!r:.60}, expected text or a list of texts")


def score(response: str, answers: Sequence[str], scorer: str = "contained") -> float:
    """Return the score of a response from 0 to 1, by one of `SCORERS`."""
    if scorer == "contained":
        return float(any(is_right(response, answer) for answer in answers))
    found = [answer.lower() in response.lower() for answer in answers]
    return float(any(found)) if scorer == "string_match_part" else sum(found) / len(found)


def text_check(response: str, answer: str | Sequence[str], scorer: str | None) -> dict[str, Any]:
    """The check of free text that a trace stores, as JSON; scorer: None for a contained answer."""
    several = isinstance(answer, list | tuple)
    check: dict[str, Any] = {"expected": [*answer] if several else answer}
    check |= {} if scorer is None else {"scorer": scorer}
    value = text_score(response, check)
    check |= {} if scorer is None else {"score": value}
    end = final_part(response).strip()[-200:]
    return {"kind": "text", "right": value == 1, **check, "answer": end}


def text_score(response: str, check: Mapping[str, Any]) -> float:
    """Score a response by an untrusted `answer_check`; TextError for no text, or unknown scorer."""
    expected, scorer = check.get("expected"), check.get("scorer", "contained")
    answers = expected if isinstance(expected, list) else [expected]
    if not answers:
        raise TextError("the answer is [], expected text or a list of texts")
    if scorer not in SCORERS:
        raise TextError(f"scorer is {scorer!r}, expected one of {', '.join(SCORERS)}")
    return score(response, [*map(answer_text, answers)], scorer)


def final_part(response: str) -> str:
    """Return the text after the last ``</think>``."""
    return response.rpartition("</think>")[2]
