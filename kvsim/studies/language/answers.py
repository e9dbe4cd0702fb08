"""Answers to prompts in the language of the ledger: their check, and what they rest on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvsim.errors import GoldError
from kvsim.studies.language.ledger import LedgerError, check, read, solve
from kvsim.text.answers import Language


def answer_check(prompt: str, response: str, _: object = None) -> dict[str, Any]:
    """Return a `check` as traces store it; without a right response where the prompt has none."""
    try:
        found = check(prompt, response)
    except LedgerError as error:
        return {"kind": "none", "right": None, "reason": str(error)}
    return {"kind": "ledger", "right": found.exact, **asdict(found)}


def answer_facts(words: Sequence[str], name: str) -> list[int]:
    """Return the places of the words of a prompt that its answer is made from, ascending.

    Whatever a word of the right response is looked up from, with the rest of its statement. Words
    before the prompt, such as ``<bos>``, count. GoldError, with the trace's name, for other
    prompts.
    """
    first = list(words).index("facts") if "facts" in words else 0
    prompt = " ".join(words[first:])
    try:
        page, retrievals = read(prompt), solve(prompt).retrievals
    except LedgerError as error:
        raise GoldError(
            f"{name}: the prompt is no task of the shipped model ({error}); give gold positions or "
            "a text"
        ) from None
    holds = {at: statement for statement in page.statements() for at in statement}
    looked_up = {at for retrieval in retrievals for at in retrieval.path if at < page.length}
    return sorted({first + part for at in looked_up for part in holds.get(at, (at,))})


LEDGER = Language(answer_check, answer_facts)
