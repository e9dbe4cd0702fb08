"""The check of a response against the right answer, and against what the model would write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvsim.recorder.generation import log_likelihoods
from kvsim.recorder.prompts import Encoded, Prompt
from kvsim.schema import LOGPROBS
from kvsim.text.answers import LANGUAGES, SCORERS, language_of, open_reasoning, text_check


def answer_check(
    prompt: Prompt, encoded: Encoded, response: str, *, tiny: bool, longest: int | None
) -> dict[str, Any] | None:
    """Return what a trace says of a response, ready for JSON; None without anything to compare.

    It says in which mark of reasoning the response begins (`opened`), if it does.
    A scorer of another kind than free text decides where the prompt names one. For tiny the right
    response follows from the text of the prompt. longest: tokens of the longest response, if the
    prompt states it.
    """
    answer, scorer, text = prompt.answer, prompt.scorer, encoded.text
    response = encoded.opened + response
    if scorer is not None and scorer not in SCORERS:
        known = {"scorer": scorer, "expected": answer, "metadata": prompt.metadata}
        check = language_of(scorer).check(text or "", response, known)
    elif tiny and text is not None:
        check = LANGUAGES["ledger"].check(text, response, {})
    elif answer is None:
        return None
    else:
        check = text_check(response, answer, scorer)
    check |= {"opened": encoded.opened} if encoded.opened else {}
    return check | ({"max_new_tokens": longest} if longest else {})


def reasoning_notes(response: str) -> list[str]:
    """Return a note on a response, with what its prompt begins, that does not end its reasoning."""
    mark = open_reasoning(response)
    return [f"the response does not leave its reasoning ({mark}): it has no answer"] if mark else []


def agreement(likeliest: Sequence[bool], prompt_len: int) -> dict[str, Any]:
    """Return the share of tokens that greedy decoding chooses, too, and the first other position.

    likeliest: of each token of the response, whether no other has a larger logit there. `first` is
    None where all are.
    """
    first = None if all(likeliest) else prompt_len + likeliest.index(False)
    return {"share": sum(likeliest) / len(likeliest), "first": first}


def likelihoods(scores: Sequence[tuple[float, float]]) -> dict[str, list[float]]:
    """Return what a trace says of the `log_likelihoods` of its response, ready for JSON."""
    of_each = ([*values] for values in zip(*scores, strict=True))
    return dict(zip(LOGPROBS, of_each, strict=False))


@contextmanager
def scoring(
    model: PreTrainedModel, added: Callable[[list[int], int | None], None], scores: list[Any]
) -> Iterator[Callable[[list[int], int | None], None]]:
    """Yield an `added` of `generate` that also adds the `log_likelihoods` of a token to `scores`.

    By the logits of the model, whatever chose the token. Of several turns `scores` stays empty,
    because those of the questions are not known.
    """
    logits, several = Tensor(), False

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        nonlocal logits
        if getattr(output, "logits", None) is not None:
            logits = output.logits[0, -1]

    def scored(ids: list[int], question: int | None) -> None:
        nonlocal several
        several |= question is not None
        scores.extend(log_likelihoods(logits[None], torch.tensor([ids[:1]], device=logits.device)))
        if several:
            scores.clear()
        added(ids, question)

    handle = model.register_forward_hook(keep)
    try:
        yield scored
    finally:
        handle.remove()
