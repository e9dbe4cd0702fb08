"""`capture` and `capture_many`: one model, one prompt or many, one trace each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvsim.core.attention import attention_weights
from kvsim.core.trace import Trace, open_trace
from kvsim.errors import CaptureError
from kvsim.recorder.blocks import BlockRecorder, MemorySink, Sink
from kvsim.recorder.generation import Ended, StopStrings, generate, stop_tokens
from kvsim.recorder.hooks import KernelCall, attention_modules, kernel_name, listening
from kvsim.recorder.models import (
    context_length,
    describe_model,
    is_tiny,
    load_model,
    model_name,
    read_ropes,
    softcap,
    versions,
)
from kvsim.recorder.options import Keywords, Options, Progress, check_output, chosen_layers
from kvsim.recorder.progress import progress_bar
from kvsim.recorder.projections import Projections
from kvsim.recorder.prompts import (
    Encoded,
    Labels,
    Prompt,
    PromptLike,
    check_answer,
    check_labels,
    encode,
    file_name,
    token_strings,
    with_distinct_ids,
)
from kvsim.recorder.residual import Residual
from kvsim.recorder.resuming import differences, offering_resume, telling_progress
from kvsim.schema import CHUNK, is_url
from kvsim.store.checks import DTYPES
from kvsim.store.header import Header
from kvsim.store.publication import check_target, check_writable
from kvsim.store.writer import TraceWriter

#: Dense attention above this size is refused: it follows from q, k and the log-sum-exp.
MAX_ATTENTION_BYTES = 4 << 30


def capture(
    model: PreTrainedModel | str | Path,
    tokenizer: Any,
    prompt: PromptLike,
    *,
    out: str | Path | None = None,
    answer: str | None = None,
    labels: Labels | None = None,
    name: str | None = None,
    **keywords: Unpack[Keywords],
) -> Trace:
    """Run a model over a prompt and record what its attention saw.

    Args:
        model: a decoder model of transformers, or what `load_model` takes: a local folder, a hub
            id, or one of `kvsim.tiny.MODELS`.
        tokenizer: the model's tokenizer; None if the prompt is token ids, or if `model` is a name.
        prompt: text, chat messages, or token ids.
        out: where to write the trace; None keeps it in memory.
        answer: the expected answer, for the answer check.
        labels: `task`, `domain` and `level` of the prompt, any of them, for tables.
        name: of the trace; by default from `out`.
        keywords: `max_new_tokens`, `temperature`, `seed`, `stop`, `system`, `chat`, `layers`,
            `attention`, `o_proj`, `residual`, `store_dtype`, `overwrite`, `resume` and `progress`,
            as `kvsim.recorder.Options` describes them.

    Returns:
        The trace, opened from `out` or in memory.

    Raises:
        CaptureError: a prompt that is empty, too long or has unknown words; a label of another name
            or kind; an option out of range; a layer that the model does not have; a model whose
            attention recomputed from q, k, v is not what it computed; with `o_proj`, one that has
            no such projection, or does something else with the output of its attention; with
            `residual`, one whose decoder layers are not found, or do not pass on what they return;
            with `resume`, a trace at `out` that is of something else.
        TraceError: a number that is not finite, or too large for `store_dtype`.
        TraceExistsError: something is at `out`.
        TypeError: a keyword that is none.
    """
    options = Options.of(keywords)
    check_output(options, stored=out is not None)
    if out is not None:
        _check_local(out)
        _check_target(Path(out), options)
        check_writable(Path(out).parent)
    known = check_labels(labels or {})
    model, tokenizer = _resolve(model, tokenizer)
    encoded = _encode(model, tokenizer, prompt, options)
    job = _Capture(model, tokenizer, encoded, options, out, answer, known, name)
    kept = job.kept()
    return job.run() if kept is None else kept


def capture_many(
    model: PreTrainedModel | str | Path,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    out_dir: str | Path,
    **keywords: Unpack[Keywords],
) -> list[Trace]:
    """Record one trace for each prompt, as ``out_dir/<id>.zarr``.

    All prompts and paths are checked before the first is run. An error or an interrupt later keeps
    the traces that are finished; `resume=True` then records the others. A prompt's own `system`
    goes before the keyword. Arguments and errors as for `capture`.
    """
    options = Options.of(keywords)
    _check_local(out_dir)
    folder = Path(out_dir)
    prompts = with_distinct_ids(prompts)
    paths = [folder / file_name(prompt.id) for prompt in prompts]
    with offering_resume(applies=not options.overwrite):
        for path in paths:
            _check_target(path, options)
    check_writable(folder)
    labels = [check_labels(prompt.labels, f"prompt {prompt.id!r}: ") for prompt in prompts]
    model, tokenizer = _resolve(model, tokenizer)
    jobs = []
    for prompt, path, known in zip(prompts, paths, labels, strict=True):
        try:
            encoded = _encode(model, tokenizer, prompt.content, options, prompt.system)
        except CaptureError as error:
            raise CaptureError(f"prompt {prompt.id!r}: {error}") from error
        jobs.append(
            _Capture(model, tokenizer, encoded, options, path, prompt.answer, known, prompt.id)
        )
    kept = [job.kept() for job in jobs]
    traces = []
    for place, (job, trace) in enumerate(zip(jobs, kept, strict=True)):
        with telling_progress(prompts[place].id, place, len(jobs)):
            traces.append(job.run() if trace is None else trace)
    return traces


def _check_local(out: str | Path) -> None:
    """Raise CaptureError for a URL: blocks are written while the model runs, and renamed."""
    if is_url(str(out)):
        raise CaptureError(
            f"out is {str(out)!r}, expected a local path; record there, and put the trace behind "
            "the URL with trace.save(URL)"
        )


def _check_target(path: Path, options: Options) -> None:
    """Raise TraceExistsError where a trace is in the way; one that may stay is looked at later."""
    if not (options.resume and path.exists()):
        check_target(path, overwrite=options.overwrite)


def _resolve(model: PreTrainedModel | str | Path, tokenizer: Any) -> tuple[PreTrainedModel, Any]:
    if isinstance(model, str | Path):
        model, found = load_model(model)
        tokenizer = found if tokenizer is None else tokenizer
    return model, tokenizer


def _encode(
    model: PreTrainedModel,
    tokenizer: Any,
    prompt: PromptLike,
    options: Options,
    system: str | None = None,
) -> Encoded:
    embedding = cast("torch.nn.Embedding", model.get_input_embeddings())
    return encode(
        prompt,
        tokenizer,
        system=options.system if system is None else system,
        chat=options.chat,
        vocab_size=embedding.weight.shape[0],
        context=context_length(model),
        tiny=is_tiny(model),
    )


class _Capture:
    """One capture: everything that is fixed before the model runs."""

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
        self.new_tokens = self._room()
        cap = softcap(model)
        if cap is not None and kernel_name(model) == "sdpa":
            self.notes.append(
                f"the sdpa kernel leaves out the softcap of {cap} that the model defines; loaded "
                "with the eager kernel it computes what it was trained to"
            )
        self.limit = len(encoded.ids) + self.new_tokens
        self.layer_ids = chosen_layers(options.layers, attention_modules(model))
        self.projections = Projections(model, self.layer_ids) if options.o_proj else None
        self.residual = Residual(model) if options.residual else None
        self.stop = StopStrings(options.stops, tokenizer)

    def _room(self) -> int:
        """How many new tokens fit into the model's context."""
        wanted, context = self.options.max_new_tokens, context_length(self.model)
        if context is None or len(self.encoded.ids) + wanted <= context:
            return wanted
        room = context - len(self.encoded.ids)
        self.notes.append(
            f"the response was cut to {room} of {wanted} new tokens, "
            f"where the model's context of {context} ends"
        )
        return room

    def kept(self) -> Trace | None:
        """The trace that `resume` keeps, if there is one; raises CaptureError for another one."""
        if not self.options.resume or self.out is None or not self.out.exists():
            return None
        trace = open_trace(self.out)
        other = differences(
            trace, self.model, self.encoded, self.options, self.layer_ids, self.answer, self.labels
        )
        if other:
            raise CaptureError(
                f"{self.out} is of another capture: {'; '.join(other)}; --resume keeps traces of "
                "the same capture, give another --out, or overwrite=True (--overwrite)"
            )
        return trace

    def run(self) -> Trace:
        with ExitStack() as stack:
            progress = self.options.progress
            if progress is True:
                progress = stack.enter_context(progress_bar(self.name))
            report: Progress = progress if callable(progress) else _silent
            writer: TraceWriter | None = None
            projections, residual = self.projections, self.residual

            def open_sink(call: KernelCall) -> Sink:
                nonlocal writer
                if self.out is None:
                    return MemorySink()
                writer = stack.enter_context(self._writer(call))
                return _Placed(writer, self.layer_ids)

            def keep(ids: list[int]) -> None:
                if writer is not None:
                    writer.add_tokens(ids, token_strings(ids, self.tokenizer))

            def so_far(header: Header) -> Header:
                meta = {**header.meta, **_check(recorder)}
                return replace(header, formulas=recorder.formulas, ropes=recorder.ropes, meta=meta)

            def begin(layer: int) -> None:
                if writer is not None and layer == self.layer_ids[-1]:
                    writer.begin(self._header(recorder), so_far)
                    keep(self.encoded.ids)

            narrow = torch.float16 if self.options.store_dtype else None
            recorder = BlockRecorder(
                open_sink,
                lambda: read_ropes(self.model),
                begin=begin,
                store_dtype=narrow,
                rounds_logits=kernel_name(self.model) == "eager",
            )

            def receive(call: KernelCall) -> None:
                if residual is not None:
                    call = replace(call, residual=residual.rows(call))
                recorder.receive(call)
                if projections is not None:
                    projections.receive(call)

            def keep_projection(layer: int, weights: Tensor) -> None:
                if writer is not None:
                    writer.write_o_proj(self.layer_ids.index(layer), weights)

            with (
                listening(self.model, receive, layers=self.layer_ids),
                nullcontext() if projections is None else projections.checking(keep_projection),
                nullcontext() if residual is None else residual.following(),
            ):
                tokens, ended = generate(
                    self.model,
                    self.encoded.ids,
                    new_tokens=self.new_tokens,
                    temperature=self.options.temperature,
                    seed=self.options.seed,
                    stop=stop_tokens(self.model, self.tokenizer),
                    completed=self.stop.completed,
                    chosen=lambda token: keep([token]),
                    before_last=recorder.finish_at,
                    progress=report,
                )
            header = self._ended(self._header(recorder), recorder, tokens, ended=ended)
            texts = token_strings(tokens, self.tokenizer)
            if writer is None:
                return self._in_memory(recorder, header, tokens, texts)
            writer.begin(header)
            if self.options.attention:
                self._write_attention(writer, header, len(tokens))
            writer.publish(header, tokens=torch.tensor(tokens).numpy(), token_text=texts)
        return open_trace(writer.path)

    def _writer(self, call: KernelCall) -> TraceWriter:
        if self.out is None:
            raise RuntimeError("no path")
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
            name = self._attention
            shapes[name], dtypes[name] = (layers, qheads, rows, n), exact
        if call.residual is not None:
            shapes["residual"] = (layers, n, call.residual.shape[1])
            dtypes["residual"] = DTYPES[call.residual.dtype]
        if self.projections is not None:
            shapes["o_proj"] = (layers, qheads, dim, self.projections.hidden)
            dtypes["o_proj"] = self.projections.dtype
        return TraceWriter(
            self.out,
            shapes=shapes,
            source_dtypes=dtypes,
            layer_ids=self.layer_ids,
            store_dtype=self.options.store_dtype,
            overwrite=self.options.overwrite,
        )

    def _header(self, recorder: BlockRecorder) -> Header:
        """What is known once every layer has been called: everything but how it ends."""
        if len(recorder.errors) != len(self.layer_ids):
            raise CaptureError(
                f"{len(recorder.errors)} of {len(self.layer_ids)} layers called the attention "
                "kernel of transformers' table, expected all; this model cannot be recorded"
            )
        meta = {
            "model": describe_model(self.model),
            "versions": versions(),
            "text": {"prompt": self.encoded.text, "messages": self.encoded.messages},
            "generation": {
                "temperature": self.options.temperature,
                "seed": self.options.seed,
                "max_new_tokens": self.options.max_new_tokens,
                "stop": list(self.options.stops),
            },
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

    def _ended(
        self, header: Header, recorder: BlockRecorder, tokens: list[int], *, ended: Ended | None
    ) -> Header:
        """The header with what the response was, and how well everything fits."""
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
            **_check(recorder),
        }
        return replace(header.within(len(tokens)), meta=meta)

    def _in_memory(
        self, recorder: BlockRecorder, header: Header, tokens: list[int], texts: list[str] | None
    ) -> Trace:
        if not isinstance(recorder.sink, MemorySink):
            raise TypeError("expected a sink in memory")
        arrays = {name: recorder.sink.array(name) for name in recorder.sink.blocks}
        found = {} if self.projections is None else self.projections.blocks
        weights = [found[layer].to("cpu", copy=True) for layer in sorted(found)]
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

    @property
    def _attention(self) -> str:
        """The array that dense attention goes to."""
        return "attention" if self.options.attention in (True, "full") else "attention_window"

    def _write_attention(self, writer: TraceWriter, header: Header, n_pos: int) -> None:
        """Dense attention from what is stored, a block of rows at a time."""
        first = n_pos - self.options.dense_rows(n_pos)
        for layer in range(len(self.layer_ids)):
            q, k, lse = (writer.read_back(name, layer) for name in ("q", "k", "lse"))
            q, k = q.to(lse.dtype), k.to(lse.dtype)
            at = torch.arange(n_pos)
            for start in range(first, n_pos, CHUNK):
                rows = slice(start, min(start + CHUNK, n_pos))
                formula = header.formulas[layer]
                block = attention_weights(q[:, rows], k, lse[:, rows], formula, at[rows], at)
                writer.write_attention(self._attention, layer, start - first, block)


class _Placed:
    """A writer whose layers are called by the model's numbers."""

    def __init__(self, writer: TraceWriter, layer_ids: Sequence[int]) -> None:
        self.writer = writer
        self.places = {number: place for place, number in enumerate(layer_ids)}

    def append(self, name: str, layer: int, block: Tensor) -> None:
        """Store the next positions of one layer."""
        self.writer.append(name, self.places[layer], block)

    def set_length(self, n_pos: int) -> None:
        """Fix the number of positions."""
        self.writer.set_length(n_pos)


def _check(recorder: BlockRecorder) -> dict[str, Any]:
    """How far what was recorded by now differs from what the model computed, as in `meta`."""
    check = {"max_relative_error": recorder.errors, "tolerance": recorder.allowed}
    return {"capture_check": check}


def _silent(done: int, total: int) -> None:
    """No progress."""


__all__ = ["capture", "capture_many"]
