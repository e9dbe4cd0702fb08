"""Generation: prefill, then tokens one by one, or a given response; checks of answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvsim.core.header import Header
from kvsim.errors import CaptureError
from kvsim.recorder.choice import Choice, following
from kvsim.recorder.forward import WHOLE, evaluating, full_cache, run_chunks
from kvsim.recorder.head import Head, Predictions
from kvsim.recorder.loading import is_tiny
from kvsim.recorder.prompts import Prompt, Turn
from kvsim.recorder.tokenization import response_text
from kvsim.text.answers import LANGUAGES, SCORERS, language_of, open_reasoning, text_check

#: End reasons of a response: a token that ends one, or a stop string.
Ended = Literal["eos", "stop"]


class Generated(NamedTuple):
    """Tokens of prompt and response, and the end reason of each answer, if any.

    scores: `log_likelihoods` of each token of the response by the logits of the model, however it
    was chosen; empty with several turns. questions: spans of later ones.
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

    Every token goes through the model, also the last one, so every position has its q, k, v.

    choice: selects each token. stop: tokens that end the response, as its last one. completed:
    called with the tokens so far and the start of the answer, returns whether it ends here.
    before_last: called with the final length before the last forward. progress: called with (tokens
    done, most tokens possible) after every forward. chunk: the most rows of a forward. later:
    questions that follow an answer, and the most tokens of the answer to each. step: the most rows
    of a forward of a later question. begun: a cache, and the number of rows of the prompt in it.
    """
    out = Generated([*ids], [], [], [])
    tokens = out.tokens
    total = len(tokens) + new_tokens + sum(len(question) + n for question, n in later)
    generator = torch.Generator().manual_seed(choice.seed)
    cache, ran = begun or (full_cache(model), 0)

    def forward(*, last: bool = False) -> Tensor:
        nonlocal ran
        logits, rows = Tensor(), chunk if ran < len(ids) else step
        for end, of_chunk in run_chunks(model, cache, tokens[ran:], ran, 1, rows):
            progress(total if last and end == len(tokens) else end, total)
            logits = of_chunk
        ran = len(tokens)
        return logits[-1]

    with torch.no_grad(), evaluating(model):
        for question, count in [((), new_tokens), *later]:
            if question:
                begin = len(tokens)
                tokens += following(question, tokens[-1], stop)
                out.questions.append((begin, len(tokens)))
            start = len(tokens)
            choose = choice.begin(start, count, generator)
            while True:
                ended: Ended | None = None
                if len(tokens) > start and tokens[-1] in stop:
                    ended = "eos"
                elif completed(tokens, start):
                    ended = "stop"
                if ended or len(tokens) == start + count:
                    break
                logits = forward()
                tokens.append(choose(logits, tokens))
                if not later:
                    target = torch.tensor([tokens[-1:]], device=logits.device)
                    out.scores.extend(log_likelihoods(logits[None], target))
            out.ended.append(ended)
        before_last(len(tokens))
        forward(last=True)
    return out


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

    Tokens are teacher-forced. before_last, progress, chunk, begun: as for `generate`. head: the
    model's.
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

    A mean is over the vocabulary, with at least -1000 nats per token: it shows the scale of logits
    even where a model is certain of its token.
    """
    scores = logits.double().log_softmax(-1)
    pairs = scores.gather(-1, tokens)[:, 0], scores.clamp(min=-1000).mean(-1)
    return [*zip(*(x.tolist() for x in pairs), strict=True)]


def stop_search(strings: Sequence[str], tokenizer: Any) -> Callable[[Sequence[int], int], bool]:
    """Return whether a response has a stop string, from all tokens and the start of the response.

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


def _check(
    asked: Prompt | Turn, response: str, text: str | None, *, tiny: bool
) -> dict[str, Any] | None:
    """Compare a response with the expected answer; None without anything to compare.

    A scorer other than free text decides where the prompt names one; for tiny the right response
    follows from the text of the prompt.
    """
    answer, scorer = asked.answer, asked.scorer
    if scorer is not None and scorer not in SCORERS:
        known = {"scorer": scorer, "expected": answer, "metadata": getattr(asked, "metadata", None)}
        return language_of(scorer)(text or "", response, known)
    if tiny and text is not None:
        return LANGUAGES["ledger"](text, response, {})
    return None if answer is None else text_check(response, answer, scorer)


def describe_turns(
    session: Any, header: Header, tokens: Sequence[int], ended: Sequence[str | None]
) -> list[dict[str, Any]]:
    """Describe each turn of a `Session` for JSON; ended: end reasons, None for the length."""
    prompt, tokenizer, encoded = session.prompt, session.tokenizer, session.encoded
    asked = [prompt, *prompt.turns]
    begun = [encoded.opened, *(each.opened for each in encoded.turns)]
    spans, written = header.answers(len(tokens)), prompt.response is None or prompt.writer
    whole = None if prompt.turns else encoded.text
    out = []
    for turn, span, end, opened in zip(asked, spans, ended, begun, strict=True):
        text, check, question = None, None, getattr(turn, "question", prompt.content)
        if tokenizer is not None:
            text = response_text(tokens[slice(*span)], tokenizer)
        if text is not None and written:
            check = _check(turn, opened + text, whole, tiny=is_tiny(session.model))
        if text is not None and check is not None:
            check |= {"opened": opened} if opened else {}
            longest = turn.max_new_tokens or prompt.max_new_tokens
            check |= {"max_new_tokens": longest} if longest and session.longest is None else {}
            if mark := open_reasoning(opened + text):
                note = f"the response does not leave its reasoning ({mark}): it has no answer"
                session.notes.append(note)
        out.append(
            {
                "question": question if isinstance(question, str) else None,
                "response": text,
                "stopped": end or "length",
                "labels": {**prompt.labels, **getattr(turn, "turn_labels", turn.labels)},
                "answer_check": check,
            }
        )
    return out
