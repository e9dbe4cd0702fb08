"""Files of prompts: a JSON object on each line, or a data set of the hub."""

from __future__ import annotations

import json
import re
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from kvsim.errors import CaptureError, error_line, missing_extra, suggest
from kvsim.files import read_input
from kvsim.recorder.facts import check_labels, check_writer
from kvsim.recorder.prompts import (
    Prompt,
    Turn,
    ids_of,
    is_chat,
    joined_parts,
    naming,
    with_distinct_ids,
)
from kvsim.recorder.spans import needle_parts
from kvsim.schema import LABELS
from kvsim.text.answers import answer_text, check_answer

# Types of the values of a key, and how errors call them.
Kind = tuple[tuple[type, ...], str]

_TEXT: Kind = (str,), "text"

#: The keys of a prompt: text, a chat, token ids.
CONTENT = ("prompt", "messages", "tokens")

# What belongs to one question and its answer.
_OF_TURN: dict[str, Kind] = {
    "question": _TEXT,
    "answer": ((str, int, float, list), "text, a number or a list of them"),
    "answers": ((list,), "a list of texts or numbers"),
    "scorer": _TEXT,
    "answer_prefix": _TEXT,
    "response": ((str, list), "text or a list of token ids"),
    "max_new_tokens": ((int,), "a number of tokens, at least 1"),
}

# All keys that are read; others are ignored.
_KINDS: dict[str, Kind] = {
    "id": ((str, int), "text or a number"),
    "prompt": ((str, list), "text, a chat or token ids"),
    "messages": ((list,), "a chat"),
    "tokens": ((list, int), "token ids, or their number"),
    "context": ((str, int), "text before a text, or how many messages or tokens"),
    "system": _TEXT,
    "needle": ((str, list), "a text or several, or spans of token ids"),
    "writer": ((str, dict), "text or an object"),
    "metadata": ((object,), "anything"),
    "difficulty": ((str, int), "text or a whole number"),
    "turns": ((list,), "a list of objects with 'question'"),
    **_OF_TURN,
    **dict.fromkeys(LABELS, ((str, int, float), "text or a number")),
}

# Whose numbers stay as they are; elsewhere tables have 7.0 where a whole number is 7.
_AS_IS = ("answer", "answers", "metadata")

_LONGEST_ID = 200

#: Most bytes of a file.
_LARGEST = 4 << 30

# Scorers of RULER's tasks.
_RULER = {"niah": "all", "vt": "all", "cwe": "all", "fwe": "all", "qa": "part"}


def read_prompts(
    path: str | Path, *, limit: int | None = None, note: Callable[[str], None] | None = None
) -> list[Prompt]:
    """Read the prompts of a JSONL file or of a data set of a hub, in order.

    A line or row has ``prompt`` (text, or one of the next two), ``messages`` (a chat, whose
    contents are text or lists of text parts, which are joined) or ``tokens`` (ids). Optional keys
    are ``id``, ``context``, ``needle``, ``response`` with its ``writer``, ``system``, ``answer``,
    ``scorer`` with its ``metadata`` and the labels ``task``, ``domain``, ``level`` (or
    ``difficulty``), ``length`` and ``depth``. Other keys are ignored, and so is ``tokens`` if it is
    a number. Empty lines and a byte order mark are skipped.

    ``turns`` is a list of objects, each with a ``question`` that follows the answer before it, and
    what belongs to it (answer, response, labels); the row then has no prompt but a ``context``, if
    any.

    Rows of kvpress's benchmarks have ``context`` and ``question`` instead, and optionally
    ``answer_prefix``, ``answer`` or ``answers`` (text or a list), ``task`` and ``max_new_tokens``.
    Without a ``scorer`` that of tasks of RULER is RULER's (`kvsim.text.answers.SCORERS`).

    Args:
        path: a file in UTF-8, or ``hub:OWNER/NAME[:CONFIG][:SPLIT]``, which `datasets` loads; the
            split is ``test`` by default.
        limit: read only the first prompts, so many.
        note: called once for each ignored key whose name is close to one that is read.

    Raises:
        CaptureError: no such file, or a line that is no such object; the error gives its number.
            No such data set.
        ExtraError: a data set of a hub without the package `datasets`.
    """
    if limit is not None and limit < 1:
        raise CaptureError(f"limit is {limit}, expected at least 1 prompt")
    seen: set[str] = set()
    prompts: list[Prompt] = []
    for where, line in islice(_lines(str(path)), limit and min(limit, sys.maxsize)):
        with naming(where):
            row = _object(line)
            prompts.append(_prompt(row, len(prompts)))
        for key in row.keys() - seen - _KINDS.keys():
            close = suggest(key, _KINDS)
            if note is not None and close:
                note(f"{where}: {key!r} is not read{close}")
            seen.add(key)
    if not prompts:
        raise CaptureError(f"{path} has no prompts, expected one JSON object on each line")
    return with_distinct_ids(prompts)


def _lines(path: str) -> Iterator[tuple[str, str | dict[str, Any]]]:
    """Yield the lines of a file that are not empty, or rows of a hub, and where they are."""
    if path.startswith("hub:"):
        yield from ((f"{path}, row {i}", row) for i, row in enumerate(_of_hub(path)))
        return
    try:
        text = read_input(Path(path), _LARGEST).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CaptureError(
            f"{path} cannot be read ({error_line(error)}), expected a JSONL file of prompts in "
            "UTF-8"
        ) from error
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{path}, line {number}", line


def _of_hub(name: str) -> Iterable[dict[str, Any]]:
    """Return the rows of a data set of a hub."""
    _, dataset, config, split, *more = f"{name}::".split(":")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", dataset) or any(more):
        raise CaptureError(f"{name!r} is no data set; expected hub:OWNER/NAME[:CONFIG][:SPLIT]")
    try:
        from datasets import load_dataset  # noqa: PLC0415  a large library
    except ModuleNotFoundError as error:
        raise missing_extra(error) or error from error
    try:
        rows: Iterable[dict[str, Any]] = load_dataset(
            dataset, config or None, split=split or "test"
        )
    except (OSError, ValueError, RuntimeError) as error:  # no network, data set, config or split
        raise CaptureError(
            f"{name} cannot be loaded ({error_line(error)}), expected a data set that the hub has; "
            "without a network give a file of its rows"
        ) from error
    return rows


def _object(line: str | dict[str, Any]) -> dict[str, Any]:
    """Return a row, parsed if it is a line."""
    try:
        row = json.loads(line) if isinstance(line, str) else line
        json.dumps(row, ensure_ascii=False, default=str).encode()  # half of a character is no text
        shown = reprlib.repr(row)
    except (ValueError, RecursionError) as error:
        row, shown = None, error_line(error)
    if not isinstance(row, dict):
        raise CaptureError(f"{shown}, expected an object, such as {{'prompt': 'text'}}")
    return row


def _values(row: Mapping[str, Any], kinds: Mapping[str, Kind]) -> dict[str, Any]:
    """Return what is read of a row, without null; CaptureError for a value of another type."""
    values = {}
    for key, (types, expected) in kinds.items():
        value = row.get(key)
        if value is None:
            continue
        values[key] = value = value if key in _AS_IS else _whole(value)
        fits = isinstance(value, types) and (object in types or not isinstance(value, bool))
        if not fits or (key == "max_new_tokens" and value < 1):
            raise CaptureError(f"{key} is {reprlib.repr(value)}, expected {expected}")
    return values


def _whole(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_whole, value)]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _prompt(row: Mapping[str, Any], index: int) -> Prompt:
    values = _values(row, _KINDS)
    name = str(values.get("id", f"prompt-{index:04d}"))
    if not name.strip() or len(name) > _LONGEST_ID:
        raise CaptureError(f"id is {name!r:.60}, expected 1 to {_LONGEST_ID} characters")
    level = values.pop("difficulty", None)
    if level is not None and values.setdefault("level", level) != level:
        raise CaptureError("level and difficulty differ, expected one: they are the same label")
    labels, turns = _labels(values), values.get("turns")
    if turns is None:
        content = _content(values)
        first, later = _turn(values, content), list[Turn]()
    else:
        content = None
        if (outside := [key for key in (*CONTENT, *_OF_TURN) if key in values]) or not turns:
            raise CaptureError(
                f"turns is {reprlib.repr(turns)}, expected a list of objects with 'question', and "
                f"{', '.join(outside) or 'answers'} in these"
            )
        first, *later = (_of_turns(turn, number, values) for number, turn in enumerate(turns, 1))
    context, needle = values.get("context"), values.get("needle")
    return Prompt(
        id=name,
        content=first.question,
        labels=labels,
        system=values.get("system") or None,
        needle=() if needle is None else needle_parts(needle),
        context=(context or None) if content is None else context,
        metadata=values.get("metadata"),
        writer=check_writer(values.get("writer"), first.response),
        turns=tuple(later),
        turn_labels={} if turns is None else first.labels,
        **{key: x for key, x in vars(first).items() if key not in ("question", "labels")},
    )


def _labels(values: Mapping[str, Any]) -> dict[str, str | int | float]:
    return check_labels({name: values[name] for name in LABELS if name in values})


def _of_turns(row: Any, number: int, prompt: Mapping[str, Any]) -> Turn:
    """Return one of the `turns` of a row."""
    kinds = {key: _KINDS[key] for key in (*_OF_TURN, *LABELS)}
    with naming(f"turn {number}"):
        unknown = sorted(row.keys() - kinds) if isinstance(row, dict) else []
        if unknown or not isinstance(row, dict) or not row.get("question"):
            shown = reprlib.repr(unknown[0] if unknown else row)
            close = suggest(unknown[0], kinds) if unknown else ""
            raise CaptureError(
                f"{shown} is no turn or no key of one{close}, expected an object with 'question' "
                f"and any of {', '.join(kinds)}"
            )
        turn = _turn({"task": prompt.get("task"), **(values := _values(row, kinds))}, None)
        return replace(turn, labels=_labels(values))


def _turn(values: Mapping[str, Any], content: Any) -> Turn:
    """Return a question with what belongs to it; content: the prompt, None for its question."""
    answers = [values[key] for key in ("answer", "answers") if key in values]
    several = bool(answers) and isinstance(answers[0], list)
    texts = [*map(answer_text, answers[0] if several else answers[:1])]
    scorer = values.get("scorer")
    if len(answers) > 1 or not all(map(str.strip, texts)):
        raise CaptureError(
            f"the answer is {reprlib.repr(texts)}, expected text or several in one of 'answer', "
            "'answers'"
        )
    if scorer is None and isinstance(values.get("answer"), list):
        kind = _RULER.get(str(values.get("task")).removeprefix("ruler:").partition("_")[0])
        scorer = kind and f"string_match_{kind}"
    answer = (texts if several else texts[0]) if answers else None
    check_answer(answer, scorer)
    response, prefix = values.get("response"), values.get("answer_prefix")
    return Turn(
        question=values["question"] if content is None else content,
        answer=answer,
        scorer=scorer,
        answer_prefix=prefix or "" if content is None else prefix,
        response=ids_of(response, "response") if isinstance(response, list) else response,
        max_new_tokens=values.get("max_new_tokens"),
    )


def _content(values: Mapping[str, Any]) -> Any:
    """Return text, messages or token ids of a row; None where it has a question instead."""
    given = [key for key in CONTENT if key in values and not isinstance(values[key], int)]
    if len(given) > 1 or not (given or "question" in values):
        raise CaptureError(
            f"{' and '.join(given) or 'no prompt'}, expected one of 'prompt' (text), 'messages' (a "
            "chat), 'tokens' (ids) or 'question'"
        )
    content = values[given[0]] if given else None
    if isinstance(content, list):
        return joined_parts(content) if is_chat(content) else ids_of(content)
    return content
