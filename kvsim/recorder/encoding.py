"""Prompts as token ids of a model: the first question, later ones, and given answers."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from kvsim.errors import CaptureError
from kvsim.recorder.choice import following, stop_tokens
from kvsim.recorder.options import Options
from kvsim.recorder.positions import context_length
from kvsim.recorder.prompts import Messages, Prompt, Span, is_chat, naming
from kvsim.recorder.tokenization import doubled_notes, reasoning_begun, rendered, tokenize
from kvsim.schema import Spans

# Roles of a system message; a chat has at most one.
_SYSTEM = ("system", "developer")

# The content of an unknown answer, for a template that renders what follows it.
_ANSWER = "x"


class EncodedTurn(NamedTuple):
    """A later question as token ids, its given answer, most new tokens, mark (`Encoded.opened`)."""

    ids: list[int]
    response: list[int]
    longest: int
    opened: str


@dataclass(frozen=True)
class Encoded:
    """A prompt as token ids, and the text or messages that they were encoded from.

    needle: its token spans. context_len: tokens of the context, None without one. notes: duplicate
    special tokens. opened: the mark of reasoning at the start of the response, such as ``<think>``.
    template: arguments of the chat template besides messages. turns: later questions. given: all
    tokens after the prompt if answers are given, and questions: spans of later ones.
    """

    ids: list[int]
    text: str | None
    messages: list[dict[str, Any]] | None
    needle: list[Span]
    context_len: int | None
    notes: list[str]
    opened: str = ""
    template: Mapping[str, Any] = field(default_factory=dict)
    turns: list[EncodedTurn] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    questions: Spans = ()


def encode(prompt: Prompt, model: PreTrainedModel, tokenizer: Any, options: Options) -> Encoded:
    """Encode a prompt as token ids of a model.

    A system message makes text a chat. A last message of the assistant is continued. A response is
    encoded separately, without special tokens. The context ends before the first token with text of
    the question. A later question in text directly follows the answer; in a chat it is the next
    user's message, with the template's text between the answer and the next one.

    Raises CaptureError for a prompt longer than the context, with its answers if they are given;
    unknown ids or words; text without a tokenizer; a chat without a template, or one that the
    template refuses, leaves out, or renders otherwise before another turn; a second system message,
    or one for token ids; a needle that is not exactly once in the prompt, or with a tokenizer
    without offsets; a context that ends outside the prompt; a question of another kind than the
    prompt.
    """
    content: Any = prompt.content
    context, template = prompt.context, options.chat_template_kwargs or {}
    if isinstance(content, str):
        content = f"{context or ''}{content}"
    system = options.system if prompt.system is None else prompt.system
    messages = _messages(content, system, chat=options.chat)
    special = messages is None  # a chat template includes the special tokens
    if messages is not None:
        text: str | None = rendered(messages, tokenizer, template)
    elif template:
        raise CaptureError(
            "chat_template_kwargs are given and the prompt is no chat, expected messages, or text "
            "with --chat; leave --chat-template-kwargs out"
        )
    else:
        text = content if isinstance(content, str) else None
    if text is not None and prompt.answer_prefix is not None:
        text += "\n" * special + prompt.answer_prefix
    ids = _token_ids(content if text is None else text, tokenizer, special=special)
    context_len: int | None = None
    if context is not None and text is None:
        context_len = counted_context(context, len(ids), "tokens")
    elif context is not None and text is not None:
        end = _context_end(content, context, messages or [], text, tokenizer, template)
        context_len = tokens_before(end, text, tokenizer, special=special)
    turns = _later(prompt, text, messages, tokenizer, options)
    given, questions = _token_ids(prompt.response, tokenizer, "response"), list[Span]()
    stop = stop_tokens(model, tokenizer)
    for turn in turns if given else ():
        start, question = len(ids) + len(given), following(turn.ids, given[-1], stop)
        questions.append((start, start + len(question)))
        given += [*question, *turn.response]
    _check_ids(ids, given or [token for turn in turns for token in turn.ids], model)
    return Encoded(
        ids,
        text,
        messages,
        located(prompt.needle, text, len(ids), tokenizer, special=special),
        context_len,
        [] if text is None else doubled_notes(text, ids, tokenizer),
        "" if text is None else reasoning_begun(text, messages),
        template,
        turns,
        given,
        tuple(questions),
    )


def _messages(content: Any, system: str | None, *, chat: bool) -> list[dict[str, Any]] | None:
    """Return the messages of a chat; None for plain text and for token ids."""
    messages: list[dict[str, Any]] | None = None
    if is_chat(content):
        messages = [*content]
    elif isinstance(content, str) and (chat or system is not None):
        messages = [{"role": "user", "content": content}]
    if system is None:
        return messages
    if messages is None or any(message["role"] in _SYSTEM for message in messages):
        raise CaptureError(
            "a system message is given, and the prompt is token ids or has one, expected text, or "
            "messages without one; leave the system message out"
        )
    return [{"role": "system", "content": system}, *messages]


def _context_end(
    prompt: Any,
    context: str | int,
    messages: list[dict[str, Any]],
    text: str,
    tokenizer: Any,
    template: Mapping[str, Any],
) -> int:
    """Return the end of the context of a prompt, or of its messages, in its rendered text."""
    if isinstance(context, str):
        start = text.rfind(prompt.strip())  # templates may strip it
        length = len(context) - (len(prompt) - len(prompt.lstrip()))
    else:
        count = len(messages) - len(prompt)  # a system message is not counted
        count += counted_context(context, len(prompt), "messages")
        beginning = rendered(messages[:count], tokenizer, template, generation=False)
        start, length = -(not text.startswith(beginning)), len(beginning)
    if start < 0:
        raise CaptureError(
            "the chat template renders the context with a question differently, so its end cannot "
            "be found, expected a template that does; give token ids, with context a number"
        )
    return start + length


def _later(
    prompt: Prompt,
    text: str | None,
    messages: list[dict[str, Any]] | None,
    tokenizer: Any,
    options: Options,
) -> list[EncodedTurn]:
    out: list[EncodedTurn] = []
    prefix, template = prompt.answer_prefix, options.chat_template_kwargs or {}
    for number, turn in enumerate(prompt.turns, start=2):
        with naming(f"turn {number}"):
            question: Any = turn.question
            if isinstance(question, str) != (text is not None) or question == "":
                raise CaptureError(
                    f"the question is {question!r:.60}, expected some text after text, and token "
                    "ids after token ids"
                )
            opened = ""
            if text is not None:
                before = text + _ANSWER
                if messages is None:
                    text = before + question
                else:
                    messages = _next(messages, (prefix or "") + _ANSWER, question)
                    text = rendered(messages, tokenizer, template)
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
            longest = options.max_new_tokens
            if longest is None:
                longest = turn.max_new_tokens or prompt.max_new_tokens or options.longest
            if not longest:
                raise CaptureError("its answer has 0 tokens, expected at least 1")
            ids = _token_ids(question, tokenizer, "question")
            response = _token_ids(turn.response, tokenizer, "response")
            out.append(EncodedTurn(ids, response, longest, opened))
    return out


def _next(messages: list[dict[str, Any]], answer: str, question: str) -> list[dict[str, Any]]:
    """Return a chat with an answer, maybe incomplete, and the next question."""
    if messages[-1]["role"] == "assistant":
        *messages, begun = messages
        answer = (begun.get("content") or "") + answer
    new = {"assistant": answer, "user": question}
    return [*messages, *({"role": role, "content": text} for role, text in new.items())]


def _check_ids(ids: list[int], later: list[int], model: PreTrainedModel) -> None:
    """Raise CaptureError for tokens that the model lacks, or more than it can read."""
    embedding: Any = model.get_input_embeddings()
    vocab_size = embedding.weight.shape[0]
    for token in (*ids, *later):
        if not 0 <= token < vocab_size:
            raise CaptureError(
                f"token id {token} is not in the model's vocabulary, expected 0 to "
                f"{vocab_size - 1}; encode prompt and response with the model's own tokenizer"
            )
    context = context_length(model)
    if context is not None and len(ids) + len(later) > context:
        after = f"{len(later)} tokens of response after " if later else ""
        raise CaptureError(
            f"{after}a prompt of {len(ids)} tokens, expected at most the model's context of "
            f"{context}; give fewer or a model with a longer context"
        )


def _token_ids(
    content: Any, tokenizer: Any, what: str = "prompt", *, special: bool = False
) -> list[int]:
    """Return text or token ids as a list of ids; CaptureError for text without any token."""
    if not isinstance(content, str):
        return [*(content or ())]
    ids = tokenize(content, tokenizer, what, special=special)
    if not ids:
        raise CaptureError(f"the {what} {content!r:.60} has no tokens, expected at least one")
    return ids


def located(
    parts: Any, text: str | None, n_tokens: int, tokenizer: Any, *, special: bool
) -> list[Span]:
    """Return the token spans of a needle (`needle_parts`) in a prompt.

    text: the source of the prompt's tokens, None for token ids. special: whether the tokenizer
    added special tokens. Raises CaptureError for a text that is not exactly once in the prompt, a
    span outside it, a needle of the other kind than the prompt, or a tokenizer without offsets.
    """
    texts = [part for part in parts if isinstance(part, str)]
    spans = [part for part in parts if not isinstance(part, str)]
    outside = any(not 0 <= start < end <= n_tokens for start, end in spans)
    if (texts if text is None else spans) or outside:
        raise CaptureError(
            f"needle is {reprlib.repr(parts)}, expected texts in a prompt of text, or of token "
            f"ids spans [start, end] within the {n_tokens} tokens of the prompt"
        )
    if text is None or not texts:
        return spans
    places = offsets(text, tokenizer, special=special)
    return [_tokens_of(each, text, places) for each in texts]


def offsets(text: str, tokenizer: Any, *, special: bool) -> list[Span]:
    """Return each token's character span, (0, 0) for special ones; CaptureError without offsets."""
    if not getattr(tokenizer, "is_fast", False):
        raise CaptureError(
            f"the tokenizer ({type(tokenizer).__name__}) does not say where its tokens are in the "
            "text, expected a fast one (tokenizer.json); give token ids and spans"
        )
    encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
    return [(int(start), int(end)) for start, end in encoded["offset_mapping"]]


def counted_context(count: Any, n: int, what: str) -> int:
    """Return the first `count` of n messages or tokens; CaptureError unless it is 1 to n."""
    number = count + n * (count < 0) if type(count) is int else 0
    if not 1 <= number <= n:
        raise CaptureError(
            f"context is {count!r} and the prompt has {n} {what}, expected a context that ends in "
            f"it: 1 to {n}, or -1 for all but the last"
        )
    return number


def tokens_before(end: int, text: str, tokenizer: Any, *, special: bool) -> int:
    """Return how many of the first tokens end in the first `end` characters of a text.

    A token with characters on both sides counts to the second part. Raises CaptureError for zero.
    """
    places = offsets(text, tokenizer, special=special)
    count = next((i for i, (_, stop) in enumerate(places) if stop > end), len(places))
    if not any(stop for _, stop in places[:count]):
        raise CaptureError(
            f"no token of the prompt ends in its context of {end} characters, expected at least "
            "one; give a longer context"
        )
    return count


def _tokens_of(needle: str, text: str, places: Sequence[Span]) -> Span:
    """Return the tokens that overlap a needle, which is in the text exactly once."""
    first, again = text.find(needle), text.find(needle, text.find(needle) + 1)
    stop = first + len(needle)
    at = [i for i, (start, end) in enumerate(places) if start < min(end, stop) and end > first]
    if first < 0 or again >= 0 or not at:
        raise CaptureError(
            f"needle {reprlib.repr(needle)} is {'more than once' if again >= 0 else 'not'} in the "
            "prompt, expected once; give a text that is there once, as the chat template renders it"
        )
    return at[0], at[-1] + 1


def token_count(prompt: str | Messages, tokenizer: Any) -> int:
    """Return the length in tokens of a text or a chat, as `encode` encodes it."""
    messages = _messages(prompt, None, chat=False)
    text = str(prompt) if messages is None else rendered(messages, tokenizer, {})
    return len(tokenize(text, tokenizer, special=messages is None))
