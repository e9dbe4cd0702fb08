"""One capture: a model runs over one prompt, and what its attention sees goes into a trace."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvsim.core.attention import attention_weights
from kvsim.core.checks import DTYPES
from kvsim.core.header import Header
from kvsim.core.trace import Trace
from kvsim.errors import CaptureError
from kvsim.recorder.answers import check_answer
from kvsim.recorder.blocks import BlockRecorder, MemorySink, Sink
from kvsim.recorder.generation import Ended, StopStrings, generate, stop_tokens
from kvsim.recorder.hooks import KernelCall, attention_modules, intercepting, kernel_name
from kvsim.recorder.models import (
    context_length,
    describe_model,
    is_tiny,
    model_name,
    read_ropes,
    softcap,
    versions,
)
from kvsim.recorder.options import Options, Progress, select_layers
from kvsim.recorder.progress import progress_bar
from kvsim.recorder.projections import Projections
from kvsim.recorder.prompts import Encoded, Labels, token_strings
from kvsim.recorder.residual import Residual
from kvsim.recorder.resuming import differences
from kvsim.schema import CHUNK
from kvsim.store import open_trace
from kvsim.store.writer import TraceWriter

#: Dense attention above this size is refused: it follows from q, k and the log-sum-exp.
MAX_ATTENTION_BYTES = 4 << 30


class Session:
    """One capture, with everything that is fixed before the model runs.

    Args:
        model: a decoder model.
        tokenizer: the model's tokenizer, or None.
        encoded: the prompt.
        options: the options of the capture.
        out: where to write the trace; None keeps it in memory.
        answer: the expected answer, or None.
        labels: the prompt's labels.
        name: the trace's name; None takes that of `out`, or the model's.

    Raises:
        CaptureError: a layer that the model does not have, a model without what an option needs, or
            stop strings without a tokenizer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        encoded: Encoded,
        options: Options,
        out: str | Path | None,
        answer: str | None,
        labels: Labels,
        name: str | None,
    ) -> None:
        self.model, self.tokenizer, self.encoded = model, tokenizer, encoded
        self.options, self.answer, self.labels = options, answer, labels
        self.out = None if out is None else Path(out)
        self.name = name or (self.out.stem if self.out else model_name(model))
        self.notes: list[str] = []
        self.new_tokens = self._response_limit()
        cap = softcap(model)
        if cap is not None and kernel_name(model) == "sdpa":
            self.notes.append(
                f"the sdpa kernel leaves out the softcap of {cap} that the model defines; loaded "
                "with the eager kernel it computes what it was trained to"
            )
        self.limit = len(encoded.ids) + self.new_tokens
        self.layer_ids = select_layers(options.layers, attention_modules(model))
        self.projections = Projections(model, self.layer_ids) if options.o_proj else None
        self.residual = Residual(model) if options.residual else None
        self.stop = StopStrings(options.stops, tokenizer)

    def _response_limit(self) -> int:
        """Return how many new tokens fit into the model's context."""
        requested, context = self.options.max_new_tokens, context_length(self.model)
        if context is None or len(self.encoded.ids) + requested <= context:
            return requested
        room = context - len(self.encoded.ids)
        self.notes.append(
            f"the response was cut to {room} of {requested} new tokens, "
            f"where the model's context of {context} ends"
        )
        return room

    def existing(self) -> Trace | None:
        """Return the trace that `resume` keeps, if there is one.

        Raises:
            CaptureError: a trace at `out` that is of another capture.
        """
        if not self.options.resume or self.out is None or not self.out.exists():
            return None
        trace = open_trace(self.out)
        differing = differences(
            trace, self.model, self.encoded, self.options, self.layer_ids, self.answer, self.labels
        )
        if differing:
            raise CaptureError(
                f"{self.out} is of another capture: {'; '.join(differing)}; --resume keeps traces "
                "of the same capture, give another --out, or overwrite=True (--overwrite)"
            )
        return trace

    def run(self) -> Trace:
        """Run the model over prompt and response, and return the trace."""
        return _Run(self).trace()

    @property
    def _attention_array(self) -> str:
        """The name of the array of dense attention."""
        return "attention" if self.options.attention in (True, "full") else "attention_window"

    def open_writer(self, out: Path, call: KernelCall) -> TraceWriter:
        """Open a writer at `out`; the first kernel call shows the shapes."""
        layers, n = len(self.layer_ids), self.limit
        qheads, heads, dim = call.q.shape[0], call.k.shape[0], call.q.shape[2]
        shapes: dict[str, tuple[int, ...]] = {
            "q": (layers, qheads, n, dim),
            "k": (layers, heads, n, dim),
            "v": (layers, heads, n, call.v.shape[2]),
            "attn_out": (layers, qheads, n, dim),
            "lse": (layers, qheads, n),
        }
        source = DTYPES[call.q.dtype]
        exact = "float64" if source == "float64" else "float32"
        dtypes = {**dict.fromkeys(shapes, source), "lse": exact}
        if self.options.attention:
            rows = self.options.dense_rows(n)
            size = layers * qheads * rows * n * 4
            if size > MAX_ATTENTION_BYTES:
                raise CaptureError(
                    f"dense attention of up to {n} tokens takes {size / 2**30:.1f} GiB, expected "
                    f"at most {MAX_ATTENTION_BYTES >> 30}; leave --attention out, it follows from "
                    "q, k and lse, or store the last rows alone (--attention window:N)"
                )
            name = self._attention_array
            shapes[name], dtypes[name] = (layers, qheads, rows, n), exact
        if call.residual is not None:
            shapes["residual"] = (layers, n, call.residual.shape[1])
            dtypes["residual"] = DTYPES[call.residual.dtype]
        if self.projections is not None:
            shapes["o_proj"] = (layers, qheads, dim, self.projections.hidden)
            dtypes["o_proj"] = self.projections.dtype
        return TraceWriter(
            out,
            shapes=shapes,
            source_dtypes=dtypes,
            layer_ids=self.layer_ids,
            store_dtype=self.options.store_dtype,
            overwrite=self.options.overwrite,
        )

    def header(self, recorder: BlockRecorder) -> Header:
        """Return the header as far as it is known once every layer has been called."""
        if len(recorder.errors) != len(self.layer_ids):
            raise CaptureError(
                f"{len(recorder.errors)} of {len(self.layer_ids)} layers called the attention "
                "kernel of transformers' table, expected all; this model cannot be recorded"
            )
        meta: dict[str, Any] = {
            "model": describe_model(self.model),
            "versions": versions(),
            "text": {"prompt": self.encoded.text, "messages": self.encoded.messages},
            "generation": self.options.generation,
            "labels": dict(self.labels),
            "notes": self.notes,
        }
        return Header(
            prompt_len=len(self.encoded.ids),
            formulas=recorder.formulas,
            ropes=recorder.ropes,
            layer_ids=self.layer_ids,
            name=self.name,
            meta=meta,
        )

    def final_header(
        self, recorder: BlockRecorder, tokens: list[int], ended: Ended | None
    ) -> Header:
        """Return the header with the response, and with how close the recording is."""
        header = self.header(recorder)
        prompt_len = header.prompt_len
        response = None
        if self.tokenizer is not None:
            response = str(self.tokenizer.decode(tokens[prompt_len:], skip_special_tokens=True))
        cut = self.new_tokens < self.options.max_new_tokens
        meta = {
            **header.meta,
            "text": {**header.meta["text"], "response": response},
            "generation": {
                **header.meta["generation"],
                "new_tokens": len(tokens) - prompt_len,
                "stopped": ended or ("context" if cut else "length"),
            },
            "answer_check": check_answer(
                self.encoded.text, response, self.answer, tiny=is_tiny(self.model)
            ),
            **_capture_check(recorder),
        }
        return replace(header.within(len(tokens)), meta=meta)

    def in_memory(
        self, sink: Sink | None, header: Header, tokens: list[int], texts: list[str] | None
    ) -> Trace:
        """Return the trace of a capture without a path."""
        if not isinstance(sink, MemorySink):
            raise TypeError(f"the sink is {type(sink).__name__}, expected one in memory")
        arrays = {name: sink.array(name) for name in sink.blocks}
        blocks = {} if self.projections is None else self.projections.blocks
        weights = [blocks[layer].to("cpu", copy=True) for layer in sorted(blocks)]
        return Trace.from_arrays(
            arrays["q"],
            arrays["k"],
            arrays["v"],
            attn_out=arrays["attn_out"],
            lse=arrays["lse"],
            o_proj=torch.stack(weights) if weights else None,
            residual=arrays.get("residual"),
            prompt_len=header.prompt_len,
            rope=header.ropes,
            formulas=header.formulas,
            tokens=tokens,
            token_text=texts,
            name=header.name,
            layer_ids=header.layer_ids,
            meta=header.meta,
        )

    def write_attention(self, writer: TraceWriter, header: Header, n_pos: int) -> None:
        """Write dense attention, recomputed from what is stored, a block of rows at a time."""
        first = n_pos - self.options.dense_rows(n_pos)
        for layer in range(len(self.layer_ids)):
            q, k, lse = (writer.read_back(name, layer) for name in ("q", "k", "lse"))
            q, k = q.to(lse.dtype), k.to(lse.dtype)
            at = torch.arange(n_pos)
            for start in range(first, n_pos, CHUNK):
                rows = slice(start, min(start + CHUNK, n_pos))
                formula = header.formulas[layer]
                block = attention_weights(q[:, rows], k, lse[:, rows], formula, at[rows], at)
                writer.write_attention(self._attention_array, layer, start - first, block)


class _Run:
    """The state of a session while its model runs, dropped with its blocks at the end."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.stack = ExitStack()
        self.writer: TraceWriter | None = None
        self.recorder = BlockRecorder(
            self._open_sink,
            lambda: read_ropes(session.model),
            begin=self._begin_layer,
            store_dtype=torch.float16 if session.options.store_dtype else None,
            rounds_logits=kernel_name(session.model) == "eager",
        )

    def trace(self) -> Trace:
        """Run the model over prompt and response, and return the trace."""
        with self.stack:
            progress = self.session.options.progress
            if progress is True:
                progress = self.stack.enter_context(progress_bar("tokens", self.session.name))
            tokens, ended = self._generate(progress if callable(progress) else lambda *_: None)
            header = self.session.final_header(self.recorder, tokens, ended)
            texts = token_strings(tokens, self.session.tokenizer)
            if self.writer is None:
                return self.session.in_memory(self.recorder.sink, header, tokens, texts)
            self.writer.begin(header)
            if self.session.options.attention:
                self.session.write_attention(self.writer, header, len(tokens))
            self.writer.publish(header, tokens=torch.tensor(tokens).numpy(), token_text=texts)
        return open_trace(self.writer.path)

    def _generate(self, progress: Progress) -> tuple[list[int], Ended | None]:
        """Generate with the kernel intercepted."""
        projections, residual = self.session.projections, self.session.residual
        with (
            intercepting(self.session.model, self._receive, layers=self.session.layer_ids),
            nullcontext() if projections is None else projections.checking(self._store_projection),
            nullcontext() if residual is None else residual.following(),
        ):
            return generate(
                self.session.model,
                self.session.encoded.ids,
                new_tokens=self.session.new_tokens,
                temperature=self.session.options.temperature,
                seed=self.session.options.seed,
                stop=stop_tokens(self.session.model, self.session.tokenizer),
                completed=self.session.stop.completed,
                sampled=lambda token: self._store_tokens([token]),
                before_last=self.recorder.finish_at,
                progress=progress,
            )

    def _receive(self, call: KernelCall) -> None:
        """Record one kernel call."""
        if self.session.residual is not None:
            call = replace(call, residual=self.session.residual.rows(call))
        self.recorder.receive(call)
        if self.session.projections is not None:
            self.session.projections.receive(call)

    def _open_sink(self, call: KernelCall) -> Sink:
        if self.session.out is None:
            return MemorySink()
        self.writer = self.stack.enter_context(self.session.open_writer(self.session.out, call))
        return _LayerSink(self.writer, self.session.layer_ids)

    def _begin_layer(self, layer: int) -> None:
        """Write the header once every layer has been called."""
        if self.writer is not None and layer == self.session.layer_ids[-1]:
            self.writer.begin(self.session.header(self.recorder), self._draft_header)
            self._store_tokens(self.session.encoded.ids)

    def _store_tokens(self, ids: list[int]) -> None:
        if self.writer is not None:
            self.writer.add_tokens(ids, token_strings(ids, self.session.tokenizer))

    def _store_projection(self, layer: int, weights: Tensor) -> None:
        if self.writer is not None:
            self.writer.write_o_proj(self.session.layer_ids.index(layer), weights)

    def _draft_header(self, header: Header) -> Header:
        """Return the header of a draft, with what has been recorded so far."""
        meta = {**header.meta, **_capture_check(self.recorder)}
        return replace(
            header, formulas=self.recorder.formulas, ropes=self.recorder.ropes, meta=meta
        )


def _capture_check(recorder: BlockRecorder) -> dict[str, Any]:
    """Return how far the recording so far differs from what the model computed, for `meta`."""
    check = {"max_relative_error": recorder.errors, "tolerance": recorder.allowed}
    return {"capture_check": check}


class _LayerSink:
    """A writer whose layers go by the model's numbers."""

    def __init__(self, writer: TraceWriter, layer_ids: Sequence[int]) -> None:
        self.writer = writer
        self.places = {number: place for place, number in enumerate(layer_ids)}

    def append(self, name: str, layer: int, block: Tensor) -> None:
        """Store the next positions of one layer."""
        self.writer.append(name, self.places[layer], block)

    def set_length(self, n_pos: int) -> None:
        """Fix the number of positions."""
        self.writer.set_length(n_pos)
