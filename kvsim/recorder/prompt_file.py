"""Files of prompts: a JSON object on each line, or a data set of the hub."""

from __future__ import annotations

import json
import re
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from kvsim.errors import CaptureError, error_line, missing_extra, suggest
from kvsim.files import read_input
from kvsim.recorder.prompts import Prompt, Turn, naming, with_distinct_ids
from kvsim.schema import LABELS
from kvsim.text.answers import answer_text

#: The keys of a prompt: text, a chat, token ids.
CONTENT = ("prompt", "messages", "tokens")

#: Keys of one question and its answer; of a turn; and of a row.
_ANSWERED = [
    "question",
    "answer",
    "answers",
    "scorer",
    "answer_prefix",
    "response",
    "max_new_tokens",
]
_OF_TURN = (*_ANSWERED, *LABELS)
_KEYS = (
    *("id", *CONTENT, "context", "system", "needle", "writer", "metadata", "difficulty", "turns"),
    *_OF_TURN,
)

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
    seen: set[str] = set()
    prompts: list[Prompt] = []
    for where, line in islice(_lines(str(path)), limit and min(limit, sys.maxsize)):
        with naming(where):
            row = _object(line)
            prompts.append(_prompt(row, len(prompts)))
        for key in row.keys() - seen - {*_KEYS}:
            close = suggest(key, _KEYS)
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
    try:
        row = json.loads(line) if isinstance(line, str) else line
        json.dumps(row, ensure_ascii=False, default=str).encode()  # half of a character is no text
        shown = reprlib.repr(row)
    except (ValueError, RecursionError) as error:
        row, shown = None, error_line(error)
    if not isinstance(row, dict):
        raise CaptureError(f"{shown}, expected an object, such as {{'prompt': 'text'}}")
    return row


def _values(row: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    given = {key: row[key] for key in keys if row.get(key) is not None}
    return {key: x if key in _AS_IS else _whole(x) for key, x in given.items()}


def _whole(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_whole, value)]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _prompt(row: Mapping[str, Any], index: int) -> Prompt:
    values = _values(row, _KEYS)
    name = str(values.get("id", f"prompt-{index:04d}"))
    if not name.strip() or len(name) > _LONGEST_ID:
        raise CaptureError(f"id is {name!r:.60}, expected 1 to {_LONGEST_ID} characters")
    values.setdefault("level", values.pop("difficulty", None))
    turns = values.get("turns")
    given = [key for key in CONTENT if key in values and _is_content(key, values[key])]
    outside = [*given, *(key for key in _ANSWERED if key in values)]
    if turns is not None and (outside or not turns or not isinstance(turns, list)):
        raise CaptureError(
            f"turns is {reprlib.repr(turns)}, expected a list of objects with 'question'; move "
            f"{', '.join(outside) or 'answers'} into them"
        )
    if turns is None and (len(given) > 1 or not (given or "question" in values)):
        raise CaptureError(
            f"{' and '.join(given) or 'no prompt'}, expected one of 'prompt' (text), 'messages' (a "
            "chat), 'tokens' (ids) or 'question'"
        )
    first, *later = [_answered(values)] if turns is None else _turns(turns, values.get("task"))
    content, context = first.pop("question", None), values.get("context")
    if given:
        content = values[given[0]]
    else:
        context = context or None
        first.setdefault("answer_prefix", "")
    return Prompt(
        id=name,
        content=content,
        labels=_labels(values),
        system=values.get("system") or None,
        context=context,
        turns=tuple(Turn(**each) for each in later),
        turn_labels=first.pop("labels", {}),
        **{key: values[key] for key in ("needle", "metadata", "writer") if key in values},
        **first,
    )


def _is_content(key: str, value: Any) -> bool:
    return key != "tokens" or isinstance(value, list)  # a number is how many there are


def _labels(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in LABELS if values.get(name) is not None}


def _turns(rows: list[Any], task: Any) -> list[dict[str, Any]]:
    turns = []
    for number, row in enumerate(rows, 1):
        with naming(f"turn {number}"):
            unknown = sorted(row.keys() - {*_OF_TURN}) if isinstance(row, dict) else []
            if unknown or not isinstance(row, dict) or not row.get("question"):
                shown = reprlib.repr(unknown[0] if unknown else row)
                close = suggest(unknown[0], _OF_TURN) if unknown else ""
                raise CaptureError(
                    f"{shown} is no turn or no key of one{close}, expected an object with "
                    f"'question' and any of {', '.join(_OF_TURN)}"
                )
            values = _values(row, _OF_TURN)
            turn = {"answer_prefix": "", **_answered({"task": task, **values})}
            turns.append(vars(Turn(**turn, labels=_labels(values))))
    return turns


def _answered(values: Mapping[str, Any]) -> dict[str, Any]:
    fields = {key: values[key] for key in _ANSWERED if key in values}
    answers = [fields.pop(key) for key in ("answer", "answers") if key in fields]
    if not answers:
        return fields
    several = isinstance(answers[0], list)
    texts = [*map(answer_text, answers[0] if several else answers[:1])]
    if len(answers) > 1 or not all(map(str.strip, texts)):
        raise CaptureError(
            f"the answer is {reprlib.repr(texts)}, expected text or several in one of 'answer', "
            "'answers'"
        )
    if "scorer" not in fields and isinstance(values.get("answer"), list):
        kind = _RULER.get(str(values.get("task")).removeprefix("ruler:").partition("_")[0])
        fields["scorer"] = kind and f"string_match_{kind}"
    return {**fields, "answer": texts if several else texts[0]}
