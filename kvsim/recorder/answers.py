"""The checks of responses against right answers, and against what the model would write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsim.core.header import Header
from kvsim.recorder.models import is_tiny
from kvsim.recorder.prompts import Prompt, Turn
from kvsim.recorder.tokenization import response_text
from kvsim.text.answers import LANGUAGES, SCORERS, language_of, open_reasoning, text_check


def _check(
    asked: Prompt | Turn, response: str, text: str | None, *, tiny: bool
) -> dict[str, Any] | None:
    """Compare a response with what is asked for; None without anything to compare.

    A scorer of another kind than free text decides where the prompt names one; for tiny the right
    response follows from the text of the prompt.
    """
    answer, scorer = asked.answer, asked.scorer
    if scorer is not None and scorer not in SCORERS:
        known = {"scorer": scorer, "expected": answer, "metadata": getattr(asked, "metadata", None)}
        return language_of(scorer)(text or "", response, known)
    if tiny and text is not None:
        return LANGUAGES["ledger"](text, response, {})
    return None if answer is None else text_check(response, answer, scorer)


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
    whole = None if prompt.turns else encoded.text
    out = []
    for turn, span, end, opened in zip(asked, spans, ended, begun, strict=True):
        text, check, question = None, None, getattr(turn, "question", prompt.content)
        if tokenizer is not None:
            text = response_text(tokens[slice(*span)], tokenizer)
        if text is not None and written:
            check = _check(turn, opened + text, whole, tiny=is_tiny(session.model))
        if text is not None and check is not None:
            check |= {"opened": opened} if opened else {}
            longest = turn.max_new_tokens or prompt.max_new_tokens
            check |= {"max_new_tokens": longest} if longest and session.longest is None else {}
            if mark := open_reasoning(opened + text):
                note = f"the response does not leave its reasoning ({mark}): it has no answer"
                session.notes.append(note)
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
