"""Settings of a capture, which a trace keeps, so that `resume` keeps traces of the same capture."""

from __future__ import annotations

import json
import reprlib
from typing import Any

from kvsim.core.digest import document_digest
from kvsim.core.trace import Trace
from kvsim.recorder.provenance import config_differences, tokenizer_difference
from kvsim.schema import object_at

#: Options that change how a capture runs, and not what it records.
_HOW = {"overwrite", "resume", "batch", "force", "planned", "progress", "chunk", "layers"}

#: What a trace says of its prompt and model elsewhere.
_APART = {"content", "response", "turns", "metadata"}
_MODEL = ("name", "dtype", "attention", "weights", "source")


def settings_of(session: Any) -> dict[str, Any]:
    """Return all that decides what a capture (`Session`) records, by name, as JSON reads it."""
    encoded, facts = session.encoded, {**vars(session.prompt), **vars(session.options)}
    tokens = [encoded.ids, session.response, *([x.ids, x.response] for x in session.turns)]
    document = {
        **{key: value for key, value in facts.items() if key not in _HOW | _APART},
        **{f"model {key}": session.described.get(key) for key in _MODEL},
        "prompt": document_digest({"tokens": tokens}),
        "turns": [{**vars(x), "question": None, "response": None} for x in session.prompt.turns],
        "layers": session.layer_ids,
        "context": encoded.context_len,
        "needle": encoded.needle,
    }
    return dict(json.loads(json.dumps(document)))


def differences(session: Any, trace: Trace) -> list[str]:
    """Return in words how a trace differs from what a capture would record."""
    recorded, settings = object_at(trace.meta, "settings"), settings_of(session)
    differing = [
        f"its {key} is {reprlib.repr(recorded.get(key))}, expected {reprlib.repr(value)}"
        for key, value in settings.items()
        if value != recorded.get(key)
    ]
    if config := config_differences(trace.meta, session.described):
        differing.append(f"its model has another configuration ({', '.join(config)})")
    other = tokenizer_difference(trace, session.tokenizer)
    return differing if other is None else [*differing, other]
