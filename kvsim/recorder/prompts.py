"""Prompts: text, chat messages or token ids, and how they are encoded for a model."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from kvsim.errors import CaptureError, TextError
from kvsim.recorder.positions import context_length
from kvsim.recorder.spans import Needle, Span, counted_context, located, tokens_before
from kvsim.recorder.tokenization import doubled_notes, reasoning_begun, rendered, tokenize

Messages = Sequence[Mapping[str, Any]]
Labels = Mapping[str, str | int | float]
PromptLike = str | Messages | Sequence[int] | torch.Tensor | np.ndarray[Any, Any]

# Roles of a system message; a chat has at most one.
_SYSTEM = ("system", "developer")


@dataclass(frozen=True)
class Turn:
    """A question after an answer.

    Attributes:
        question: text, which follows the answer before it directly, or is the next user's message
            of a chat; token ids after a prompt of token ids.
        answer, scorer, answer_prefix, response, max_new_tokens: as those of `Prompt`.
        labels: of this turn, for tables, beside those of the prompt.
    """

    question: str | Sequence[int]
    answer: str | Sequence[str] | None = None
    scorer: str | None = None
    answer_prefix: str | None = None
    response: str | Sequence[int] | None = None
    max_new_tokens: int | None = None
    labels: Labels = field(default_factory=dict)


@dataclass(frozen=True)
class Prompt:
    """One of many prompts, such as a line of a file.

    Attributes:
        id: the name of the trace.
        content: text, chat messages or token ids.
        answer: the expected answer, several, or None.
        scorer: what decides whether a response is right: one of `kvsim.text.answers.SCORERS`, or
            ``KIND:NAME`` of a package's language; None for responses that have the
            answer in them. metadata: what it knows of the question beside the answer, as JSON.
        labels: any of `schema.LABELS`, which the trace keeps for tables: `task`, `domain`, `level`
            (text or whole numbers), `length` (a whole number) and `depth` (0 to 1).
        system: a system message before the prompt, or None.
        needle: what the answer depends on, as texts that occur in the prompt once each, or for
            token ids as token spans (start, end); the trace keeps their token spans.
        writer: what wrote the response, such as an engine with its model and sampling: text, or an
            object for JSON; then the response is compared with the answer.
        context: the part of the prompt before its question: text before a text, which follows
            it directly (in one user's message if it is a chat); of chat messages how many of them,
            of token ids how many. Negative numbers count from the end.
        response: text or token ids that are recorded as the response, instead of generating one.
        answer_prefix: the beginning of the answer, which ends the prompt: of plain text after a
            line end, of a chat after the template's beginning of a response.
        max_new_tokens: tokens of the longest response, unless the option is given.
        turns: questions after the first one, which is the end of the prompt; all that is said of a
            response here is then of the first answer. turn_labels: of the first turn alone.
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
    max_new_tokens: int | None = None
    turns: Sequence[Turn] = ()
    turn_labels: Labels = field(default_factory=dict)


@dataclass(frozen=True)
class Encoded:
    """A prompt as token ids, and the text or messages that they were encoded from.

    needle: its token spans. response: token ids of a given response, None to generate one.
    context_len: tokens of the context, None without one. notes: special tokens that are
    there twice.
    opened: the mark of reasoning in which the response begins, such as ``<think>``. template: what
    the chat template was given beside messages.
    """

    ids: list[int]
    text: str | None
    messages: list[dict[str, Any]] | None
    needle: list[Span]
    response: list[int] | None
    context_len: int | None
    notes: list[str]
    opened: str = ""
    template: Mapping[str, Any] = field(default_factory=dict)


def encode(
    whole: Prompt,
    model: PreTrainedModel,
    tokenizer: Any,
    template: Mapping[str, Any] | None = None,
    *,
    system: str | None,
    chat: bool,
) -> Encoded:
    """Encode a prompt as token ids of a model.

    system: a message before it, which makes text a chat. chat: text is a user's message. template:
    variables of the chat template, such as `enable_thinking`. A last message of the assistant is
    continued. A response is encoded by itself, without special tokens. The context ends with the
    last token that has no text of the question.

    Raises CaptureError for a prompt that is empty, or with its response longer than the context; a
    response that is empty; unknown ids or words; text without a tokenizer; a chat without a
    template, or one that the template refuses or leaves out; a second system message, or one for
    token ids; a needle that is not in the prompt once, or with a tokenizer that does not say where
    its tokens are in the text; a context that ends outside the prompt.
    """
    prompt, context, template = whole.content, whole.context, template or {}
    if context is not None and isinstance(prompt, str) != isinstance(context, str):
        raise CaptureError(
            f"context is {reprlib.repr(context)}, expected the text before a prompt of text, or "
            "how many messages or tokens of another prompt"
        )
    if isinstance(prompt, str):
        prompt = f"{context or ''}{prompt}"
    messages = _messages(prompt, system=system, chat=chat)
    special = messages is None  # a chat template has put the special tokens in already
    if messages is not None:
        text: str | None = rendered(messages, tokenizer, template)
    elif template:
        raise CaptureError(
            "chat_template_kwargs are given and the prompt is no chat, expected messages, or text "
            "with --chat; leave --chat-template-kwargs out"
        )
    else:
        text = prompt if isinstance(prompt, str) else None
    if text is not None and whole.answer_prefix is not None:
        text += "\n" * special + whole.answer_prefix
    if isinstance(prompt, str) and not prompt.strip():
        raise CaptureError("the prompt is empty, expected some text")
    ids = token_ids(prompt if text is None else text, tokenizer, special=special)
    response = whole.response
    given = None if response is None else token_ids(response, tokenizer, "response")
    check_ids(ids, given or [], model)
    notes = [] if text is None else doubled_notes(text, ids, tokenizer)
    spans = located(whole.needle, text, len(ids), tokenizer, special=special)
    context_len: int | None = None
    if context is not None and text is None:
        context_len = counted_context(context, len(ids), "tokens")
    elif context is not None and text is not None:
        end = _context_end(prompt, context, messages or [], text, tokenizer, template)
        context_len = tokens_before(end, text, tokenizer, special=special)
    opened = "" if text is None else reasoning_begun(text, messages)
    return Encoded(ids, text, messages, spans, given, context_len, notes, opened, template)


def _context_end(
    prompt: Any,
    context: str | int,
    messages: list[dict[str, Any]],
    text: str,
    tokenizer: Any,
    template: Mapping[str, Any],
) -> int:
    """Return where the context of a prompt, or of its messages, ends in its rendered text."""
    if isinstance(context, str):
        start = text.rfind(prompt.strip())  # templates may strip it
        length = len(context) - (len(prompt) - len(prompt.lstrip()))
    else:
        count = len(messages) - len(prompt)  # a system message that is not counted
        count += counted_context(context, len(prompt), "messages")
        beginning = rendered(messages[:count], tokenizer, template, generation=False)
        start, length = -(not text.startswith(beginning)), len(beginning)
    if start < 0:
        raise CaptureError(
            "the chat template does not render the context as it does alone, so its end cannot be "
            "found, expected a template that does; give token ids, with context a number"
        )
    return start + length


def check_ids(ids: list[int], response: list[int], model: PreTrainedModel) -> None:
    """Raise CaptureError for tokens that the model does not have, or more than it can read."""
    vocab_size = cast("torch.nn.Embedding", model.get_input_embeddings()).weight.shape[0]
    for name, tokens in {"prompt": ids, "response": response}.items():
        unknown = [token for token in tokens if not 0 <= token < vocab_size]
        if unknown:
            raise CaptureError(
                f"token id {unknown[0]} is not in the model's vocabulary, expected 0 to "
                f"{vocab_size - 1}; encode the {name} with the model's own tokenizer"
            )
    context = context_length(model)
    if context is not None and len(ids) + len(response) > context:
        after = f"{len(response)} tokens of response after " if response else ""
        raise CaptureError(
            f"{after}a prompt of {len(ids)} tokens, expected at most the model's context of "
            f"{context}; give fewer or a model with a longer context"
        )


def token_ids(
    content: object, tokenizer: Any, what: str = "prompt", *, special: bool = False
) -> list[int]:
    """Return text or token ids as a list of ids; CaptureError for anything else, or none."""
    if not isinstance(content, str):
        return ids_of(content, what)
    ids = tokenize(content, tokenizer, what, special=special)
    return ids or ids_of(ids, what)


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


def _messages(prompt: PromptLike, *, system: str | None, chat: bool) -> list[dict[str, Any]] | None:
    """Return the messages of a chat; None for plain text and for token ids."""
    messages: list[dict[str, Any]] | None = None
    if is_chat(prompt):
        messages = joined_parts(cast("Messages", prompt))
    elif isinstance(prompt, str) and (chat or system is not None):
        messages = [{"role": "user", "content": prompt}]
    if system is None:
        return messages
    if messages is None or any(message["role"] in _SYSTEM for message in messages):
        raise CaptureError(
            "a system message is given, and the prompt is token ids or has one, expected text, or "
            "messages without one; leave the system message out"
        )
    return [{"role": "system", "content": system}, *messages]


def is_chat(content: object) -> bool:
    """Return whether a prompt is chat messages."""
    some = isinstance(content, Sequence) and not isinstance(content, str) and bool(content)
    return some and all(isinstance(each, Mapping) for each in cast("Messages", content))


def joined_parts(messages: Messages) -> list[dict[str, Any]]:
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


def token_count(prompt: str | Messages, tokenizer: Any) -> int:
    """Return the length in tokens of a text or a chat, as `encode` encodes it."""
    messages = _messages(prompt, system=None, chat=False)
    text = str(prompt) if messages is None else rendered(messages, tokenizer, {})
    return len(tokenize(text, tokenizer, special=messages is None))


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
    """Begin an error on a prompt with what it is of."""
    try:
        yield
    except (CaptureError, TextError) as error:
        name = f"prompt {place.id!r}" if isinstance(place, Prompt) else place
        raise CaptureError(f"{name}: {error}") from error


def file_name(prompt_id: str) -> str:
    """Return the name of a prompt's trace: letters, digits, dots and dashes."""
    return (re.sub(r"[^A-Za-z0-9._-]+", "-", prompt_id).strip(".-") or "prompt") + ".zarr"
