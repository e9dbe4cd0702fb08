"""Prompts: text, chats or token ids, with their answers and labels; checked once."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, cast

import numpy as np
import torch

from kvsim.core.header import fits_label
from kvsim.core.parameters import AtLeast, check_fields
from kvsim.errors import CaptureError, TextError, error_line
from kvsim.files import DOCUMENT
from kvsim.schema import LABELS
from kvsim.store.inputs import decode_document
from kvsim.text.answers import check_answer

Messages = Sequence[Mapping[str, Any]]
Labels = Mapping[str, str | int | float]
PromptLike = str | Messages | Sequence[int] | torch.Tensor | np.ndarray[Any, Any]

#: First token, and the end (exclusive).
Span = tuple[int, int]

#: One text or several, or token spans.
Needle = str | Sequence[str] | Sequence[Sequence[int]]

#: Types of a label.
_LABELS = dict.fromkeys(LABELS, "text or a whole number of 64 bits")
_LABELS |= {"length": "a whole number of 64 bits", "depth": "a number from 0 to 1"}

#: Fields that a trace stores as JSON.
_STORED = ("labels", "turn_labels", "answer", "metadata", "writer")


@dataclass(frozen=True)
class Turn:
    """A question after an answer.

    Attributes:
        question: text, which follows the answer before it directly, or is the next user's message
            of a chat; token ids after a prompt of token ids.
        answer, scorer, answer_prefix, response, max_new_tokens: as those of `Prompt`.
        labels: of this turn, for tables, in addition to those of the prompt.

    Raises:
        CaptureError, TextError: as `Prompt`.
    """

    question: str | Sequence[int]
    answer: str | Sequence[str] | None = None
    scorer: str | None = None
    answer_prefix: str | None = None
    response: str | Sequence[int] | None = None
    max_new_tokens: Annotated[int | None, AtLeast(1)] = None
    labels: Labels = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.question, str):
            object.__setattr__(self, "question", ids_of(self.question, "question"))
        _check(self)


@dataclass(frozen=True)
class Prompt:
    """One of many prompts, such as a line of a file.

    Attributes:
        id: the name of the trace.
        content: text, chat messages or token ids.
        answer: the expected answer, several, or None.
        scorer: decides whether a response is right: one of `kvsim.text.answers.SCORERS`, or
            ``KIND:NAME`` of a package's language; None: the response contains the answer. metadata:
            further facts for the scorer, as JSON.
        labels: any of `schema.LABELS`, which the trace keeps for tables: `task`, `domain`, `level`
            (text or whole numbers), `length` (a whole number) and `depth` (0 to 1).
        system: a system message before the prompt, or None.
        needle: the source of the answer, as texts that occur in the prompt once each, or for token
            ids as token spans (start, end); the trace keeps their token spans.
        writer: the author of the response, such as an engine with its model and sampling: text, or
            an object for JSON; then the response is compared with the answer.
        context: the part of the prompt before its question: text before a text, which follows
            it directly (in one user's message if it is a chat); of chat messages how many of them,
            of token ids how many. Negative numbers count from the end.
        response: text or token ids that are recorded as the response, instead of generating one.
        answer_prefix: the beginning of the answer, which ends the prompt: of plain text after a
            line end, of a chat after the template's beginning of a response.
        max_new_tokens: tokens of the longest response, unless the option is given.
        turns: questions after the first one, which ends the prompt; fields on a response are then
            of the first answer. turn_labels: of only the first turn.

    Raises:
        CaptureError: an invalid content, label, needle, context or writer, facts that JSON cannot
            hold, responses for only some of the turns.
        TextError: an unknown scorer, or an answer of which it cannot score responses.
    """

    id: str
    content: PromptLike
    answer: str | Sequence[str] | None = None
    labels: Labels = field(default_factory=dict)
    system: str | None = None
    needle: Needle = ()
    response: str | Sequence[int] | None = None
    context: str | int | None = None
    scorer: str | None = None
    metadata: Any = None
    writer: str | Mapping[str, Any] | None = None
    answer_prefix: str | None = None
    max_new_tokens: Annotated[int | None, AtLeast(1)] = None
    turns: Sequence[Turn] = ()
    turn_labels: Labels = field(default_factory=dict)

    def __post_init__(self) -> None:
        content, context, chat = self.content, self.context, is_chat(self.content)
        if not isinstance(content, str):
            content = _messages(cast("Messages", content)) if chat else ids_of(content)
        object.__setattr__(self, "content", content)
        object.__setattr__(self, "needle", needle_parts(self.needle))
        _check(self, content=content if chat else None)
        turns: Any = self.turns
        written = isinstance(self.writer, str | Mapping) and bool(self.writer)
        alike = (
            isinstance(turn, Turn) and (turn.response is None) == (self.response is None)
            for turn in turns
        )
        problems = {
            f"context is {reprlib.repr(context)}, expected the text before a prompt of text, or "
            "how many messages or tokens of another prompt": (
                context is not None and isinstance(content, str) != isinstance(context, str)
            ),
            "the prompt is empty, expected some text": (
                isinstance(content, str) and not f"{context or ''}{content}".strip()
            ),
            f"writer is {reprlib.repr(self.writer)}, expected text or an object such as "
            '{"engine": ..., "model": ...}, of a response that is given': (
                self.writer is not None and (not written or self.response is None)
            ),
            f"turns are {reprlib.repr(self.turns)}, expected a list of kvsim.recorder.Turn, with "
            "responses to all of them and to the prompt, or to none": not all(alike),
        }
        for problem, applies in problems.items():
            if applies:
                raise CaptureError(problem)


def _check(part: Prompt | Turn, **more: Any) -> None:
    """Check a question and its answer; more: further stored fields, by name."""
    check_fields(part, type(part).__name__, CaptureError)
    if part.response is not None and not isinstance(part.response, str):
        object.__setattr__(part, "response", ids_of(part.response, "response"))
    for labels in (part.labels, getattr(part, "turn_labels", {})):
        if not isinstance(labels, Mapping):
            raise CaptureError(f"labels are {reprlib.repr(labels)}, expected names with values")
        for name, value in labels.items():
            if name not in LABELS or not fits_label(name, value):
                expected = _LABELS.get(name, f"one of {', '.join(LABELS)}")
                text = (
                    f"{name} is {reprlib.repr(value)}" if name in LABELS else f"label {name!r:.50}"
                )
                raise CaptureError(f"{text}, expected {expected}")
    for name, value in ({x: getattr(part, x, None) for x in _STORED} | more).items():
        # as deep as in a trace, and of a size that leaves room for the others
        document = {"attributes": {"meta": {"turns": [{"answer_check": [value]}]}}}
        try:
            text = json.dumps(document, allow_nan=False, indent=2)
            decode_document(text.encode("ascii"), DOCUMENT // 8)
        except (TypeError, ValueError, RecursionError) as error:
            raise CaptureError(
                f"{name} cannot be stored as JSON ({error_line(error)}); change it or leave it out"
            ) from None
    check_answer(part.answer, part.scorer)


def ids_of(content: object, what: str = "prompt") -> list[int]:
    """Return token ids as a list; CaptureError for anything else, or none."""
    try:
        array = np.asarray(content)
    except (ValueError, TypeError, RuntimeError):
        array = np.empty((), dtype=object)
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]
    flags = isinstance(content, list | tuple) and bool in {*map(type, content)}
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu" or flags:
        raise CaptureError(
            f"the {what} is {reprlib.repr(content)}, expected text, a list of chat messages, "
            "or a list of token ids"
        )
    return [int(token) for token in array]


def is_chat(content: object) -> bool:
    """Return whether a prompt is chat messages."""
    some = isinstance(content, Sequence) and not isinstance(content, str) and bool(content)
    return some and all(isinstance(each, Mapping) for each in cast("Messages", content))


def _messages(messages: Messages) -> list[dict[str, Any]]:
    """Return the messages of a chat, with lists of text parts joined to text.

    The missing content of a message that calls tools is left to the template. CaptureError for one
    without a role, and for other content.
    """
    joined = []
    for place, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list | tuple):
            parts = [x if isinstance(x, Mapping) else {} for x in content]
            texts = [x.get("text") for x in parts if x.get("type") == "text"]
            whole = len(texts) == len(parts) and all(isinstance(x, str) for x in texts)
            content = "".join(map(str, texts)) if whole else parts
        fits = isinstance(content, str) or (content is None and message.get("tool_calls"))
        if not fits or not isinstance(message.get("role"), str):
            raise CaptureError(
                f"message {place} is {reprlib.repr(dict(message))}, expected a 'role', and a "
                "'content' that is text or a list of {'type': 'text', 'text': '...'}; only one "
                "with tool_calls may have none"
            )
        joined.append({**message, "content": content} if content is not None else {**message})
    return joined


def needle_parts(needle: Any) -> tuple[str, ...] | tuple[Span, ...]:
    """Return a needle as several; raise CaptureError for anything else than texts or spans."""
    parts = [needle] if isinstance(needle, str) else needle
    if isinstance(parts, list | tuple):
        if all(isinstance(part, str) and part.strip() for part in parts):
            return tuple(parts)
        if all(
            isinstance(part, list | tuple) and len(part) == 2 and {*map(type, part)} == {int}
            for part in parts
        ):
            return tuple((start, end) for start, end in parts)
    raise CaptureError(
        f"needle is {reprlib.repr(needle)}, expected a text that is in the prompt, a list of such "
        "texts, or for token ids a list of [start, end]"
    )


def with_distinct_ids(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts; raise CaptureError if two ids would name the same trace."""
    seen: dict[str, str] = {}
    for prompt in prompts:
        name = file_name(prompt.id)
        if name in seen:
            raise CaptureError(
                f"prompts {seen[name]!r} and {prompt.id!r} would both be recorded as {name}, "
                "expected ids that differ in letters (a to z), digits, '.', '_' or '-'; rename one"
            )
        seen[name] = prompt.id
    return list(prompts)


@contextmanager
def naming(place: Prompt | str) -> Iterator[None]:
    """Name the prompt in its errors."""
    try:
        yield
    except (CaptureError, TextError) as error:
        name = f"prompt {place.id!r}" if isinstance(place, Prompt) else place
        raise CaptureError(f"{name}: {error}") from error


def file_name(prompt_id: str) -> str:
    """Return the name of a prompt's trace: letters, digits, dots and dashes."""
    return (re.sub(r"[^A-Za-z0-9._-]+", "-", prompt_id).strip(".-") or "prompt") + ".zarr"
