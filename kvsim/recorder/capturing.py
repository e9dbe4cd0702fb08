"""`capture` and `capture_many`: one model, one prompt or many, one trace each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvsim.core.options import takes_options
from kvsim.core.trace import Trace
from kvsim.errors import (
    CaptureError,
    KvsimError,
    MemoryLimitError,
    local_path,
)
from kvsim.files import check_writable
from kvsim.progress import progress_bar
from kvsim.recorder.batching import Batch, prefilled, separate, write
from kvsim.recorder.choice import stop_tokens
from kvsim.recorder.contexts import share_contexts
from kvsim.recorder.forecast import forecast
from kvsim.recorder.forward import device_of
from kvsim.recorder.loading import ModelLike, Tokenizer, load_model, unwrapped
from kvsim.recorder.options import Options
from kvsim.recorder.prompts import (
    Labels,
    Needle,
    Prompt,
    PromptLike,
    file_name,
    naming,
    with_distinct_ids,
)
from kvsim.recorder.provenance import describe_model
from kvsim.recorder.session import Session
from kvsim.store.opening import check_target


@takes_options(Options)
def capture(
    model: ModelLike,
    tokenizer: Tokenizer,
    prompt: PromptLike | Prompt,
    *,
    out: str | Path | None = None,
    answer: str | Sequence[str] | None = None,
    scorer: str | None = None,
    writer: str | Mapping[str, Any] | None = None,
    labels: Labels | None = None,
    needle: Needle = (),
    response: str | Sequence[int] | None = None,
    context: str | int | None = None,
    name: str | None = None,
    **options: Any,
) -> Trace:
    """Run a model over a prompt and record its attention as a trace.

    Args:
        model: a decoder model of transformers, or a name for `load_model`: a local folder, a hub
            id, or one of `kvsim.tiny.MODELS`.
        tokenizer: the model's tokenizer; None if the prompt is token ids, or if `model` is a name.
        prompt: text, chat messages, or token ids; or a `Prompt`, which may have `turns`, questions
            that follow the answer before them. Its fields are not passed as arguments too.
        out: where to write the trace; None keeps it in memory.
        answer: the expected answer, or several, for the answer check.
        scorer: decides whether a response is right, as `Prompt.scorer`.
        labels: of the prompt, for tables; as `Prompt.labels`.
        needle: texts in the prompt, or token spans; as `Prompt.needle`.
        context: the part of the prompt before its question, as `Prompt.context`; the trace keeps
            its number of tokens (`context_len`), for `kvsim.replay(..., compress="context")`.
        response: text or token ids to record as the response, instead of generating one. The trace
            keeps the log-likelihood of each of its tokens (`response_logprobs`), and how many of
            them greedy decoding would have chosen (`meta["agreement"]`).
        writer: the author of the response, as `Prompt.writer`.
        name: the trace's name; by default from `out`.
        **options: the fields of `kvsim.recorder.Options`.

    Returns:
        The trace, opened from `out` or in memory.

    Raises:
        CaptureError: a prompt, label, needle or option that cannot be recorded; a model whose
            attention recomputed from q, k, v differs from its output, or that lacks the parts that
            `o_proj=True` or `residual` require; with `resume`, a trace of another capture at `out`.
        OutputError: the disk is too small.
        TraceError: a number that is not finite, or too large for `store_dtype`.
        TextError: an unknown scorer.
        TraceExistsError: `out` exists.
        TypeError: an unknown keyword.

    Example:
        >>> prompt = "facts : kuga red rapi ; question : get kuga"
        >>> trace = kvsim.capture("tiny", None, prompt, max_new_tokens=8)
        >>> trace.n_layers, trace.prompt_len, trace.n_pos
        (3, 11, 19)
    """
    given: dict[str, Any] = {"answer": answer, "labels": labels, "needle": needle or None}
    given |= {"response": response, "context": context, "scorer": scorer, "writer": writer}
    given = {key: value for key, value in {**given, "name": name}.items() if value is not None}
    if isinstance(prompt, Prompt):
        if given:
            raise CaptureError(
                f"{', '.join(given)} and a Prompt are given, expected only the Prompt"
            )
        whole = prompt
    else:
        whole = Prompt(given.pop("name", ""), prompt, **given)
    checked = Options.of(options)
    if out is None and (checked.store_dtype or checked.resume):
        raise CaptureError("store_dtype and resume concern a written trace, but out is None")
    path = None if out is None else local_path(out, CaptureError)
    (trace,) = _record(model, tokenizer, {path: whole}, checked, single=True)
    return trace


@takes_options(Options)
def capture_many(
    model: ModelLike,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    out_dir: str | Path,
    **options: Any,
) -> list[Trace]:
    """Record one trace for each prompt, as ``out_dir/<id>.zarr``.

    All prompts and paths are checked before the first one runs. Prompts with the same context run
    one after the other: the context runs once, and its complete blocks of 256 rows are stored once,
    as hard links. A later error or interrupt keeps the finished traces; `resume=True` then records
    the others. A prompt's own `system` replaces the option.

    Args:
        model: as for `capture`.
        tokenizer: as for `capture`.
        prompts: the prompts, with distinct ids.
        out_dir: the folder of the traces.
        **options: the fields of `kvsim.recorder.Options`.

    Returns:
        The traces, in the order of the prompts.

    Raises:
        As `capture`; CaptureError also for two ids that would name one trace.
    """
    checked, folder = Options.of(options), local_path(out_dir, CaptureError)
    check_writable(folder)
    paths = dict[Path | None, Prompt]()
    paths |= {folder / file_name(prompt.id): prompt for prompt in with_distinct_ids(prompts)}
    return _record(model, tokenizer, paths, checked)


def _record(
    model: ModelLike,
    tokenizer: Tokenizer,
    prompts: Mapping[Path | None, Prompt],
    options: Options,
    *,
    single: bool = False,
) -> list[Trace]:
    """Record prompts to paths; single: errors do not name the prompt."""
    named = (lambda _: nullcontext()) if single else naming
    for target in filter(None, prompts):
        if not (options.resume and target.exists()):  # compared below
            check_target(target, overwrite=options.overwrite)
            check_writable(target.parent)
    model, tokenizer = _resolve(model, tokenizer)
    sessions, described = [], describe_model(model)
    for path, prompt in prompts.items():
        with named(prompt):
            sessions.append(Session(model, tokenizer, prompt, options, path, described))
    traces = [session.existing() for session in sessions]
    order = share_contexts(sessions, traces)
    new = [sessions[place] for place in order if traces[place] is None]
    waiting = [sessions[place] for place in order]
    del sessions  # a finished one keeps blocks
    folder = next((each.out.parent for each in new if each.out), None)
    if folder is not None and not options.force:
        forecast(model, new, device_of(model).type).check(folder)
    together = min(options.batch, len(new))
    reason = separate(model, max(each.limit for each in new)) if together > 1 else None
    with ExitStack() as stack:
        bar = options.progress is True
        show = stack.enter_context(progress_bar("tokens")) if bar else None
        for done, place in enumerate(order):
            session, where = waiting.pop(0), f" ({done + 1} of {len(order)})"
            session.show, session.label = show, session.name + where * (not single)
            if traces[place] is not None:
                continue
            try:
                if together > 1:
                    _write(new, together, reason)
                del new[0]
                traces[place] = session.run()
            except KvsimError as error:
                if single:
                    raise
                more = "; resume=True (--resume) keeps those before it" if done else ""
                name = f"prompt {session.prompt.id!r}{where}"
                raise type(error)(f"{name}: {error}{more}") from error
    return [trace for trace in traces if trace is not None]


def _write(sessions: Sequence[Session], count: int, reason: str | None) -> None:
    """Write the responses of the next sessions in a batch; reason: why one by one instead."""
    first = sessions[0]
    alike = [x for x in sessions if x.new_tokens and x.written is None and not x.alone]
    chosen = [each for each in alike if not each.turns][:count]
    if first not in alike:
        return
    reason = "it has several turns" if first.turns else reason
    if reason is not None:
        first.notes.append(f"the response was written by itself, not in a batch: {reason}")
    if reason is not None or len(chosen) < 2:
        return
    try:
        runs = [prefilled(each.model, each.encoded.ids, each.chunk) for each in chosen]
        logits = torch.stack([last for _, last in runs])
        lengths = [len(each.encoded.ids) for each in chosen]
        batch = Batch(first.model, [held for held, _ in runs], lengths)
        del runs  # its tensors are in the batch
        written = write(
            batch,
            logits,
            [each.new_tokens for each in chosen],
            stop=stop_tokens(first.model, first.tokenizer),
            choice=first.choice,
            prompts=[each.encoded.ids for each in chosen],
            completed=lambda number, response: chosen[number].completed(response, 0),
        )
    except KvsimError:  # of one of them, which its own run names
        for each in chosen:
            each.alone = True
            each.notes.append("the response was written by itself: a prompt of its batch failed")
        return
    except torch.OutOfMemoryError as error:
        raise MemoryLimitError(
            f"{len(chosen)} responses at once take more memory than the device has free; expected "
            "a smaller batch (--batch-size)"
        ) from error
    for each, response in zip(chosen, written, strict=True):
        each.written = response


def _resolve(model: ModelLike, tokenizer: Any) -> tuple[PreTrainedModel, Any]:
    """Load a model by name, or check a given one; CaptureError for anything else."""
    if isinstance(model, str | Path):
        model, loaded = load_model(model)
        tokenizer = loaded if tokenizer is None else tokenizer
    decoder: PreTrainedModel = unwrapped(model)
    fits = callable(getattr(decoder, "get_input_embeddings", None))
    if not fits or not (tokenizer is None or callable(tokenizer)):
        name, wrong = ("tokenizer", tokenizer) if fits else ("model", model)
        raise CaptureError(
            f"{name} is of type {type(wrong).__name__}; expected a {name} of transformers, a model "
            "also by its name"
        )
    return decoder, tokenizer
