"""Forecast of captures: shapes from one kernel call of the model, with or without weights.

The gate of a trace is not included, because finding a gate takes numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvsim.core.attention import Formula
from kvsim.core.checks import DTYPES, compute_dtype
from kvsim.recorder.contexts import share_contexts
from kvsim.recorder.counting import ModelSize
from kvsim.recorder.head import LOGITS
from kvsim.recorder.hooks import REPEATED, KernelCall
from kvsim.recorder.loading import load_outline
from kvsim.recorder.modules import attention_modules, kernel_name, kernel_sizes, layer_size
from kvsim.recorder.options import Options
from kvsim.recorder.prompts import Prompt, naming
from kvsim.recorder.sensitivity import LOGITS as SENSITIVITY
from kvsim.recorder.sensitivity import ROWS
from kvsim.recorder.session import Session
from kvsim.recorder.steps import Projections, Stream
from kvsim.schema import CHUNK
from kvsim.store.forecast import PROCESS, Forecast, resident_bytes
from kvsim.store.layout import StoredArray, cut_shape, stored_arrays

#: Bytes of a capture's modules, and of freed memory that the allocator keeps: glibc up to 64 MiB.
_LOADED = 96 << 20


def forecast(model: PreTrainedModel, sessions: Sequence[Session], device: str) -> Forecast:
    """Return the resources of captures with responses of the greatest length; device: theirs."""
    on_device, size = device != "cpu", ModelSize(model)
    writing = [each for each in sessions if each.new_tokens]
    together = min(writing[0].options.batch, len(writing)) if writing else 1
    stored = list[StoredArray]()
    small = peak = 0.0
    begun = set[int]()
    for each in sessions:
        call, shared = outline(each), each.shared
        linked = len(each.context) if shared and (shared.path or id(shared) in begun) else 0
        begun.add(id(shared))
        peak = max(peak, _memory(each, call, size, together, spares=not on_device))
        of_trace = stored_arrays(**each.arrays(call), store_dtype=each.options.store_dtype)
        rest = each.limit - linked // CHUNK * CHUNK
        if linked:
            of_trace = [replace(x, shape=cut_shape(x.name, x.shape, rest)) for x in of_trace]
        stored += of_trace
        # metadata with checksums, tokens and their texts
        small += 14_000 + sum(1000 + 40 * array.nchunks for array in of_trace) + 5 * each.limit
    if projected := bool(sessions) and sessions[0].has(Projections):
        shape = (len(each.layer_ids), len(call.q), call.v.shape[2], call.hidden.shape[1])
        source = {"o_proj": DTYPES[model.dtype]}
        stored += stored_arrays({"o_proj": shape}, source, each.options.store_dtype)
    # a trace counts metadata and `tokens`, projections their own
    chunks = sum(1 + array.nfiles for array in stored)
    resident, weights = resident_bytes() or PROCESS, 0 if on_device else size.weights
    return Forecast(
        written=sum(array.usual_bytes for array in stored) + small,
        files=chunks + 3 * len(sessions) + projected,
        memory=max(resident, PROCESS + weights) + (0 if on_device else peak),
        device_memory=size.weights + peak if on_device else 0,
    )


def outline(session: Session) -> KernelCall:
    """Return a kernel call of a capture's first layer, of two rows without numbers."""
    model, layer = session.model, session.layer_ids[0]
    plain = kernel_sizes(model)[layer]
    qheads, heads, dim, value_dim = layer_size(model, layer)
    hidden, dtype = model.config.get_text_config().hidden_size, model.dtype

    def rows(heads: int, dim: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(heads, 2, dim, dtype=dtype, device="meta")

    return KernelCall(
        *(layer, rows(1, hidden)[0]),
        q=rows(qheads, dim, dtype if value_dim == plain[3] else compute_dtype(dtype)),
        k=rows(heads, dim),
        v=rows(heads, value_dim),
        out=rows(qheads, plain[3]),
        formula=Formula(1.0),
        residual=rows(1, hidden)[0] if session.options.residual else None,
        residual_norm=rows(1, hidden)[0, :, 0].float() if session.has(Stream) else None,
        again=lambda _: (Tensor(), Tensor()),
    )


def _memory(
    session: Session, call: KernelCall, size: ModelSize, together: int, *, spares: bool
) -> float:
    """Return the peak bytes besides the weights; together: responses of a batch.

    The sum of the cache (in a batch those of all sequences and of their prompts; and that of a
    shared context), incomplete blocks, and the largest of one layer's needs: its kernel over a mask
    (repeated keys and values of query heads, and the mask), the recorder (computed and stored keys
    and values, and differences of all rows), its MLP, logits, and output projections as stored.
    """
    (heads, _, dim), (kv_heads, value_dim) = call.q.shape, call.v.shape[::2]
    item, wide = call.q.element_size(), compute_dtype(call.q.dtype).itemsize
    layers = len(attention_modules(session.model))
    n, given, hidden = session.limit, len(session.response), call.hidden.shape[1]
    rows, projected = min(len(session.encoded.ids) + given, session.chunk), session.has(Projections)
    several = session.options.sensitivity and max(given, session.new_tokens) > 1
    copies = ROWS * (layers + 1) if projected and several else 0  # run together at the end
    eager, narrow = kernel_name(session.model) == "eager", item < wide
    entry, of_rows = dim + value_dim, rows * heads * max(dim, value_dim)
    caches = (1 if together == 1 else 2 * together) + (session.shared is not None)
    cache = n * layers * kv_heads * entry * item * caches
    blocks = len(session.layer_ids) * CHUNK * (2 * heads + kv_heads) * max(dim, value_dim) * item
    of_head = n * heads // kv_heads * entry * item
    most = max(of_head, REPEATED) if spares and not eager else inf
    repeated = min(of_head * kv_heads, most) if heads > kv_heads else 0
    masked = rows * n * (1 + item) + repeated if session.chunk < n or eager else 0
    kernel = of_rows * item + masked + 8 * heads * rows * n * eager
    copied = n * kv_heads * (entry * narrow + dim * bool(session.options.store_dtype)) * wide
    recorder = copied + of_rows * wide * (4 if narrow else 2)
    projections = 2 * heads * value_dim * hidden * item * projected
    held = (3 * rows * hidden + 2 * of_rows) * item  # the stream, queries, the output
    mlp = 3 * rows * (hidden + size.widest) * item
    again = n * kv_heads * entry * item + repeated + ROWS * heads * n * (2 + item)
    logits = size.vocabulary * max(min(rows, 1 + given), copies)
    logits = 4 * min(logits, SENSITIVITY if copies else 2 * LOGITS)
    logits += 16 * size.vocabulary * min(ROWS, copies)  # some as float64 too
    in_a_layer = max(held + max(kernel, recorder, projections), mlp, again * bool(copies))
    return _LOADED + cache + blocks + max(in_a_layer, logits)


def planned(
    name: str,
    captures: Sequence[tuple[Prompt, Path]],
    options: Options,
    *,
    dtype: str | None = None,
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> Forecast:
    """Return the forecast of captures of prompts to paths, without the model's weights.

    Other arguments as for `load_model`, whose errors this raises, and for `capture`.
    """
    model, tokenizer = load_outline(
        name, dtype=dtype, on_cpu=device == "cpu", trust_remote_code=trust_remote_code
    )
    sessions = []
    for prompt, out in captures:
        with naming(prompt):
            sessions.append(Session(model, tokenizer, prompt, options, out, {}))
    share_contexts(sessions, [None] * len(sessions))
    return forecast(model, sessions, device)
