"""Later turns of a prompt: questions that follow the answer before them, as token ids."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from kvsim.core.header import Header
from kvsim.errors import CaptureError
from kvsim.recorder.answers import answer_check, reasoning_notes
from kvsim.recorder.facts import check_labels
from kvsim.recorder.options import Options
from kvsim.recorder.positions import fitting_tokens
from kvsim.recorder.prompts import Encoded, Prompt, Turn, check_ids, naming, token_ids
from kvsim.recorder.tokenization import reasoning_begun, rendered, response_text
from kvsim.schema import Spans
from kvsim.text.answers import text_check

# The content of an answer that is not known yet, where a template renders what follows it.
_ANSWER = "x"


@dataclass(frozen=True)
class EncodedTurn:
    """A question after an answer as token ids, the given answer to it, and its most new tokens.

    opened: as `Encoded.opened`.
    """

    ids: list[int]
    response: list[int]
    longest: int
    opened: str


def encode_turns(
    whole: Prompt, encoded: Encoded, longest: int | None, model: PreTrainedModel, tokenizer: Any
) -> list[EncodedTurn]:
    """Return the later turns of a prompt.

    A question in text follows the answer as it is; in a chat it is the next user's message, with
    all that the template puts between the answer and the next one. longest: most tokens of each
    answer, None for what the turns say.

    Raises CaptureError for a question of another kind than the prompt, or without tokens; answers
    of some turns alone; a template that renders an answer otherwise where another turn follows;
    unknown ids or words; more tokens than the model's context. TextError for a scorer that is not
    of free text.
    """
    turns = whole.turns
    asked: tuple[Prompt | Turn, ...] = (whole, *turns)
    alike = all(isinstance(turn, Turn) for turn in turns)
    if not alike or len({each.response is None for each in asked}) > 1:
        raise CaptureError(
            f"turns are {reprlib.repr(turns)}, expected a list of kvsim.recorder.Turn, with "
            "responses to all of them and to the prompt, or to none"
        )
    for each in asked if turns else ():
        text_check("", each.answer or "", each.scorer)
    out: list[EncodedTurn] = []
    messages, text, prefix = encoded.messages, encoded.text, whole.answer_prefix
    for number, turn in enumerate(turns, start=2):
        with naming(f"turn {number}"):
            check_labels(turn.labels)
            question: Any = turn.question
            if isinstance(question, str) != (text is not None) or question == "":
                raise CaptureError(
                    f"the question is {reprlib.repr(question)}, expected some text after text, "
                    "and token ids after token ids"
                )
            opened = ""
            if text is not None:
                before = text + _ANSWER
                if messages is None:
                    text = before + question
                else:
                    messages = _next(messages, (prefix or "") + _ANSWER, question)
                    text = rendered(messages, tokenizer, encoded.template)
                if not text.startswith(before):
                    raise CaptureError(
                        "the chat template renders a turn otherwise where another turn follows it, "
                        "expected the beginning of the whole text; leave --chat out, or give token "
                        "ids"
                    )
                prefix = turn.answer_prefix
                if prefix is not None:
                    text += "\n" * (messages is None) + prefix
                question, opened = text[len(before) :], reasoning_begun(text, messages)
            ids = token_ids(question, tokenizer, "question")
            response = []
            if turn.response is not None:
                response = token_ids(turn.response, tokenizer, "response")
            own = turn.max_new_tokens or whole.max_new_tokens
            most = longest if longest is not None else own or Options().longest
            if type(most) is not int or most < 1:
                raise CaptureError(f"its answer has {most} tokens, expected at least 1")
            out.append(EncodedTurn(ids, response, most, opened))
    later = [token for each in out for token in (*each.ids, *each.response)]
    check_ids(encoded.ids, [*(encoded.response or []), *later] if out else [], model)
    return out


def _next(messages: list[dict[str, Any]], answer: str, question: str) -> list[dict[str, Any]]:
    """Return a chat with an answer, which may be begun, and the next question."""
    if messages[-1]["role"] == "assistant":
        *messages, begun = messages
        answer = (begun.get("content") or "") + answer
    new = {"assistant": answer, "user": question}
    return [*messages, *({"role": role, "content": text} for role, text in new.items())]


def fitting_turns(
    model: PreTrainedModel, start: int, first: int, turns: Sequence[EncodedTurn]
) -> tuple[int, list[str]]:
    """Return the new tokens after a prompt of `start`, as `fitting_tokens`; all turns must fit.

    first: most tokens of the first answer, 0 where answers are given.
    """
    most = first + (sum(len(turn.ids) + turn.longest for turn in turns) if first else 0)
    count, notes = fitting_tokens(model, start, most)
    if turns and count < most:
        raise CaptureError(
            f"questions and answers of all turns take up to {most} tokens after a prompt of "
            f"{start}, and the model has room for {count}; expected turns that fit; give a smaller "
            "--max-new-tokens, or fewer turns"
        )
    return count, notes


def given_response(encoded: Encoded, turns: Sequence[EncodedTurn]) -> tuple[list[int], Spans]:
    """Return all tokens after a prompt whose answers are given, and spans of later questions."""
    ids, spans = [*(encoded.response or [])], []
    for turn in turns if ids else ():
        start = len(encoded.ids) + len(ids)
        spans.append((start, start + len(turn.ids)))
        ids += [*turn.ids, *turn.response]
    return ids, spans


def describe_turns(
    session: Any, header: Header, tokens: Sequence[int], ended: Sequence[str | None]
) -> list[dict[str, Any]]:
    """Return what the trace of a capture (`Session`) says of each turn, ready for JSON.

    ended: what ended each answer, None for its length.
    """
    prompt, tokenizer = session.prompt, session.tokenizer
    first = Turn(prompt.content, prompt.answer, prompt.scorer, labels=prompt.turn_labels)
    begun = [session.encoded.opened, *(each.opened for each in session.turns)]
    spans, written = header.answers(len(tokens)), prompt.response is None or prompt.writer
    out = []
    for turn, span, end, opened in zip((first, *prompt.turns), spans, ended, begun, strict=True):
        text, check = None, None
        if tokenizer is not None:
            text = response_text(tokens[slice(*span)], tokenizer)
            own = turn.max_new_tokens or prompt.max_new_tokens
            longest = own if session.longest is None else None
            check = answer_check(turn, text, opened, longest) if written else None
            session.notes += reasoning_notes(opened + text) if check else []
        out.append(
            {
                "question": turn.question if isinstance(turn.question, str) else None,
                "response": text,
                "stopped": end or "length",
                "labels": {**prompt.labels, **turn.labels},
                "answer_check": check,
            }
        )
    return out
