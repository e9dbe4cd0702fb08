"""`capture` and `capture_many`: one model, one prompt or many, one trace each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvsim.errors import CaptureError
from kvsim.recorder.blocks import BlockRecorder, MemorySink, Sink
from kvsim.recorder.generation import generate, stop_tokens
from kvsim.recorder.hooks import KernelCall, attention_modules, kernel_name, listening
from kvsim.recorder.models import (
    context_length,
    describe_model,
    is_tiny,
    load_model,
    model_name,
    read_rope,
    versions,
)
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
from kvsim.schema import CHUNK
from kvsim.store.checks import DTYPES
from kvsim.store.header import Header
from kvsim.store.publication import check_target, check_writable
from kvsim.store.verification import attention_rows
from kvsim.store.writer import TraceWriter
from kvsim.trace import Trace, open_trace

Progress = Callable[[int, int], None]

#: Dense attention above this size is refused: it follows from q, k and the log-sum-exp.
MAX_ATTENTION_BYTES = 4 << 30


@dataclass(frozen=True)
class _Options:
    max_new_tokens: int
    temperature: float
    seed: int
    attention: bool
    o_proj: bool
    residual: bool
    overwrite: bool
    store_dtype: str | None
    progress: Progress | bool | None


def capture(
    model: PreTrainedModel | str | Path,
    tokenizer: Any,
    prompt: PromptLike,
    *,
    max_new_tokens: int = 512,
    out: str | Path | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    attention: bool = False,
    o_proj: bool = False,
    residual: bool = False,
    overwrite: bool = False,
    store_dtype: str | None = None,
    answer: str | None = None,
    labels: Labels | None = None,
    name: str | None = None,
    progress: Progress | bool | None = None,
) -> Trace:
    """Run a model over a prompt and record what its attention saw.

    Args:
        model: a decoder model of transformers, or what `load_model` takes: a local folder, a hub
            id, or one of `kvsim.tiny.MODELS`.
        tokenizer: the model's tokenizer; None if the prompt is token ids, or if `model` is a name.
        prompt: text, chat messages, or token ids.
        max_new_tokens: the response is at most so long; cut at the model's context, with a note.
            0 records the prefill alone.
        out: where to write the trace; None keeps it in memory.
        temperature: 0 takes the most likely token, else tokens are drawn with `seed`.
        seed: of the draws.
        attention: store dense attention too. It follows from q, k and lse at any time, so this is
            for short sequences and other programs.
        o_proj: store the output projection of each layer too, which some policies read. It is as
            large as these weights of the model, whatever the length of the sequence.
        residual: store the residual stream too, the input of each decoder layer, from which deeper
            layers can be computed again. For each token it takes as much as `hidden` numbers of
            each layer.
        overwrite: replace a trace at `out`.
        store_dtype: None stores exactly, ``float16`` stores q, k, v, attn_out, o_proj and
            residual in half the space.
        answer: the expected answer, for the answer check.
        labels: `task`, `domain` and `level` of the prompt, any of them, for tables.
        name: of the trace; by default from `out`.
        progress: called with (tokens done, most tokens there can be); True shows a bar on a
            terminal.

    Returns:
        The trace, opened from `out` or in memory.

    Raises:
        CaptureError: a prompt that is empty, too long or has unknown words; a label of another name
            or kind; a model whose attention recomputed from q, k, v is not what it computed; with
            `o_proj`, one that has no such projection, or does something else with the output of its
            attention; with `residual`, one whose decoder layers are not found, or do not pass on
            what they return.
        TraceError: a number that is not finite, or too large for `store_dtype`.
        TraceExistsError: something is at `out`.
    """
    options = _Options(
        max_new_tokens,
        temperature,
        seed,
        attention,
        o_proj,
        residual,
        overwrite,
        store_dtype,
        progress,
    )
    _check_options(options, out)
    if out is not None:
        check_target(Path(out), overwrite=overwrite)
        check_writable(Path(out).parent)
    known = check_labels(labels or {})
    model, tokenizer = _resolve(model, tokenizer)
    encoded = _encode(model, tokenizer, prompt)
    return _Capture(model, tokenizer, encoded, options, out, answer, known, name).run()


def capture_many(
    model: PreTrainedModel | str | Path,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    out_dir: str | Path,
    *,
    max_new_tokens: int = 512,
    temperature: float = 0.0,
    seed: int = 0,
    attention: bool = False,
    o_proj: bool = False,
    residual: bool = False,
    overwrite: bool = False,
    store_dtype: str | None = None,
    progress: Progress | bool | None = None,
) -> list[Trace]:
    """Record one trace for each prompt, as ``out_dir/<id>.zarr``.

    All prompts and paths are checked before the first is run. An error or an interrupt later keeps
    the traces that are finished. Arguments and errors as for `capture`.
    """
    options = _Options(
        max_new_tokens,
        temperature,
        seed,
        attention,
        o_proj,
        residual,
        overwrite,
        store_dtype,
        progress,
    )
    folder = Path(out_dir)
    prompts = with_distinct_ids(prompts)
    paths = [folder / file_name(prompt.id) for prompt in prompts]
    for path in paths:
        check_target(path, overwrite=overwrite)
    check_writable(folder)
    labels = [check_labels(prompt.labels, f"prompt {prompt.id!r}: ") for prompt in prompts]
    _check_options(options, folder)
    model, tokenizer = _resolve(model, tokenizer)
    jobs = []
    for prompt, path, known in zip(prompts, paths, labels, strict=True):
        try:
            encoded = _encode(model, tokenizer, prompt.content)
        except CaptureError as error:
            raise CaptureError(f"prompt {prompt.id!r}: {error}") from error
        jobs.append(
            _Capture(model, tokenizer, encoded, options, path, prompt.answer, known, prompt.id)
        )
    return [job.run() for job in jobs]


def _check_options(options: _Options, out: str | Path | None) -> None:
    if options.max_new_tokens < 0:
        raise CaptureError(f"max_new_tokens is {options.max_new_tokens}, expected 0 or more")
    if not options.temperature >= 0:
        raise CaptureError(f"temperature is {options.temperature}, expected 0 or more")
    if options.store_dtype not in (None, "float16"):
        raise CaptureError(
            f"store_dtype is {options.store_dtype!r}, expected None (exact) or 'float16'"
        )
    if out is None and (options.attention or options.store_dtype):
        raise CaptureError(
            "attention and store_dtype are about what is written, but out is None; give out=..., "
            "or use trace.attention(layer, rows)"
        )


def _resolve(model: PreTrainedModel | str | Path, tokenizer: Any) -> tuple[PreTrainedModel, Any]:
    if isinstance(model, str | Path):
        model, found = load_model(model)
        tokenizer = found if tokenizer is None else tokenizer
    return model, tokenizer


def _encode(model: PreTrainedModel, tokenizer: Any, prompt: PromptLike) -> Encoded:
    embedding = cast("torch.nn.Embedding", model.get_input_embeddings())
    return encode(
        prompt,
        tokenizer,
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
        options: _Options,
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
        self.limit = len(encoded.ids) + self.new_tokens
        self.layer_ids = tuple(attention_modules(model))
        self.rope = read_rope(model)
        self.projections = Projections(model) if options.o_proj else None
        self.residual = Residual(model) if options.residual else None

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
                return writer

            def keep(ids: list[int]) -> None:
                if writer is not None:
                    writer.add_tokens(ids, token_strings(ids, self.tokenizer))

            def begin(layer: int) -> None:
                if writer is not None and layer == self.layer_ids[-1]:
                    writer.begin(self._header(recorder), lambda: _check(recorder))
                    keep(self.encoded.ids)

            narrow = torch.float16 if self.options.store_dtype else None
            recorder = BlockRecorder(
                open_sink,
                self.rope,
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

            with (
                listening(self.model, receive, limit=self.limit),
                nullcontext() if projections is None else projections.checking(),
                nullcontext() if residual is None else residual.following(),
            ):
                tokens, ended = generate(
                    self.model,
                    self.encoded.ids,
                    new_tokens=self.new_tokens,
                    temperature=self.options.temperature,
                    seed=self.options.seed,
                    stop=stop_tokens(self.model, self.tokenizer),
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
                self._write_attention(writer, header)
            for place, blocks in enumerate(self._o_proj()):
                writer.write_o_proj(place, blocks)
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
            size = layers * qheads * n * n * 4
            if size > MAX_ATTENTION_BYTES:
                raise CaptureError(
                    f"dense attention of up to {n} tokens takes {size / 2**30:.1f} GiB, expected "
                    f"at most {MAX_ATTENTION_BYTES >> 30}; leave --attention out, it follows from "
                    "q, k and lse"
                )
            shapes["attention"], dtypes["attention"] = (layers, qheads, n, n), exact
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
        if recorder.scale is None or len(recorder.errors) != len(self.layer_ids):
            raise CaptureError(
                f"{len(recorder.errors)} of {len(self.layer_ids)} layers called the attention "
                "kernel of transformers' table, expected all; this model cannot be recorded"
            )
        if self.rope != read_rope(self.model):
            raise CaptureError("the rotary embedding changed while the model ran, expected not")
        meta = {
            "model": describe_model(self.model),
            "versions": versions(),
            "text": {"prompt": self.encoded.text, "messages": self.encoded.messages},
            "generation": {
                "temperature": self.options.temperature,
                "seed": self.options.seed,
                "max_new_tokens": self.options.max_new_tokens,
            },
            "labels": dict(self.labels),
            "notes": self.notes,
        }
        return Header(
            prompt_len=len(self.encoded.ids),
            scale=recorder.scale,
            rope=self.rope,
            layer_ids=self.layer_ids,
            name=self.name,
            meta=meta,
        )

    def _ended(
        self, header: Header, recorder: BlockRecorder, tokens: list[int], *, ended: bool
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
                "stopped": "eos" if ended else "context" if cut else "length",
            },
            "answer_check": check_answer(
                self.encoded.text, response, self.answer, tiny=is_tiny(self.model)
            ),
            **_check(recorder),
        }
        return replace(header, meta=meta)

    def _in_memory(
        self, recorder: BlockRecorder, header: Header, tokens: list[int], texts: list[str] | None
    ) -> Trace:
        if not isinstance(recorder.sink, MemorySink):
            raise TypeError("expected a sink in memory")
        arrays = {name: recorder.sink.array(name) for name in recorder.sink.blocks}
        blocks = [block.to("cpu", copy=True) for block in self._o_proj()]
        return Trace.from_arrays(
            arrays["q"],
            arrays["k"],
            arrays["v"],
            attn_out=arrays["attn_out"],
            lse=arrays["lse"],
            o_proj=torch.stack(blocks) if blocks else None,
            residual=arrays.get("residual"),
            prompt_len=header.prompt_len,
            rope=header.rope,
            scale=header.scale,
            tokens=tokens,
            token_text=texts,
            name=header.name,
            layer_ids=header.layer_ids,
            meta=header.meta,
        )

    def _o_proj(self) -> list[Tensor]:
        """The output projections [qhead, dim, hidden] of the layers; none if not wanted."""
        blocks = {} if self.projections is None else self.projections.blocks
        return [blocks[layer] for layer in self.layer_ids if layer in blocks]

    def _write_attention(self, writer: TraceWriter, header: Header) -> None:
        """Dense attention from what is stored, a block of rows at a time."""
        for layer in range(len(self.layer_ids)):
            q, k, lse = (writer.read_back(name, layer) for name in ("q", "k", "lse"))
            q, k = q.to(lse.dtype), k.to(lse.dtype)
            for start in range(0, q.shape[1], CHUNK):
                rows = slice(start, min(start + CHUNK, q.shape[1]))
                block = attention_rows(q, k, lse, header.scale, rows)
                writer.write_attention(layer, start, block)


def _check(recorder: BlockRecorder) -> dict[str, Any]:
    """How far what was recorded by now differs from what the model computed, as in `meta`."""
    check = {"max_relative_error": recorder.errors, "tolerance": recorder.allowed}
    return {"capture_check": check}


def _silent(done: int, total: int) -> None:
    """No progress."""


__all__ = ["capture", "capture_many"]
