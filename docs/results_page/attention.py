"""What full attention says of a trace, before any policy: windows, sparsity, expectation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvsim
from kvsim import Trace, policy
from kvsim.metrics import window_overlap
from results_page.quantities import Floats

#: Rows of a window of the trace's own attention, and the share of keys that are its top.
WINDOW, TOP = 16, 0.1
SHARES = (0.05, 0.1, 0.25, 0.5, 0.55)


def of_trace(trace: Trace) -> dict[str, float]:
    """What full attention says: overlap of windows, sparsity, gaps, size of scores, expectation."""
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
        scores = _window_scores(trace, layer)  # [window, head, key]
        last = _local(trace, layer, trace.n_pos - WINDOW, trace.n_pos - WINDOW)
        for sinks in (0, 4):
            peak = last[:, sinks:].max(-1, keepdims=True)
            out[f"sparsity {layer} {sinks}"] = float((last[:, sinks:] < 0.01 * peak).mean())
        out[f"back {layer}"], out[f"back shuffled {layer}"] = _come_back(scores)
        out[f"size {layer}"] = float(
            np.mean([_spearman(np.arange(len(scores)), x) for x in scores.max(-1).T])
        )
        out[f"expectation {layer}"] = _expectation(trace, layer)
    return out


def _window_scores(trace: Trace, layer: int) -> Floats:
    """Local scores of the prompt's keys in every whole window after it; [window, head, key]."""
    starts = range(trace.prompt_len, trace.n_pos - WINDOW + 1, WINDOW)
    return np.stack([_local(trace, layer, start, trace.prompt_len) for start in starts])


def _local(trace: Trace, layer: int, start: int, keys: int) -> Floats:
    """G-KV's local score of the first keys in the window from row `start`; [head, key]."""
    attention = trace.attention(layer, slice(start, start + WINDOW), slice(0, keys))
    by_group = attention.unflatten(0, (trace.n_heads, -1)).amax(1)
    found: Floats = by_group.mean(1).double().numpy()
    return found


def _come_back(scores: Floats) -> tuple[float, float]:
    """Share of the top keys of a window, seen in a top before, that the last window did without.

    The second number is the same with the windows in random orders.
    """
    count = max(1, round(TOP * scores.shape[-1]))
    best = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    top = np.zeros(scores.shape, bool)
    np.put_along_axis(top, best, values=True, axis=-1)

    def share(order: NDArray[np.int64]) -> float:
        seen = top[order]
        before = np.cumsum(seen, 0)[:-1] > 0
        again = seen[1:] & before
        return float((again & ~seen[:-1]).sum() / max(1, again.sum()))

    rng = np.random.default_rng(0)
    shuffled = [share(rng.permutation(len(top))) for _ in range(20)]
    return share(np.arange(len(top))), float(np.mean(shuffled))


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
