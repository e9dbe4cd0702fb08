"""Traces that a search or a training does not see."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvsim.core.trace import Trace

#: Fewest prompts that are split; with fewer of them over-fitting cannot be seen.
FEWEST = 4


def split(
    traces: Sequence[Trace], held_out: float, seed: int
) -> tuple[Sequence[Trace], Sequence[Trace]]:
    """Return the traces to learn from and those held out, each in the order given."""
    count = round(held_out * len(traces)) if len(traces) >= FEWEST else 0
    count = min(count, len(traces) - 1)
    back = set(np.random.default_rng(seed).permutation(len(traces))[:count].tolist())
    kept = [trace for at, trace in enumerate(traces) if at not in back]
    return kept, [trace for at, trace in enumerate(traces) if at in back]
