"""Tokenizers: text as token ids, whether the ids keep the text, and chats as text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from kvsim.errors import CaptureError, error_line
from kvsim.schema import first_of
from kvsim.text.answers import REASONING, open_reasoning

_SHOWN_WORDS = 8

_REASONING = (*REASONING, *REASONING.values())

# Marks of a template that prints lists of parts instead of their text.
_CODE = ("'type': 'text'", '"type": "text"')


def need_tokenizer(tokenizer: Any, what: str = "prompt") -> None:
    """Raise CaptureError without a tokenizer."""
    if tokenizer is None:
        raise CaptureError(
            f"the {what} is text or a chat, and there is no tokenizer, expected one; put its files "
            "into the model's folder, or give token ids (`tokens` in a file of prompts)"
        )


def tokenize(text: str, tokenizer: Any, what: str = "prompt", *, special: bool) -> list[int]:
    """Return the token ids of a text; CaptureError for words that the tokenizer does not know.

    special: whether the tokenizer adds its special tokens.
    """
    need_tokenizer(tokenizer, what)
    ids = list(tokenizer(text, add_special_tokens=special)["input_ids"])
    if unknown := _unknown_words(text, ids, tokenizer):
        raise CaptureError(
            f"the tokenizer does not know {first_of([*map(repr, unknown)], _SHOWN_WORDS)}, "
            "expected words of its vocabulary; tiny reads only the ledger language, in which "
            "`kvsim prompts` writes prompts"
        )
    return ids


def _unknown_words(text: str, ids: list[int], tokenizer: Any) -> list[str]:
    """Return the words that became the unknown token, each once, in order.

    Special tokens named in the text are ignored: many tokenizers use one as the unknown token.
    """
    if tokenizer.unk_token_id is None or tokenizer.unk_token_id not in ids:
        return []
    words = dict.fromkeys(re.sub(_special_tokens(text, tokenizer), " ", text).split())
    return [word for word in words if not knows(tokenizer, word)]


def knows(tokenizer: Any, text: str) -> bool:
    """Return whether no part of a text becomes the unknown token, unless it names that."""
    token = tokenizer.unk_token_id
    parts = [] if token is None else re.split(_special_tokens(text, tokenizer), text)
    return all(
        token not in tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts
    )


def _special_tokens(text: str, tokenizer: Any) -> str:
    texts = {*getattr(tokenizer, "get_added_vocab", dict)(), tokenizer.unk_token or ""} - {""}
    names = [name for name in texts if name in text]
    return "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)"


def doubled_notes(text: str, ids: list[int], tokenizer: Any) -> list[str]:
    """Return notes on special tokens that a text has and the tokenizer adds, at begin or end."""
    plain = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    start = next((n for n in range(len(ids)) if ids[n : n + len(plain)] == plain), 0)
    ends = (ids[:start][-1:], plain[:1]), (ids[start + len(plain) :][:1], plain[-1:])
    return [
        f"the prompt has {tokenizer.decode(token)!r} twice at one end: its text has it and the "
        "tokenizer adds it; leave it out of the text"
        for special, token in ends
        if special and special == token
    ]


def rendered(
    messages: list[dict[str, Any]],
    tokenizer: Any,
    template: Mapping[str, Any],
    *,
    generation: bool = True,
) -> str:
    """Return the text of a chat, with the beginning of the response, or an open last message.

    Messages whose text the template leaves out, or all if it refuses text, are passed as lists of
    parts. Raises CaptureError without a template, if it refuses those, too, or leaves one out.
    """
    need_tokenizer(tokenizer)
    if not getattr(tokenizer, "chat_template", None):
        raise CaptureError(
            f"the prompt is a chat, and the tokenizer ({type(tokenizer).__name__}) has no chat "
            "template, expected one, as instruction-tuned models have; give such a model, or text "
            "without --chat and --system"
        )
    goes_on = generation and messages[-1].get("role") == "assistant"
    options = {**template, "tokenize": False, "continue_final_message": goes_on}
    options["add_generation_prompt"] = generation and not goes_on
    texts = {n: x["content"] for n, x in enumerate(messages) if isinstance(x.get("content"), str)}
    marks = {n: f"kvsim-{n}-text" for n in texts}
    in_parts, first = list[int](), ""

    def apply(contents: Mapping[int, str]) -> str:
        given = [dict(each) for each in messages]
        for n, text in contents.items():
            given[n]["content"] = [{"type": "text", "text": text}] if n in in_parts else text
        return str(tokenizer.apply_chat_template(given, **options))

    for _ in range(2):
        try:
            trial = apply(marks)
            shows_code = any(form in trial for form in _CODE)
            lost = [
                n
                for n, mark in marks.items()
                if (mark not in trial or (n in in_parts and shows_code))
                and not messages[n].get("tool_calls")
            ]
            if not lost:
                return apply(texts)
            reason = f"leaves out the text of message {lost[0]} ({messages[lost[0]].get('role')})"
        except (TemplateError, TypeError, ValueError) as error:
            # unknown roles, or content of another kind
            lost, reason = [*texts], f"refuses the messages ({error_line(error)})"
        in_parts, first = lost, first or reason
    raise CaptureError(
        f"the tokenizer's chat template {first}, expected roles and content that it accepts; see "
        "the template, or leave --system out"
    )


def reasoning_begun(text: str, messages: Sequence[Mapping[str, Any]] | None) -> str:
    """Return the mark of reasoning in which the response to a prompt begins, or the empty string.

    Plain text may end in one; in a chat the template or the user begins it after the last message
    that is not the assistant's.
    """
    if messages is None:
        return next((mark for mark in REASONING if text.rstrip().endswith(mark)), "")
    for each in messages:
        if each.get("role") != "assistant":
            content = str(each.get("content") or "").strip()
            text = text[text.find(content) + len(content) :] if content in text else text
    return open_reasoning(text)


def token_strings(ids: Sequence[int], tokenizer: Any) -> list[str] | None:
    """Return each token decoded by itself, or None without a tokenizer."""
    if tokenizer is None:
        return None
    return [str(tokenizer.decode([token], skip_special_tokens=False)) for token in ids]


def response_text(ids: Sequence[int], tokenizer: Any) -> str:
    """Return the text of a response without special tokens, except marks of reasoning."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    names = [str(each) for each in added if each.special]
    others = [name for name in names if not any(name in mark for mark in _REASONING)]
    text = str(tokenizer.decode(list(ids), skip_special_tokens=len(others) == len(names)))
    return text if len(others) == len(names) else re.sub("|".join(map(re.escape, others)), "", text)
