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

#: The keys of a prompt: text, a chat, token ids.
CONTENT = ("prompt", "messages", "tokens")

# Types of the values of what belongs to one question and its answer, and of all keys that are read.
Kinds = Mapping[str, tuple[type, ...]]
_NAMES = {str: "text", int: "a number", float: "a number", list: "a list", dict: "an object"}
_OF_TURN: Kinds = {
    **dict.fromkeys(("question", "scorer", "answer_prefix"), (str,)),
    "answer": (str, int, float, list),
    "answers": (list,),
    "response": (str, list),
    "max_new_tokens": (int,),
}
_LABELS: Kinds = dict.fromkeys(LABELS, (str, int, float))
_KINDS: Kinds = {
    "id": (str, int),
    "prompt": (str, list),
    "messages": (list,),
    "tokens": (object,),  # ignored unless it is a list
    "context": (str, int),
    "system": (str,),
    "needle": (str, list),
    "writer": (str, dict),
    "metadata": (object,),
    "difficulty": (str, int),
    "turns": (list,),
    **_OF_TURN,
    **_LABELS,
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

    A line or row has ``prompt`` (text, or one of the next two), ``messages`` (a chat) or ``tokens``
    (ids; a number is ignored), and any of the other fields of `Prompt`, with its labels as keys of
    their own (``difficulty`` is ``level``). Or it has a ``question`` after its ``context``, as rows
    of kvpress's benchmarks, whose ``answers`` are several; without a ``scorer`` that of tasks of
    RULER is RULER's. Or ``turns``, a list of objects with a ``question`` each and the fields of
    `Turn`. Other keys are ignored, and so are empty lines and a byte order mark.

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


def _values(row: Mapping[str, Any], kinds: Kinds) -> dict[str, Any]:
    """Return what is read of a row, without null; CaptureError for a value of another type."""
    values = {}
    for key, types in kinds.items():
        if (value := row.get(key)) is None:
            continue
        values[key] = value = value if key in _AS_IS else _whole(value)
        fits = isinstance(value, types) and (object in types or not isinstance(value, bool))
        if not fits or (key == "max_new_tokens" and value < 1):
            expected = " or ".join(dict.fromkeys(_NAMES[each] for each in types))
            positive = " of at least 1" * (key == "max_new_tokens")
            raise CaptureError(f"{key} is {reprlib.repr(value)}, expected {expected}{positive}")
    return values


def _whole(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_whole, value)]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _prompt(row: Mapping[str, Any], index: int) -> Prompt:
    values = _values(row, _KINDS)
    if not isinstance(values.get("tokens"), list):
        values.pop("tokens", None)
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
    kinds = {**_OF_TURN, **_LABELS}
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
    given = [key for key in CONTENT if key in values]
    if len(given) > 1 or not (given or "question" in values):
        raise CaptureError(
            f"{' and '.join(given) or 'no prompt'}, expected one of 'prompt' (text), 'messages' (a "
            "chat), 'tokens' (ids) or 'question'"
        )
    content = values[given[0]] if given else None
    if isinstance(content, list):
        return joined_parts(content) if is_chat(content) else ids_of(content)
    return content
