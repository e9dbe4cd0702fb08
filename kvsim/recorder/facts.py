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

#: What a label may be; one of any other name is text or a whole number.
_LABELS = dict.fromkeys(LABELS, "text or a whole number of 64 bits")
_LABELS |= {"length": "a whole number of 64 bits", "depth": "a number from 0 to 1"}


def check_labels(labels: Labels) -> dict[str, str | int | float]:
    """Return the labels; raise CaptureError for an unknown name or a value of another kind."""
    if not isinstance(labels, Mapping):
        raise CaptureError(f"labels are {reprlib.repr(labels)}, expected names with values")
    for name, value in labels.items():
        if not fits_label(name, value) or name not in LABELS:
            expected = _LABELS.get(name, f"one of {', '.join(LABELS)}")
            text = f"{name} is {reprlib.repr(value)}" if name in LABELS else f"label {name!r:.50}"
            raise CaptureError(f"{text}, expected {expected}")
    return dict(labels)


def check_writer(writer: object, response: object) -> Any:
    """Return what wrote a response; CaptureError unless it is text or an object."""
    known = isinstance(writer, str | Mapping) and writer and response is not None
    if writer is not None and not known:
        raise CaptureError(
            f"writer is {reprlib.repr(writer)}, expected text or an object such as "
            '{"engine": ..., "model": ...}, of a response that is given'
        )
    return writer


def check_facts(whole: Prompt, **more: Any) -> None:
    """Raise CaptureError for what a prompt says that cannot be recorded, or no trace can hold.

    more: what else is recorded, by name. Raises TextError as `check_answer`.
    """
    check_labels(whole.labels)
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
