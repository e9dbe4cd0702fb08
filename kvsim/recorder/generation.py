"""Generation: prefill, then one token after the other; or all tokens of a given response."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvsim.errors import CaptureError, KvsimError, error_line
from kvsim.recorder.cache import cache_option, full_cache
from kvsim.recorder.positions import has_rope, reset_frequencies

#: What ended a response by itself: a token that ends one, or a stop string.
Ended = Literal["eos", "stop"]

# Rows whose log-softmax is computed at once.
_ROWS = 128


def generate(
    model: PreTrainedModel,
    ids: Sequence[int],
    *,
    new_tokens: int,
    temperature: float,
    seed: int,
    stop: frozenset[int],
    completed: Callable[[Sequence[int], int], bool],
    sampled: Callable[[int], None],
    before_last: Callable[[int], None],
    progress: Callable[[int, int], None],
) -> tuple[list[int], Ended | None]:
    """Return the tokens of prompt and response, and what ended the response, if anything did.

    Every token goes through the model, the last one too, so every position has its q, k, v.

    temperature: 0 takes the most likely token; above 0, tokens are drawn. stop: tokens that end the
    response, as its last one. completed: called with the tokens so far and the start of the
    response, returns whether it ends here. sampled: called with each token of the response before
    it goes through the model. before_last: called with the final length before the last forward.
    progress: called with (tokens done, most tokens possible) after every forward.
    """
    tokens = list(ids)
    total = len(tokens) + new_tokens
    generator = torch.Generator().manual_seed(seed)
    forward, inputs = _forward(model), tokens[:]
    with torch.no_grad(), evaluating(model):
        while True:
            ended: Ended | None = None
            if len(tokens) > len(ids) and tokens[-1] in stop:
                ended = "eos"
            elif completed(tokens, len(ids)):
                ended = "stop"
            if ended or len(tokens) == total:
                before_last(len(tokens))
                forward(inputs, len(tokens) - len(inputs), 1)
                progress(total, total)
                return tokens, ended
            logits = forward(inputs, len(tokens) - len(inputs), 1)[0]
            progress(len(tokens), total)
            tokens.append(sample(logits, temperature, generator))
            sampled(tokens[-1])
            inputs = tokens[-1:]


def score(
    model: PreTrainedModel,
    ids: Sequence[int],
    start: int,
    *,
    before_last: Callable[[int], None],
    progress: Callable[[int, int], None],
) -> list[float]:
    """Run all tokens in one forward; return the log-likelihood of each from `start` on.

    That of a token is given all tokens before it. before_last, progress: as for `generate`.
    """
    n = len(ids)
    with torch.no_grad(), evaluating(model):
        before_last(n)
        logits = _forward(model)(ids, 0, n - start + 1)[:-1]
        progress(n, n)
        targets = torch.tensor(ids[start:], device=logits.device)
        parts = [
            part.double().log_softmax(-1).gather(-1, token.unsqueeze(-1)).squeeze(-1)
            for part, token in zip(logits.split(_ROWS), targets.split(_ROWS), strict=True)
        ]
        return [float(x) for x in torch.cat(parts)]


def check_logits(logits: Tensor, start: int) -> Tensor:
    """Return the logits [n, V] of rows from `start` on; CaptureError unless all are finite."""
    for at, part in enumerate(logits.split(_ROWS)):
        bad = (~part.isfinite()).sum(-1)
        if bad.any():
            row = int(bad.nonzero()[0])
            raise CaptureError(
                f"row {start + at * _ROWS + row} has NaN or infinity in its logits "
                f"({int(bad[row])} of {logits.shape[-1]}), expected finite numbers; check the "
                "model's weights, or load it in another precision than "
                f"{str(logits.dtype).removeprefix('torch.')}"
            )
    return logits


def _forward(model: PreTrainedModel) -> Callable[[Sequence[int], int, int], Tensor]:
    """Return a function that runs tokens from a row on, over one cache of all rows before.

    It returns so many of the last logits, [n, V].
    """
    device, options = device_of(model), cache_option(model, full_cache(model))
    # some models count from 0 in every forward; without RoPE a position may be counted otherwise
    states = "position_ids" in inspect.signature(model.forward).parameters and has_rope(model)

    def forward(ids: Sequence[int], start: int, count: int) -> Tensor:
        n = start + len(ids)
        at = {"position_ids": torch.arange(start, n, device=device)[None]} if states else {}
        inputs = torch.tensor([ids], device=device)
        out = run_model(model, inputs, use_cache=True, **options, **at, **last_logits(model, count))
        logits = getattr(out, "logits", None)
        if logits is None:
            raise CaptureError(
                f"{type(model).__name__} returns no logits, expected a model for causal language "
                "modelling, as AutoModelForCausalLM loads it"
            )
        return check_logits(logits[0, -count:], n - count)

    return forward


def run_model(model: PreTrainedModel, ids: Tensor, **options: Any) -> Any:
    """Run a model on tokens [1, n]; what it raises becomes a CaptureError."""
    try:
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


def sample(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    """Draw a token from logits [V] at a temperature; the most likely one at 0."""
    # on the CPU in float64, so that the draw is the same on every device
    scaled = logits.to("cpu", torch.float64) / (temperature or 1.0)
    if temperature == 0 or bool(scaled.isinf().any()):  # so cold that it overflows
        return int(logits.argmax())
    weights = scaled.softmax(-1)
    return int(torch.multinomial(weights, 1, generator=generator))


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


class StopStrings:
    """Text that ends a response, searched in its decoded end after every token.

    strings: the texts. tokenizer: decodes tokens; required if there are strings.

    A token is at least one byte of text (special tokens count as text), so a string of b bytes lies
    in the last b tokens. Some more are decoded, because decoders may change the start of a text.
    """

    _MORE = 8

    def __init__(self, strings: Sequence[str], tokenizer: Any) -> None:
        if strings and tokenizer is None:
            raise CaptureError(
                "stop is text, and there is no tokenizer, expected one that decodes the response; "
                "give one, or leave --stop out"
            )
        self.strings, self.tokenizer = tuple(strings), tokenizer
        longest = max((len(text.encode()) for text in strings), default=0)
        self.tail = longest + self._MORE

    def completed(self, tokens: Sequence[int], start: int) -> bool:
        """Return whether the response, from token `start` on, now has a stop string."""
        if not self.strings or len(tokens) == start:
            return False
        tail = list(tokens[max(start, len(tokens) - self.tail) :])
        text = str(self.tokenizer.decode(tail, skip_special_tokens=False))
        return any(string in text for string in self.strings)


def stop_tokens(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a response, by generation settings, model and tokenizer."""
    tokens: set[int] = set()
    settings = getattr(model, "generation_config", None)
    for holder in (settings, model.config, tokenizer):
        token = getattr(holder, "eos_token_id", None)
        tokens.update([token] if isinstance(token, int) else token or [])
    return frozenset(tokens)
