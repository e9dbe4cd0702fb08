"""Derived traces: by query head, in memory, and with some rows of the prompt."""

from __future__ import annotations

from dataclasses import replace

from kvsim.core.full import FullAttention
from kvsim.core.lazy import Tensor, torch
from kvsim.core.left_out import left_out_among
from kvsim.core.sources import Loaded, PerQueryHead, SelectedRows
from kvsim.core.trace import Trace, derived


def by_query_head(trace: Trace) -> Trace:
    """Return the trace with a KV head for each query head, copied only on reading."""
    if trace.group == 1:
        return trace
    return derived(trace, PerQueryHead(trace.source, trace.group), base=trace)


def loaded(trace: Trace, layers: slice = slice(None)) -> Trace:
    """Return the trace with some layers held in memory, each array as soon as it is read.

    For repeated reading: stored arrays are read and converted once, and full attention is kept.
    """
    source = Loaded(trace.source, layers, trace.dtype, trace.header.held)
    same = derived(trace, source, fingerprint=trace.fingerprint)
    same.full_attention = FullAttention(source, trace.formulas, trace.dtype, cache=True)
    return same


def of_rows(trace: Trace, prompt_rows: Tensor) -> Trace:
    """Return the trace of layers that only some rows of the prompt reach.

    prompt_rows: their positions, int [k], ascending. Rows after the prompt stay. The new trace
    counts these rows; its `positions` are those in the sequence. Arrays are copied only on reading;
    attention is among these rows, with the recorded q, k, v.
    """
    after = torch.arange(trace.prompt_len, trace.n_pos)
    rows = torch.cat([prompt_rows.to("cpu", torch.int64), after])
    gone = trace.prompt_len - len(prompt_rows)
    asked = tuple((start - gone, stop - gone) for start, stop in trace.header.questions)
    header = replace(trace.header, prompt_len=len(prompt_rows), context_len=None)
    left_out = left_out_among(rows, header.left_out)
    header = replace(header, questions=asked, left_out=left_out)
    return Trace(SelectedRows(trace.source, rows), header, dtype=trace.dtype)
