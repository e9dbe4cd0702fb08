"""Files of prompts: a JSON object on each line, or a data set of the hub."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

from kvsim.errors import CaptureError, TextError, error_line, missing_extra, suggest
from kvsim.files import read_input
from kvsim.recorder.facts import check_labels, check_writer
from kvsim.recorder.prompts import (
    Prompt,
    PromptLike,
    Turn,
    joined_parts,
    with_distinct_ids,
)
from kvsim.recorder.spans import check_needle
from kvsim.schema import LABELS
from kvsim.text.answers import SCORERS, answer_text, language_of

#: The keys of a prompt: text, a chat, token ids.
CONTENT = ("prompt", "messages", "tokens")

#: The keys of kvpress's benchmarks beside `context`, `answer` and `task`.
BENCHMARK = ("question", "answer_prefix", "answers", "max_new_tokens", "scorer")

#: All keys that are read; others are ignored.
KEYS = (
    *("id", *CONTENT, "context", "needle", "response", "writer", "system", "answer", "metadata"),
    *(*BENCHMARK, *LABELS, "difficulty", "turns"),
)

# Keys whose values may be numbers, or have some.
_NUMBERS = {*KEYS} - {"metadata", "writer", "system"}

#: The keys of a turn, which belong to one question and its answer.
OF_TURN = ("response", "answer", *BENCHMARK)

_EXPECTED = "expected an object with 'prompt' (text), 'messages' (a chat) or 'tokens' (ids)"

# Types of the values of keys, in Python and in words.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "id": ((str, int), "text or a number"),
    "system": ((str,), "text"),
    "question": ((str,), "text"),
    "answer_prefix": ((str,), "text"),
    "max_new_tokens": ((int,), "a number of tokens"),
    "scorer": ((str,), f"text: {', '.join(SCORERS)}, or KIND:NAME of a package of yours"),
    "answer": ((str, int, float, list), "text, a number or a list of them"),
    "answers": ((list,), "a list of texts or numbers"),
    "response": ((str, list), "text or a list of token ids"),
    "context": ((str, int), "text before a text, or how many messages or tokens"),
}

_LONGEST_ID = 200

#: Most bytes of a file.
_LARGEST = 4 << 30


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
    what belongs to it (`OF_TURN`, labels); the row then has no prompt but a ``context``, if any.

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
    for where, row in islice(_rows(str(path)), limit and min(limit, sys.maxsize)):
        prompts.append(_prompt(row, len(prompts), where))
        for key in row.keys() - seen - set(KEYS):
            close = suggest(key, KEYS)
            if note is not None and close:
                note(f"{where}: {key!r} is not read{close}")
            seen.add(key)
    if not prompts:
        raise CaptureError(f"{path} has no prompts, expected one JSON object on each line")
    return with_distinct_ids(prompts)


def _rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows, and where they are, for errors."""
    if path.startswith("hub:"):
        yield from ((f"{path}, row {i}", row) for i, row in enumerate(_of_hub(path)))
    else:
        for number, line in _lines(Path(path)):
            where = f"{path}, line {number}"
            yield where, _object(line, where)


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


def _lines(source: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not empty, with their numbers from 1."""
    try:
        text = read_input(source, _LARGEST).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CaptureError(
            f"{source} cannot be read ({error_line(error)}), expected a JSONL file of prompts in "
            "UTF-8"
        ) from error
    lines = enumerate(text.split("\n"), start=1)
    return ((number, line.strip()) for number, line in lines if line.strip())


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()  # half of a character is no text
    except (ValueError, RecursionError) as error:
        raise CaptureError(f"{where}: {error_line(error)}, {_EXPECTED} on each line") from None
    if not isinstance(row, dict):
        raise CaptureError(f"{where}: {_short(row)}, {_EXPECTED} on each line")
    return row


def _exact(row: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a row in which whole numbers are int, in lists too: tables have 7.0 where one is 7."""

    def exact(value: Any, key: str) -> Any:
        if isinstance(value, list):
            return [exact(each, key) for each in value]
        if not isinstance(value, float):
            return value
        if not math.isfinite(value):
            raise CaptureError(f"{where}: {key} is {value}, expected a finite number or null")
        return int(Decimal(repr(value))) if value.is_integer() else value

    return {key: exact(row[key], key) if key in _NUMBERS else row[key] for key in row}


def _turns(row: dict[str, Any], where: str) -> tuple[dict[str, Any], list[Turn], Any]:
    """Return a row with the first of its turns in it, later turns, and labels of the first."""
    turns = row.get("turns")
    if turns is None:
        return row, [], {}
    if not isinstance(turns, list) or not turns or not all(isinstance(x, dict) for x in turns):
        raise CaptureError(
            f"{where}: turns is {_short(turns)}, expected a list of objects with 'question'"
        )
    outside = [key for key in (*CONTENT, *OF_TURN) if row.get(key) is not None]
    if outside:
        raise CaptureError(
            f"{where}: {outside[0]!r} belongs to no turn, expected it in an object of 'turns'"
        )
    turns = [_exact(turn, f"{where}, turn {number}") for number, turn in enumerate(turns, start=1)]
    later, labels = [], []
    for number, turn in enumerate(turns, start=1):
        inside = f"{where}, turn {number}"
        if unknown := sorted(turn.keys() - {*OF_TURN, *LABELS}):
            close = suggest(unknown[0], OF_TURN)
            raise CaptureError(
                f"{inside}: {unknown[0]!r:.60} is no key of a turn{close}; expected "
                f"{', '.join((*OF_TURN, *LABELS))}"
            )
        _check_kinds(turn, inside)
        if not (turn.get("question") or "").strip():
            raise CaptureError(f"{inside}: no question, expected text")
        known = {name: turn[name] for name in LABELS if turn.get(name) is not None}
        labels.append(check_labels(known, f"{inside}: "))
        if (scorer := turn.get("scorer")) not in (None, *SCORERS):
            raise CaptureError(
                f"{inside}: scorer is {_short(scorer)}, expected one of {', '.join(SCORERS)}"
            )
        own = {name: turn.get(name) for name in OF_TURN if name != "answers"}
        own |= {"answer": _answer(turn, inside), "scorer": _scorer({**row, **turn}, inside)}
        own["answer_prefix"] = own["answer_prefix"] or ""
        later.append(Turn(**own, labels=labels[-1]))
    whole = {**row, **{name: turns[0].get(name) for name in OF_TURN}}
    return whole, later[1:], labels[0]


def _check_kinds(row: dict[str, Any], where: str) -> None:
    for key, (kinds, expected) in _KINDS.items():
        value = row.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
            raise CaptureError(f"{where}: {key} is {_short(value)}, expected {expected}")
    if row.get("max_new_tokens") is not None and row["max_new_tokens"] < 1:
        raise CaptureError(
            f"{where}: max_new_tokens is {row['max_new_tokens']}, expected at least 1 token"
        )
    response = row.get("response")
    if isinstance(response, list) and not all(type(token) is int for token in response):
        raise CaptureError(f"{where}: response is {_short(response)}, expected token ids")


def _prompt(row: dict[str, Any], index: int, where: str) -> Prompt:
    row, turns, turn_labels = _turns(_exact(row, where), where)
    _check_kinds(row, where)
    if row.get("id") is not None and not str(row["id"]).strip():
        raise CaptureError(f"{where}: id is {_short(row['id'])}, expected text or no id")
    name = f"prompt-{index:04d}" if row.get("id") is None else str(row["id"])
    if len(name) > _LONGEST_ID:
        raise CaptureError(
            f"{where}: id has {len(name)} characters, expected at most {_LONGEST_ID}"
        )
    labels = {name: row[name] for name in LABELS if row.get(name) is not None}
    if row.get("difficulty") is not None:
        other = row["difficulty"]
        level = labels.setdefault("level", other)
        if level != other:
            raise CaptureError(
                f"{where}: level is {level!r:.60} and difficulty {other!r:.60}, expected one of "
                "them: they are the same label"
            )
    prefix, is_question = row.get("answer_prefix"), _is_question(row)
    needle, response = row.get("needle"), row.get("response")
    return Prompt(
        id=name,
        content=_content(row, where),
        answer=_answer(row, where),
        labels=check_labels(labels, f"{where}: "),
        system=row.get("system") or None,
        needle=() if needle is None else check_needle(needle, f"{where}: "),
        response=response,
        context=(row.get("context") or None) if is_question else row.get("context"),
        answer_prefix=prefix or "" if is_question else prefix,
        scorer=_scorer(row, where),
        metadata=row.get("metadata"),
        writer=check_writer(row.get("writer"), response, f"{where}: "),
        max_new_tokens=row.get("max_new_tokens"),
        turns=tuple(turns),
        turn_labels=turn_labels,
    )


def _answer(row: dict[str, Any], where: str) -> str | list[str] | None:
    """Return the answer of a row, or several."""
    given = [key for key in ("answer", "answers") if row.get(key) is not None]
    if not given:
        return None
    if len(given) > 1:
        raise CaptureError(f"{where}: 'answer' and 'answers' are given, expected one of them")
    value = row[given[0]]
    parts = value if isinstance(value, list) else [value]
    try:
        texts = [*map(answer_text, parts)]
    except TextError:
        texts = []
    if not texts or not all(text.strip() for text in texts):
        raise CaptureError(
            f"{where}: {given[0]} is {_short(value)}, expected text, several or no {given[0]}"
        )
    return texts if isinstance(value, list) else texts[0]


def _scorer(row: dict[str, Any], where: str) -> str | None:
    """Return the scorer that a row names, or that of its task of RULER."""
    name, task = row.get("scorer"), str(row.get("task"))
    if name is None and isinstance(row.get("answer"), list):
        ruler = {"niah": "all", "vt": "all", "cwe": "all", "fwe": "all", "qa": "part"}
        kind = ruler.get(task.removeprefix("ruler:").partition("_")[0])
        return kind and f"string_match_{kind}"
    if name is not None and name not in SCORERS:
        try:
            language_of(name)
        except TextError as error:
            raise CaptureError(f"{where}: {error}") from error
    return name


def _is_question(row: dict[str, Any]) -> bool:
    """Whether the prompt is a question after a context."""
    return row.get("question") is not None and not _contents(row)


def _contents(row: dict[str, Any]) -> list[str]:
    """Return which of the keys of a prompt a row has; `tokens` can also be their number."""
    given = [name for name in CONTENT if row.get(name) is not None]
    return [name for name in given if name != "tokens" or isinstance(row[name], list)]


def _content(row: dict[str, Any], where: str) -> PromptLike:
    if _is_question(row):
        return str(row["question"])
    given = _contents(row)
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
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
