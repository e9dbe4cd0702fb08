"""The check of a response against the right answer, and against what the model would write."""

from __future__ import annotations

from collections.abc import Sequence
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


def agreement(likeliest: Sequence[bool], prompt_len: int) -> dict[str, Any]:
    """Return the share of tokens that greedy decoding chooses, too, and the first other position.

    likeliest: of each token of the response, whether no other has a larger logit there. `first` is
    None where all are.
    """
    first = None if all(likeliest) else prompt_len + likeliest.index(False)
    return {"share": sum(likeliest) / len(likeliest), "first": first}
