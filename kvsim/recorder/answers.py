"""The checks of responses against right answers, and against what the model would write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsim.core.header import Header
from kvsim.recorder.prompts import Prompt, Turn
from kvsim.recorder.tokenization import response_text
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


def describe_turns(
    session: Any, header: Header, tokens: Sequence[int], ended: Sequence[str | None]
) -> list[dict[str, Any]]:
    """Return what the trace of a capture (`Session`) says of each turn, ready for JSON.

    ended: what ended each answer, None for its length.
    """
    prompt, tokenizer, encoded = session.prompt, session.tokenizer, session.encoded
    asked = [prompt, *prompt.turns]
    begun = [encoded.opened, *(each.opened for each in encoded.turns)]
    spans, written = header.answers(len(tokens)), prompt.response is None or prompt.writer
    out = []
    for turn, span, end, opened in zip(asked, spans, ended, begun, strict=True):
        text, check, question = None, None, getattr(turn, "question", prompt.content)
        if tokenizer is not None:
            text = response_text(tokens[slice(*span)], tokenizer)
            own = turn.max_new_tokens or prompt.max_new_tokens
            longest = own if session.longest is None else None
            check = answer_check(turn, text, opened, longest) if written else None
            session.notes += reasoning_notes(opened + text) if check else []
        out.append(
            {
                "question": question if isinstance(question, str) else None,
                "response": text,
                "stopped": end or "length",
                "labels": {**prompt.labels, **getattr(turn, "turn_labels", turn.labels)},
                "answer_check": check,
            }
        )
    return out
