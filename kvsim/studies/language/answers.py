"""The check of answers to prompts in the language of the ledger."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvsim.studies.language.ledger import LedgerError, check
from kvsim.text.answers import Language


def answer_check(prompt: str, response: str, _: object = None) -> dict[str, Any]:
    """Return a `check` as traces store it; without a right response where the prompt has none."""
    try:
        found = check(prompt, response)
    except LedgerError as error:
        return {"kind": "none", "right": None, "reason": str(error)}
    return {"kind": "ledger", "right": found.exact, **asdict(found)}


LEDGER = Language(answer_check)
