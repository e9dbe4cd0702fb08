"""What full attention says of a trace, before any policy: windows, sparsity, expectation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvsim
from kvsim import Trace, policy
from kvsim.diagnostics import key_projections
from kvsim.metrics import attention_gaps, attention_sparsity, window_overlap
from kvsim.metrics.windows import row_blocks, window_scores
from results_page.quantities import Floats

#: Rows of a window of the trace's own attention, and the share of keys that are its top.
WINDOW, TOP = 16, 0.1
SHARES = (0.05, 0.1, 0.25, 0.5, 0.55)


def of_trace(trace: Trace) -> dict[str, float]:
    """What full attention says: windows, sparsity, gaps, size of scores, what was expected."""
    out = {"tokens": float(trace.n_pos), "prompt": float(trace.prompt_len)}
    for layer in range(trace.n_layers):
        found = window_overlap(trace, layer, shares=SHARES)
        for i, share in enumerate(SHARES):
            name = f"{layer} {share:g}"
            out[f"overlap {name}"] = float(found.before[:, i].mean())
            out[f"oldest {name}"], out[f"newest {name}"] = found.before[[0, 2], i]
            out[f"chance {name}"] = float(found.chance[i])
            out[f"union {name}"] = float(found.union[i])
            out[f"union chance {name}"] = float(found.chance_union[i])
            out[f"merged {name}"] = float(found.equal_budget[i])
        few = attention_sparsity(trace, layer, shares=(0.01,), window=WINDOW)
        out[f"sparsity {layer} 0"] = float(few.sequence.mean())
        out[f"sparsity {layer} 4"] = float(few.behind_sink.mean())
        gaps = attention_gaps(trace, layer, start=trace.prompt_len, window=WINDOW, share=TOP)
        out[f"back {layer}"] = _after_gap(gaps.gaps)
        out[f"back shuffled {layer}"] = _after_gap(gaps.chance_gaps)
        scores = _window_scores(trace, layer)  # [window, head, key]
        out[f"size {layer}"] = float(
            np.mean([_spearman(np.arange(len(scores)), x) for x in scores.max(-1).T])
        )
        out[f"expectation {layer}"] = _expectation(trace, layer)
    for skip in (0, 4):
        found = key_projections(trace, skip=skip)
        off = np.abs(np.median(found.gap - found.normal_gap, axis=(1, 2)))
        out |= {f"projections {layer} from {skip}": float(x) for layer, x in enumerate(off)}
    return out


def _window_scores(trace: Trace, layer: int) -> Floats:
    """Local scores of the prompt's keys in every whole window after it; [window, head, key]."""
    first = trace.prompt_len
    whole = (trace.n_pos - first) // WINDOW * WINDOW
    windows = row_blocks(first, first + whole, WINDOW)
    return np.stack(list(window_scores(trace, layer, windows, first)))


def _after_gap(gaps: NDArray[Any]) -> float:
    """Share of the returns of all heads that the window before did without; gaps [head, gap]."""
    return float(gaps[:, 1:].sum() / max(1, gaps.sum()))


def _expectation(trace: Trace, layer: int) -> float:
    """Rank correlation over the prompt's keys of expected with observed attention, by query head.

    Expected: the score without value and epsilon, for as many positions as the response has.
    """
    rest = trace.n_pos - trace.prompt_len
    made = policy("expected_attention", n_future=rest, value_norm="none")
    one = replace(made, per_query_head=True)
    found = kvsim.replay(trace, one, 8, layers=[layer], internals=True).internals[0]
    rows, keys = slice(trace.prompt_len, None), slice(4, trace.prompt_len)
    observed = trace.attention(layer, rows, keys).mean(1).numpy()
    return float(
        np.mean([_spearman(a, b) for a, b in zip(found.scores[0, :, 4:], observed, strict=True)])
    )


def _spearman(a: NDArray[Any], b: NDArray[Any]) -> float:
    first, second = (np.argsort(np.argsort(x, kind="stable")) for x in (a, b))
    return float(np.corrcoef(first, second)[0, 1])
