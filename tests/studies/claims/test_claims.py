"""Claims of the papers on made-up Tables: three answers, and what is missing for one."""

import json
from itertools import product

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvsim
from kvsim.analysis.registry import METRICS
from kvsim.analysis.table import COLUMNS
from kvsim.studies.claims import CLAIMS, claims
from kvsim.studies.claims.claim import ALL, HOLDS, MOST, NOT, OPEN, Claim

EVERY = {
    "AMS": {f"Q{i}" for i in range(1, 14)},
    "G-KV": {f"G{i}" for i in range(1, 15)},
    "Expected Attention": {f"E{i}" for i in range(1, 8)},
    "ASL": {f"S{i}" for i in range(1, 7)},
}


#: A multiple of the numbers of values given, and enough to decide about a dozen cases.
PROMPTS = 12


def rows(policy, values, metric="output_error", variant=None, *, params=None, few=False, **more):
    """A row per prompt, `PROMPTS` of them, of one result, at one event in 16 rows by default."""
    values = [*values] if few else [*values] * (PROMPTS // len(values))
    main = METRICS[metric].main if metric in METRICS else ""
    if policy is not None:
        small = {"window": 16} if policy.startswith("ams") else {}  # in its range
        known = kvsim.policy(policy).params | small | (params or {})
        own = {"policy": policy, "params": json.dumps(known), "budget": 64}
        own |= {"interval": 16, "prefill": False}
    else:
        own = {}
    for trace, value in enumerate(values):
        row = dict.fromkeys(COLUMNS) | {"trace": f"t{trace}", "metric": metric, "value": value}
        yield row | {"variant": main if variant is None else variant, "layer": 0} | own | more


def table(*parts):
    """A Table of all these rows."""
    return pl.DataFrame([row for part in parts for row in part], schema=COLUMNS)


def answer(found, number, words=""):
    """The one claim of a number whose text has these words, or ends with them."""
    every = [one for of_paper in claims(found).values() for one in of_paper]
    known = [one for one in every if one.number == number and words in one.says]
    (one,) = known if len(known) == 1 else [one for one in known if one.says.endswith(words)]
    return one


RIGHT, WRONG = np.linspace(0.5, 1.5, PROMPTS), -np.linspace(0.5, 1.5, PROMPTS)
EITHER = np.resize([1.0, -0.9], PROMPTS)


@pytest.mark.parametrize(
    ("cells", "where", "verdict"),
    [
        ([RIGHT], MOST, HOLDS),
        ([RIGHT, 2 * RIGHT], ALL, HOLDS),
        ([RIGHT, EITHER], ALL, OPEN),
        ([RIGHT, EITHER, WRONG], ALL, NOT),
        ([RIGHT, RIGHT, WRONG], MOST, HOLDS),
        ([RIGHT, RIGHT, WRONG], ALL, NOT),
        ([RIGHT, WRONG], MOST, NOT),
        ([RIGHT, WRONG, EITHER], MOST, OPEN),
        ([RIGHT] * 19 + [WRONG] * 11, MOST, HOLDS),
        ([RIGHT] * 16 + [WRONG] * 14, MOST, HOLDS),
        ([RIGHT] * 15 + [WRONG] * 15, MOST, NOT),
        ([0 * RIGHT], MOST, OPEN),
        ([RIGHT / 200], MOST, OPEN),
        ([WRONG / 200], MOST, OPEN),
        ([RIGHT / 50], MOST, HOLDS),
        ([WRONG / 50], MOST, NOT),
        ([RIGHT, WRONG[:5]], ALL, HOLDS),
        ([RIGHT[:5]], MOST, OPEN),
        ([WRONG[:6]], MOST, NOT),
        ([WRONG[:6], RIGHT], ALL, NOT),
        ([WRONG[:1]], MOST, OPEN),
        ([[np.inf] * 12], MOST, OPEN),
        ([np.full(9, np.nan)], MOST, OPEN),
        ([], MOST, OPEN),
    ],
)
def test_verdicts(cells, where, verdict):
    """Right in all or in most cells that have prompts, so that the contrary is, or neither."""
    given = {str(i): np.resize(np.nan, PROMPTS) for i in range(len(cells))}
    for values, cell in zip(given.values(), cells, strict=True):
        values[: len(cell)] = cell

    assert Claim("", "", cells=given, where=where).verdict == verdict


@pytest.mark.parametrize(("cells", "where"), [(1, ALL), (2, ALL), (3, MOST), (4, MOST), (5, ALL)])
def test_p_values_are_those_of_a_loop_over_flips(cells, where):
    """Of the weakest cells that are one too many for the contrary, and of the strongest for it."""
    rng = np.random.default_rng(cells)
    numbers = rng.normal(0.6, 1, (7, cells))
    least = 0.01

    def plain(gaps, right):
        sizes = [np.sqrt(sum(x * x for x in gap)) for gap in gaps.T]
        flips = [
            [sum(s * x for s, x in zip(signs, gap, strict=True)) / size
             for gap, size in zip(gaps.T, sizes, strict=True)]
            for signs in product((1, -1), repeat=len(gaps))
        ]  # fmt: skip
        less = [
            [sum(other[cell] < flip[cell] - 1e-9 for other in flips) for cell in range(cells)]
            for flip in flips
        ]  # flips that say less for a cell, which order its p-values
        weakest = sorted(range(cells), key=lambda cell: less[0][cell])[: cells - right + 1]
        largest = [max(flip[cell] for cell in weakest) for flip in less]
        return sum(x >= largest[0] for x in largest) / len(flips)

    right = cells if where == ALL else cells // 2 + 1
    claim = Claim("", "", cells={str(i): gap for i, gap in enumerate(numbers.T)}, where=where)

    assert claim.p == pytest.approx(
        (plain(numbers - least, right), plain(-numbers - least, cells - right + 1))
    )


def test_every_claim_is_there_and_says_what_it_needs():
    """On a Table that has next to nothing, with a command that gives what is missing."""
    found = claims(table(rows("h2o", [0.1, 0.2])))

    assert list(found) == list(CLAIMS)
    for (paper, of_paper), (name, numbers) in zip(found.items(), EVERY.items(), strict=True):
        assert paper.startswith(name)
        assert {one.number for one in of_paper} == numbers
        assert len({(one.number, one.says) for one in of_paper}) == len(of_paper)
        for one in of_paper:
            assert one.verdict == OPEN
            assert one.why.startswith("needs ")
            assert one.says
    assert claims(table()).keys() == CLAIMS.keys()


def pair(more, less, metric="output_error", variant=None, **own):
    """Rows of two results, `more` with the larger values; each is (policy, parameters)."""

    def make(sign):
        for (policy, params), base in ((more, 2.0 + sign), (less, 2.0 - sign)):
            values = [base, base + 0.2, base + 0.1]
            yield from rows(policy, values, metric, variant, params=params, **own)

    return make


def trace_rows(metric, variant, larger, smaller, **own):
    """Rows of the traces: a value where the claim is right, and one where it is not."""

    def make(sign):
        value = larger if sign > 0 else smaller
        return rows(None, [value, value + 0.001, value + 0.002], metric, variant, **own)

    return make


def both(*makers):
    """All of these rows."""
    return lambda sign: [row for make in makers for row in make(sign)]


def layers(metric, variant, first, second):
    """Rows of the traces in two layers."""
    pairs = (first, second), (second, first)
    return both(*(trace_rows(metric, variant, *x, layer=i) for i, x in enumerate(pairs)))


def lead(sign):
    """TOVA above AMS, by more at the smaller budget or at the larger."""
    for budget, more in ((32, 2.0 + sign), (64, 2.0)):
        yield from rows("tova", [1 + more, 1.1 + more], budget=budget)
        yield from rows("ams", [1.0, 1.1], budget=budget)


def by_depth(sign):
    """More segments in the first or in the second layer."""
    for layer, count in ((0, 8.0 + sign), (1, 8.0 - sign)):
        yield from rows("ams", [count, count + 0.1], "segment_count", layer=layer)


def overlaps(**values):
    """Overlap of windows by variant, with chance 0.3."""
    pairs = values.items()
    return both(*(trace_rows("window_overlap", name, *pair, chance=0.3) for name, pair in pairs))


def changed(policy, params, metric="output_error", **own):
    """Rows of a policy and of the same with another parameter, which is near or far from it."""

    def make(sign):
        yield from rows(policy, [1.0, 1.1], metric, **own)
        value = 1.01 if sign > 0 else 1.5
        yield from rows(policy, [value, value + 0.1], metric, params=params, **own)

    return make


KEPT = {"protect": {"sink": 4, "recent": 32, "prompt": False}}
ONE = {"interval": None, "prefill": True}
GLOBAL, LOCAL = ("global_max", {}), ("morphkv@gkv", {})
#: Number, words of the claim, and rows on which it holds (sign 1) or does not (sign -1).
PLANTED = [
    ("Q1", "", pair(("tova", {}), ("ams", {}), "wipeout", "length=16,threshold=0")),
    ("Q2", "", pair(("ams", {}), ("tova", {}), "retained_iou", "")),
    ("Q3", "", pair(("ams", {}), ("tova", {}), "middle_coverage", "")),
    ("Q4", "", pair(("tova", {}), ("ams", {}), "burst_length", "longest")),
    ("Q5", "move less", pair(("ams", {"credit": False}), ("ams", {}), "boundary_shift")),
    ("Q5", "raises the IoU", pair(("ams", {}), ("ams", {"credit": False}), "retained_iou")),
    ("Q6", "by length", pair(("ams", {"weights": "length"}), ("ams", {}))),
    ("Q6", "equal ones", pair(("ams", {"weights": "equal"}), ("ams", {}))),
    (
        "Q7",
        "fixed ones",
        pair(("ams", {"segmentation": "fixed", "segment_length": 16}), ("ams", {})),
    ),
    ("Q8", "every scorer", pair(("tova", {}), ("ams", {}))),
    ("Q8", "Keeping sinks", pair(("tova", {}), ("tova", KEPT))),
    ("Q8", "entries kept", pair(("tova", KEPT), ("ams", {}))),
    ("Q8", "Sets per head", pair(("tova", {}), ("tova", {"heads": "group"}))),
    ("Q9", "what was observed", pair(("ams", {"suffix_fill": "observed"}), ("ams", {}))),
    ("Q9", "fewer regions", pair(("ams", {"suffix_fill": "observed"}), ("ams", {}), "wipeout")),
    ("Q10", "", lead),
    ("Q11", "Earlier layers", by_depth),
    ("Q12", "window", changed("ams", {"window": 32})),
    (
        "G1",
        "older window",
        overlaps(**{"share=0.1,block=3": (0.9, 0.1), "share=0.1,block=1": (0.1, 0.9)}),
    ),
    (
        "G1",
        "Windows attend to different",
        overlaps(
            **{f"share=0.5,block={i}": (0.9, 0.4) for i in (1, 2, 3)},
            **{f"share=0.05,block={i}": (0.4, 0.9) for i in (1, 2, 3)},
        ),
    ),
    ("G2", "95 %", overlaps(**{"share=0.55,union": (0.97, 0.9)})),
    ("G2", "more than chance gives", overlaps(**{"share=0.55,union": (0.97, 0.2)})),
    ("G2", "merged", overlaps(**{"share=0.55,equal_budget": (0.6, 0.2)})),
    (
        "G3",
        "intermittent",
        trace_rows("attention_return", "share=0.1,returns", 0.4, 0.1, chance=0.6),
    ),
    ("G4", "all keys", trace_rows("sparsity", "p=0.01,max=sequence", 0.95, 0.8)),
    ("G4", "first 4", trace_rows("sparsity", "p=0.01,max=behind_sink", 0.95, 0.8)),
    ("G6", "later positions", pair(LOCAL, GLOBAL, "retained_position")),
    ("G6", "evenly", pair(LOCAL, GLOBAL, "retained_position", "distance")),
    ("G8", "later than morphkv@gkv", pair(GLOBAL, LOCAL, "retained_mass")),
    ("G8", "is better than morphkv@gkv", pair(LOCAL, GLOBAL)),
    ("G9", "by mean", pair(("global_mean", {}), ("global_max", {}))),
    ("G9", "better than 0 and 0.5", pair(("global_max", {"decay": 0.5}), ("global_max", {}))),
    ("G9", "0 and 0.5", pair(("global_max", {"decay": 0.0}), ("global_max", {}))),
    ("G9", "0.8 and 0.9", changed("global_max", {"decay": 0.9})),
    ("G10", "", pair(("global_max", {"pool": "max"}), ("global_max", {}))),
    ("G10", "Pooling", pair(("snapkv@gkv", {}), ("morphkv@gkv", {}))),
    ("G11", "less alike", pair(("global_max", {}), ("gkv", {}), "key_similarity")),
    ("G11", "output better", pair(("global_max", {}), ("gkv", {"mix_lambda": 0.9}))),
    ("G12", "thins out", trace_rows("score_decline", "", -0.4, 0.4)),
    ("G13", "than chance", pair(("random", {}), ("h2o", {}), "retained_position", "older")),
    ("E1", "goes with", trace_rows("expectation", "", 0.4, -0.4)),
    ("E2", "looked ahead", changed("expected_attention", {"n_future": 128}, **ONE)),
    (
        "E3",
        "makes it better",
        pair(("expected_attention", {"covariance": False}), ("expected_attention", {}), **ONE),
    ),
    (
        "E4",
        "without epsilon",
        pair(
            ("expected_attention", {}),
            ("expected_attention", {"epsilon": 0.0}),
            "value_norm_overlap",
            **ONE,
        ),
    ),
    (
        "E4",
        "norm of the value makes",
        pair(
            ("expected_attention", {"value_norm": "none"}),
            ("expected_attention", {"epsilon": 0.0}),
            **ONE,
        ),
    ),
    (
        "E4",
        "Epsilon 0.01",
        pair(("expected_attention", {"epsilon": 0.0}), ("expected_attention", {}), **ONE),
    ),
    ("E5", "", pair(("expected_attention", {}), ("adakv+expected_attention", {}), **ONE)),
    ("E6", "", pair(("tova", {}), ("expected_attention", {}), **ONE)),
    ("E7", "nearly normal", trace_rows("projection_gap", "skip=4", 0.1, 2.0)),
    (
        "E7",
        "sinks",
        both(
            trace_rows("projection_gap", "skip=4", 0.1, 2.0),
            trace_rows("projection_gap", "skip=0", 1.0, 1.0),
        ),
    ),
    ("S1", "variance of ranks", layers("rank_variance", "k=25%", 9.0, 3.0)),
    ("S2", "flatly", layers("layer_entropy", "", 4.0, 2.0)),
    (
        "S3",
        "threshold is passed later",
        both(
            trace_rows("rank_relative", "k=10%", 0.3, 0.6),
            trace_rows("rank_relative", "k=50%", 0.5, 0.5),
        ),
    ),
    (
        "S3",
        "later layer is selected",
        both(
            trace_rows("selection_layer", "k=10%,tau=0.3", 5.0, 9.0),
            trace_rows("selection_layer", "k=50%,tau=0.3", 7.0, 7.0),
        ),
    ),
    (
        "S3",
        "smaller threshold",
        both(
            trace_rows("selection_layer", "k=10%,tau=0.2", 9.0, 5.0),
            trace_rows("selection_layer", "k=10%,tau=0.6", 7.0, 7.0),
        ),
    ),
    (
        "S4",
        "reacts faster",
        both(
            trace_rows("selection_layer", "k=10%,tau=0.3", 9.0, 5.0),
            trace_rows("selection_layer", "k=10%,tau=0.3,look_back=2", 7.0, 7.0),
        ),
    ),
    ("S5", "than propagate", trace_rows("rank_union", "k=25%", 1.5, 0.9)),
]  # fmt: skip


@pytest.mark.parametrize(("number", "words", "make"), PLANTED)
def test_a_claim_holds_or_not_by_what_is_planted(number, words, make):
    """On rows of which it is so, and on the same the other way round."""
    right, wrong = (answer(table(make(sign)), number, words) for sign in (1, -1))

    assert right.verdict == HOLDS, right.result
    assert wrong.verdict == NOT, wrong.result
    assert not right.why
    assert right.n == PROMPTS


def test_schedules_are_not_mixed():
    """Another schedule is another case, and none in common is no evidence."""
    more, less = [2.0, 2.1], [1.0, 1.1]
    apart = table(rows("tova", more), rows("ams", less, interval=32))
    one = answer(apart, "Q8", "every scorer")
    assert one.verdict == OPEN
    assert "of tova and ams at the same budgets, with one schedule" in one.why
    two = table(
        *(
            rows(name, x, interval=n)
            for n in (16, 32)
            for name, x in (("tova", more), ("ams", less))
        )
    )
    assert list(answer(two, "Q8", "every scorer").means) == [
        "budget 64, after: every 16 rows",
        "budget 64, after: every 32 rows",
    ]


@given(
    gaps=st.lists(st.floats(-3, 3), min_size=1, max_size=9),
    base=st.floats(-5, 5),
)
def test_only_paired_differences_count(gaps, base):
    """A verdict does not change when prompts get harder alike, and the opposite has its own."""
    tova = [base + 7.0 * i + gap for i, gap in enumerate(gaps)]
    ams = [base + 7.0 * i for i in range(len(gaps))]
    both_ways = (
        table(rows("tova", x, few=True), rows("ams", y, few=True))
        for x, y in ((tova, ams), (ams, tova))
    )
    there, back = (answer(one, "Q8", "every scorer") for one in both_ways)
    tova, ams = np.float64(tova), np.float64(ams)
    size = np.abs([tova, ams]).mean()

    assert list(there.means.values()) == pytest.approx([np.mean(gaps) / size] if size else [])
    assert {HOLDS: NOT, NOT: HOLDS, OPEN: OPEN}[there.verdict] == back.verdict
    if len(gaps) < 6:
        assert there.verdict == OPEN
    elif max(gaps) < 0:
        assert there.verdict != HOLDS


def test_a_policy_is_not_tested_at_a_budget_that_is_mostly_its_window():
    """The case is named with the reason, whatever its numbers, and the others decide."""
    parts = [
        [*rows(name, [value, value + 0.1], budget=budget, **params)]
        for name, params in (("tova", {}), ("ams", {"params": {"window": 128}}))
        for budget, value in ((128, 1.0 + (name == "ams")), (256, 2.0 - (name == "ams")))
    ]
    one = answer(table(*parts), "Q8", "every scorer")

    assert list(one.means) == ["budget 256"]
    assert one.verdict == HOLDS
    assert one.untested == {"budget 128": "a window of more than half of the budget"}
    alone = answer(table(*parts[::2]), "Q8", "every scorer")
    assert alone.verdict == OPEN
    assert alone.why == "1 cell left out: a window of more than half of the budget"
