"""One capture: a model runs over one prompt, and what its attention sees goes into a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvsim.core.checks import DTYPES, compute_dtype
from kvsim.core.header import Header
from kvsim.core.probe import ARRAYS as PROBE
from kvsim.core.threads import threads_for
from kvsim.core.trace import Trace
from kvsim.errors import CaptureError
from kvsim.progress import progress_bar
from kvsim.recorder.answers import agreement, likelihoods
from kvsim.recorder.blocks import BlockRecorder
from kvsim.recorder.cache import full_cache
from kvsim.recorder.contexts import SharedContext
from kvsim.recorder.generation import (
    evaluating,
    generate,
    run_chunks,
    score,
    stop_tokens,
)
from kvsim.recorder.hooks import KernelCall, intercepting
from kvsim.recorder.layers import ProjectionModules, Residual
from kvsim.recorder.models import model_name, model_notes
from kvsim.recorder.modules import attention_modules, head_of, kernel_name
from kvsim.recorder.options import Options, Progress, select_layers
from kvsim.recorder.positions import read_ropes
from kvsim.recorder.prompts import Prompt
from kvsim.recorder.provenance import versions
from kvsim.recorder.repetition import read_probe
from kvsim.recorder.resuming import differences, settings_of
from kvsim.recorder.rows import Rows
from kvsim.recorder.sensitivity import LayerEntries, layer_sensitivity
from kvsim.recorder.sink import MemorySink, arrays_of
from kvsim.recorder.sizes import as_largest, largest, layer_sizes, size_of
from kvsim.recorder.tokenization import describe_tokenizer, response_text, token_strings
from kvsim.recorder.turns import (
    describe_turns,
)
from kvsim.store import open_trace
from kvsim.store.projections import KEY, Facts
from kvsim.store.writer import TraceWriter


class Session(Rows):
    """One capture, checked as far as possible before the model runs.

    prompt: its id is the name of the trace; if empty, that of `out` is, or the model's. out: where
    to write the trace; None keeps it in memory. described: by `describe_model`. Raises as `Rows`,
    and CaptureError for a layer that the model has not.
    """

    #: the context that other prompts have, too
    shared: SharedContext | None = None
    #: the bar of several prompts, and what it says of this one
    show: Callable[..., None] | None = None
    label = ""
    _begun = False  # behind the rows that another has run

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        prompt: Prompt,
        options: Options,
        out: str | Path | None,
        described: Mapping[str, Any],
    ) -> None:
        super().__init__(model, tokenizer, prompt, options)
        self.described, self.out = described, None if out is None else Path(out)
        self.name = prompt.id or (self.out.stem if self.out else model_name(model))
        self.scores, self.likeliest = list[Any](), list[bool]()
        self._entries: dict[int, LayerEntries] = {}  # what the last call of each layer attended to
        self.layer_ids = select_layers(options.layers, attention_modules(model))
        self.sizes = layer_sizes(model, self.layer_ids, options.probe, self.left_out)
        self.notes += model_notes(model, self.layer_ids)
        self._stack = ExitStack()
        self._writer: TraceWriter | None = None
        self.projections: ProjectionModules | None = None
        self.residual: Residual | None = None
        self._stored: Facts | None = None  # of the projections
        self._without: set[str] = set()
        self._recorder = BlockRecorder(
            self._open_sink,
            lambda: read_ropes(model),
            layer_ids=self.layer_ids,
            sizes=self.sizes,
            store_dtype=torch.float16 if options.store_dtype else None,
            rounds_logits=kernel_name(model) == "eager",
            left_out=self.left_out,
        )
        if options.o_proj or (options.o_proj is None and self.out is not None):
            with self._leaving_out("o_proj"):
                self.projections = ProjectionModules(model, self.layer_ids)
        with self._leaving_out("residual_norm"):
            self.residual = Residual(model)

    def existing(self) -> Trace | None:
        """Return the trace that `resume` keeps, if there is one; CaptureError if it is another."""
        if not self.options.resume or self.out is None or not self.out.exists():
            return None
        trace = open_trace(self.out)
        differing = differences(self, trace)
        if differing:
            raise CaptureError(
                f"{self.out} is of another capture: {'; '.join(differing)}; --resume keeps traces "
                "of the same capture, give another --out, or overwrite=True (--overwrite)"
            )
        return trace

    def run(self) -> Trace:
        """Run the model over prompt and response, once, and return the trace."""
        with self._stack, threads_for(self.model):
            progress = self.options.progress
            if progress is True:
                show = self.show or self._stack.enter_context(progress_bar("tokens"))
                progress = partial(show, label=self.label or self.name)
            tokens, ended = self._forward(progress if callable(progress) else lambda *_: None)
            header = self._with_sensitivity(self._final_header(tokens, ended), tokens)
            texts = token_strings(tokens, self.tokenizer)
            recorded: dict[str, torch.Tensor] = {}
            if self.probe is not None and not self._begun:
                rows = read_probe(self.model, self.context, self.probe, self.layer_ids, self.chunk)
                recorded = dict(zip(PROBE, rows, strict=True))
            if self._writer is None:
                return self._in_memory(header, tokens, texts, recorded)
            for name, values in recorded.items():
                for layer, of_layer in enumerate(values):
                    self._writer.write_layer(name, layer, of_layer)
            if self.probe is not None and self.shared is not None and self._begun:
                self.shared.store(self._writer, PROBE, 0)
            self._writer.publish(header, tokens=torch.tensor(tokens).numpy(), token_text=texts)
        if self.shared is not None:
            self.shared.path = self._writer.path
        return open_trace(self._writer.path)

    def _forward(self, progress: Progress) -> tuple[list[int], Sequence[str | None]]:
        with ExitStack() as stack:
            if self.projections is not None:
                checked = self.model, self.encoded.ids, self._store_projections
                guard = partial(self._leaving_out, "o_proj")
                stack.enter_context(self.projections.checking(*checked, guard))
            stack.enter_context(intercepting(self.model, self._receive, layers=self.layer_ids))
            if self.residual is not None:
                following = self.residual.following(partial(self._leaving_out, "residual_norm"))
                stack.enter_context(following)
            ends: dict[str, Any] = {"progress": progress, "chunk": self.chunk}
            ends["before_last"] = self._recorder.finish_at
            ends["begun"] = self._context(progress)
            if self.written is not None:
                tokens = [*self.encoded.ids, *self.written.tokens]
                ends["head"] = head_of(self.model)
                found = score(self.model, tokens, len(self.encoded.ids), **ends)
                self.scores, self.likeliest = found
                return tokens, [self.written.ended] * (1 + len(self.turns))
            made = generate(
                self.model,
                self.encoded.ids,
                new_tokens=min(self.new_tokens, self.options.longest),
                later=[(turn.ids, turn.longest) for turn in self.turns],
                step=self.step,
                choice=self.choice,
                stop=stop_tokens(self.model, self.tokenizer),
                completed=self.stop.completed,
                **ends,
            )
            self.scores, self.questions = made.scores, made.questions
            return made.tokens, made.ended

    def _context(self, progress: Progress) -> tuple[Cache, int] | None:
        """Run a shared context, or go on behind it; return its cache and length."""
        if self.shared is None:
            return None
        cache = self.shared.take()
        if cache is not None:
            self._begun = True
            self._recorder.restore(self.shared.layers)
            return cache, len(self.context)
        cache = full_cache(self.model)
        with torch.no_grad(), evaluating(self.model):
            for end, _ in run_chunks(self.model, cache, self.context, 0, 1, self.chunk):
                progress(end, self.limit)
        self.shared.keep(cache, self._recorder.saved())
        return cache, len(self.context)

    def _receive(self, call: KernelCall) -> None:
        if self.residual is not None:
            with self._leaving_out("residual_norm"):
                rows = self.residual.rows(call)
                dtype = compute_dtype(rows.dtype)
                norm = torch.linalg.vector_norm(rows, dim=-1, dtype=dtype).float()
                kept = rows if self.options.residual else None
                call = replace(call, residual=kept, residual_norm=norm)
        if self.projections is not None:
            with self._leaving_out("o_proj"):
                call = replace(call, gate=self.projections.gate(call))
        self._recorder.receive(call)
        if self.projections is not None:
            with self._leaving_out("o_proj"):
                self.projections.receive(call)
            LayerEntries.note(self._entries, call, len(self.encoded.ids), self._recorder.last)

    def _store_projections(self) -> None:
        """Store the projections next to the trace, once all of them are checked."""
        if self._writer is None or self.projections is None:
            return
        of_layers = self.projections.blocks
        blocks = [as_largest("o_proj", of_layers[x], self.sizes) for x in self.layer_ids]
        shape = len(blocks), *blocks[0].shape
        self._stored = self._writer.write_projections(
            shape, blocks.__getitem__, DTYPES[blocks[0].dtype]
        )

    @contextmanager
    def _leaving_out(self, name: str) -> Iterator[None]:
        """Go on without an array that the model has no part for, with a note, unless required."""
        try:
            yield
        except CaptureError as error:
            option, required = "--residual", self.options.residual
            if name == "o_proj":
                option, required = "--o-proj", self.options.o_proj is True
            if required:
                raise CaptureError(f"{error}; record the model without {option}") from error
            if name == "o_proj":
                self.projections = None
            else:
                self.residual = None
            if name not in self._without:
                self._without.add(name)
                self.notes.append(f"recorded without {name}: {str(error).partition(';')[0]}")
                if self._recorder.sink is not None:
                    for array in (name, "gate") if name == "o_proj" else (name,):
                        self._recorder.sink.drop(array)

    def arrays(self, call: KernelCall) -> dict[str, Any]:
        """Return shapes, of most positions, and types of the arrays that a call is a part of."""
        size = largest(self.sizes or [size_of(call)])
        shapes, dtypes = arrays_of(
            *(call, size, len(self.layer_ids), self.limit), probe=self.probe, left_out=self.left_out
        )
        # chunks in shards cannot be stored once
        more = {"left_out": self.left_out, "shards": self.shared is None}
        return {"shapes": shapes, "source_dtypes": dtypes, **more}

    def _open_sink(self, call: KernelCall) -> MemorySink | TraceWriter:
        """Open the destination of blocks; the first kernel call shows the shapes."""
        if self.out is None:
            return MemorySink()
        arrays, path = self.arrays(call), None if self.shared is None else self.shared.path
        writer = TraceWriter(
            self.out,
            **arrays,
            like=path,
            layer_ids=self.layer_ids,
            store_dtype=self.options.store_dtype,
            overwrite=self.options.overwrite,
        )
        self._writer = self._stack.enter_context(writer)
        if call.start and self.shared is not None:
            names = [name for name in arrays["shapes"] if name not in PROBE]
            self.shared.store(self._writer, names, call.start)
        return self._writer

    def _header(self) -> Header:
        """Return the header as far as it is known before the model runs."""
        text: dict[str, Any] = {"prompt": self.encoded.text, "messages": self.encoded.messages}
        text |= {"template": self.encoded.template} if self.encoded.template else {}
        meta: dict[str, Any] = {
            "model": self.described,
            **({} if self.tokenizer is None else {"tokenizer": describe_tokenizer(self.tokenizer)}),
            "versions": versions(),
            "text": text,
            "generation": self.settings,
            "settings": settings_of(self),
            "labels": dict(self.prompt.labels),
            **({KEY: asdict(self._stored)} if self._stored else {}),
            **({"spans": {"needle": self.encoded.needle}} if self.encoded.needle else {}),
            "notes": self.notes,
        }
        return Header(
            *(len(self.encoded.ids), (), (), self.layer_ids),
            name=self.name,
            meta=meta,
            context_len=self.encoded.context_len,
            left_out=self.left_out,
            questions=tuple(self.questions),
        )

    def _final_header(self, tokens: list[int], ended: Sequence[str | None]) -> Header:
        """Return the header with the response, and with how close the recording is."""
        self.notes += self._recorder.remarks()
        header, response = self._header(), None
        prompt_len = header.prompt_len
        if self.tokenizer is not None:
            response = response_text(tokens[prompt_len:], self.tokenizer)
        cut = self.new_tokens < self.options.longest
        agrees = self.likeliest and not self.turns  # questions were not written by the model
        meta = {
            **header.meta,
            "text": {**header.meta["text"], "response": response},
            "generation": {
                **header.meta["generation"],
                "new_tokens": len(tokens) - prompt_len,
                "stopped": ended[-1] or ("context" if cut else "length"),
            },
            "answer_check": None if self.turns else self.answer_check(response),
            **({"turns": describe_turns(self, header, tokens, ended)} if self.turns else {}),
            **likelihoods(self.scores),
            **({"agreement": agreement(self.likeliest, prompt_len)} if agrees else {}),
            **({"probe": self.probe.document()} if self.probe else {}),
        }
        return self._recorder.described(replace(header, meta=meta)).within(len(tokens))

    def _with_sensitivity(self, header: Header, tokens: list[int]) -> Header:
        """Return the header with the sensitivity of layers, where all have output projections."""
        blocks = self.projections.blocks if self.projections and self.options.sensitivity else {}
        try:
            values = layer_sensitivity(self.model, tokens, header.prompt_len, self._entries, blocks)
        except CaptureError as error:
            reason, values = str(error).partition(";")[0], None
            self.notes.append(f"recorded without layer_sensitivity: {reason}")
        self._entries.clear()
        more = {} if values is None else {"layer_sensitivity": values}
        return replace(header, meta={**header.meta, **more})

    def _in_memory(
        self,
        header: Header,
        tokens: list[int],
        texts: list[str] | None,
        recorded: Mapping[str, torch.Tensor],
    ) -> Trace:
        sink = self._recorder.sink
        if not isinstance(sink, MemorySink):
            raise TypeError(f"the sink is {type(sink).__name__}, expected one in memory")
        arrays: dict[str, Any] = {name: sink.array(name) for name in sink.blocks}
        arrays |= {name: values.to("cpu") for name, values in recorded.items()}
        if self.projections is not None:
            blocks = self.projections.blocks
            parts = [as_largest("o_proj", blocks[x], self.sizes).to("cpu") for x in sorted(blocks)]
            arrays["o_proj"] = torch.stack(parts)
        facts = {**vars(header), "rope": header.ropes}
        del facts["ropes"], facts["source_dtypes"]  # as the arrays are
        return Trace.from_arrays(**arrays, **facts, tokens=tokens, token_text=texts)
