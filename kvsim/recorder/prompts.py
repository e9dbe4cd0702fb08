"""Prompts: text, chat messages or token ids, encoded for a model or read from JSONL files."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from jinja2 import TemplateError
from transformers import PreTrainedModel

from kvsim.errors import CaptureError, error_line, suggest
from kvsim.recorder.models import context_length, is_tiny
from kvsim.schema import LABELS

Messages = Sequence[Mapping[str, Any]]
Labels = Mapping[str, str | int]
PromptLike = str | Messages | Sequence[int] | torch.Tensor | np.ndarray[Any, Any]

_SHOWN_WORDS = 8

# Roles of a system message; a chat has at most one.
_SYSTEM = ("system", "developer")

#: The keys of a prompt: text, a chat, token ids.
CONTENT = ("prompt", "messages", "tokens")

#: All keys that are read; others are ignored.
KEYS = ("id", *CONTENT, "system", "answer", *LABELS, "difficulty")

_EXPECTED = "expected an object with 'prompt' (text), 'messages' (a chat) or 'tokens' (ids)"

_LONGEST_ID = 200


@dataclass(frozen=True)
class Prompt:
    """One of many prompts, such as a line of a file.

    Attributes:
        id: the name of the trace.
        content: text, chat messages or token ids.
        answer: the expected answer, or None.
        labels: any of `task`, `domain` and `level`, which the trace keeps for tables.
        system: a system message before the prompt, or None.
    """

    id: str
    content: PromptLike
    answer: str | None = None
    labels: Labels = field(default_factory=dict)
    system: str | None = None


@dataclass(frozen=True)
class Encoded:
    """A prompt as token ids, and the text or messages that they were encoded from."""

    ids: list[int]
    text: str | None
    messages: list[dict[str, Any]] | None


def encode(
    prompt: PromptLike, model: PreTrainedModel, tokenizer: Any, *, system: str | None, chat: bool
) -> Encoded:
    """Encode a prompt as token ids of a model.

    system: a message before it, which makes text a chat. chat: text is a user's message.

    Raises:
        CaptureError: a prompt that is empty or longer than the context; unknown ids or words; text
            without a tokenizer; a chat without a template, or one that the template refuses; or a
            second system message, or one for token ids.
    """
    text = prompt if isinstance(prompt, str) else None
    if text is not None and not text.strip():
        raise CaptureError("the prompt is empty, expected some text; give --prompt TEXT")
    messages = _messages(prompt, system=system, chat=chat)
    if messages is not None:
        reason = "messages" if text is None else "--chat" if chat else "a system message"
        text = _render(messages, tokenizer, reason)
    if text is None:
        ids = _ids(prompt)
    else:
        ids = _tokenize(text, tokenizer, chat=messages is not None, tiny=is_tiny(model))
    if not ids:
        raise CaptureError("the prompt has no tokens, expected at least one; give some text")
    vocab_size = cast("torch.nn.Embedding", model.get_input_embeddings()).weight.shape[0]
    unknown = [token for token in ids if not 0 <= token < vocab_size]
    if unknown:
        raise CaptureError(
            f"token id {unknown[0]} is not in the model's vocabulary, expected 0 to "
            f"{vocab_size - 1}; encode the prompt with the model's own tokenizer"
        )
    context = context_length(model)
    if context is not None and len(ids) > context:
        raise CaptureError(
            f"the prompt has {len(ids)} tokens, expected at most the model's context of {context}; "
            "give a shorter prompt or a model with a longer context"
        )
    return Encoded(ids, text, messages)


def _messages(prompt: PromptLike, *, system: str | None, chat: bool) -> list[dict[str, Any]] | None:
    """Return the messages of a chat; None for plain text and for token ids."""
    if isinstance(prompt, str):
        if not chat and system is None:
            return None
        messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, Sequence) and prompt and all(isinstance(x, Mapping) for x in prompt):
        messages = joined_parts(prompt)  # type: ignore[arg-type]  # checked above
    elif system is None:
        return None
    else:
        raise CaptureError(
            "the prompt is token ids, expected text or chat messages for a system message; leave "
            "--system out"
        )
    if system is None:
        return messages
    if any(message.get("role") in _SYSTEM for message in messages):
        raise CaptureError(
            "the chat has a system message, and another one is given; expected one of them, leave "
            "--system out"
        )
    return [{"role": "system", "content": system}, *messages]


def joined_parts(messages: Messages, where: str = "") -> list[dict[str, Any]]:
    """Return the messages, with lists of text parts joined to text.

    A missing content is left to the template: calls of tools have no content.

    where: the beginning of an error message.

    Raises:
        CaptureError: a part that is not text, or a content of another kind.
    """
    joined = []
    for place, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list | tuple):
            texts = [_text_of(part, f"{where}message {place}") for part in content]
            joined.append({**message, "content": "".join(texts)})
        elif isinstance(content, str | None):
            joined.append(dict(message))
        else:
            raise CaptureError(
                f"{where}content of message {place} is {type(content).__name__}, expected text or "
                "a list of text parts"
            )
    return joined


def _text_of(part: object, where: str) -> str:
    """Return the text of a part of a message's content."""
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) and kind == "text" else None
    if not isinstance(text, str):
        raise CaptureError(
            f"{where} has a part of type {kind!r}, expected only text parts, such as "
            "{'type': 'text', 'text': '...'}; leave the others out"
        )
    return text


def _ids(prompt: object) -> list[int]:
    try:
        array = np.asarray(prompt)
    except (ValueError, TypeError, RuntimeError):
        array = np.empty((), dtype=object)
    if array.size == 0:
        raise CaptureError("the prompt is empty, expected text, chat messages or token ids")
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise CaptureError(
            f"the prompt is {type(prompt).__name__} of shape {array.shape} and {array.dtype}, "
            "expected text, a list of chat messages, or a list of token ids"
        )
    return [int(token) for token in array]


def _need_tokenizer(tokenizer: Any, prompt: str, expected: str) -> None:
    if tokenizer is None:
        raise CaptureError(
            f"the prompt is {prompt}, and there is no tokenizer, expected {expected}; put the "
            "tokenizer's files into the model's folder, or give token ids (`tokens` in a file of "
            "prompts)"
        )


def _render(messages: list[dict[str, Any]], tokenizer: Any, reason: str) -> str:
    """Return the text of a chat. reason: why the prompt is a chat, for errors."""
    _need_tokenizer(tokenizer, f"a chat ({reason})", "one with a chat template")
    if not getattr(tokenizer, "chat_template", None):
        text = "give text instead of messages" if reason == "messages" else f"leave {reason} out"
        raise CaptureError(
            f"the prompt is a chat ({reason}), and the tokenizer ({type(tokenizer).__name__}) has "
            "no chat template, expected one, as instruction-tuned models have; give such a model, "
            f"or {text}"
        )
    try:
        return str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )
    except (TemplateError, TypeError, ValueError) as error:
        # templates refuse unknown roles, and content of another kind
        raise CaptureError(
            f"the tokenizer's chat template refuses the messages ({error_line(error)}), expected "
            "roles and content that it accepts; see the template, or leave --system out"
        ) from error


def _tokenize(text: str, tokenizer: Any, *, chat: bool, tiny: bool) -> list[int]:
    _need_tokenizer(tokenizer, "text", "one that encodes it")
    # a chat template has put the special tokens in already
    ids = list(tokenizer(text, add_special_tokens=not chat)["input_ids"])
    unknown = _unknown_words(text, ids, tokenizer)
    if unknown:
        shown = ", ".join(repr(word) for word in unknown[:_SHOWN_WORDS])
        more = f" and {len(unknown) - _SHOWN_WORDS} more" if len(unknown) > _SHOWN_WORDS else ""
        advice = (
            "tiny reads only the ledger language, in which `kvsim prompts` writes prompts"
            if tiny
            else "use other words"
        )
        raise CaptureError(
            f"the tokenizer does not know {shown}{more}, expected words of its vocabulary; {advice}"
        )
    return ids


def _unknown_words(text: str, ids: list[int], tokenizer: Any) -> list[str]:
    """Return the words that became the unknown token, each once, in order."""
    token, name = tokenizer.unk_token_id, tokenizer.unk_token
    if token is None or token not in ids:
        return []
    words = dict.fromkeys(text.split())
    return [
        word
        for word in words
        if word != name and token in tokenizer(word, add_special_tokens=False)["input_ids"]
    ]


def token_strings(ids: Sequence[int], tokenizer: Any) -> list[str] | None:
    """Return each token decoded by itself, or None without a tokenizer."""
    if tokenizer is None:
        return None
    return [str(tokenizer.decode([token], skip_special_tokens=False)) for token in ids]


def check_labels(labels: Labels, where: str = "") -> dict[str, str | int]:
    """Return the labels; raise CaptureError for an unknown name or a value of another kind.

    where: the beginning of an error message.
    """
    for name, value in labels.items():
        if name not in LABELS:
            raise CaptureError(f"{where}label {name!r}, expected one of {', '.join(LABELS)}")
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise CaptureError(f"{where}{name} is {value!r}, expected text or a whole number")
    return dict(labels)


def with_distinct_ids(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts; raise CaptureError if two ids would name the same trace."""
    seen: dict[str, str] = {}
    for prompt in prompts:
        name = file_name(prompt.id)
        if name in seen:
            raise CaptureError(
                f"prompts {seen[name]!r} and {prompt.id!r} would both be recorded as {name}, "
                "expected distinct ids; rename one"
            )
        seen[name] = prompt.id
    return list(prompts)


def file_name(prompt_id: str) -> str:
    """Return the name of a prompt's trace: letters, digits, dots and dashes."""
    return (re.sub(r"[^A-Za-z0-9._-]+", "-", prompt_id).strip(".-") or "prompt") + ".zarr"


def read_prompts(
    path: str | Path, *, limit: int | None = None, note: Callable[[str], None] | None = None
) -> list[Prompt]:
    """Read the prompts of a JSONL file, in order.

    A line has ``prompt`` (text, or one of the next two), ``messages`` (a chat, whose contents are
    text or lists of text parts, which are joined) or ``tokens`` (ids). Optional keys are ``id``,
    ``system``, ``answer`` and the labels ``task``, ``domain`` and ``level`` (or ``difficulty``).
    Other keys are ignored, and so is ``tokens`` if it is a number. Empty lines and a byte order
    mark are skipped.

    Args:
        path: the file, UTF-8.
        limit: read only the first prompts, so many.
        note: called once for each ignored key whose name is close to one that is read.

    Raises:
        CaptureError: no such file, or a line that is no such object; the error gives its number.
    """
    source = Path(path)
    seen: set[str] = set()
    prompts: list[Prompt] = []
    for number, line in islice(_lines(source), limit):
        where = f"{source}, line {number}"
        row = _object(line, where)
        prompts.append(_prompt(row, len(prompts), where))
        for key in row.keys() - seen - set(KEYS):
            close = suggest(key, KEYS)
            if note is not None and close:
                note(f"{where}: {key!r} is not read{close}")
            seen.add(key)
    if not prompts:
        raise CaptureError(f"{source} has no prompts, expected one JSON object on each line")
    return with_distinct_ids(prompts)


def _lines(source: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not empty, with their numbers from 1."""
    try:
        kind = stat.S_IFMT(source.stat().st_mode)
        if kind not in (stat.S_IFREG, stat.S_IFDIR):  # a pipe may never end, nor a device
            raise CaptureError(
                f"{source} is not a regular file, expected a JSONL file of prompts; write them to "
                "one first"
            )
        with source.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                try:
                    # a byte order mark can only be at the beginning
                    line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                except UnicodeDecodeError as error:
                    raise CaptureError(
                        f"{source}, line {number}: byte {error.start} is not UTF-8, expected a "
                        "JSONL file in UTF-8; convert it first"
                    ) from None
                if line:
                    yield number, line
    except OSError as error:
        raise CaptureError(
            f"{source} cannot be read ({error.strerror}), expected a JSONL file of prompts"
        ) from error


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise CaptureError(
            f"{where}: {error.object[error.start]!a} is half of a character, expected whole ones; "
            "write the line again"
        ) from None
    except (ValueError, RecursionError) as error:
        if not line.startswith("["):
            raise CaptureError(
                f"{where}: {error}, expected one JSON object on each line; write the line again"
            ) from None
        row = []
    if isinstance(row, list):
        raise CaptureError(
            f"{where}: a JSON array, expected one JSON object on each line; "
            "`jq -c '.[]' FILE > FILE.jsonl` converts an array of objects"
        )
    if not isinstance(row, dict):
        raise CaptureError(f"{where}: no prompt, {_EXPECTED}")
    return row


def _prompt(row: dict[str, Any], index: int, where: str) -> Prompt:
    system, answer = row.get("system"), row.get("answer")
    if not isinstance(system, str | None):
        raise CaptureError(f"{where}: system is {system!r}, expected text")
    labels = {name: row[name] for name in LABELS if row.get(name) is not None}
    if row.get("difficulty") is not None:
        level = labels.setdefault("level", row["difficulty"])
        if level != row["difficulty"]:
            raise CaptureError(
                f"{where}: level is {level!r} and difficulty {row['difficulty']!r}, expected "
                "one of them: they are the same label"
            )
    return Prompt(
        id=_id(row.get("id"), index, where),
        content=_content(row, where),
        answer=None if answer is None else str(answer),
        labels=check_labels(labels, f"{where}: "),
        system=system or None,
    )


def _content(row: dict[str, Any], where: str) -> PromptLike:
    given = [name for name in CONTENT if row.get(name) is not None]
    if "tokens" in given and not isinstance(row["tokens"], list):
        given.remove("tokens")  # the number of tokens, not a prompt
    if len(given) > 1:
        raise CaptureError(f"{where}: {' and '.join(map(repr, given))} are given, {_EXPECTED}")
    if not given:
        raise CaptureError(f"{where}: no prompt, {_EXPECTED}")
    name = given[0]
    content: PromptLike = row[name]
    if name == "prompt" and isinstance(content, str):
        return content
    if name == "prompt" and isinstance(content, list) and content:
        name = "messages" if isinstance(content[0], dict) else "tokens"
    if name == "messages" and isinstance(content, list) and content:
        for place, message in enumerate(content):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise CaptureError(
                    f"{where}: message {place} is {_short(message)}, expected an object with "
                    "'role' and 'content'"
                )
        return joined_parts(content, f"{where}: ")
    if name == "tokens" and content and all(type(token) is int for token in content):
        return content
    raise CaptureError(f"{where}: no prompt, {name} is {_short(content)}; {_EXPECTED}")


def _id(given: object, index: int, where: str) -> str:
    if given is None:
        return f"prompt-{index:04d}"
    if isinstance(given, bool) or not isinstance(given, str | int) or str(given).strip() == "":
        raise CaptureError(f"{where}: id is {_short(given)}, expected text or a number")
    if len(str(given)) > _LONGEST_ID:
        raise CaptureError(
            f"{where}: id has {len(str(given))} characters, expected at most {_LONGEST_ID}: it "
            "names the trace"
        )
    return str(given)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
