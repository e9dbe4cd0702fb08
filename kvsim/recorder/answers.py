"""Whether a response is right."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

from kvsim.tiny import ledger


def check_answer(
    text: str | None, response: str | None, expected: str | None, *, tiny: bool
) -> dict[str, Any] | None:
    """Compare a response with the right one, ready for JSON; None without anything to compare.

    For tiny the right response follows from the prompt. For other models the response is right if
    `expected` occurs after the last ``</think>``, as whole words, upper or lower case.
    """
    if response is None:
        return None
    if tiny and text is not None:
        try:
            check = ledger.check(text, response)
        except ledger.LedgerError as error:
            return {"kind": "none", "right": None, "reason": str(error)}
        return {"kind": "ledger", "right": check.exact, **asdict(check)}
    if expected is None:
        return None
    final = response.rpartition("</think>")[2]
    pattern = rf"(?<!\w){re.escape(expected.strip())}(?!\w)"
    right = bool(expected.strip()) and re.search(pattern, final, re.IGNORECASE) is not None
    return {"kind": "text", "right": right, "expected": expected, "answer": final.strip()[-200:]}
