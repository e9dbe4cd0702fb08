"""Files of prompts: a JSON object on each line."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from kvsim.errors import CaptureError, suggest
from kvsim.recorder.prompts import (
    Prompt,
    PromptLike,
    check_labels,
    check_writer,
    joined_parts,
    with_distinct_ids,
)
from kvsim.recorder.spans import check_needle
from kvsim.schema import LABELS

#: The keys of a prompt: text, a chat, token ids.
CONTENT = ("prompt", "messages", "tokens")

#: All keys that are read; others are ignored.
KEYS = (
    *("id", *CONTENT, "context", "needle", "response", "writer", "system", "answer"),
    *("scorer", "metadata", *LABELS, "difficulty"),
)

_EXPECTED = "expected an object with 'prompt' (text), 'messages' (a chat) or 'tokens' (ids)"

# Types of the values of keys, in Python and in words.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "id": ((str, int), "text or a number"),
    "system": ((str,), "text"),
    "answer": ((str, int, float), "text or a number"),
    "scorer": ((str,), "text such as 'gym:chain_sum'"),
    "response": ((str, list), "text or a list of token ids"),
    "context": ((str, int), "text before a text, or how many messages or tokens"),
}

_LONGEST_ID = 200


def read_prompts(
    path: str | Path, *, limit: int | None = None, note: Callable[[str], None] | None = None
) -> list[Prompt]:
    """Read the prompts of a JSONL file, in order.

    A line has ``prompt`` (text, or one of the next two), ``messages`` (a chat, whose contents are
    text or lists of text parts, which are joined) or ``tokens`` (ids). Optional keys are ``id``,
    ``context``, ``needle``, ``response`` with its ``writer``, ``system``, ``answer``, ``scorer``
    with its ``metadata`` and the labels ``task``, ``domain``, ``level`` (or ``difficulty``),
    ``length`` and ``depth``. Other keys are ignored, and so is ``tokens`` if it is a number. Empty
    lines and a byte order mark are skipped.

    Args:
        path: the file, UTF-8.
        limit: read only the first prompts, so many.
        note: called once for each ignored key whose name is close to one that is read.

    Raises:
        CaptureError: no such file, or a line that is no such object; the error gives its number.
    """
    if limit is not None and limit < 1:
        raise CaptureError(f"limit is {limit}, expected at least 1 prompt")
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
            raise CaptureError(f"{source} is not a regular file, expected a JSONL file of prompts")
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
            f"{where}: {error.object[error.start]!a} is half of a character, expected whole ones"
        ) from None
    except (ValueError, RecursionError) as error:
        if not line.startswith("["):
            raise CaptureError(f"{where}: {error}, expected one JSON object on each line") from None
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
    for key, (kinds, expected) in _KINDS.items():
        value = row.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
            raise CaptureError(f"{where}: {key} is {_short(value)}, expected {expected}")
    for key in ("id", "answer"):
        if row.get(key) is not None and not str(row[key]).strip():
            raise CaptureError(f"{where}: {key} is {_short(row[key])}, expected text or no {key}")
    name = f"prompt-{index:04d}" if row.get("id") is None else str(row["id"])
    if len(name) > _LONGEST_ID:
        raise CaptureError(
            f"{where}: id has {len(name)} characters, expected at most {_LONGEST_ID}"
        )
    labels = {name: row[name] for name in LABELS if row.get(name) is not None}
    if row.get("difficulty") is not None:
        level = labels.setdefault("level", row["difficulty"])
        if level != row["difficulty"]:
            raise CaptureError(
                f"{where}: level is {level!r} and difficulty {row['difficulty']!r}, expected "
                "one of them: they are the same label"
            )
    needle, response = row.get("needle"), row.get("response")
    if isinstance(response, list) and not all(type(token) is int for token in response):
        raise CaptureError(f"{where}: response is {_short(response)}, expected token ids")
    return Prompt(
        id=name,
        content=_content(row, where),
        answer=None if row.get("answer") is None else str(row["answer"]),
        labels=check_labels(labels, f"{where}: "),
        system=row.get("system") or None,
        needle=() if needle is None else check_needle(needle, f"{where}: "),
        response=response,
        context=row.get("context"),
        scorer=row.get("scorer"),
        metadata=row.get("metadata"),
        writer=check_writer(row.get("writer"), response, f"{where}: "),
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


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
