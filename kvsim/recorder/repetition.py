"""Rows that repeat the context: their tokens, and a model's queries and keys of them (KVzip).

For each chunk of the context the model reads, over the full cache of the context, a request to
repeat it and the chunk itself. Then these rows are dropped again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvsim.core.probe import KEY, Chunk, Probe
from kvsim.core.trace import Trace
from kvsim.errors import CaptureError
from kvsim.recorder.forward import chunk_rows, evaluating, full_cache, run_chunks
from kvsim.recorder.hooks import KernelCall, intercepting
from kvsim.recorder.modules import attention_modules, layer_sizes
from kvsim.recorder.options import PROBE_CHUNK
from kvsim.recorder.positions import steady_length
from kvsim.recorder.tokenization import knows, rendered
from kvsim.schema import REPETITION

#: Requests for the first chunk, and for a later one after the last tokens of the former.
_FIRST = "\n\nRepeat the previous context exactly."
_LATER = "\n\nRepeat the part of the previous context exactly, starting with"

#: Tokens of the former chunk that mark the start of the next one.
_CUE = 8


def repetition(
    context: Sequence[int], tokenizer: Any = None, *, chat: bool = False, chunk: int = PROBE_CHUNK
) -> Probe:
    """Return the rows that repeat a context, given as token ids.

    tokenizer: encodes the request; without one, or if its vocabulary lacks the words, the rows are
    only the repetition, of later chunks after the last tokens of the former one. chat: the request
    ends with the chat template's text between a user's message and its response.
    """
    first, later = (_encoded(text, tokenizer) for text in (_FIRST, _LATER))
    turn = _encoded(_turn(tokenizer) if chat else "\n", tokenizer) if first else []
    chunks: list[Chunk] = []
    tokens: list[int] = []
    for start in range(0, len(context), chunk):
        stop = min(start + chunk, len(context))
        request = [*later, *context[max(0, start - _CUE) : start]] if start else first
        rows = [*request, *turn, *context[start:stop]]
        chunks.append(Chunk(start, stop, len(rows)))
        tokens += rows
    return Probe("repeat", tuple(chunks), tuple(map(int, tokens)))


def check_length(model: PreTrainedModel, context: int, probe: Probe, n_pos: int = 0) -> None:
    """Raise CaptureError where context and probe are longer than the model can read.

    n_pos: of their sequence, which has the same frequencies.
    """
    limit = steady_length(model, context)
    longest = max(n_pos, context + probe.longest)
    if limit is not None and longest > limit:
        raise CaptureError(
            f"a context of {context} tokens and a probe of {probe.longest} rows take {longest} "
            f"tokens, expected at most {limit}, the model's context, or where frequencies of its "
            "RoPE change; give less text, or smaller chunks (--probe repeat:N)"
        )


def read_probe(
    model: PreTrainedModel,
    context: Sequence[int],
    probe: Probe,
    layers: Sequence[int],
    rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the context, then each chunk of the probe after it; at most `rows` in a forward.

    Returns its queries [layer, qhead, probe, dim] and keys [layer, head, probe, dim].
    """
    calls: dict[int, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in layers}

    def receive(call: KernelCall) -> None:
        if call.start >= len(context):  # the rows of a chunk of the probe
            calls[call.layer].append((call.q.clone(), call.k[:, call.start :].clone()))

    check_length(model, len(context), probe)
    layer_sizes(model, layers, probe)
    cache, most = full_cache(model), rows or chunk_rows(model, context)[0]
    states = any(hasattr(layer, "conv_states") for layer in cache.layers)

    def forward(ids: Sequence[int], start: int) -> None:
        for _ in run_chunks(model, cache, ids, start, 1, most):
            pass

    with torch.inference_mode(), evaluating(model), intercepting(model, receive, layers=layers):
        forward(context, 0)
        end = 0
        for chunk in probe.chunks:
            begin, end = end, end + chunk.rows
            before = deepcopy(cache) if states else cache  # states cannot be rolled back
            forward(probe.tokens[begin:end], len(context))
            cache = before
            if not states:
                cache.crop(-chunk.rows)  # the meaning of a positive number depends on the release
    parts = [[torch.cat(rows, dim=1) for rows in zip(*calls[at], strict=True)] for at in layers]
    queries, keys = (torch.stack(arrays) for arrays in zip(*parts, strict=True))
    return queries, keys


def repeat_context(
    model: PreTrainedModel, context: Sequence[int], trace: Trace | None = None
) -> dict[str, Tensor]:
    """Run the rows that repeat a context, as in a trace, or only the repetition, in all layers.

    Returns their queries and keys [layer, head, P, d], and chunks [chunk, 3].
    """
    probe = repetition(context)
    if trace is not None:
        trace.read(REPETITION[0], slice(0, 1))  # its error says how they are recorded
        probe = trace.header.probe or probe
    arrays = read_probe(model, context, probe, sorted(attention_modules(model)))
    return {**dict(zip(REPETITION, arrays, strict=True)), "chunks": torch.tensor(probe.chunks)}


def repetition_like(
    arrays: Mapping[str, Tensor], rows: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the `meta` and the arrays of a repetition that is to be run, with zeros as numbers.

    arrays: q and k of the sequence. rows: tokens of the context, about as many as will run.
    """
    probe = Probe("repeat", (Chunk(0, rows, rows),), (0,) * rows)
    zeros = (arrays[name][:, :, :1].expand(-1, -1, rows, -1) for name in "qk")
    return {KEY: probe.document()}, dict(zip(REPETITION, zeros, strict=True))


def _encoded(text: str, tokenizer: Any) -> list[int]:
    """Return the ids of a text, none where the vocabulary lacks a word of it."""
    if tokenizer is None or not knows(tokenizer, text):
        return []
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]


def _turn(tokenizer: Any) -> str:
    """Return the text of a chat template between a user's message and its response."""
    marker = "\N{SECTION SIGN}" * 3
    try:
        text = rendered([{"role": "user", "content": marker}], tokenizer, {})
    except CaptureError:
        return "\n"
    return text.rpartition(marker)[2] if marker in text else "\n"
