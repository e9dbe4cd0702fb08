"""What the paper on Expected Attention says, arXiv 2510.00636."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from results_page.statistics import Results
from results_page.verdicts import Claim, compared


def expected_claims(r: Results) -> Iterator[Claim]:
    """Expected Attention, at the one event after the prompt."""
    made, budgets = "prompt: expected_attention", r.plan.budgets
    yield Claim(
        "E1",
        "Expected attention goes with observed attention",
        "rank correlation over the prompt's keys with what the response attends to, mean over "
        "query heads",
        {f"layer {i}": r.trace(f"expectation {i}") for i in range(r.layers)},
    )
    yield Claim(
        "E2",
        "The number of positions looked ahead hardly matters",
        "relative change of the output error with 128, 256 or 1024 instead of 512; within 5 %",
        {
            f"{ahead} positions, budget {n}": values
            for ahead in (128, 256, 1024)
            for n, values in r.change(f"prompt: n_future {ahead}", made).items()
        },
        margin=0.05,
    )
    yield compared(r, "E3", "The covariance makes it better", "prompt: no covariance", made)
    yield Claim(
        "E3",
        "The covariance matters less where queries and keys are normalised",
        why="`tiny` has no such norm",
    )
    yield Claim(
        "E4",
        "With epsilon 0.01 the norm of the value decides more than the expected attention",
        "share of the kept entries that the norm alone would keep, minus the share that the "
        "expected attention alone would keep",
        {
            str(n): r.of(made, n, "norm overlap") - r.of(made, n, "attention overlap")
            for n in budgets
        },
    )
    says = "The norm of the value makes it better"
    yield compared(r, "E4", says, "prompt: no value norm", "prompt: epsilon 0")
    yield compared(r, "E4", "Epsilon 0.01 makes it better", "prompt: epsilon 0", made)
    for name in ("expected_attention", "snapkv"):
        says = f"Budgets by head (AdaKV) make {name} better"
        yield compared(r, "E5", says, f"prompt: {name}", f"prompt: adakv+{name}")
    for name in ("knorm", "keydiff", "snapkv", "tova", "streaming_llm"):
        says = f"Expected Attention is better than {name}"
        yield compared(r, "E6", says, f"prompt: {name}", made)
    said = "distance of log mean exp(x) from that of normal samples, median over keys"
    yield Claim(
        "E7",
        "Projections of queries are nearly normal: their mean exponential is within a factor of 2",
        f"log 2 minus {said}",
        {f"layer {i}": np.log(2) - r.trace(f"projections {i} from 4") for i in range(r.layers)},
    )
    yield Claim(
        "E7",
        "... and the queries of the first 4 tokens, the sinks, are what deviates",
        f"{said}: of all queries minus without these",
        {
            f"layer {i}": r.trace(f"projections {i} from 0") - r.trace(f"projections {i} from 4")
            for i in range(r.layers)
        },
    )
