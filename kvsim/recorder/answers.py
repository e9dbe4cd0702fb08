"""The answer check: whether the response of a capture is the right one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from transformers import PreTrainedModel

from kvsim.recorder.models import is_tiny
from kvsim.recorder.prompts import Encoded
from kvsim.text.answers import final_part, is_right
from kvsim.tiny import ledger


def answer_check(
    model: PreTrainedModel, encoded: Encoded, response: str | None, answer: str | None
) -> dict[str, Any] | None:
    """Compare a response with the right one, ready for JSON; None without anything to compare.

    For tiny the right response follows from the prompt. For other models the response is right if
    it has the answer in it (`kvsim.text.answers.is_right`).
    """
    if response is None:
        return None
    if is_tiny(model) and encoded.text is not None:
        try:
            check = ledger.check(encoded.text, response)
        except ledger.LedgerError as error:
            return {"kind": "none", "right": None, "reason": str(error)}
        return {"kind": "ledger", "right": check.exact, **asdict(check)}
    if answer is None:
        return None
    right = is_right(response, answer)
    end = final_part(response).strip()[-200:]
    return {"kind": "text", "right": right, "expected": answer, "answer": end}
