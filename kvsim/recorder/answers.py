"""The check of a response against the right answer."""

from __future__ import annotations

from typing import Any

from kvsim.recorder.prompts import Prompt
from kvsim.text.answers import LANGUAGES, final_part, is_right, language_of


def answer_check(
    prompt: Prompt, text: str | None, response: str, *, tiny: bool
) -> dict[str, Any] | None:
    """Return what a trace says of a response, ready for JSON; None without anything to compare.

    A scorer decides where the prompt names one. For tiny the right response follows from the text
    of the prompt. For other models the response is right if it has the answer in it.
    """
    answer, scorer = prompt.answer, prompt.scorer
    if scorer is not None:
        known = {"scorer": scorer, "expected": answer, "metadata": prompt.metadata}
        return language_of(scorer).check(text or "", response, known)
    if tiny and text is not None:
        return LANGUAGES["ledger"].check(text, response, {})
    if answer is None:
        return None
    end = final_part(response).strip()[-200:]
    right = is_right(response, answer)
    return {"kind": "text", "right": right, "expected": answer, "answer": end}
