"""What full attention says of a trace, before any policy: windows, sparsity, expectation."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from kvsim import Trace
from kvsim.diagnostics import findings
from kvsim.metrics import attention_gaps, attention_sparsity, window_overlap

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
    return out | _found(trace)


#: What `kvsim.diagnostics.findings` says of a trace, by name and variant, as the page calls it.
_CALLED = {
    ("expectation", ""): "expectation {}",
    ("projection_gap", "skip=0"): "projections {} from 0",
    ("projection_gap", "skip=4"): "projections {} from 4",
    ("score_decline", ""): "size {}",
}


def _found(trace: Trace) -> dict[str, float]:
    """Findings for each layer, mean over heads."""
    table = findings(trace, list(dict.fromkeys(name for name, _ in _CALLED)))
    means = table.group_by("metric", "variant", "layer").agg(
        pl.col("value").mean().fill_null(np.nan)
    )
    return {
        _CALLED[name, variant].format(layer): value
        for name, variant, layer, value in means.iter_rows()
    }


def _after_gap(gaps: NDArray[Any]) -> float:
    """Share of the returns of all heads that the window before did without; gaps [head, gap]."""
    return float(gaps[:, 1:].sum() / max(1, gaps.sum()))
