"""The check of a response against the right answer, and against what the model would write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsim.recorder.prompts import Prompt, Turn
from kvsim.text.answers import LANGUAGES, SCORERS, language_of, open_reasoning, text_check


def answer_check(
    asked: Prompt | Turn,
    response: str,
    opened: str,
    longest: int | None,
    text: str | None = None,
    *,
    tiny: bool = False,
) -> dict[str, Any] | None:
    """Return what a trace says of a response, ready for JSON; None without anything to compare.

    A scorer of another kind than free text decides where the prompt names one; for tiny the right
    response follows from the text of the prompt. opened: the mark of reasoning in which the
    response begins. longest: tokens of the longest response, if the prompt states it.
    """
    answer, scorer, response = asked.answer, asked.scorer, opened + response
    if scorer is not None and scorer not in SCORERS:
        known = {"scorer": scorer, "expected": answer, "metadata": getattr(asked, "metadata", None)}
        check = language_of(scorer)(text or "", response, known)
    elif tiny and text is not None:
        check = LANGUAGES["ledger"](text, response, {})
    elif answer is None:
        return None
    else:
        check = text_check(response, answer, scorer)
    check |= {"opened": opened} if opened else {}
    return check | ({"max_new_tokens": longest} if longest else {})


def reasoning_notes(response: str) -> list[str]:
    """Return a note on a response, with what its prompt begins, that does not end its reasoning."""
    mark = open_reasoning(response)
    return [f"the response does not leave its reasoning ({mark}): it has no answer"] if mark else []


def agreement(likeliest: Sequence[bool], prompt_len: int) -> dict[str, Any]:
    """Return the share of tokens that greedy decoding chooses, too, and the first other position.

    likeliest: of each token of the response, whether no other has a larger logit there. `first` is
    None where all are.
    """
    first = None if all(likeliest) else prompt_len + likeliest.index(False)
    return {"share": sum(likeliest) / len(likeliest), "first": first}
