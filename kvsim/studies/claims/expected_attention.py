"""Claims of the paper on Expected Attention, arXiv 2510.00636: E1 to E7."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from kvsim.analysis.arrays import Floats
from kvsim.studies.claims.claim import ALL, Claim
from kvsim.studies.claims.evidence import Evidence, of

MADE = "expected_attention"


def expected_attention(e: Evidence) -> Iterator[Claim]:
    """Expected Attention, at the one event after the prompt where there are results of it."""
    release, e = of(MADE), e.of_prompt()
    says = "Expected attention goes with observed attention"
    tested = "rank correlation over the prompt's keys with what the response attends to"
    yield e.traced("E1", says, tested, "expectation")
    says = "The number of positions looked ahead hardly matters"
    ahead, settings = e.around(MADE, "n_future"), [release, of(MADE, n_future=128)]
    yield e.alike("E2", says, "with another n_future", ahead, settings)
    with_it = of(MADE, covariance=False), of(MADE, covariance=True)
    yield e.claim("E3", "The covariance makes it better", with_it)
    says = "The covariance matters less where queries and keys are normalised"
    yield Claim("E3", says, needs="needs a model with such norms beside one without")
    yield from _value_norm(e)
    says = "Budgets by head (AdaKV) make it better"
    yield e.claim("E5", says, (release, of(f"adakv+{MADE}")))
    rivals = ("knorm", "keydiff", "snapkv", "tova", "streaming_llm")
    couples = [(of(name), release) for name in rivals]
    yield e.claim("E6", f"It is better than {', '.join(rivals)}", *couples, where=ALL)
    yield from _normal_queries(e)


def _value_norm(e: Evidence) -> Iterator[Claim]:
    """E4: the norm of the value, and the epsilon that lets it decide where attention is small."""
    larger, zero = of(MADE, epsilon=0.01), of(MADE, epsilon=0.0)
    overlap = "value_norm_overlap"
    says = "With epsilon 0.01 the norm of the value decides about most of the kept entries"
    tested = "share of the kept entries that the norm alone would keep, minus 1/2"
    half = partial(np.add, -0.5)
    yield e.claim("E4", says, (larger,), metric=overlap, cell=half, tested=tested)
    says = "The norm decides about more of the kept entries than without epsilon"
    yield e.claim("E4", says, (larger, zero), metric=overlap)
    normed = of(MADE, value_norm=("v", "wo_v"), epsilon=0.0)
    # without the norm epsilon is added to every score alike and does nothing
    alone = of(MADE, value_norm="none", epsilon=...)
    yield e.claim("E4", "The norm of the value makes it better", (alone, normed))
    yield e.claim("E4", "Epsilon 0.01 makes it better", (zero, larger))


def _normal_queries(e: Evidence) -> Iterator[Claim]:
    """E7: the conditions of eq. 7 on queries."""

    def off(layer: int, skip: int) -> Floats:
        return e.value("projection_gap", f"skip={skip}", layer)

    distance = "distance from 0 of log mean exp(x) less that of normal samples, median over keys"
    gap = "projection_gap", "skip=4"
    says = "Projections of queries are nearly normal: mean exponentials are within a factor of 2"
    nearly = f"log 2 minus {distance}"
    yield e.traced("E7", says, nearly, *gap, lambda i: np.log(2) - off(i, 4))
    says = "Queries of the first 4 tokens, the sinks, deviate from normal"
    tested = f"{distance}: of all queries minus without these"
    yield e.traced("E7", says, tested, *gap, lambda i: off(i, 0) - off(i, 4))
