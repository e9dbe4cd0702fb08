"""Generation: prefill, then one token after the other; or all tokens of a given response.

A long prompt goes through the model in chunks of rows, over one cache.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvsim.core.checks import DTYPES, tolerance
from kvsim.errors import CaptureError, KvsimError, error_line
from kvsim.recorder.cache import cache_option, full_cache
from kvsim.recorder.choice import Choice
from kvsim.recorder.head import APART, Head, Predictions, check_logits
from kvsim.recorder.positions import has_rope, reset_frequencies, steady_length
from kvsim.schema import CHUNK

#: What ended a response by itself: a token that ends one, or a stop string.
Ended = Literal["eos", "stop"]

#: Pairs of a row and an entry in one forward of a long prompt. Attention weights of 32 heads, as
#: eager attention keeps them, take 1 GiB then.
PAIRS = 1 << 23

#: More rows than any prompt has.
WHOLE = 1 << 31

# Rows that show whether a model goes on where its last forward ended.
_FEW = 16

_AUTOCAST = torch.is_autocast_enabled


class Generated(NamedTuple):
    """Tokens of prompt and response, and what ended each answer, if anything did.

    scores: `log_likelihoods` of each token of the response by the logits of the model, whatever
    chose it; empty with several turns. questions: spans of later ones.
    """

    tokens: list[int]
    ended: list[Ended | None]
    scores: list[tuple[float, float]]
    questions: list[tuple[int, int]]


def generate(
    model: PreTrainedModel,
    ids: Sequence[int],
    *,
    new_tokens: int,
    choice: Choice,
    stop: frozenset[int],
    completed: Callable[[Sequence[int], int], bool],
    before_last: Callable[[int], None],
    progress: Callable[[int, int], None],
    chunk: int,
    later: Sequence[tuple[Sequence[int], int]] = (),
    step: int = WHOLE,
    begun: tuple[Cache, int] | None = None,
) -> Generated:
    """Generate a response, and an answer to each later question.

    Every token goes through the model, the last one too, so every position has its q, k, v.

    choice: of each token. stop: tokens that end the response, as its last one. completed: called
    with the tokens so far and the start of the answer, returns whether it ends here. before_last:
    called with the final length before the last forward. progress: called with (tokens done, most
    tokens possible) after every forward. chunk: the most rows of a forward. later: questions that
    follow an answer, and the most tokens of the answer to each. step: the most rows of a forward of
    one. begun: a cache, and how many rows at the beginning of the prompt have run over it.
    """
    out = Generated([*ids], [], [], [])
    tokens, turns = out.tokens, deque(later)
    start, most = len(tokens), len(tokens) + new_tokens
    total = most + sum(len(question) + n for question, n in later)
    generator = torch.Generator().manual_seed(choice.seed)
    choose = choice.begin(start, new_tokens, generator)
    cache, ran = begun or (full_cache(model), 0)
    inputs = tokens[ran:]

    def forward(*, last: bool) -> Tensor:
        """Run the new tokens; return the logits [V] of the last one."""
        logits, first = Tensor(), len(tokens) - len(inputs)
        rows = step if first > ran else chunk
        for end, of_chunk in run_chunks(model, cache, inputs, first, 1, rows):
            progress(total if last and end == len(tokens) else end, total)
            logits = of_chunk
        return logits[-1]

    with torch.no_grad(), evaluating(model):
        while True:
            ended: Ended | None = None
            if len(tokens) > start and tokens[-1] in stop:
                ended = "eos"
            elif completed(tokens, start):
                ended = "stop"
            if ended or len(tokens) == most:
                out.ended.append(ended)
                if not turns:
                    before_last(len(tokens))
                    forward(last=True)
                    return out
                question, count = turns.popleft()
                question = following(question, tokens[-1], stop)
                out.questions.append((len(tokens), len(tokens) + len(question)))
                tokens += question
                inputs += question
                start, most = len(tokens), len(tokens) + count
                choose = choice.begin(start, count, generator)
            logits = forward(last=False)
            inputs = [choose(logits, tokens)]
            tokens += inputs
            if not later:
                target = torch.tensor([inputs], device=logits.device)
                out.scores.extend(log_likelihoods(logits[None], target))


def following(question: Sequence[int], last: int, stop: Collection[int]) -> list[int]:
    """Return a question behind an answer with this last token, which it does not repeat.

    Chat templates end an answer with a token that ends one.
    """
    return [*question[int(len(question) > 1 and question[0] == last and last in stop) :]]


def score(
    model: PreTrainedModel,
    ids: Sequence[int],
    start: int,
    *,
    before_last: Callable[[int], None],
    progress: Callable[[int, int], None],
    chunk: int,
    head: Head,
    begun: tuple[Cache, int] | None = None,
) -> tuple[list[tuple[float, float]], list[bool]]:
    """Run all tokens; return `log_likelihoods` of each from `start` on, and if none is likelier.

    Both are given all tokens before it. before_last, progress, chunk, begun: as for `generate`.
    head: the model's.
    """
    n, scores, likeliest = len(ids), list[tuple[float, float]](), list[bool]()
    cache, ran = begun or (full_cache(model), 0)
    with torch.no_grad(), evaluating(model):
        before_last(n)
        with head.apart() as outputs:
            for end, _ in run_chunks(model, cache, ids[ran:], ran, n - start + 1, chunk):
                progress(end, n)
        rows = torch.cat(outputs)[start - n - 1 : -1]
        targets = torch.tensor(ids[n - len(rows) :], device=rows.device).unsqueeze(-1)
        for at, logits in Predictions(rows, n - 1 - len(rows), head).parts():
            scores += log_likelihoods(logits, targets[at])
            likeliest += (logits.gather(-1, targets[at])[:, 0] == logits.amax(-1)).tolist()
        return scores, likeliest


def log_likelihoods(logits: Tensor, tokens: Tensor) -> list[tuple[float, float]]:
    """Return log-likelihoods in nats of tokens [R, 1], and the means of each row of logits [R, V].

    A mean is over all tokens of the vocabulary, each of -1000 nats at least, so that it shows the
    scale of logits where a model is certain of its token, too.
    """
    scores = logits.double().log_softmax(-1)
    pairs = scores.gather(-1, tokens)[:, 0], scores.clamp(min=-1000).mean(-1)
    return [*zip(*(x.tolist() for x in pairs), strict=True)]


def run_chunks(
    model: PreTrainedModel, cache: Cache, ids: Sequence[int], start: int, count: int, chunk: int
) -> Iterator[tuple[int, Tensor]]:
    """Run tokens from row `start` on, over a cache of all rows before, `chunk` in a forward.

    After each forward it yields its end, and the logits [n, V] of those of its rows that are among
    the last `count`.
    """
    device, options = device_of(model), cache_option(model, cache)
    # some models count from 0 in every forward; without RoPE a position may be counted otherwise
    states = "position_ids" in inspect.signature(model.forward).parameters and has_rope(model)
    for at in range(0, len(ids), chunk):
        part = ids[at : at + chunk]
        begin, end = start + at, start + at + len(part)
        wanted = max(0, min(len(part), end - (start + len(ids) - count)))
        rows = max(1, wanted)  # 0 asks for all
        pos = {"position_ids": torch.arange(begin, end, device=device)[None]} if states else {}
        inputs = torch.tensor([part], device=device)
        out = run_model(model, inputs, use_cache=True, **options, **pos, **last_logits(model, rows))
        logits = getattr(out, "logits", None)
        if logits is None:
            raise CaptureError(
                f"{type(model).__name__} returns no logits, expected a model for causal language "
                "modelling, as AutoModelForCausalLM loads it"
            )
        logits = logits[0, -rows:]
        yield end, check_logits(logits, end - len(logits))[rows - wanted :]


def chunk_rows(
    model: PreTrainedModel, ids: Sequence[int], requested: int | None = None
) -> tuple[int, list[str]]:
    """Return the most rows of a forward of a prefill of `ids`, and notes on it.

    `WHOLE` unless requested, up to `PAIRS` pairs of a row and an entry. Raises CaptureError where
    fewer are requested and the model computes something else in chunks.
    """
    n = len(ids)
    rows = requested or max(CHUNK, PAIRS // n // CHUNK * CHUNK)
    if rows >= n or (requested is None and n * n <= PAIRS):
        return WHOLE, []
    reason = one_piece(model, ids, rows)
    if reason is None:
        return rows, []
    if requested is not None:
        raise CaptureError(
            f"chunk is {requested} for a prompt of {n} tokens, and {reason}; expected one forward "
            "for all of them; leave --chunk out"
        )
    return WHOLE, [f"the prompt was run in one piece: {reason}"]


def one_piece(model: PreTrainedModel, ids: Sequence[int], rows: int) -> str | None:
    """Return why `ids` have to run in one forward, and not in one of `rows` and more after it."""
    if (steady_length(model, rows) or len(ids)) < len(ids):
        return "frequencies of its RoPE change with the length"
    if next(model.parameters()).is_meta or continues(model, ids):
        return None
    return f"{type(model).__name__} starts from empty states in a forward of several rows"


def continues(model: PreTrainedModel, ids: Sequence[int]) -> bool:
    """Return whether a forward of several rows goes on from the states of the rows before.

    In some families it starts from empty ones, and only a forward of one row does. Of the first few
    `ids`, logits are those of one forward up to rounding, which is that of rows that run one by
    one.
    """
    half = len(ids[:_FEW]) // 2
    first, rest = [*ids[:half]], [*ids[half:_FEW]]

    def last(*parts: Sequence[int]) -> Tensor:
        cache, start, logits = full_cache(model), 0, Tensor()
        for part in parts:
            ((start, logits),) = run_chunks(model, cache, part, start, 1, len(part))
        return logits

    with torch.no_grad(), evaluating(model):
        whole = last(first + rest)
        chunk, single = (
            float((last(first, *parts) - whole).abs().max())
            for parts in ([rest], [[token] for token in rest])
        )
    return chunk <= max(tolerance(DTYPES[whole.dtype]) * float(whole.abs().max()), 4 * single)


@contextmanager
def on_meta(model: PreTrainedModel) -> Iterator[None]:
    """Let a model without weights run where torch knows no autocast of its device, as 2.8.

    Other devices, which other threads may use meanwhile, are asked as ever.
    """
    if not next(model.parameters()).is_meta:
        yield
        return
    before = torch.is_autocast_enabled  # the same function inside of another such block
    torch.is_autocast_enabled = lambda *device: device != ("meta",) and _AUTOCAST(*device)
    try:
        yield
    finally:
        torch.is_autocast_enabled = before


def run_model(model: PreTrainedModel, ids: Tensor, **options: Any) -> Any:
    """Run a model on tokens [1, n]; what it raises becomes a CaptureError."""
    try:
        with on_meta(model):
            return model(ids, **options)
    except (KvsimError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of an unknown model, whatever it is
        raise CaptureError(
            f"{type(model).__name__} raised {type(error).__name__} in a forward of {ids.shape[1]} "
            f"tokens: {error_line(error)}; expected a decoder model that runs on token ids alone; "
            "this model cannot be recorded"
        ) from error


def last_logits(model: PreTrainedModel, count: int) -> dict[str, int | Tensor]:
    """Return the option of a forward that computes the last logits alone, where there is one."""
    # a long prompt times the vocabulary would be large
    count = 1 if model in APART else count
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        return {}
    shares = getattr(model.config.get_text_config(), "num_kv_shared_layers", None)
    # a number would cut the rows of layers that read another's entries, too (Gemma 4)
    return {"logits_to_keep": torch.arange(-count, 0) if shares else count}


def device_of(model: PreTrainedModel) -> torch.device:
    """Return the device that a model takes its tokens on."""
    device = cast("torch.nn.Embedding", model.get_input_embeddings()).weight.device
    # offloaded until it runs
    return torch.device("cpu") if device.type == "meta" else device


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Set evaluation mode for as long as the block lasts: dropout would make q, k, v random.

    The frequencies of dynamic RoPE are those of a new text in it, and after it.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    reset_frequencies(model)
    try:
        yield
    finally:
        reset_frequencies(model)
        for module in training:
            module.training = True


def stop_search(strings: Sequence[str], tokenizer: Any) -> Callable[[Sequence[int], int], bool]:
    """Return whether a response has text that ends it, of all tokens and the start of the response.

    A token is at least one byte of text (special tokens count as text), so a string of b bytes lies
    in the last b tokens. Eight more are decoded, because decoders may change the start of a text.
    """
    if strings and tokenizer is None:
        raise CaptureError(
            "stop is text, and there is no tokenizer, expected one that decodes the response; "
            "give one, or leave --stop out"
        )
    last = 8 + max((len(text.encode()) for text in strings), default=0)

    def completed(tokens: Sequence[int], start: int) -> bool:
        tail = [*tokens[max(start, len(tokens) - last) :]] if strings else []
        text = str(tokenizer.decode(tail, skip_special_tokens=False)) if tail else ""
        return any(string in text for string in strings)

    return completed


def stop_tokens(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a response, by generation settings, model and tokenizer."""
    tokens: set[int] = set()
    settings = getattr(model, "generation_config", None)
    for holder in (settings, model.config, tokenizer):
        token = getattr(holder, "eos_token_id", None)
        tokens.update([token] if isinstance(token, int) else token or [])
    return frozenset(tokens)
