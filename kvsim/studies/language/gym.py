"""Tasks of the library reasoning-gym (extra `tasks`): questions, and the check of their answers.

``gym:NAME`` is the task NAME of the library. A level is a step of its curriculum: every setting of
the task has the value of this step alone (`RangeAttributeMode.UPPER_BOUND`), or its last one if it
has fewer. The answer is the text in the last ``<answer>`` tag of a response, as the system message
of the library asks for it, and right if the task's own `score_answer` gives it the full score.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from itertools import count
from types import ModuleType
from typing import Any

from kvsim.errors import TextError, error_line, missing_extra, suggest
from kvsim.schema import plural
from kvsim.text.answers import Language, final_part

PREFIX = "gym:"

# Their scorers run the answer, or what the trace says of it, as Python code.
_EVALUATED = (
    *("binary_matrix", "bitwise_arithmetic", "countdown", "intermediate_integration", "n_queens"),
    *("number_sorting", "polynomial_multiplication", "puzzle24", "simple_integration"),
    *("spiral_matrix", "string_insertion"),
)
# They iterate over sets of strings, whose order is another one in every process.
_UNSTEADY = ("isomorphic_strings", "knight_swap", "ransom_note", "word_ladder")

_REPEATS = 100  # draws of known questions in a row, after which a task has no more of them


def library() -> ModuleType:
    """Return the library; ExtraError where it is not installed."""
    try:
        import reasoning_gym  # noqa: PLC0415  an extra, and it takes a second
    except ModuleNotFoundError as error:
        raise missing_extra(error) or error from error
    return reasoning_gym  # type: ignore[no-any-return]  # untyped


def levels(task: str) -> int:
    """Levels of a task, 0 without a curriculum; TextError for one unknown, or not checkable."""
    name = task.removeprefix(PREFIX)
    known = [each for each in library().factory.DATASETS if each not in (*_EVALUATED, *_UNSTEADY)]
    if name in _EVALUATED:
        raise TextError(f"{task}: its scorer runs answers as Python code; expected another task")
    if name in _UNSTEADY:
        raise TextError(f"{task}: one seed gives several prompts or answers; expected another task")
    if not task.startswith(PREFIX) or name not in known:
        raise TextError(
            f"task is {task!r}, expected {PREFIX} and a task of reasoning-gym"
            f"{suggest(task, map(PREFIX.__add__, known)) or ', such as gym:chain_sum'}"
        )
    if not library().factory.has_curriculum(name):
        return 0
    settings = library().factory.create_curriculum(name).attributes.values()
    return max((len(each.levels) for each in settings), default=0)


def draw(seed: int, task: str, level: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield lines of a prompt file without their ids, with different questions.

    The same seed, task and level give the same lines under one version of the library. Raises
    TextError for an unknown task or level, a task that the library cannot write or check, and
    where there are no more questions.
    """
    highest = levels(task)
    if level is not None and not 1 <= level <= highest:
        expected = f"1 to {highest}" if highest else "none: the task has no levels"
        raise TextError(f"level of {task} is {level}, expected {expected}")
    system = library().utils.SYSTEM_PROMPTS["default"].strip()
    seen, repeats = set[str](), 0
    for index in count():
        entry = _entry(task, level, zlib.crc32(f"{seed} {task} {level} {index}".encode()))
        if entry["question"] in seen:
            repeats += 1
            if repeats == _REPEATS:
                of = "" if level is None else f", level {level}"
                raise TextError(
                    f"{task}{of} has about {plural(len(seen), 'question')}; give a smaller --n, or "
                    "another level"
                )
            continue
        repeats = 0
        seen.add(entry["question"])
        roles = {"system": system, "user": entry["question"]}
        yield {
            "messages": [{"role": role, "content": text} for role, text in roles.items()],
            "answer": entry["answer"],
            "scorer": task,
            "metadata": entry["metadata"],
            "task": task,
            **({} if level is None else {"level": level}),
        }


def _entry(task: str, level: int | None, seed: int) -> dict[str, Any]:
    """Return an entry of the library, as JSON keeps it; its answer has the full score."""
    name, of_entry = task.removeprefix(PREFIX), {"seed": seed, "size": 1}
    try:
        with redirect_stdout(StringIO()):  # some tasks print
            if level is None:
                config = library().factory.DATASETS[name][1](**of_entry)
            else:
                config = _config(name, level, of_entry)
            entry = library().factory.DATASETS[name][0](config)[0]
        entry = json.loads(json.dumps({x: entry[x] for x in ("question", "answer", "metadata")}))
    except Exception as error:  # a task is anybody's code
        where = "" if level is None else f" at level {level}"
        raise TextError(
            f"reasoning-gym cannot write {task}{where} ({error_line(error)}); give another level "
            "or task"
        ) from error
    if _score(task, entry["answer"], entry) != 1:
        raise TextError(f"{task}: reasoning-gym does not score its own answer; give another task")
    return entry  # type: ignore[no-any-return]  # JSON


def _config(name: str, level: int, values: dict[str, Any]) -> Any:
    contexts = library().coaching.base_curriculum
    curriculum = library().factory.create_curriculum(name)
    curriculum.set_global_level(level - 1)
    alone = contexts.DefaultCurriculumContext(contexts.RangeAttributeMode.UPPER_BOUND)
    return curriculum.generate_configuration(values, alone)


@cache
def _scorer(task: str) -> Any:
    levels(task)
    return library().factory.get_score_answer_fn(task.removeprefix(PREFIX))


def _score(task: str, answer: str | None, entry: Mapping[str, Any]) -> float:
    scorer = _scorer(task)
    try:
        return float(scorer(answer, entry))
    except Exception:  # noqa: BLE001  whatever an answer in another form makes it raise
        return 0.0


def check(_: str, response: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `answer_check` of a response: `score`, from 0 to 1, is the library's own.

    known: `scorer`, `expected` and `metadata` of the prompt. Raises TextError for an unknown task.
    """
    task = str(known.get("scorer"))  # a trace is untrusted input
    answer = library().utils.extract_answer(final_part(response))
    entry = {"question": "", "answer": known.get("expected"), "metadata": known.get("metadata")}
    score = _score(task, answer, entry)
    found = {"right": score == 1, "score": score, "answer": answer and answer[-200:]}
    kept = ("scorer", "expected", "metadata")
    return {"kind": "gym", **found, **{key: known.get(key) for key in kept}}


GYM = Language(check)
