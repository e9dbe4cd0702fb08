"""Metrics of a trace's full attention: windows, queries, and expected attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from kvsim.analysis.definition import Cells, Metric
from kvsim.analysis.subject import Analysis


def _overlap(analysis: Analysis) -> Iterator[Cells]:
    from kvsim.analysis.attention.windows import SHARES, default_window, window_overlap

    trace = analysis.trace
    window = default_window(trace.n_pos)
    if window < 1:
        return
    for layer in analysis.layers:
        overlap = window_overlap(trace, layer, window=window)
        for i, share in enumerate(SHARES):
            for name, (values, chance) in overlap.items():
                row = slice(i, i + 1)
                yield Cells(layer, values[row], None, f"share={share:g},{name}", chance[row])


def _sparsity(analysis: Analysis) -> Iterator[Cells]:
    from kvsim.analysis.attention.sparsity import attention_sparsity

    for layer in analysis.layers:
        for variant, values in attention_sparsity(analysis.trace, layer).items():
            yield Cells(layer, values, "head", variant)


def _return(analysis: Analysis) -> Iterator[Cells]:
    from kvsim.analysis.attention.windows import GAP_SHARE, attention_gaps, gap_windows

    for layer in analysis.layers if gap_windows(analysis.trace)[1] else ():
        pairs = zip(("returns", "keys"), *attention_gaps(analysis.trace, layer), strict=True)
        for name, values, chance in pairs:
            yield Cells(layer, values, "head", f"share={GAP_SHARE:g},{name}", chance)


def _decline(analysis: Analysis) -> Iterator[Cells]:
    from kvsim.analysis.attention.agreement import spearman
    from kvsim.analysis.attention.windows import WINDOW, row_blocks, window_scores

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


METRICS: Mapping[str, Metric] = {
    "window_overlap": Metric(
        "share of the last rows' top keys that were top keys of earlier rows, next to chance",
        "trace", "share", None, "G-KV, Fig. 1", _overlap, arrays=("last_windows",)),
    "sparsity": Metric(
        "share of the last 512 keys that score below p x maximum in the last 16 rows",
        "trace", "share", None, "G-KV, Fig. 9", _sparsity),
    "attention_return": Metric(
        "share of the returns of keys to the top tenth of a window, and of these keys, that come "
        "after a window without the key in its top, next to chance",
        "trace", "share", None, "G-KV; defined here", _return),
    "score_decline": Metric(
        "rank correlation of the number of a window of later rows with its largest score of a "
        "prompt's key",
        "trace", "correlation", None, "after G-KV, eq. 5", _decline, default=False),
}  # fmt: skip
