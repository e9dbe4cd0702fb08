"""Metrics of a trace's full attention: windows, queries, and expected attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from kvsim.analysis.arrays import Floats, mean_known
from kvsim.analysis.attention.agreement import spearman
from kvsim.analysis.attention.expectation import ORDERS, REMOVED, STEPS, TOP, Expectation
from kvsim.analysis.attention.fit import normal_ks
from kvsim.analysis.attention.sparsity import attention_sparsity
from kvsim.analysis.attention.windows import (
    GAP_SHARE,
    WINDOW,
    default_window,
    row_blocks,
    window_overlap,
    window_scores,
)
from kvsim.analysis.definition import Cells, Metric
from kvsim.analysis.kept.retention import SINK
from kvsim.analysis.subject import Analysis

# ---------------------------------------------------------------------------------- windows of rows

_SHARE = f"share={GAP_SHARE:g}"


def _overlap(analysis: Analysis) -> Iterator[Cells]:
    trace = analysis.trace
    window = default_window(trace.n_pos)
    if window < 1:
        return
    for layer in analysis.layers:
        overlap = window_overlap(trace, layer, window=window)
        sets = [
            *((f"block={i}", values, overlap.chance) for i, values in enumerate(overlap.before, 1)),
            ("union", overlap.union, overlap.chance_union),
            ("equal_budget", overlap.equal_budget, overlap.chance),
        ]
        for i, share in enumerate(overlap.shares):
            for name, values, chance in sets:
                row = slice(i, i + 1)
                yield Cells(layer, values[row], None, f"share={share:g},{name}", chance[row])


def _sparsity(analysis: Analysis) -> Iterator[Cells]:
    for layer in analysis.layers:
        sparsity = attention_sparsity(analysis.trace, layer)
        for variant, values in sparsity.variants(("sequence", "behind_sink", "domain")):
            yield Cells(layer, values, "head", variant)


def _gap(analysis: Analysis) -> Iterator[Cells]:
    for layer, gaps in analysis.gaps.items():
        yield Cells(layer, gaps.mean_gap, "head", _SHARE, gaps.chance.mean_gap)


def _return(analysis: Analysis) -> Iterator[Cells]:
    for layer, gaps in analysis.gaps.items():
        yield Cells(layer, gaps.after_gap, "head", f"{_SHARE},returns", gaps.chance.after_gap)
        yield Cells(layer, gaps.keys_back, "head", f"{_SHARE},keys", gaps.chance.keys_back)


def _decline(analysis: Analysis) -> Iterator[Cells]:
    trace = analysis.trace
    prompt_len = trace.prompt_len
    whole = (trace.n_pos - prompt_len) // WINDOW * WINDOW
    windows = row_blocks(prompt_len, prompt_len + whole, WINDOW)
    if len(windows) < 2:
        return
    number = np.arange(len(windows), dtype=np.float64)
    for layer in sorted({*range(trace.n_layers)} - {*trace.windowed}):
        scores = window_scores(trace, layer, windows, prompt_len, device=analysis.device)
        largest = np.stack([of_window.max(-1) for of_window in scores], -1)  # [head, window]
        yield Cells(layer, spearman(largest, np.broadcast_to(number, largest.shape)), "head")


# ------------------------------------------------------------------ expected and observed attention


#: (variant, values [layer, qhead], what chance gives) of an Expectation.
Values = Callable[[Expectation], Iterable[tuple[str, Floats, float | None]]]


def _expected(values: Values) -> Callable[[Analysis], Iterator[Cells]]:
    def cells(analysis: Analysis) -> Iterator[Cells]:
        if analysis.expectation is not None:
            for variant, by_layer, chance in values(analysis.expectation):
                for layer, by_head in enumerate(by_layer):
                    random = None if chance is None else np.full(by_head.shape, chance)
                    yield Cells(layer, by_head, "qhead", variant, random)

    return cells


def _steps(values: Floats) -> Iterator[tuple[str, Floats, None]]:
    """Values [step, layer, qhead] of each step."""
    return ((step, by_layer, None) for step, by_layer in zip(STEPS, values, strict=True))


def _recall(expectation: Expectation) -> Iterator[tuple[str, Floats, float]]:
    for share in TOP:
        chance = math.ceil(share * expectation.keys - 1e-9) / expectation.keys
        for step, by_layer in zip(STEPS, expectation.recall(share), strict=True):
            yield f"{step},top={share:g}", by_layer, chance


def _loss(expectation: Expectation) -> Iterator[tuple[str, Floats, None]]:
    loss = expectation.loss(REMOVED)  # [order, layer, qhead, removed]
    for order, by_layer in zip(ORDERS, loss, strict=True):
        for place, removed in enumerate(REMOVED):
            yield f"{order},removed={removed:g}", by_layer[..., place], None


# ---------------------------------------------------------------------- how queries are distributed


def _projection_gap(analysis: Analysis) -> Iterator[Cells]:
    for skip, projections in analysis.projections.items():
        off = np.abs(np.median(projections.gap - projections.normal_gap, axis=(1, 2)))
        for layer, value in enumerate(off):
            yield Cells(layer, value.reshape(1), variant=f"skip={skip}")


def _distance(analysis: Analysis) -> Iterator[Cells]:
    normality = analysis.normality
    if normality is None:
        return
    distance = normality.effects["ks"]
    chance = np.full(distance.shape[1], normal_ks(normality.samples))
    for layer, by_head in enumerate(distance):
        yield Cells(layer, mean_known(by_head), "qhead", chance=chance)


METRICS: Mapping[str, Metric] = {
    "window_overlap": Metric(
        "share of the last rows' top keys that were top keys of earlier rows, next to chance",
        "trace", "share", None, "G-KV, Fig. 1", _overlap),
    "sparsity": Metric(
        "share of the last 512 keys that score below p x maximum in the last 16 rows",
        "trace", "share", None, "G-KV, Fig. 9", _sparsity),
    "attention_gap": Metric(
        "windows without a key between two that have it in their top tenth, next to chance",
        "trace", "windows", None, "G-KV; defined here", _gap),
    "attention_return": Metric(
        "share of the returns of keys to the top tenth of a window, and of these keys, that come "
        "after a window without the key in its top, next to chance",
        "trace", "share", None, "as attention_gap", _return),
    "expectation": Metric(
        "rank correlation over the prompt's keys of expected attention with what the response "
        "attends to",
        "trace", "correlation", None, "Expected Attention, Fig. 10",
        _expected(lambda expectation: [("", expectation.spearman[-1], None)]), default=False),
    "expectation_steps": Metric(
        "rank correlation over the prompt's keys with what the response attends to, after each "
        "assumption on the way from observed to expected attention",
        "trace", "correlation", None, "kvsim, after Expected Attention",
        _expected(lambda expectation: _steps(expectation.spearman)), main=STEPS[-1], default=False),
    "expectation_logs": Metric(
        "correlation of the logarithms of expected and observed attention, after each assumption",
        "trace", "correlation", None, "as expectation_steps",
        _expected(lambda expectation: _steps(expectation.log_pearson)), main=STEPS[-1],
        default=False),
    "expectation_recall": Metric(
        "share of the keys with the most observed attention that are first by expected attention "
        "too, next to chance",
        "trace", "share", None, "as expectation_steps", _expected(_recall),
        main=f"{STEPS[-1]},top=0.1", default=False),
    "attention_loss": Metric(
        "share of observed attention lost with keys removed in the order of a score",
        "trace", "share", None, "as expectation_steps", _expected(_loss),
        main=f"{STEPS[-1]},removed=0.5", default=False),
    "projection_gap": Metric(
        "distance of a key's log mean exponential over queries from that of normal ones, median "
        "over heads and keys",
        "trace", "nats", None, "Expected Attention, eq. 7", _projection_gap,
        main=f"skip={SINK}", default=False),
    "normal_distance": Metric(
        "Kolmogorov-Smirnov distance of queries before RoPE from normal, mean over dimensions, "
        "next to that of normal samples",
        "trace", "share", None, "Expected Attention, Fig. 7 to 9", _distance, default=False),
    "score_decline": Metric(
        "rank correlation of the number of a window of later rows with its largest score of a "
        "prompt's key",
        "trace", "correlation", None, "after G-KV, eq. 5", _decline, default=False),
}  # fmt: skip
