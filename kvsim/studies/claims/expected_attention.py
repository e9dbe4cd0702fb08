"""Claims of the paper on Expected Attention, arXiv 2510.00636: E1 to E7."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvsim.analysis.arrays import Floats
from kvsim.studies.claims.claim import Claim
from kvsim.studies.claims.evidence import Evidence, of

MADE = "expected_attention"


def expected_attention(e: Evidence) -> Iterator[Claim]:
    """Expected Attention, at the one event after the prompt where there are results of it."""
    release, e = of(MADE), e.of_prompt()
    says, cases = "Expected attention goes with observed attention", e.by_layer("expectation")
    tested = (
        "rank correlation over the prompt's keys with what the response attends to, mean over "
        "query heads"
    )
    yield Claim("E1", says, tested, cases, needs=e.untraced("expectation"))
    says = "The number of positions looked ahead hardly matters"
    ahead, settings = e.around(MADE, "n_future"), [release, of(MADE, n_future=128)]
    yield e.alike("E2", says, "with another n_future", ahead, settings)
    says = "The covariance makes it better"
    yield e.compared("E3", says, of(MADE, covariance=False), of(MADE, covariance=True))
    says = "The covariance matters less where queries and keys are normalised"
    needs = (
        "needs a model with such norms beside one without, and a Table does not say which "
        "model it is of"
    )
    yield Claim("E3", says, needs=needs)
    yield from _value_norm(e)
    policies = dict.fromkeys(result.policy for result in e.results)
    crossed = [name.removeprefix("adakv+") for name in policies if name.startswith("adakv+")]
    for name in dict.fromkeys((MADE, "snapkv", *filter(policies.__contains__, crossed))):
        says = f"Budgets by head (AdaKV) make {name} better"
        yield e.compared("E5", says, of(name), of(f"adakv+{name}"))
    for name in ("knorm", "keydiff", "snapkv", "tova", "streaming_llm"):
        yield e.compared("E6", f"Expected Attention is better than {name}", of(name), release)
    yield from _normal_queries(e)


def _value_norm(e: Evidence) -> Iterator[Claim]:
    """E4: the norm of the value, and the epsilon that lets it decide where attention is small."""
    larger, zero = of(MADE, epsilon=0.01), of(MADE, epsilon=0.0)
    overlap = "value_norm_overlap"
    says = "With epsilon 0.01 the norm of the value decides about most of what is kept"
    tested = "share of the kept entries that the norm alone would keep, minus 1/2"
    yield e.measured("E4", says, tested, larger, overlap, case=lambda x: x - 0.5)
    says = "... more than it does without epsilon"
    yield e.compared("E4", says, larger, zero, overlap)
    normed = of(MADE, value_norm=("v", "wo_v"), epsilon=0.0)
    says = "The norm of the value makes it better"
    # without the norm epsilon is added to every score alike and does nothing
    alone = of(MADE, value_norm="none", epsilon=...)
    yield e.compared("E4", says, alone, normed)
    yield e.compared("E4", "Epsilon 0.01 makes it better", zero, larger)


def _normal_queries(e: Evidence) -> Iterator[Claim]:
    """E7: what eq. 7 needs of the queries."""

    def off(layer: int, skip: int) -> Floats:
        return e.value("projection_gap", f"skip={skip}", layer)

    distance = "distance from 0 of log mean exp(x) less that of normal samples, median over keys"
    needs, metric = e.untraced("projection_gap"), ("projection_gap", "skip=4")
    says = (
        "Projections of queries are nearly normal: their mean exponential is within a factor of 2"
    )
    cases = e.by_layer(*metric, lambda i: np.log(2) - off(i, 4))
    yield Claim("E7", says, f"log 2 minus {distance}", cases, needs=needs)
    says = "... and the queries of the first 4 tokens, the sinks, are what deviates"
    cases = e.by_layer(*metric, lambda i: off(i, 0) - off(i, 4))
    yield Claim("E7", says, f"{distance}: of all queries minus without these", cases, needs=needs)
