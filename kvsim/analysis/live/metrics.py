"""Metrics of a running model: one prompt, one policy, one budget; closed loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

from kvsim.analysis.arrays import Floats
from kvsim.analysis.definition import Cells, Metric
from kvsim.analysis.output.changed import prompt_parts
from kvsim.analysis.subject import Subject
from kvsim.core.outcome import Forced, Generated

Values = Callable[[Subject], Iterator[Cells]]


def _reached(
    subject: Subject, value: Callable[[Forced], Floats]
) -> Iterator[tuple[int | None, Floats]]:
    """Values [..., R] of the tokens of each turn's answer that an event before them can reach.

    The last row of the prompt predicts the first token: only events within the prompt reach it.
    """
    forced, trace = subject.outcome.forced, subject.trace
    ends = subject.record.schedule.ends(trace.prompt_len, trace.header.context_len)
    first = int(ends[0] == trace.prompt_len)
    values = np.empty(0) if forced is None else value(forced)
    for turn, rows in trace.answers:
        of_turn = values[..., rows][..., first if turn in (None, 1) else 0 :]
        if of_turn.shape[-1]:
            yield turn, of_turn


def _forced(value: Callable[[Forced], Floats]) -> Values:
    """Mean of a value over the tokens of the response that an earlier event can reach."""

    def cells(subject: Subject) -> Iterator[Cells]:
        for turn, of_turn in _reached(subject, value):
            yield Cells(None, np.array([of_turn.mean()]), turn=turn)
        for variant, rows, before in _before(subject):
            of_part = value(before)[rows]
            if len(of_part):
                yield Cells(None, np.array([of_part.mean()]), variant=variant)

    return cells


def _tokens(subject: Subject) -> Iterator[Cells]:
    """KL of each token in the mean `response_kl`, and whether the most likely token differs."""
    n = subject.trace.n_pos
    for turn, (kl, same, position) in _reached(
        subject, lambda x: np.stack([x.kl, x.agreement, np.arange(n - len(x.kl), n)])
    ):
        at = position.astype(np.int64)
        yield Cells(None, kl[None], events=at, turn=turn)
        yield Cells(None, 1 - same[None], variant="changed", unit="share", events=at, turn=turn)


def _before(subject: Subject) -> Iterator[tuple[str, slice, Forced]]:
    """Rows of the prompt after an event, by variant; the last one counts in the response."""
    forced, schedule = subject.outcome.forced, subject.record.schedule
    if forced is not None and forced.before is not None:
        count = forced.before.stream_error.shape[1]
        for variant, rows in prompt_parts(schedule, subject.trace, count).items():
            yield variant, rows, forced.before


def _generated(value: Callable[[Generated], float | None]) -> Values:
    def cells(subject: Subject) -> Iterator[Cells]:
        written = subject.outcome.generated, *subject.outcome.later
        for (turn, _), generated in zip(subject.trace.answers, written, strict=False):
            number = None if generated is None else value(generated)
            if number is not None and not np.isnan(number):
                yield Cells(None, np.array([float(number)]), turn=turn)

    return cells


def _residual(subject: Subject) -> Iterator[Cells]:
    forced = subject.outcome.forced
    if forced is None or not forced.stream_error.shape[1]:
        return
    layers = range(len(forced.stream_error))
    for turn, rows in subject.trace.answers:
        yield Cells(layers, forced.stream_error[:, rows].mean(1), turn=turn)
    for variant, rows, before in _before(subject):
        yield Cells(layers, before.stream_error[:, rows].mean(1), variant=variant)


def _peak(*, share: bool) -> Values:
    def cells(subject: Subject) -> Iterator[Cells]:
        peak, full = subject.outcome.peak_bytes, subject.outcome.full_bytes
        if peak is not None and full is not None:
            yield Cells(None, np.array([peak / full if share else float(peak)]))

    return cells


#: Metrics of a pass of the model under the kept sets of a replay (`kvsim.runner.judging`).
JUDGED = ("response_kl", "nll_increase", "top_agreement", "stream_error")
#: The metric that has a row for each token: the same KL as `response_kl`, which ranks.
KL_TOKENS = "response_kl_tokens"

_metric = partial(Metric, kind="live", source="kvsim", default=False)

METRICS: Mapping[str, Metric] = {
    "response_kl": _metric(
        "KL(full || live) of the prediction of a token of the recorded response after its first, "
        "mean",
        unit="nats", better="lower", cells=_forced(lambda x: x.kl)),
    KL_TOKENS: _metric(
        "response_kl of each token, whose position is its event; and 1 where the full cache makes "
        "another token most likely (variant changed)",
        unit="nats", better=None, cells=_tokens, over_events="each"),
    "nll_increase": _metric(
        "negative log-likelihood of a token of the recorded response after its first, beyond that "
        "with the full cache, mean",
        unit="nats", better="lower", cells=_forced(lambda x: x.nll - x.full_nll)),
    "top_agreement": _metric(
        "share of tokens of the recorded response after its first where the most likely token "
        "is the same with the full cache",
        unit="share", better="higher", cells=_forced(lambda x: x.agreement)),
    "stream_error": _metric(
        "|h' - h| / |h| of the residual stream before a layer, mean over rows after the prompt",
        unit="relative", better="lower", cells=_residual),
    "answer_right": _metric(
        "whether the response that the model writes has the right answer (mean: pass@1)",
        unit="share", better="higher", source="G-KV, section 4.1",
        cells=_generated(lambda x: x.right)),
    "answer_score": _metric(
        "score of the response that the model writes, by the scorer that its prompt names",
        unit="share", better="higher", cells=_generated(lambda x: x.score)),
    "answer_kept": _metric(
        "as answer_right, of the prompts that are answered right with the full cache",
        unit="share", better="higher",
        cells=_generated(lambda x: x.right if x.full_right else None)),
    "tokens_to_answer": _metric(
        "tokens written until the right answer is complete, where it comes",
        unit="tokens", better="lower", cells=_generated(lambda x: x.answered)),
    "response_tokens": _metric(
        "tokens that the model wrote",
        unit="tokens", better=None, cells=_generated(lambda x: len(x.tokens))),
    "decode_seconds": _metric(
        "seconds of decoding per token written, prefill excluded",
        unit="seconds", better="lower",
        cells=_generated(lambda x: x.seconds / max(1, len(x.tokens)))),
    "peak_bytes": _metric(
        "most bytes of live keys and values at once in decoding, without padding",
        unit="bytes", better="lower", cells=_peak(share=False)),
    "peak_share": _metric(
        "peak_bytes as a share of the full cache at the end",
        unit="share", better="lower", cells=_peak(share=True)),
}  # fmt: skip
