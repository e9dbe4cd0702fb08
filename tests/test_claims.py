"""Claims of the papers on made-up Tables: three answers, and nothing where there is no number."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from kvsim.claims import HOLDS, NOT, OPEN, Claim, claims
from kvsim.metrics import COLUMNS, METRICS
from kvsim.statistics import Interval


def table(values, *, metric="output_error", budget=64, chance=None, variant=None):
    """Values by policy, one per prompt."""
    rows = []
    for policy, numbers in values.items():
        for trace, value in enumerate(numbers):
            row = dict.fromkeys(COLUMNS)
            row |= {"trace": str(trace), "policy": policy, "metric": metric, "value": value}
            row |= {"variant": METRICS[metric].main if variant is None else variant}
            row |= {"budget": budget, "layer": 0, "fidelity": "open", "params": policy}
            rows.append(row | {"unit": METRICS[metric].unit, "chance": chance})
    return pl.DataFrame(rows, schema=COLUMNS)


@pytest.mark.parametrize(
    ("gaps", "verdict"), [([0.2, 0.3], HOLDS), ([-0.2, -0.3], NOT), ([-0.2, 0.3], OPEN)]
)
def test_a_claim_about_two_policies_is_about_their_paired_difference(gaps, verdict):
    """Above zero on every resample it holds, below it does not, and else nothing can be said."""
    base = np.array([1.0, 5.0])
    (found,) = claims(table({"tova": base + gaps, "ams": base}))

    assert (found.number, found.verdict) == ("Q8", verdict)
    (case,) = found.cases.items()
    assert case[0] == "budget 64"
    assert case[1].mean == pytest.approx(np.mean(gaps))
    assert found.tested == "output error: tova minus ams"


def test_one_budget_against_it_decides():
    """What holds at one budget and not at another does not hold."""
    both = pl.concat(
        [
            table({"tova": [2.0, 2.1], "ams": [1.0, 1.0]}, budget=32),
            table({"tova": [0.5, 0.6], "ams": [1.0, 1.0]}, budget=64),
        ]
    )
    (found,) = claims(both)

    assert list(found.cases) == ["budget 32", "budget 64"]
    assert found.verdict == NOT


def test_one_prompt_decides_nothing():
    """Without an interval there is no verdict."""
    (found,) = claims(table({"snapkv": [2.0], "expected_attention": [1.0]}))

    assert (found.number, found.verdict) == ("E6", OPEN)


def test_the_wipe_out_claim_is_over_the_whole_grid():
    """Every length and threshold is a case, and one against it is enough."""
    grid = [
        table({"tova": [0.5, 0.6], "ams": [less, less]}, metric="wipeout", variant=variant)
        for variant, less in (("length=16,threshold=0", 0.1), ("length=32,threshold=0", 0.9))
    ]
    (found,) = claims(pl.concat(grid))

    assert list(found.cases) == [
        "budget 64, length=16,threshold=0",
        "budget 64, length=32,threshold=0",
    ]
    assert (found.number, found.verdict) == ("Q1", NOT)


def test_a_property_of_traces_is_compared_with_chance():
    """Overlap that chance gives too is no finding."""
    variant = "share=0.1,union"
    more, same = (
        table({None: values}, metric="window_overlap", variant=variant, chance=0.3)
        for values in ([0.6, 0.7], [0.25, 0.35])
    )

    assert [one.verdict for one in claims(more)] == [HOLDS]
    assert [one.verdict for one in claims(same)] == [OPEN]


def test_a_table_without_the_policies_has_no_claims():
    """Nothing is said about what was not replayed."""
    assert claims(table({"random": [0.5, 0.6]})) == []
    assert claims(table({"tova": [0.5, 0.6], "ams+knorm": [0.1, 0.1]})) == []


def test_a_verdict_needs_every_case():
    """Cases without an interval leave it open."""
    sure, not_known = Interval(1.0, 0.5, 1.5, 9), Interval(1.0, np.nan, np.nan, 1)

    assert Claim("Q1", "", "", "", {"a": sure}).verdict == HOLDS
    assert Claim("Q1", "", "", "", {"a": sure, "b": not_known}).verdict == OPEN
