"""Checks of the labels, answer and writer of a prompt before the model runs."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Any

from kvsim.core.header import fits_label
from kvsim.errors import CaptureError, error_line
from kvsim.recorder.prompts import Labels, Prompt
from kvsim.schema import LABELS
from kvsim.store.metadata import ROOT_LIMIT, decode_document
from kvsim.text.answers import check_answer

# Labels that are numbers, the same in all tables.
_LABELS = {"length": "a whole number of 64 bits", "depth": "a number from 0 to 1"}


def check_labels(labels: Labels, where: str = "") -> dict[str, str | int | float]:
    """Return the labels; raise CaptureError for an unknown name or a value of another kind.

    where: the beginning of an error message.
    """
    if not isinstance(labels, Mapping):
        raise CaptureError(f"{where}labels are {reprlib.repr(labels)}, expected names with values")
    for name, value in labels.items():
        if name not in LABELS:
            raise CaptureError(
                f"{where}label {reprlib.repr(name)}, expected one of {', '.join(LABELS)}"
            )
        if not fits_label(name, value):
            expected = _LABELS.get(name, "text or a whole number of 64 bits")
            raise CaptureError(f"{where}{name} is {reprlib.repr(value)}, expected {expected}")
    return dict(labels)


def check_writer(writer: object, response: object, where: str = "") -> Any:
    """Return what wrote a response; CaptureError unless it is text or an object."""
    if writer is None:
        return None
    if not isinstance(writer, str | Mapping) or not writer:
        raise CaptureError(
            f"{where}writer is {reprlib.repr(writer)}, expected text or an object such as "
            '{"engine": ..., "model": ..., "temperature": ...}'
        )
    if response is None:
        raise CaptureError(
            f"{where}writer is {reprlib.repr(writer)} and there is no response, expected the one "
            "that it wrote; leave the writer out to generate one"
        )
    return writer


def check_facts(whole: Prompt, **more: Any) -> None:
    """Raise CaptureError for what a prompt says that cannot be recorded, or no trace can hold.

    more: what else is recorded, by name. Raises TextError as `check_answer`.
    """
    check_writer(whole.writer, whole.response)
    stored = ("labels", "turn_labels", "answer", "metadata", "writer", "max_new_tokens")
    parts = whole, *whole.turns
    facts = {name: [getattr(part, name, None) for part in parts] for name in stored}
    for name, values in (facts | more).items():
        # as deep as in a trace, and of a size that leaves room for the others
        document = {"attributes": {"meta": {"turns": [{"answer_check": values}]}}}
        try:
            text = json.dumps(document, allow_nan=False, indent=2)
            decode_document(text.encode("ascii"), ROOT_LIMIT // 8)
        except (TypeError, ValueError, RecursionError) as error:
            raise CaptureError(
                f"{name} cannot be stored as JSON ({error_line(error)}); change it or leave it out"
            ) from None
    check_answer(whole.answer, whole.scorer)
