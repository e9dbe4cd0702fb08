"""Whether an existing trace is the one that a capture would record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from kvsim.core.checks import DTYPES, stored_dtype
from kvsim.core.trace import Trace
from kvsim.errors import TraceExistsError
from kvsim.recorder.models import describe_model, is_tiny
from kvsim.recorder.options import Options
from kvsim.recorder.prompts import Encoded, Labels, check_answer
from kvsim.store.metadata import object_at


@contextmanager
def suggesting_resume(*, applies: bool) -> Iterator[None]:
    """Add to the error about an existing trace what `resume` would do, if it applies."""
    try:
        yield
    except TraceExistsError as error:
        if not applies:
            raise
        raise TraceExistsError(
            f"{error}, or resume=True (--resume), which keeps traces of the same capture and "
            "records the others"
        ) from error


def differences(
    trace: Trace,
    model: PreTrainedModel,
    encoded: Encoded,
    options: Options,
    layer_ids: tuple[int, ...],
    answer: str | None,
    labels: Labels,
) -> list[str]:
    """Return in words how `trace` differs from what a capture would record; empty if it does not.

    Weights are not compared: models of one name and one configuration count as equal.
    """
    generation, recorded = (object_at(trace.meta, key) for key in ("generation", "model"))
    if generation.get("stopped") == "interrupted":
        return ["it was recovered from an interrupted capture and is not complete"]
    generation = {"stop": [], **generation}  # older traces have no stop strings
    expected = describe_model(model)
    shapes = trace.source.shapes
    dense = shapes.get("attention", shapes.get("attention_window", (0, 0, 0)))[2]
    exact = DTYPES[stored_dtype(trace.source_dtypes.get("q", "float32"))]
    stored = DTYPES[trace.source.read("q", slice(0, 1), slice(0, 0)).dtype]
    pairs = {
        "its model is": (recorded.get("name"), expected["name"]),
        "its model's dtype is": (recorded.get("dtype"), expected["dtype"]),
        "its attention kernel is": (recorded.get("attention"), expected["attention"]),
        **{
            f"its {key} is": (generation.get(key), value)
            for key, value in options.generation.items()
        },
        "its layers are": (list(trace.layer_ids), list(layer_ids)),
        "its rows of dense attention are": (dense, options.dense_rows(trace.n_pos)),
        "it is stored in": (stored, options.store_dtype or exact),
    }
    differing = [f"{text} {a}, expected {b}" for text, (a, b) in pairs.items() if a != b]
    if recorded.get("config_digest") != expected["config_digest"]:
        differing.append("its model has another configuration")
    for name, requested in {"o_proj": options.o_proj, "residual": options.residual}.items():
        if trace.has(name) != requested:
            differing.append(f"it has {'no ' if requested else ''}{name}")
    return [*_prompt_differences(trace, encoded, answer, labels, tiny=is_tiny(model)), *differing]


def _prompt_differences(
    trace: Trace, encoded: Encoded, answer: str | None, labels: Labels, *, tiny: bool
) -> list[str]:
    prompt = [] if trace.tokens is None else trace.tokens[: trace.prompt_len].tolist()
    if prompt != encoded.ids:
        pairs = enumerate(zip(prompt, encoded.ids, strict=False))
        shorter = min(len(prompt), len(encoded.ids))
        first = next((place for place, (a, b) in pairs if a != b), shorter)
        expected = f"expected {len(encoded.ids)} tokens"
        return [f"its prompt of {len(prompt)} tokens differs from token {first} on, {expected}"]
    differing = []
    if dict(trace.labels) != dict(labels):
        differing.append(f"its labels are {dict(trace.labels)}, expected {dict(labels)}")
    response = object_at(trace.meta, "text").get("response")
    check = check_answer(encoded.text, response, answer, tiny=tiny)
    if json.loads(json.dumps(check)) != trace.meta.get("answer_check"):
        differing.append("its response was compared with another answer")
    return differing
