"""One capture: a model runs over one prompt, and its attention is stored in a trace."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvsim.core.checks import DTYPES
from kvsim.core.digest import document_digest
from kvsim.core.header import Header
from kvsim.core.lazy import threads_for
from kvsim.core.left_out import left_out_before
from kvsim.core.trace import Trace
from kvsim.errors import CaptureError
from kvsim.progress import progress_bar
from kvsim.recorder.batching import GIVEN, Written
from kvsim.recorder.blocks import BlockRecorder
from kvsim.recorder.choice import Choice, stop_tokens
from kvsim.recorder.contexts import SharedContext
from kvsim.recorder.encoding import encode
from kvsim.recorder.forward import WHOLE, chunk_rows, continues, evaluating, full_cache, run_chunks
from kvsim.recorder.generation import describe_turns, generate, score, stop_search
from kvsim.recorder.hooks import KernelCall, intercepting
from kvsim.recorder.loading import model_name, model_notes
from kvsim.recorder.modules import attention_modules, head_of, kernel_name, largest, layer_sizes
from kvsim.recorder.options import Options, Progress, select_layers
from kvsim.recorder.positions import fitting_tokens, indexer_notes, read_ropes
from kvsim.recorder.prompts import Prompt
from kvsim.recorder.provenance import (
    config_differences,
    describe_tokenizer,
    tokenizer_difference,
    versions,
)
from kvsim.recorder.steps import STEPS, Step
from kvsim.recorder.tokenization import response_text, token_strings
from kvsim.schema import AXES, LOGPROBS, SUMS, axes_of, object_at
from kvsim.store.layout import pos_axis
from kvsim.store.reader import open_trace
from kvsim.store.writer import TraceWriter

#: Options that change how a capture runs, but not its trace.
_HOW = {"overwrite", "resume", "batch", "force", "progress", "chunk", "layers"}

#: Facts on prompt and model that a trace has elsewhere.
_APART = {"content", "response", "turns", "metadata"}
_MODEL = ("name", "dtype", "attention", "weights", "source")


class Session:
    """One capture, checked as far as possible before the model runs.

    prompt: its id is the name of the trace; if empty, the name follows from `out`, or is the
    model's. out: where to write the trace; None keeps it in memory. described: by `describe_model`.
    Raises CaptureError for a prompt or an option that the model or its tokenizer does not support.
    """

    #: the context that other prompts have, too
    shared: SharedContext | None = None
    #: the progress bar of several prompts, and this prompt's label
    show: Callable[..., None] | None = None
    label = ""
    begun = False  # after the rows that another session has run
    alone = False  # because a batch with it failed

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        prompt: Prompt,
        options: Options,
        out: str | Path | None,
        described: Mapping[str, Any],
    ) -> None:
        self.encoded = encoded = encode(prompt, model, tokenizer, options)
        self.longest = options.max_new_tokens
        if self.longest is None and prompt.max_new_tokens is not None:
            options = replace(options, max_new_tokens=prompt.max_new_tokens)
        self.model, self.tokenizer, self.prompt, self.options = model, tokenizer, prompt, options
        draws = {x: getattr(options, x) for x in ("temperature", "seed", "top_k", "top_p")}
        self.choice = Choice(model, stop_tokens(model, tokenizer), **draws)
        self.completed = stop_search(options.stops, tokenizer)
        self.turns, self.response = encoded.turns, encoded.given
        self.questions = [*encoded.questions]
        asks = bool(self.turns) and not next(model.parameters()).is_meta
        self.step = 1 if asks and not continues(model, encoded.ids) else WHOLE  # rows of a question
        #: a response that is known before it is recorded: given, or written in a batch
        self.written = Written(self.response, GIVEN, 0.0) if self.response else None
        self.new_tokens, cut = self._fitting()
        self.context = encoded.ids[: encoded.context_len]
        n = len(encoded.ids) + len(self.response)
        stay, end = options.rows_before, encoded.context_len or len(encoded.ids)
        self.left_out = None if stay is None else left_out_before(end, stay)
        self.chunk, whole = chunk_rows(model, [*encoded.ids, *self.response], options.chunk)
        self.limit = n + self.new_tokens
        drawn = self.choice.notes if self.new_tokens else ()
        indexed = indexer_notes(model, self.limit)
        self.notes = [*encoded.notes, *cut, *whole, *drawn, *indexed]
        self.described, self.out = described, None if out is None else Path(out)
        self.name = prompt.id or (self.out.stem if self.out else model_name(model))
        self.scores, self.likeliest = list[Any](), list[bool]()
        self.layer_ids = select_layers(options.layers, attention_modules(model))
        self.sizes = layer_sizes(model, self.layer_ids, self.left_out)
        self.notes += model_notes(model)
        self._stack = ExitStack()
        self.recorder = BlockRecorder(
            self._open_sink,
            lambda: read_ropes(model),
            layer_ids=self.layer_ids,
            sizes=self.sizes,
            store_dtype=torch.float16 if options.store_dtype else None,
            rounds_logits=kernel_name(model) == "eager",
            left_out=self.left_out,
        )
        self._steps = [kind(self) for kind in STEPS if kind.wanted(self)]

    def _fitting(self) -> tuple[int, list[str]]:
        """Return how many new tokens fit, as `fitting_tokens`; CaptureError unless all turns do."""
        start, most = len(self.encoded.ids), 0
        if not self.response:
            later = sum(len(turn.ids) + turn.longest for turn in self.turns)
            most = self.options.longest + later
        count, notes = fitting_tokens(self.model, start, most)
        if self.turns and count < most:
            raise CaptureError(
                f"questions and answers of all turns take up to {most} tokens after a prompt of "
                f"{start}, and the model has room for {count}; expected turns that fit; give a "
                "smaller --max-new-tokens, or fewer turns"
            )
        return count, notes

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of generation, or the known author of a given response."""
        if self.response:
            return {} if self.prompt.writer is None else {"writer": self.prompt.writer}
        given: dict[str, Any] = {x: getattr(self.options, x) for x in ("temperature", "seed")}
        given |= {"max_new_tokens": self.options.longest, "stop": [*self.options.stops]}
        return given | self.choice.settings

    @property
    def steps(self) -> list[Step]:
        """The steps that have not failed."""
        return [step for step in self._steps if step.active]

    def has(self, kind: type[Step]) -> bool:
        """Return whether a kind of step is among them."""
        return any(isinstance(step, kind) for step in self.steps)

    @property
    def sink(self) -> Any:
        """The destination of arrays, once the first kernel call has shown their shapes."""
        return self.recorder.sink

    @property
    def _settings(self) -> dict[str, Any]:
        """Settings that decide the content of a trace, by name, for JSON; a trace keeps them."""
        encoded, facts = self.encoded, {**vars(self.prompt), **vars(self.options)}
        tokens = [encoded.ids, self.response, *([x.ids, x.response] for x in self.turns)]
        document = {
            **{key: value for key, value in facts.items() if key not in _HOW | _APART},
            **{f"model {key}": self.described.get(key) for key in _MODEL},
            "prompt": document_digest({"tokens": tokens}),
            "turns": [{**vars(x), "question": None, "response": None} for x in self.prompt.turns],
            "layers": self.layer_ids,
            "context": encoded.context_len,
            "needle": encoded.needle,
        }
        return dict(json.loads(json.dumps(document)))

    def existing(self) -> Trace | None:
        """Return the trace that `resume` keeps, if any; CaptureError for one of another capture."""
        if not self.options.resume or self.out is None or not self.out.exists():
            return None
        trace = open_trace(self.out)
        recorded = object_at(trace.meta, "settings")
        differing = [
            f"its {key} is {reprlib.repr(recorded.get(key))}, expected {reprlib.repr(value)}"
            for key, value in self._settings.items()
            if value != recorded.get(key)
        ]
        if config := config_differences(trace.meta, self.described):
            differing.append(f"its model has another configuration ({', '.join(config)})")
        if other := tokenizer_difference(trace, self.tokenizer):
            differing.append(other)
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
            header = self._header(tokens, ended)
            for step in self.steps:
                header = step.finish(header, tokens)
            texts = token_strings(tokens, self.tokenizer)
            trace = self.sink.publish(header, tokens=np.array(tokens), token_text=texts)
        if isinstance(trace, Trace):
            return trace
        if self.shared is not None:
            self.shared.path = trace
        return open_trace(trace)

    def _forward(self, progress: Progress) -> tuple[list[int], Sequence[str | None]]:
        with ExitStack() as stack:
            for step in reversed(self.steps):
                stack.enter_context(step.hooks())
            stack.enter_context(intercepting(self.model, self._receive, layers=self.layer_ids))
            ends: dict[str, Any] = {"progress": progress, "chunk": self.chunk}
            ends["before_last"] = self.recorder.finish_at
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
                completed=self.completed,
                **ends,
            )
            self.scores, self.questions = made.scores, made.questions
            return made.tokens, made.ended

    def _context(self, progress: Progress) -> tuple[Cache, int] | None:
        """Run a shared context, or continue after it; return its cache and length."""
        if self.shared is None:
            return None
        cache = self.shared.take()
        if cache is not None:
            self.begun = True
            self.recorder.restore(self.shared.layers)
            return cache, len(self.context)
        cache = full_cache(self.model)
        with torch.no_grad(), evaluating(self.model):
            for end, _ in run_chunks(self.model, cache, self.context, 0, 1, self.chunk):
                progress(end, self.limit)
        self.shared.keep(cache, self.recorder.saved())
        return cache, len(self.context)

    def _receive(self, call: KernelCall) -> None:
        for step in self.steps:
            with step.guard():
                call = step.receive(call)
        self.recorder.receive(call)
        for step in self.steps:
            with step.guard():
                step.received(call)

    def arrays(self, call: KernelCall) -> dict[str, Any]:
        """Return shapes, for most positions, and types of the arrays of a call."""
        source, of_entries = DTYPES[call.q.dtype], DTYPES[call.k.dtype]
        dtypes = {"k": of_entries, "v": of_entries, "q": source, "attn_out": DTYPES[call.out.dtype]}
        dtypes["lse"] = "float64" if source == "float64" else "float32"
        sizes = {"layer": len(self.layer_ids), "pos": self.limit}
        of_heads = largest(self.sizes or [call.size])
        sizes |= zip(("qhead", "head", "dim", "value_dim"), of_heads, strict=True)
        if self.left_out is not None:
            sizes |= {"before": self.left_out[1], "moment": 1 + sizes["dim"]}
            dtypes |= dict.fromkeys(SUMS, dtypes["lse"])
        for step in self.steps:
            sizes |= step.sizes
            dtypes |= dict.fromkeys(step.arrays if step.sizes else (), source)
        for name in ("gate", "residual", "residual_norm"):
            if (part := getattr(call, name)) is not None:
                dtypes[name] = DTYPES[part.dtype]
        sizes["hidden"] = 0 if call.residual is None else len(call.residual[0])
        shapes = {name: tuple(sizes[axis] for axis in axes_of(name)) for name in dtypes}
        # chunks in shards cannot be stored once
        more = {"left_out": self.left_out, "shards": self.shared is None}
        return {"shapes": shapes, "source_dtypes": dtypes, **more}

    def _open_sink(self, call: KernelCall) -> MemorySink | TraceWriter:
        if self.out is None:
            return MemorySink()
        arrays, path = self.arrays(call), None if self.shared is None else self.shared.path
        writer = self._stack.enter_context(
            TraceWriter(
                self.out,
                **arrays,
                like=path,
                store_dtype=self.options.store_dtype,
                overwrite=self.options.overwrite,
            )
        )
        if call.start and self.shared is not None:
            later = {name for step in self.steps if step.sizes for name in step.arrays}
            self.shared.store(writer, arrays["shapes"].keys() - later, call.start)
        return writer

    def _header(self, tokens: list[int], ended: Sequence[str | None]) -> Header:
        """Return the header, with the errors of the recording."""
        encoded, prompt_len = self.encoded, len(self.encoded.ids)
        self.notes += self.recorder.remarks()
        header = Header(
            *(prompt_len, (), (), self.layer_ids),
            name=self.name,
            context_len=encoded.context_len,
            left_out=self.left_out,
            questions=tuple(self.questions),
        )
        text: dict[str, Any] = {"prompt": encoded.text, "messages": encoded.messages}
        text |= {"template": encoded.template} if encoded.template else {}
        response = None
        if self.tokenizer is not None:
            response = response_text(tokens[prompt_len:], self.tokenizer)
        turns = describe_turns(self, header, tokens, ended)
        cut = self.new_tokens < self.options.longest
        agreement = {}
        if self.likeliest and not self.turns:  # questions were not written by the model
            share = sum(self.likeliest) / len(self.likeliest)  # that greedy decoding chooses, too
            other = None if all(self.likeliest) else prompt_len + self.likeliest.index(False)
            agreement = {"agreement": {"share": share, "first": other}}
        meta = {
            "model": self.described,
            **({} if self.tokenizer is None else {"tokenizer": describe_tokenizer(self.tokenizer)}),
            "versions": versions(),
            "text": {**text, "response": response},
            "generation": {
                **self.settings,
                "new_tokens": len(tokens) - prompt_len,
                "stopped": ended[-1] or ("context" if cut else "length"),
            },
            "settings": self._settings,
            "labels": dict(self.prompt.labels),
            **({"spans": {"needle": encoded.needle}} if encoded.needle else {}),
            "notes": self.notes,
            "answer_check": None if self.turns else turns[0]["answer_check"],
            **({"turns": turns} if self.turns else {}),
            **dict(zip(LOGPROBS, map(list, zip(*self.scores, strict=True)), strict=False)),
            **agreement,
        }
        return self.recorder.described(replace(header, meta=meta)).within(len(tokens))


class MemorySink:
    """Blocks in memory, with the methods of a TraceWriter that a capture calls."""

    def __init__(self) -> None:
        self.blocks: dict[str, dict[int, list[Tensor]]] = {}
        self._dropped: set[str] = set()

    def append(self, name: str, layer: int, block: Tensor) -> None:
        """Keep a copy of the block."""
        if name in self._dropped:
            return
        layers = self.blocks.setdefault(name, {})
        layers.setdefault(layer, []).append(block.to("cpu", copy=True))

    write_layer = append

    def drop(self, name: str) -> None:
        """Forget an array; later blocks of it are ignored."""
        self.blocks.pop(name, None)
        self._dropped.add(name)

    def set_length(self, n_pos: int) -> None:
        """Do nothing: blocks in memory need no length."""

    def write_projections(
        self, shape: Sequence[int], read: Callable[[int], Tensor], source_dtype: str
    ) -> None:
        """Keep output projections with the other arrays."""
        for layer in range(shape[0]):
            self.append("o_proj", layer, read(layer))

    def publish(self, header: Header, **more: Any) -> Trace:
        """Return the trace; more: its tokens and their text."""
        facts = {**vars(header), "rope": header.ropes}
        del facts["ropes"], facts["source_dtypes"]  # as the arrays are
        arrays: dict[str, Any] = {name: self._array(name) for name in self.blocks}
        return Trace.from_arrays(**arrays, **facts, **more)

    def _array(self, name: str) -> Tensor:
        layers, axis = self.blocks[name], pos_axis(name) if "pos" in AXES[name] else 0
        return torch.stack([torch.cat(layers[layer], dim=axis) for layer in sorted(layers)])
