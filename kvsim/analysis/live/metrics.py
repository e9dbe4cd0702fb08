"""Metrics of a running model: one prompt, one policy, one budget; fidelity closed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from kvsim.analysis.arrays import Floats
from kvsim.analysis.definition import Cells, Metric
from kvsim.analysis.live.outcome import Forced, Generated, LiveSubject
from kvsim.analysis.live.repetition import looping, repeated


Values = Callable[[LiveSubject], Iterator[Cells]]


def _forced(value: Callable[[Forced], Floats]) -> Values:
    """The mean of a value of each token of the response."""

    def cells(subject: LiveSubject) -> Iterator[Cells]:
        forced = subject.outcome.forced
        if forced is not None and len(forced.nll):
            yield Cells(None, np.array([value(forced).mean()]))

    return cells


def _generated(value: Callable[[Generated], float | None]) -> Values:
    def cells(subject: LiveSubject) -> Iterator[Cells]:
        generated = subject.outcome.generated
        number = None if generated is None else value(generated)
        if number is not None:
            yield Cells(None, np.array([float(number)]))

    return cells


def _residual(subject: LiveSubject) -> Iterator[Cells]:
    forced = subject.outcome.forced
    if forced is None or not forced.residual_error.shape[1]:
        return
    for layer, rows in enumerate(forced.residual_error):
        yield Cells(layer, np.array([rows.mean()]))


def _peak(subject: LiveSubject) -> Iterator[Cells]:
    yield Cells(None, np.array([float(subject.outcome.peak_bytes)]))


def _share(subject: LiveSubject) -> Iterator[Cells]:
    yield Cells(None, np.array([subject.outcome.peak_bytes / subject.outcome.full_bytes]))


def _kept_right(generated: Generated) -> float | None:
    """Of a prompt that is answered right with the full cache."""
    return None if not generated.full_right or generated.right is None else generated.right


METRICS: Mapping[str, Metric] = {
    "response_kl": Metric(
        "KL(full || live) of the prediction of each token of the recorded response, mean",
        "live", "nats", "lower", "kvsim", _forced(lambda x: x.kl)),
    "nll_increase": Metric(
        "negative log-likelihood of a token of the recorded response, beyond that with the full "
        "cache, mean",
        "live", "nats", "lower", "kvsim", _forced(lambda x: x.nll - x.full_nll)),
    "top_agreement": Metric(
        "share of tokens of the recorded response where the most likely token is that of the full "
        "cache",
        "live", "share", "higher", "kvsim", _forced(lambda x: x.agreement)),
    "residual_error": Metric(
        "|h' - h| / |h| of the residual stream before a layer, mean over rows after the prompt",
        "live", "relative", "lower", "kvsim", _residual),
    "answer_right": Metric(
        "whether the response that the model writes has the right answer (mean: pass@1)",
        "live", "share", "higher", "G-KV, section 4.1", _generated(lambda x: x.right)),
    "answer_kept": Metric(
        "as answer_right, of the prompts that are answered right with the full cache",
        "live", "share", "higher", "kvsim", _generated(_kept_right)),
    "tokens_to_answer": Metric(
        "tokens written until the right answer is complete, where it comes",
        "live", "tokens", "lower", "kvsim", _generated(lambda x: x.answered)),
    "response_tokens": Metric(
        "tokens that the model wrote",
        "live", "tokens", None, "kvsim", _generated(lambda x: len(x.tokens))),
    "repetition": Metric(
        "share of 4-grams of the response that occurred in it before",
        "live", "share", "lower", "kvsim", _generated(lambda x: repeated(x.tokens))),
    "loop": Metric(
        "whether the response ends in a loop: up to 64 tokens, three times or more in a row",
        "live", "share", "lower", "kvsim", _generated(lambda x: looping(x.tokens))),
    "decode_seconds": Metric(
        "seconds of decoding per token written, prefill excluded",
        "live", "seconds", "lower", "kvsim",
        _generated(lambda x: x.seconds / max(1, len(x.tokens)))),
    "peak_bytes": Metric(
        "most bytes of live keys and values at once in decoding, without padding",
        "live", "bytes", "lower", "kvsim", _peak),
    "peak_share": Metric(
        "peak_bytes as a share of the full cache at the end",
        "live", "share", "lower", "kvsim", _share),
}  # fmt: skip
