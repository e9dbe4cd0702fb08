"""Future sequences of a model as Traces: sizes and formulas, from a short capture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from kvsim.core.attention import Formula
from kvsim.core.policy import Policy
from kvsim.core.sources import InMemory
from kvsim.core.trace import Trace
from kvsim.errors import CaptureError
from kvsim.recorder.hooks import KernelCall, intercepting
from kvsim.recorder.loading import model_name
from kvsim.recorder.options import Options
from kvsim.recorder.prompts import Prompt
from kvsim.recorder.repetition import repetition_like
from kvsim.recorder.session import Session
from kvsim.runner.model import RunningModel
from kvsim.schema import Spans, object_at

#: Tokens of the capture that shows the formulas of a model's layers.
_TOKENS = 32


def captured(running: RunningModel, *, o_proj: bool = False) -> Trace:
    """A capture of a few tokens, in memory; CaptureError without the output projections wanted."""
    if o_proj in running.captures:
        return running.captures[o_proj]
    model = running.model
    vocabulary = cast("nn.Embedding", model.get_input_embeddings()).num_embeddings
    prompt = Prompt("", [token % vocabulary for token in range(1, _TOKENS + 1)])
    formulas: dict[int, Formula] = {}

    def receive(call: KernelCall) -> None:
        formulas[call.layer] = call.formula

    # a trace so short does not say how long the sliding windows are
    with intercepting(model, receive):
        options = Options(max_new_tokens=0, o_proj=o_proj)
        trace = Session(model, None, prompt, options, None, running.described).run()
    header = replace(trace.header, formulas=tuple(formulas[at] for at in sorted(formulas)))
    running.captures[o_proj] = Trace(trace.source, header, dtype=trace.dtype)
    return running.captures[o_proj]


def projected(running: RunningModel) -> Trace | None:
    """A trace of a few tokens with output projections.

    None without such matrices, or where a gate acts before them.
    """
    try:
        trace = captured(running, o_proj=True)
    except CaptureError:
        return None
    return None if trace.has("gate") else trace


def sketch(
    running: RunningModel,
    policy: Policy,
    prompt_len: int,
    n_pos: int,
    *,
    context_len: int | None = None,
    name: str = "live",
    questions: Spans = (),
) -> Trace:
    """Return a sequence that is to be run as a Trace: sizes, formulas, and zeros as q, k, v."""
    running.check_length(n_pos)
    example = captured(running, o_proj="o_proj" in policy.reads.arrays)
    if example.has("gate"):
        raise CaptureError(
            f"{policy.name} reads the output projection, before which {model_name(running.model)} "
            "has a gate, expected none in a live run; replay a recorded trace instead"
        )
    zero, shapes = torch.zeros((), dtype=example.dtype), example.source.shapes
    arrays = {key: zero.expand(*shapes[key][:2], n_pos, shapes[key][3]) for key in ("q", "k", "v")}
    if example.has("o_proj"):
        arrays["o_proj"] = example.source.read("o_proj", slice(None), slice(None))
    model = object_at(example.meta, "model")
    meta: dict[str, Any] = {
        "model": {key: model[key] for key in ("layers", "other_layers") if key in model}
    }
    if example.header.latent is not None:
        meta["latent"] = example.header.latent
    if policy.reads.context_again:
        more, repeated = repetition_like(arrays, context_len or prompt_len)
        meta, arrays = meta | more, arrays | repeated
    facts: Any = {"prompt_len": prompt_len, "context_len": context_len, "name": name}
    header = replace(example.header, **facts, meta=meta, questions=tuple(questions))
    header.check({key: tuple(array.shape) for key, array in arrays.items()}, name)
    return Trace(InMemory(arrays), header.within(n_pos), dtype=example.dtype)
