"""Running a model over a prompt: prefill, then one token after the other."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

Stopped = Literal["eos", "length", "context"]


def generate(
    model: PreTrainedModel,
    ids: Sequence[int],
    *,
    new_tokens: int,
    temperature: float,
    seed: int,
    stop: frozenset[int],
    chosen: Callable[[int], None],
    before_last: Callable[[int], None],
    progress: Callable[[int, int], None],
) -> tuple[list[int], bool]:
    """The tokens of prompt and response, and whether the response ended by itself.

    Every token goes through the model, the last one too, so every position has its q, k, v.

    Args:
        model: a decoder model in evaluation mode.
        ids: token ids of the prompt.
        new_tokens: at most so many more.
        temperature: 0 takes the most likely token, else tokens are drawn.
        seed: of the draws.
        stop: tokens that end the response; they belong to it.
        chosen: called with each token of the response before it goes through the model.
        before_last: called with the final length before the last forward.
        progress: called with (tokens done, most tokens there can be) after every forward.
    """
    tokens = list(ids)
    total = len(tokens) + new_tokens
    cache = DynamicCache(config=model.config)
    generator = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1  # a long prompt times the vocabulary would be large
    inputs = torch.tensor([tokens], device=model.device)
    with torch.no_grad(), evaluating(model):
        while True:
            ended = len(tokens) > len(ids) and tokens[-1] in stop
            if ended or len(tokens) == total:
                before_last(len(tokens))
                model(inputs, **options)
                progress(total, total)
                return tokens, ended
            logits = model(inputs, **options).logits[0, -1]
            progress(len(tokens), total)
            tokens.append(_choose(logits, temperature, generator))
            chosen(tokens[-1])
            inputs = torch.tensor([tokens[-1:]], device=model.device)


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    # drawn on the CPU in float64, so that the draw is the same on every device
    weights = (logits.to("cpu", torch.float64) / temperature).softmax(-1)
    return int(torch.multinomial(weights, 1, generator=generator))


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode for as long as the block lasts: dropout would make q, k, v random."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def stop_tokens(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a response: those of the generation settings and of the tokenizer."""
    found: set[int] = set()
    settings = getattr(model, "generation_config", None)
    for holder in (settings, model.config, tokenizer):
        token = getattr(holder, "eos_token_id", None)
        found.update([token] if isinstance(token, int) else token or [])
    return frozenset(found)
