"""The check of a response in free text against the right answer, or several."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from types import FunctionType
from typing import Any

from kvsim.errors import TextError
from kvsim.registry import Registry

__all__ = ["LANGUAGES", "SCORERS", "is_right", "score", "text_check"]


#: Checks of a prompt, a response, and the facts on the answer in a prompt file or a trace's
#: `answer_check` (`expected`, `scorer`, `metadata`), for kinds of prompts whose right responses are
#: computed. Each returns the `answer_check` of a trace; `right` is None for other prompts.
Check = Callable[[str, str, Mapping[str, Any]], dict[str, Any]]
LANGUAGES: Registry[Check] = Registry("language", "kvsim.languages", (FunctionType,), {})

#: How a response in free text is scored against several answers. `contained`: 1 where any of them
#: is in it, as `is_right` says; the others are RULER's (arXiv 2404.06654): the share of the answers
#: that are in it, or 1 where any is, as text in upper or lower case.
SCORERS = ("contained", "string_match_all", "string_match_part")


def language_of(scorer: str) -> Check:
    """Return the check of a scorer ``KIND:NAME``; TextError for an unknown kind."""
    kind, _, name = scorer.partition(":")
    if name and kind in LANGUAGES:
        return LANGUAGES[kind]
    kinds = (f"{each}:NAME" for each in LANGUAGES if each != "ledger")
    raise TextError(f"scorer is {scorer!r:.60}, expected one of {', '.join((*SCORERS, *kinds))}")


def check_answer(answer: str | Sequence[str] | None, scorer: str | None) -> None:
    """Raise TextError for an unknown scorer, or an answer of which it cannot score responses."""
    if scorer is not None and scorer not in SCORERS:
        language_of(scorer)("", "", {"scorer": scorer})
    elif answer is not None:
        text_check("", answer, scorer)


_MARKED = (
    "<think> </think> <thinking> </thinking> <thought> </thought> <reasoning> </reasoning> "
    "[THINK] [/THINK] <seed:think> </seed:think> <longcat_think> </longcat_think> "
    "<|START_THINKING|> <|END_THINKING|> \u25c1think\u25b7 \u25c1/think\u25b7 "
    "<|inner_prefix|> <|inner_suffix|> <mm:think> </mm:think> <|channel> <channel|> "
    "<|begin_of_thought|> <|end_of_thought|> "
    "<|channel|>analysis<|message|> <|channel|>final<|message|> "
    "<|channel|>commentary<|message|> <|channel|>final<|message|>"
)
#: Where reasoning begins, and where it ends: of DeepSeek, Qwen and most others, then of Mistral,
#: Seed, LongCat, Cohere, Kimi, Apertus, MiniMax, Gemma, OpenThoughts and gpt-oss.
REASONING = dict(zip(_MARKED.split()[::2], _MARKED.split()[1::2], strict=True))
_OPENED = re.compile(rf"(?<![`'\"])(?:{'|'.join(map(re.escape, REASONING))})")
_CLOSED = re.compile("|".join(map(re.escape, REASONING.values())))

# Digits, and letters of Latin, Greek and Cyrillic.
_LATIN = "\0-\u052f\u1d00-\u2e7f\ua640-\ua7ff\uab30-\uab6f\ufb00-\ufb06"
# Signs of vowels and accents.
_MARKS = ("Mn", "Mc")
# Scripts without spaces between words, or with endings behind them: Thai to Myanmar, Hangul, Khmer,
# Chinese and Japanese.
_UNSPACED = (
    "\u0e00-\u109f\u1100-\u11ff\u1780-\u17ff\u2e80-\ua4cf\ua960-\ua97f\uac00-\ud7ff"
    "\uf900-\ufaff\uff66-\uffdc\U00020000-\U0003ffff"
)
# Numbers end where no decimals, no thousands and no ten thousands of East Asia follow.
_BEFORE = r"(?<!\d\.)(?!(?<=\d,)\d{3}(?!\d))"
_AFTER = r"(?!\.\d)(?!,\d{3}(?!\d))(?!(?<=\d)[\u4e07\u842c\u4ebf\u5104\ub9cc\uc5b5])"

# Full-width forms but the comma, which parts clauses; Arabic signs of numbers; variation selectors.
_PLAIN: dict[int, int | None] = {at: at - 0xFEE0 for at in range(0xFF01, 0xFF5F) if at != 0xFF0C}
_PLAIN |= {0x066B: ord("."), 0x066C: ord(","), 0xFE0E: None, 0xFE0F: None}


def is_right(response: str, answer: str) -> bool:
    """Return whether a response has the answer in it.

    As whole words and whole numbers (12 is not in 12.5, 12,000 or -12), in upper or lower case, in
    the final part; runs of spaces and line ends count as one space, digits of all scripts as the
    same. In a script without spaces, text is enough, and a number next to its letters is whole. An
    empty answer is never right.
    """
    final, expected = _plain(final_part(response)), _plain(answer)
    places = re.finditer(rf"(?={_BEFORE}({re.escape(expected)}){_AFTER})", final, re.IGNORECASE)
    return bool(expected) and any(_whole(final, *place.span(1)) for place in places)


def _plain(text: str) -> str:
    if not text.isascii():
        text = unicodedata.normalize("NFC", text).translate(_PLAIN)
        text = re.sub(r"(?![0-9])\d", lambda digit: str(unicodedata.decimal(digit[0])), text)
    return " ".join(text.split())


def _whole(text: str, start: int, end: int) -> bool:
    """Return whether a part of a text begins and ends at word boundaries.

    Neighbours are of one word if their kind is the same: digits and Latin letters, or letters of
    other scripts with spaces, such as Arabic, whose prefixes stand next to digits. A minus sign
    belongs to its number, a hyphen between words does not.
    """
    before, after = text[:start][-1:], text[end : end + 1]
    ends = (before, text[start]), (after, text[end - 1])
    joined = any(_kind(x) == (_kind(edge) or _LATIN) != _UNSPACED for x, edge in ends)
    signed = before in ("-", "\u2212") and _kind(text[: start - 1][-1:]) in ("", _UNSPACED)
    minus = signed and text[start].isdecimal()
    return not (joined or minus or unicodedata.category(after or " ") in _MARKS)


def _kind(letter: str) -> str:
    """Return the kind of a word's character; empty for other characters."""
    if letter.isalnum() or letter == "_" or unicodedata.category(letter or " ") in _MARKS:
        kinds = (kind for kind in (_LATIN, _UNSPACED) if re.match(f"[{kind}]", letter))
        return next(kinds, "other")
    return ""


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
    final = final_part(response).lower()
    found = [answer.lower() in final for answer in answers]
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
        raise TextError(f"scorer is {scorer!r:.60}, expected one of {', '.join(SCORERS)}")
    return score(response, [*map(answer_text, answers)], scorer)


def final_part(response: str) -> str:
    """Return the text after reasoning that has ended, up to reasoning that has not."""
    return str(_OPENED.split(_CLOSED.split(response)[-1])[0])


def open_reasoning(text: str) -> str:
    """Return the mark of reasoning (`REASONING`) that a text begins and does not end, or ''."""
    opened: list[str] = _OPENED.findall(_CLOSED.split(text)[-1])
    return opened[-1] if opened else ""
