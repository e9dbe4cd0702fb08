"""Whether a trace that is there is the one that a capture would record; what is said of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from kvsim.core.trace import Trace
from kvsim.errors import KvsimError, TraceExistsError
from kvsim.recorder.models import describe_model, is_tiny
from kvsim.recorder.options import Options
from kvsim.recorder.prompts import Encoded, Labels, check_answer
from kvsim.store.checks import DTYPES, stored_dtype


@contextmanager
def offering_resume(*, applies: bool) -> Iterator[None]:
    """Say of a trace that is in the way of one of many what `resume` would do, where it applies."""
    try:
        yield
    except TraceExistsError as error:
        if not applies:
            raise
        raise TraceExistsError(
            f"{error}, or resume=True (--resume), which keeps traces of the same capture and "
            "records the others"
        ) from error


@contextmanager
def telling_progress(prompt_id: str, place: int, count: int) -> Iterator[None]:
    """Say of an error of one of `count` prompts which one it is, and what is complete by now."""
    try:
        yield
    except KvsimError as error:
        done = ""
        if count > 1:
            before = "the prompts before it are complete and stay" if place else "none is complete"
            done = f" ({place + 1} of {count}, {before})"
        more = "; in the same place resume=True (--resume) records the others" if place else ""
        raise type(error)(f"prompt {prompt_id!r}{done}: {error}{more}") from error


def differences(
    trace: Trace,
    model: PreTrainedModel,
    encoded: Encoded,
    options: Options,
    layer_ids: tuple[int, ...],
    answer: str | None,
    labels: Labels,
) -> list[str]:
    """What `trace` has and another capture would have, in words; empty where it is the same.

    Weights are not compared: models of one name and one configuration pass for the same.
    """
    if _entry(trace.meta, "generation").get("stopped") == "interrupted":
        return ["it is what was recovered of an interrupted capture, and no whole one"]
    return [
        *_prompt(trace, encoded, answer, labels, tiny=is_tiny(model)),
        *_model(_entry(trace.meta, "model"), describe_model(model)),
        *_generation(_entry(trace.meta, "generation"), options),
        *_arrays(trace, options, layer_ids),
    ]


def _prompt(
    trace: Trace, encoded: Encoded, answer: str | None, labels: Labels, *, tiny: bool
) -> list[str]:
    tokens = trace.tokens
    found = [] if tokens is None else tokens[: trace.prompt_len].tolist()
    if found != encoded.ids:
        same = next(
            (i for i, (a, b) in enumerate(zip(found, encoded.ids, strict=False)) if a != b),
            min(len(found), len(encoded.ids)),
        )
        expected = f"expected {len(encoded.ids)} tokens"
        return [f"its prompt of {len(found)} tokens differs from token {same} on, {expected}"]
    other = []
    if dict(trace.labels) != dict(labels):
        other.append(f"its labels are {dict(trace.labels)}, expected {dict(labels)}")
    response = _entry(trace.meta, "text").get("response")
    check = check_answer(encoded.text, response, answer, tiny=tiny)
    if json.loads(json.dumps(check)) != trace.meta.get("answer_check"):
        other.append("its response was compared with another answer")
    return other


def _model(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    said = {"name": "model", "dtype": "model's dtype", "attention": "attention kernel"}
    other = [
        f"its {what} is {found.get(key)}, expected {expected[key]}"
        for key, what in said.items()
        if found.get(key) != expected[key]
    ]
    if found.get("config_digest") != expected["config_digest"]:
        other.append("its model has another configuration")
    return other


def _generation(found: Mapping[str, Any], options: Options) -> list[str]:
    expected = {
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "seed": options.seed,
        "stop": list(options.stops),
    }
    known = {"stop": [], **found}  # traces of before stop strings have none
    return [
        f"its {key} is {known.get(key)}, expected {value}"
        for key, value in expected.items()
        if known.get(key) != value
    ]


def _arrays(trace: Trace, options: Options, layer_ids: tuple[int, ...]) -> list[str]:
    if trace.layer_ids != layer_ids:
        return [f"its layers are {list(trace.layer_ids)}, expected {list(layer_ids)}"]
    other = []
    for name, wanted in {"o_proj": options.o_proj, "residual": options.residual}.items():
        if trace.has(name) != wanted:
            other.append(f"it has {'no ' if wanted else ''}{name}")
    shapes = trace.source.shapes
    dense = shapes.get("attention", shapes.get("attention_window", (0, 0, 0)))[2]
    if dense != options.dense_rows(trace.n_pos):
        expected = options.dense_rows(trace.n_pos)
        other.append(f"it has {dense} rows of dense attention, expected {expected}")
    found = DTYPES[trace.source.read("q", slice(0, 1), slice(0, 0)).dtype]
    exact = DTYPES[stored_dtype(trace.source_dtypes.get("q", "float32"))]
    if found != (options.store_dtype or exact):
        other.append(f"it is stored in {found}, expected {options.store_dtype or exact}")
    return other


def _entry(meta: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object of the metadata; empty where a foreign writer put something else."""
    value = meta.get(key)
    return value if isinstance(value, dict) else {}
